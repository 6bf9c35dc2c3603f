"""What `auto` finds: the declarations whose markers a model's chat template writes, or its vocabulary has.

The law: never silently wrong. A declaration fits where every one of its markers is there; one that another contains
loses to it; where several are left that read differently, nothing is chosen and all of them are named.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from proxy.formats.kinds import HOLE, WORDS, Calls, Channels, JsonCalls, PythonicCalls, Reasoning

PREFERRED_CALLS = ("hermes", "qwen3_coder", "glm45", "llama3_json", "pythonic")
PREFERRED_REASONING = ("qwen3", "deepseek_r1")
"""Of names that mean the same, or nearly, the one to speak of."""

_JSON_EXAMPLE = re.compile(
    r"""\{\s*\\?["']name\\?["']\s*:.{1,80}?\\?["'](parameters|arguments)\\?["']\s*:""", re.DOTALL
)
_PYTHON_EXAMPLE = re.compile(r"\[\w+\(\w+\s*=")
"""How a template shows a call that has no markers, to the model."""

_LEADING_WORD = re.compile(r"^\w+(?=\W)")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What there is to go by: the model's chat templates, and the texts of its added tokens."""

    templates: Sequence[str]
    added_texts: Collection[str]

    def is_written(self, text: str) -> bool:
        return any(text in template for template in self.templates)

    def has(self, marker: str) -> bool:
        return marker in self.added_texts or self.is_written(marker)


@dataclass(frozen=True, slots=True)
class Choice:
    """`name` is what was found, None for nothing; `others` mean the same. `rivals` fit as well and read differently,
    so that nobody can tell."""

    name: str | None = None
    others: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()


def find_calls(evidence: Evidence, tools: Mapping[str, tuple[Calls, ...]]) -> Choice:
    found = {name: markers for name, calls in tools.items() if (markers := _markers_of_calls(evidence, calls))}
    if found:
        winners = _most_specific(found)
        return _settled(winners, {name: repr(_essence(tools[name])) for name in winners})
    shown = {name: kind for name, calls in tools.items() if (kind := _shown(evidence, calls))}
    return _settled(list(shown), shown)


def find_reasoning(
    evidence: Evidence, reasoning: Mapping[str, Reasoning | Channels], tool_call_parser: str | None
) -> Choice:
    """Families that share their tags differ in where an answer begins, where the prompt does not say, and in white
    space: that one is chosen which bears the tool parser's name, or whose switches are those of the template."""
    found = {name: markers for name, declared in reasoning.items() if (markers := _present(evidence, declared))}
    winners = _most_specific(found)
    known = {name: _known_switches(evidence, reasoning[name]) for name in winners}
    switched = [name for name in winners if known[name]]
    winners = switched or [name for name in winners if not _switches(reasoning[name])] or winners
    if tool_call_parser in winners:
        return Choice(tool_call_parser)
    preferred = [name for name in PREFERRED_REASONING if name in winners]
    return _settled(preferred or winners, {name: repr(reasoning[name]) for name in winners})


def _switches(declared: Reasoning | Channels) -> tuple[str, ...]:
    return declared.switches if isinstance(declared, Reasoning) else ()


def _known_switches(evidence: Evidence, declared: Reasoning | Channels) -> list[str]:
    return [switch for switch in _switches(declared) if evidence.is_written(switch)]


def _settled(winners: Sequence[str], meanings: Mapping[str, str]) -> Choice:
    if not winners:
        return Choice()
    first = next((name for name in PREFERRED_CALLS if name in winners), winners[0])
    if any(meanings[name] != meanings[first] for name in winners):
        return Choice(rivals=tuple(winners))
    return Choice(first, tuple(name for name in winners if name != first))


def _most_specific(found: Mapping[str, frozenset[str]]) -> list[str]:
    """Those whose markers are not a part of another's."""
    return [name for name, markers in found.items() if not any(markers < others for others in found.values())]


def _essence(calls: Sequence[Calls]) -> list[tuple[str, object]]:
    """What a syntax is apart from what a server does with it."""
    aside = ("forced_json", "hidden", "by_text")
    return [
        (type(c).__name__ + field.name, _bare(getattr(c, field.name)))
        for c in calls
        for field in fields(c)
        if field.name not in aside
    ]


def _bare(value: object) -> object:
    """White space at the ends of a marker does not make it another one."""
    if isinstance(value, tuple):
        return tuple(dict.fromkeys(text.strip() if isinstance(text, str) else text for text in value))
    return value


def _markers_of_calls(evidence: Evidence, calls: Sequence[Calls]) -> frozenset[str]:
    """Of the first of several syntaxes that fits; empty where none does."""
    return next((markers for c in calls if (markers := _present(evidence, c))), frozenset())


def _present(evidence: Evidence, declared: Reasoning | Calls) -> frozenset[str]:
    """The markers of a declaration that are there, empty where one is missing."""
    present: set[str] = set()
    for number, alternatives in enumerate(_needed(declared)):
        sure = evidence.has if number or not evidence.templates else evidence.is_written
        there = [marker for marker in alternatives if sure(marker)]
        if not there:
            return frozenset()
        present.update(there)
    return frozenset(present)


def _shown(evidence: Evidence, calls: Sequence[Calls]) -> str:
    """The kind of a syntax without markers in which a template shows the model a call, empty where it does not."""
    for c in calls:
        if not isinstance(c, JsonCalls | PythonicCalls) or c.open or (isinstance(c, JsonCalls) and c.array):
            continue
        example = _JSON_EXAMPLE if isinstance(c, JsonCalls) else _PYTHON_EXAMPLE
        if any(example.search(text) for text in evidence.templates):
            return type(c).__name__
    return ""


def _needed(declared: Reasoning | Calls) -> Iterator[list[str]]:
    """Groups of markers, one of each of which has to be there: a tag up to its first hole. Without words, which a
    template may take from elsewhere. The first is what begins it, which a template has to write."""
    for field in sorted(fields(declared), key=lambda field: field.name not in ("open", "section")):
        value = getattr(declared, field.name)
        if field.name in WORDS or field.name in ("separator", "dropped", "prefix", "recipient", "ends"):
            continue
        texts = [text for text in (value if isinstance(value, tuple) else (value,)) if isinstance(text, str)]
        parts = [[part.strip() for part in HOLE.split(text)[::2]] for text in texts]
        groups = [_LEADING_WORD.sub("", next(filter(None, part), "")).strip("{") for part in parts]
        if any(groups):
            yield [marker for marker in groups if marker]
