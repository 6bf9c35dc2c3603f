"""The kinds of markup there are: what a declaration can say. Data only; `derender` reads it to parse, `render` to
constrain.

A marker is written as it looks on the wire. Where the vocabulary has (a part of) it as one added token, that part is
matched by the token's id and never by characters; everything else is matched as text. A *tag* is a marker with named
holes, such as `<function={name}>`; an attribute's quotes may be double, single or missing in what a model writes.
White space between markers never matters to a reader; a declaration shows how the model's template writes it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

HOLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A span of reasoning between two markers, or between the first `close` and the start where there is no `open`.

    `starts`: whether an answer begins inside, where the prompt does not say; one of `switches`, template variables
    that turn thinking on or off, goes before it. `trim`: white space at the end of the reasoning is the template's, and
    dropped ("end"), or at both ends ("both"). `ends` also end the reasoning and stay to be read, and so do the markers
    that begin calls, unless `ended_by_calls` is false; `dropped` are markers around the answer, which are not part of
    it. `once`: where the prompt says that the answer begins outside, there is no reasoning, and its markers are text.
    """

    close: tuple[str, ...]
    open: tuple[str, ...] = ()
    starts: Literal["inside", "outside"] = "inside"
    switches: tuple[str, ...] = ()
    trim: Literal["", "end", "both"] = ""
    ends: tuple[str, ...] = ()
    ended_by_calls: bool = True
    once: bool = False
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """A JSON object per call, or an array of them (`array`): `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    Without `open` the calls are the whole answer and begin it; an opener that ends in `{` is the object's own, and the
    first key has to be one of a call. `name` None: the object's only key is the name, and its
    value the arguments. `separator` stands between calls that have no markers. `by_text`: the markers count also where
    a model spells them in ordinary tokens.
    """

    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    array: bool = False
    name: str | None = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    separator: str = ""
    by_text: bool = False
    forced_json: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class HeaderCalls:
    """A name in a header, then its arguments as a JSON object: `<call>set_lamp<sep>{...}<end>`.

    `header` is what stands between `call` and the arguments, a tag with the holes `name` and `id` (a native id, which a
    response repeats); of several, the first that fits. `fence` is what may stand between the header and the
    arguments, and closes after them with its back-ticks. `section` and `section_end` enclose several calls.
    """

    call: str
    header: tuple[str, ...]
    call_end: str = ""
    fence: str = ""
    section: tuple[str, ...] = ()
    section_end: tuple[str, ...] = ()
    ids: Literal["", "nine"] = ""
    """The form of the ids that are made where the model wrote none; "nine": nine letters and digits."""
    forced_json: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """A tag per parameter, its value between tags: `<function=f><parameter=room>attic</parameter></function>`.

    `call` is a tag with the hole `name`; where nothing follows the hole, the name ends at the next marker or line.
    `parameter` is a tag with the hole `key`; the value follows it, or `value` where the family has a tag of its own for
    that. `types`: what a value is comes from the tool's schema, or from the wire, where the tag's hole `string` says
    "true" for text and its hole `type` says "string". `trim`: one newline at each end of a value is the template's.
    `unwraps`: a sole parameter of that name, which the schema does not know, holds the arguments as an object.
    """

    call: str
    parameter: str
    parameter_end: str
    call_end: str = ""
    value: str = ""
    section: tuple[str, ...] = ()
    section_end: tuple[str, ...] = ()
    types: Literal["schema", "wire"] = "schema"
    trim: bool = False
    unwraps: tuple[str, ...] = ()
    forced_json: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class ElementCalls:
    """An element per argument, nested for objects and lists: `<invoke name="f"><room>attic</room></invoke>`, each tag
    after `namespace`. A repeated name is a list; `item` is what a list's elements are called."""

    namespace: str
    call: str
    call_end: str
    section: tuple[str, ...] = ()
    section_end: tuple[str, ...] = ()
    item: str = "item"
    forced_json: bool = True
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """Calls as Python writes them, with keyword arguments: `[f(a=1), g()]`, or one per line (`lines`).

    Without `open` the calls are the whole answer and begin it."""

    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    lines: bool = False
    forced_json: bool = True
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class QuotedMapCalls:
    """A map with bare keys, its strings between two equal markers: `call:f{room:<q>attic<q>,level:4}`.

    `quoted`: what stands between the quotes is always a string, or typed by the schema like a bare value ("schema").
    """

    open: tuple[str, ...]
    close: tuple[str, ...]
    quote: str
    call: str = "call:{name}"
    quoted: Literal["string", "schema"] = "string"
    forced_json: bool = True
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages of a header and a body: `<|channel|>analysis<|message|>...<|end|>`. Reasoning and calls in one.

    `reasoning` are channels whose bodies are thoughts, every other channel's are content; a header with `recipient`
    before a name is a call, and its body the arguments. `dropped` are markers inside a header.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    reasoning: tuple[str, ...]
    recipient: str
    prefix: str
    dropped: tuple[str, ...] = ()
    forced_json: bool = False
    hidden: bool = True


