"""`python -m proxy.formats > proxy/formats/README.md`: the page about formats, with tables made from declarations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields

from proxy.formats.kinds import KINDS, Calls, Reasoning
from proxy.formats.reasoning import REASONING
from proxy.formats.table import NOT_HERE
from proxy.formats.tools import TOOLS

FAMILIES = {
    "apertus": "Apertus",
    "deepseek_r1": "DeepSeek R1, Phi-4-reasoning, most that think in <think>",
    "deepseek_v3": "DeepSeek V3 and R1 (calls), V3.1 and V3.2 (reasoning)",
    "deepseek_v31": "DeepSeek V3.1, V3.2-Exp",
    "deepseek_v32": "DeepSeek V3.2",
    "deepseek_v4": "DeepSeek V4",
    "deepseek_v41": "DeepSeek V4.1",
    "dots": "Dots",
    "ernie45": "Ernie 4.5",
    "functiongemma": "FunctionGemma",
    "gemma4": "Gemma 4",
    "glm45": "GLM 4.5 to 5.x, Ling 3, Poolside",
    "granite": "Granite 3.x",
    "granite-20b-fc": "Granite 20b-functioncalling",
    "granite_thinking_parser": "Granite 4.2",
    "hermes": "Qwen 2.5 and 3, QwQ, Granite 4.0, Hermes",
    "holo2": "Holo2",
    "hunyuan_a13b": "Hunyuan A13B",
    "hy_v3": "HY v3",
    "hy_v4": "HY v4",
    "inkling": "Inkling",
    "internlm": "InternLM 2",
    "jamba": "Jamba",
    "kimi_k2": "Kimi K2, K2.5",
    "kimi_k3": "Kimi K3",
    "lfm2": "LFM2",
    "llama3_json": "Llama 3.1 to 3.3, Llama 4",
    "llama4_pythonic": "Llama 4",
    "longcat": "LongCat",
    "mimo": "MiMo, Qwen3-Coder, Qwen 3.5 to 3.8, Nemotron 3, Step-3.5, Granite 4.2",
    "minicpm5": "MiniCPM5",
    "minimax_m2": "MiniMax M2",
    "minimax_m3": "MiniMax M3",
    "mistral": "Mistral, Magistral, Devstral, Ministral",
    "nemotron_v3": "Nemotron 3",
    "olmo3": "OLMo 3",
    "openai": "gpt-oss",
    "openai_gptoss": "gpt-oss",
    "phi4_mini_json": "Phi-4-mini",
    "poolside_v1": "Poolside",
    "pythonic": "Llama 3.2, Gemma 3",
    "qwen3": "Qwen 3 to 3.8",
    "seed_oss": "Seed-OSS",
    "step3": "Step3",
    "step3p5": "Step-3.5, 3.7",
    "xlam": "xLAM",
}

INTRODUCTION = """\
# Formats

How model families write reasoning and tool calls. A format is data: a declaration of a kind, with its markers and
options, that `derender` reads to parse and `render` to constrain. The names are those of vLLM's `--tool-call-parser`
and `--reasoning-parser`. This page is made by `python -m proxy.formats > proxy/formats/README.md`.

## Adding one

Of a known kind: a few lines in `tools.py` or `reasoning.py`, its markers as they look on the wire, and a line in
`__main__.py` that names the family. Markers that are added tokens of the vocabulary are then matched by id, all others
as text; which is which needs no word. An operator can do the same in the configuration, under `formats`
(`config/custom-format.yaml`), and try it with `derender-proxy replay`.

A new kind is a dataclass in `kinds.py`, a codec in `derender/codecs/`, and a line in `derender/output_format.py`.

`auto` takes the declaration all of whose markers the chat template writes or the vocabulary has; the more specific
one where one contains another. Where several are left that read differently it refuses and names them.
"""


def page() -> Iterator[str]:
    yield INTRODUCTION
    yield "## The kinds\n"
    for name, kind in KINDS.items():
        yield f"### `{name}`\n"
        yield f"{_prose(kind.__doc__ or '')}\n"
        yield f"Fields: {', '.join(f'`{field.name}`' for field in fields(kind))}.\n"
    yield "## Tool calls\n"
    yield from _table(TOOLS)
    yield "\n## Reasoning\n"
    yield from _table({name: (declared,) for name, declared in REASONING.items()})
    yield "\n## Names of vLLM's that are not accepted\n"
    for name, reason in NOT_HERE.items():
        yield f"* `{name}`: {reason}."


def _table(declared: Mapping[str, Sequence[Reasoning | Calls]]) -> Iterator[str]:
    """A row for each declaration, with all names that it has."""
    names: dict[str, list[str]] = {}
    for name, declarations in declared.items():
        names.setdefault(" ; ".join(map(_short, declarations)), []).append(name)
    yield "| family | names | kind | declaration |"
    yield "|---|---|---|---|"
    for short, alike in names.items():
        families = ", ".join(dict.fromkeys(FAMILIES[name] for name in alike if name in FAMILIES))
        kind = ", ".join(dict.fromkeys(_kind(declaration) for declaration in declared[alike[0]]))
        yield f"| {_cell(families)} | {', '.join(f'`{name}`' for name in alike)} | {kind} | {_cell(short)} |"


def _kind(declaration: Reasoning | Calls) -> str:
    return next(name for name, kind in KINDS.items() if type(declaration) is kind)


def _short(declaration: Reasoning | Calls) -> str:
    """The fields that differ from the kind's defaults."""
    parts = []
    for field in fields(declaration):
        value = getattr(declaration, field.name)
        if field.default is MISSING or value != field.default:
            texts = value if isinstance(value, tuple) else (value,)
            parts.append(f"{field.name} {' or '.join(f'`{text!r}`' for text in texts)}")
    return ", ".join(parts) or "no markers"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<think>", "`<think>`" if "`" not in text else "<think>")


def _prose(doc: str) -> str:
    return " ".join(line.strip() for line in doc.strip().splitlines()).replace("<", "\\<")


if __name__ == "__main__":
    print("\n".join(page()))
