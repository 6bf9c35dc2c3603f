"""The names: vLLM's parser names and what they stand for, what `auto` makes of a model, and why some are missing."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.formats.auto import Choice, Evidence, find_calls, find_reasoning
from proxy.formats.kinds import Calls, Channels, Reasoning
from proxy.formats.reasoning import REASONING
from proxy.formats.tools import TOOLS

AUTO = "auto"

NOT_HERE: Mapping[str, str] = {
    "cohere_command3": "its grammar lives in Cohere's own library (melody), not in markers",
    "cohere_command4": "its grammar lives in Cohere's own library (melody), not in markers",
    "gigachat3": "its calls are messages of a role of their own, which no kind here describes",
    "hf": "reads `response_template` metadata out of a checkpoint's tokenizer: a program, not a declaration",
    "k2_horizon": "each of its values has a type in a tag of its own; no output of it was recorded",
    "minimax_m2_append_think": "leaves the reasoning in the content; leave reasoning_parser out for that",
    "muse": "messages whose bodies are XML-like calls; no output of it was recorded",
    "plamo3": "nested markers; no output of it was recorded",
    "solar_open2": "its tool syntax is documented nowhere but in vLLM's code",
}
"""Names of vLLM 0.33 that are not accepted, each with the reason."""


class UnknownFormat(ValueError):
    """A name that no declaration has, or `auto` where nobody can tell."""


@dataclass(frozen=True, slots=True)
class FormatPair:
    """What a model's two parsers are, and their names. Channels stand in `calls` alone, and do both. `notes` say what
    `auto` found."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    reasoning: Reasoning | None = None
    calls: tuple[Calls, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Formats:
    """The declarations that a server knows: those of this folder, and the operator's."""

    tools: Mapping[str, tuple[Calls, ...]] = field(default_factory=lambda: TOOLS)
    reasoning: Mapping[str, Reasoning | Channels] = field(default_factory=lambda: REASONING)

    def pair(self, tool_call_parser: str | None, reasoning_parser: str | None, evidence: Evidence) -> FormatPair:
        """Raises `UnknownFormat` with the nearest names, or the reason why a name is not accepted."""
        notes = []
        if tool_call_parser == AUTO:
            choice = find_calls(evidence, self.tools)
            tool_call_parser = _found(choice, "tool_call_parser")
            notes.append(_told(choice, "tool_call_parser"))
        if reasoning_parser == AUTO:
            choice = find_reasoning(evidence, self.reasoning, tool_call_parser)
            reasoning_parser = _found(choice, "reasoning_parser")
            notes.append(_told(choice, "reasoning_parser"))
        calls = self.tools[_known(tool_call_parser, self.tools, "tool_call_parser")] if tool_call_parser else ()
        declared = None
        if reasoning_parser:
            declared = self.reasoning[_known(reasoning_parser, self.reasoning, "reasoning_parser")]
        if isinstance(declared, Channels):
            if calls not in ((), (declared,)):
                raise UnknownFormat(
                    f"reasoning_parser {reasoning_parser} reads calls as well, in another syntax than tool_call_parser "
                    f"{tool_call_parser}; give the one that belongs to it"
                )
            calls, declared = (declared,), None
        return FormatPair(tool_call_parser, reasoning_parser, declared, calls, tuple(notes))


def _found(choice: Choice, key: str) -> str | None:
    if choice.rivals:
        raise UnknownFormat(f"{key} auto: {', '.join(choice.rivals)} fit this model alike; name one of them")
    return choice.name


def _told(choice: Choice, key: str) -> str:
    if choice.name is None:
        return f"{key} auto: nothing fits this model's template and vocabulary, so there is none"
    alike = f" (the same as {', '.join(choice.others)})" if choice.others else ""
    return f"{key} auto: {choice.name}{alike}"


def _known(name: str, names: Collection[str], key: str) -> str:
    if name in names:
        return name
    if name in NOT_HERE:
        raise UnknownFormat(f"{key} {name} of vLLM's is not supported: {NOT_HERE[name]}")
    known: Sequence[str] = sorted(names)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
    raise UnknownFormat(f"{key} {name!r} is not known; {hint}")
