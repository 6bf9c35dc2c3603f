"""Calls in a model's own syntax as a constraint: a structural tag, made from the declaration that parses them.

The law: what a tag allows, the parser of the same declaration reads as calls and nothing else. A tag writes a call as
the model's template does, and leaves white space between markers to the model, two characters at most, since a grammar
without such a bound lets a model write white space for ever. What a declaration cannot say to a grammar has no tag.

The format is xgrammar's (0.2, docs/tutorials/structural_tag.md), as vLLM takes it; its styles of `json_schema` write
the arguments of families that have no JSON. vLLM begins a tag behind the reasoning, whose end its own parser finds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.formats.kinds import HOLE, Calls, Channels, HeaderCalls, JsonCalls, QuotedMapCalls, Reasoning, TaggedCalls
from proxy.protocol.generate import JsonObject

STYLES = {
    "<parameter={key}>": "qwen_xml",
    '<parameter name="{key}">': "minimax_xml",
    "<arg_key>{key}</arg_key>": "glm_xml",
    '<｜DSML｜parameter name="{key}" string="{string}">': "deepseek_xml",
    '<｜DSML｜ parameter name="{key}" string="{string}">': "deepseek_v4_1_xml",
    '<|open|>argument key="{key}" type="{type}"<|sep|>': "kimi_k3_xml",
}
"""How a family begins a parameter -> the style that xgrammar knows it by."""

QUOTED_MAP_STYLES = {'<|"|>': "gemma"}

SPACE: JsonObject = {"type": "regex", "pattern": r"[ \n]{0,2}"}


@dataclass(frozen=True, slots=True)
class Function:
    """One that may be called; `schema` is of its arguments, an object."""

    name: str
    schema: JsonObject


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What may stand before and after calls without being part of the answer: reasoning that the model may open by
    itself, and markers."""

    reasoning: Reasoning | None = None
    markers: Sequence[str] = ()


NOTHING = Surroundings()


@dataclass(frozen=True, slots=True)
class _Form:
    """How calls are written. `tags`: one of them is a call, or a section of calls; between two of them stands
    `separator`, or white space. `triggers` are what each of them begins with."""

    triggers: Sequence[str]
    tags: Sequence[JsonObject]
    separator: str = ""


def structural_tag(
    calls: Sequence[Calls],
    functions: Sequence[Function],
    *,
    forced: bool,
    single: bool,
    around: Surroundings = NOTHING,
) -> JsonObject | None:
    """The tag for calls of these functions, at least one of them where `forced`, at most one where `single`; where a
    call is not forced, any text may stand before and after it. None where no declaration of `calls` can be said so."""
    channels = next((c for c in calls if isinstance(c, Channels)), None)
    if channels is not None:
        return _tag(_messages(channels, functions, forced))
    forms = [form for c in calls if not c.forced_json and (form := _form(c, functions, single)) is not None]
    if not forms:
        return None
    if not forced:
        return _tag(
            {
                "type": "triggered_tags",
                "triggers": list(dict.fromkeys(trigger for form in forms for trigger in form.triggers)),
                "tags": [tag for form in forms for tag in form.tags],
                "stop_after_first": single,
            }
        )
    runs = [
        _separated(form.tags, form.separator, single) if form.separator else _run(form.tags, single) for form in forms
    ]
    markers = [_optional(_any_of([_text(m) for m in around.markers]))] * 2 if around.markers else []
    return _tag(_sequence(*_may_think(around.reasoning), *markers, SPACE, _any_of(runs), SPACE, *markers))


def _form(calls: Calls, functions: Sequence[Function], single: bool) -> _Form | None:
    make = _FORMS.get(type(calls))
    return make(calls, functions, single) if make is not None else None


def _json_calls(calls: JsonCalls, functions: Sequence[Function], single: bool) -> _Form | None:
    objects = [_object(calls, function) for function in functions]
    if not calls.open:
        if calls.array or calls.name is None:
            return None
        return _Form([f'{{"{calls.name}": "'], objects, f"{calls.separator} ")
    opener, closer = calls.open[0], calls.close[0] if calls.close else ""
    if opener.endswith("{") or calls.separator:  # what follows is written as without a marker, by another declaration
        return None
    if calls.array:
        body = _sequence(SPACE, _text("["), SPACE, _separated(objects, ", ", single), SPACE)
        return _Form([opener], [_between(opener, body, f"]{closer}")])
    return _Form([opener], [_between(opener, _sequence(SPACE, _any_of(objects), SPACE), closer)])


def _object(calls: JsonCalls, function: Function) -> JsonObject:
    name = orjson.dumps(function.name).decode()
    head = name if calls.name is None else f'"{calls.name}": {name}, "{calls.arguments[0]}"'
    return _between(f"{{{head}: ", _arguments(function), "}")


def _header_calls(calls: HeaderCalls, functions: Sequence[Function], single: bool) -> _Form:
    header = next((h for h in calls.header if "{id}" not in h), calls.header[0])
    before, after = (f"\n{calls.fence}\n", "\n```") if calls.fence else ("", "")
    tags = []
    for function in functions:
        begin, *rest = _filled(calls.call + header + before, function.name)
        content = _sequence(*rest, _arguments(function))
        tags.append(_between(begin["value"], content, after + calls.call_end))
    return _in_section(calls, calls.call, tags, single)


