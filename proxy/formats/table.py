"""The names: vLLM's parser names and what they stand for here, and why some are missing."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.formats.kinds import Calls, Channels, Reasoning
from proxy.formats.reasoning import REASONING
from proxy.formats.tools import TOOLS

NOT_HERE: Mapping[str, str] = {
    "cohere_command3": "its grammar lives in Cohere's own library (melody), not in markers",
    "cohere_command4": "its grammar lives in Cohere's own library (melody), not in markers",
    "gigachat3": "its calls are a role of their own, for which no output was recorded",
    "hf": "reads `response_template` metadata out of a checkpoint's tokenizer: a program, not a declaration",
    "minimax_m2_append_think": "leaves the reasoning in the content; leave reasoning_parser out for that",
    "muse": "messages whose bodies are XML-like calls; no output of it was recorded",
    "plamo3": "nested markers; no output of it was recorded",
    "solar_open2": "its tool syntax is not documented outside of vLLM's code",
}
"""Names of vLLM 0.33 that are not accepted, each with the reason."""


class UnknownFormat(ValueError):
    """A name that no declaration has."""


@dataclass(frozen=True, slots=True)
class FormatPair:
    """What a model's two parsers are. Channels stand in `calls` alone, and do both."""

    reasoning: Reasoning | None = None
    calls: tuple[Calls, ...] = ()


def format_pair(tool_call_parser: str | None, reasoning_parser: str | None) -> FormatPair:
    """Raises `UnknownFormat` with the nearest names, or the reason why a name of vLLM's is not accepted."""
    calls = TOOLS[_known(tool_call_parser, TOOLS, "tool_call_parser")] if tool_call_parser else ()
    reasoning = REASONING[_known(reasoning_parser, REASONING, "reasoning_parser")] if reasoning_parser else None
    if isinstance(reasoning, Channels):
        if calls and calls != (reasoning,):
            raise UnknownFormat(f"reasoning_parser {reasoning_parser} goes with tool_call_parser openai only")
        return FormatPair(None, (reasoning,))
    return FormatPair(reasoning, calls)


def _known(name: str, names: Iterable[str], key: str) -> str:
    known = sorted(names)
    if name in known:
        return name
    if name in NOT_HERE:
        raise UnknownFormat(f"{key} {name} of vLLM's is not supported: {NOT_HERE[name]}")
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
    raise UnknownFormat(f"{key} {name!r} is not known; {hint}")