Calls = JsonCalls | HeaderCalls | TaggedCalls | ElementCalls | PythonicCalls | QuotedMapCalls | Channels
"""A tool syntax. All of them share two options. `hidden`: calls are not shown as text where the request allows none.
`forced_json`: a call that the request demands is constrained by a JSON schema, in a form of its own, because the
syntax itself cannot be; and an answer without a call is then no answer, so that its text is dropped (as vLLM does)."""


WORDS = frozenset(
    ("starts", "switches", "trim", "name", "arguments", "ids", "types", "unwraps", "item", "quoted", "reasoning")
)
"""Fields that hold names and words, and no markers."""


def markers(declaration: Reasoning | Calls) -> Iterator[str]:
    """Every marker of a declaration, its holes in it."""
    for field in fields(declaration):
        value = getattr(declaration, field.name)
        if field.name not in WORDS:
            yield from (text for text in (value if isinstance(value, tuple) else (value,)) if isinstance(text, str))


KINDS: dict[str, type[Reasoning | Calls]] = {
    "reasoning": Reasoning,
    "json_calls": JsonCalls,
    "header_calls": HeaderCalls,
    "tagged_calls": TaggedCalls,
    "element_calls": ElementCalls,
    "pythonic_calls": PythonicCalls,
    "quoted_map_calls": QuotedMapCalls,
    "channels": Channels,
}
"""The kinds by the names that a configuration calls them."""

_HOLES: dict[tuple[type, str], tuple[frozenset[str], frozenset[str]]] = {
    (HeaderCalls, "header"): (frozenset(), frozenset({"name", "id"})),
    (TaggedCalls, "call"): (frozenset({"name"}), frozenset({"name", "index"})),
    (TaggedCalls, "parameter"): (frozenset({"key"}), frozenset({"key", "string", "type"})),
    (ElementCalls, "call"): (frozenset({"name"}), frozenset({"name"})),
    (QuotedMapCalls, "call"): (frozenset({"name"}), frozenset({"name"})),
}
"""Where holes may be: those that must be there, and those that may."""

_NEEDED: dict[type, tuple[str, ...]] = {
    Reasoning: ("close",),
    HeaderCalls: ("call", "header"),
    TaggedCalls: ("call", "parameter", "parameter_end"),
    ElementCalls: ("namespace", "call", "call_end"),
    QuotedMapCalls: ("open", "quote"),
    Channels: ("start", "channel", "message", "ends", "recipient"),
}


def check(declaration: Reasoning | Calls) -> None:
    """Raises ValueError that names the field of a declaration that cannot work, and says why."""
    kind = type(declaration)
    for name in _NEEDED.get(kind, ()):
        if not getattr(declaration, name):
            raise ValueError(f"{name} is missing")
    for field in fields(declaration):
        value = getattr(declaration, field.name)
        if isinstance(value, tuple) and not all(value):
            raise ValueError(f"{field.name} has an empty text")
        needed, allowed = _HOLES.get((kind, field.name), (frozenset[str](), frozenset[str]()))
        for text in value if isinstance(value, tuple) else (value,):
            holes = set(HOLE.findall(text)) if isinstance(text, str) else set()
            if missing := needed - holes:
                raise ValueError(f"{field.name} needs the hole {{{min(missing)}}}")
            if isinstance(text, str) and (unknown := holes - allowed):
                raise ValueError(f"{field.name} has the hole {{{min(unknown)}}}, which means nothing there")
    if isinstance(declaration, HeaderCalls) and not all(HOLE.search(header) for header in declaration.header):
        raise ValueError("header needs the hole {name} or {id}")