def _tagged_calls(calls: TaggedCalls, functions: Sequence[Function], single: bool) -> _Form | None:
    style = STYLES.get(calls.parameter)
    if style is None:
        return None
    tags = []
    for function in functions:
        begin, *rest = _filled(calls.call, function.name)
        tags.append(_between(begin["value"], _sequence(*rest, _arguments(function, style)), calls.call_end))
    return _in_section(calls, HOLE.split(calls.call)[0], tags, single)


def _quoted_map_calls(calls: QuotedMapCalls, functions: Sequence[Function], single: bool) -> _Form | None:
    style = QUOTED_MAP_STYLES.get(calls.quote)
    if style is None:
        return None
    opener = calls.open[0]
    tags = [
        _between(opener + calls.call.format(name=function.name), _arguments(function, style), calls.close[0])
        for function in functions
    ]
    return _Form([opener], tags)


_FORMS: dict[type, Callable[[Any, Sequence[Function], bool], _Form | None]] = {
    JsonCalls: _json_calls,
    HeaderCalls: _header_calls,
    TaggedCalls: _tagged_calls,
    QuotedMapCalls: _quoted_map_calls,
}


def _in_section(calls: HeaderCalls | TaggedCalls, opener: str, tags: Sequence[JsonObject], single: bool) -> _Form:
    if not calls.section:
        return _Form([opener], tags)
    section = _between(calls.section[0], _sequence(SPACE, _run(tags, single), SPACE), calls.section_end[0])
    return _Form([calls.section[0]], [section])


def _filled(template: str, name: str) -> list[JsonObject]:
    """What a header says of a call of the function `name`; the first part is text."""
    parts = HOLE.split(template)
    text, said = parts[0], []
    for hole, following in zip(parts[1::2], parts[2::2], strict=True):
        if hole == "name":
            text += name
        else:
            said += [_text(f"{text}functions.{name}:" if hole == "id" else text), _regex(r"[0-9]{1,4}")]
            text = ""
        text += following
    return [*said, _text(text)] if text else said


def _messages(channels: Channels, functions: Sequence[Function], forced: bool) -> JsonObject:
    """A whole answer of channels, the reasoning included: thoughts and texts between calls, then one call, which ends
    the turn, or else the final text. A recipient may stand before the channel or behind it."""
    end, end_of_call = channels.ends[:2]
    thoughts = [*channels.reasoning, "commentary"]
    said = [_between(f"{channels.channel}{name}{channels.message}", {"type": "any_text"}, end) for name in thoughts]
    constrain = "".join(f" ?{_escaped(marker)}|" for marker in channels.dropped)
    kind = _regex(f"({constrain} )json")
    last = []
    for function in functions:
        recipient = f" {channels.recipient}{channels.prefix}{function.name}"
        body = _sequence(kind, _text(channels.message), _arguments(function))
        last.append(_between(f"{channels.channel}commentary{recipient}", body, end_of_call))
        last.append(_between(f"{recipient}{channels.channel}commentary", body, end_of_call))
    if not forced:
        last.append(_sequence(_text(f"{channels.channel}final{channels.message}"), {"type": "any_text"}))
    before = _sequence(_any_of(said), _text(f"{channels.start}assistant"))
    return _sequence({"type": "star", "content": before}, _any_of(last))


def _may_think(reasoning: Reasoning | None) -> list[JsonObject]:
    if reasoning is None or not reasoning.open:
        return []
    return [_optional(_between(reasoning.open[0], {"type": "any_text"}, reasoning.close[0]))]


def _run(tags: Sequence[JsonObject], single: bool) -> JsonObject:
    one = _any_of(tags)
    return one if single else {"type": "plus", "content": _sequence(one, SPACE)}


def _separated(tags: Sequence[JsonObject], separator: str, single: bool) -> JsonObject:
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": single,
    }


def _arguments(function: Function, style: str = "") -> JsonObject:
    return {"type": "json_schema", "json_schema": function.schema} | ({"style": style} if style else {})


def _between(begin: str, content: JsonObject, end: str) -> JsonObject:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(value: str) -> JsonObject:
    return {"type": "const_string", "value": value}


def _regex(pattern: str) -> JsonObject:
    return {"type": "regex", "pattern": pattern}


def _escaped(text: str) -> str:
    """Only what xgrammar's regular expressions need escaped; Python's own escapes more."""
    return "".join(f"\\{c}" if c in r"\^$.|?*+()[]{}/" else c for c in text)


def _sequence(*elements: JsonObject) -> JsonObject:
    return {"type": "sequence", "elements": list(elements)} if len(elements) > 1 else elements[0]


def _any_of(elements: Sequence[JsonObject]) -> JsonObject:
    return {"type": "or", "elements": list(elements)} if len(elements) > 1 else elements[0]


def _optional(content: JsonObject) -> JsonObject:
    return {"type": "optional", "content": content}


def _tag(format_: JsonObject) -> JsonObject:
    return {"type": "structural_tag", "format": format_}
