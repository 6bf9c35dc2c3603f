"""Outputs as a model would write them, made up at random from a declaration, together with what they mean.

The law: a writer knows the declaration and the prose that `proxy.formats.kinds` has on it, and nothing of the code that
reads. What it writes is well-formed; where the format leaves a choice (white space, order, quotes), it takes any.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.formats.kinds import (
    HOLE,
    Calls,
    Channels,
    ElementCalls,
    HeaderCalls,
    JsonCalls,
    PythonicCalls,
    QuotedMapCalls,
    Reasoning,
    TaggedCalls,
)
from tests.derender.readings import Format

SPACES = ["", "", "\n", "\n\n", " ", " \n"]
WORDS = [
    *["The tide", " turns", "at noon", "a < b", "<", "<<", "</", "{", "[", "]", "}", "```", "\n", "\n\n", " "],
    *["é", "🌊", "|>", "x=1", '"', "'", ":", ";", ", ", "\\", "&amp;", "true", "7", "<br>", "call:", "\\n", "灯台"],
]
NAMES = ["set_lamp", "set_lamp", "now", "harbour.get_tide", "unheard-of"]


@dataclass
class Meant:
    """`calls` are names and arguments; `ids` the ids that the model wrote, None where it wrote none."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)


@dataclass
class Written:
    """Pieces of marked text, each a marker, a name or some such; `prompt` is marked text too."""

    meant: Meant
    pieces: list[str]
    prompt: str = ""


class Writer:
    """One output. `size` bounds how much of everything there is."""

    def __init__(self, form: Format, seed: int, size: int) -> None:
        self.form, self.marks, self.size = form, form.marks, size
        self.random = random.Random(seed)
        self.meant = Meant()
        self.pieces: list[str] = []
        self.prompt = ""
        encode = form.marks.encode
        openers = [o for calls in form.calls for o in openers_of(calls)]
        reasoning = form.reasoning
        spelled = [o for calls in form.calls if isinstance(calls, JsonCalls) and calls.by_text for o in calls.open]
        self.openers = [*map(encode, openers), *spelled]
        r = [reasoning.open, reasoning.close, reasoning.dropped, reasoning.ends] if reasoning else [()] * 4
        opens, closes, dropped, ends = ([encode(marker) for marker in markers] for markers in r)
        self._ends_content = pattern_of([*self.openers, *opens, *closes, *dropped])
        ended_by = self.openers if reasoning and reasoning.ended_by_calls else []
        self._ends_reasoning = pattern_of([*ended_by, *opens, *closes, *ends])

    def some(self, most: int) -> int:
        return self.random.randint(0, min(most, self.size))

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def put(self, *pieces: str) -> None:
        self.pieces += filter(None, pieces)

    def marker(self, marker: str) -> None:
        self.put(self.marks.encode(marker))

    def space(self) -> str:
        return self.random.choice(SPACES)

    def text(self, ends: re.Pattern[str], before: str = "") -> str:
        """Text in which nothing is a marker, also not where it meets what it stands `before`."""
        for _ in range(20):
            cut = [marker[: self.random.randint(1, len(marker))][:-1] for marker in self.openers if len(marker) > 1]
            text = "".join(self.random.choices([*WORDS, *cut[:3]], k=self.some(6)))
            found = ends.search(text + before)
            if found is None or found.start() >= len(text):
                return text
        return "low tide"

    def write(self) -> Written:
        if self.form.calls and isinstance(self.form.calls[0], Channels):
            write_channels(self, self.form.calls[0])
        else:
            ended = self._reasoning(self.form.reasoning) if self.form.reasoning else True
            if ended:
                self._answer()
        return Written(self.meant, self.pieces, self.prompt)

    def _reasoning(self, declared: Reasoning) -> bool:
        """Whether an answer follows."""
        encode = self.marks.encode
        inside = declared.starts == "inside"
        if declared.open and self.chance(0.3):
            inside = self.chance(0.5)
            self.prompt = encode(self.random.choice(declared.open if inside else declared.close))
        if not inside:
            if declared.once or not declared.open or self.chance(0.3):
                return True
            self.put(self.space())
        if declared.open and (not inside or self.chance(0.3)):
            self.marker(self.random.choice(declared.open))
        close = encode(self.random.choice(declared.close))
        thought = self.text(self._ends_reasoning, close)
        self.put(thought)
        thought = self.marks.text(thought)
        self.meant.reasoning = {"": thought, "end": thought.rstrip(), "both": thought.strip()}[declared.trim]
        if self.chance(0.1):
            return False
        if declared.ended_by_calls and any(map(openers_of, self.form.calls)) and self.chance(0.2):
            self._calls(openly=True)
            return False
        self.put(close)
        if self.chance(0.1):
            self.put(close)
        return True

    def _answer(self) -> None:
        """Text and calls in turn. Calls that have no opener begin the answer; white space beside calls, and nothing
        else there, means nothing."""
        dropped = self.form.reasoning.dropped if self.form.reasoning else ()
        if dropped and self.chance(0.5):
            end = self.marks.encode(dropped[1]) if len(dropped) > 1 else ""
            self.marker(dropped[0])
            text = self.text(self._ends_content, end)
            self.put(text, end)
            self.meant.content = self.marks.text(text)
            return
        bare = [calls for calls in self.form.calls if not openers_of(calls)]
        opened = [calls for calls in self.form.calls if openers_of(calls)]
        runs: list[str] = []
        if bare and self.chance(0.7):
            self.put(self.space())
            self._calls(openly=False)
        runs.append(self._run())
        for _ in range(self.some(3) if opened else 0):
            self._calls(openly=True)
            runs.append(self._run())
        self.meant.content = "".join(run for run in runs if not (self.meant.calls and run.isspace()))

    def _run(self) -> str:
        text = self.text(self._ends_content, self.openers[0] if self.openers else "")
        first = text.lstrip()[:1]
        if first and ((self.meant.calls and first in ";`") or (first == "{" and "\n{" in self.openers)):
            text = "low tide"  # what could go on with the call before, or begin one itself
        self.put(text)
        return self.marks.text(text)

    def _calls(self, openly: bool) -> None:
        declared = self.random.choice([calls for calls in self.form.calls if bool(openers_of(calls)) is openly])
        WRITERS[type(declared)](self, declared)

    def call(self, arguments: dict[str, Any], name: str, native_id: str | None = None) -> None:
        self.meant.calls.append((name, json.loads(json.dumps(arguments), object_pairs_hook=list)))
        self.meant.ids.append(native_id)

    def json_text(self, value: Any) -> str:
        return json.dumps(
            value,
            ensure_ascii=self.chance(0.2),
            indent=self.random.choice([None, None, 1]),
            separators=self.random.choice([None, (",", ":"), (" , ", " : ")]),
        )

    def string(self) -> str:
        """Any text at all, markers spelled in it."""
        spelled = [self.marks.text(opener) for opener in self.openers]
        return "".join(self.random.choices([*WORDS, *spelled], k=self.some(4)))

    def any_value(self, depth: int = 2) -> Any:
        kinds = ["string", "string", "number", "word", *(["list", "map"] if depth else [])]
        match self.random.choice(kinds):
            case "string":
                return self.string()
            case "number":
                return self.random.choice([0, 4, -17, 0.5, -3.25, 1e30, 2**60])
            case "word":
                return self.random.choice([True, False, None])
            case "list":
                return [self.any_value(depth - 1) for _ in range(self.some(3))]
            case _:
                return {self.string(): self.any_value(depth - 1) for _ in range(self.some(2))}

    def any_arguments(self) -> dict[str, Any]:
        keys = ["room", "level", "a b", "name", self.string()]
        return {self.random.choice(keys): self.any_value() for _ in range(self.some(3))}

    def typed_arguments(self, name: str, plain: bool = False) -> dict[str, Any]:
        """Values as the schemas of `readings.ASKED` have them. `plain`: no string that could be taken for more."""
        text = (lambda: self.random.choice(["attic", "by the sea", "灯台 é"])) if plain else self.string
        made = {
            "room": text,
            "level": lambda: self.random.choice([0, 4, -17]),
            "dim": lambda: self.random.choice([0.5, -3.25, 7]),
            "on": lambda: self.chance(0.5),
            "note": lambda: self.random.choice([None, "by the sea"]),
            "tags": lambda: [text() for _ in range(self.some(2))],
            "spot": lambda: dict(list({"x": self.random.choice([1, -2]), "label": text()}.items())[: self.some(2)]),
        }
        keys = {"set_lamp": [*made], "now": [], "harbour.get_tide": ["room"]}.get(name, ["memo"])
        chosen = self.random.sample(keys, min(len(keys), self.random.randint(0, self.size)))
        return {key: made.get(key, text)() for key in chosen}


def pattern_of(markers: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(filter(None, markers), key=len, reverse=True))) or "(?!)")


def prefix_of(tag: str) -> str:
    """What a tag with holes always begins with."""
    attribute = re.search(r"""\s+[\w:-]+="\{""", tag)
    hole = HOLE.search(tag)
    return tag[: attribute.start()] if attribute else tag[: hole.start()] if hole else tag


def openers_of(calls: Calls) -> list[str]:
    match calls:
        case Channels():
            return []
        case HeaderCalls() | TaggedCalls() | ElementCalls():
            return [*calls.section, prefix_of(calls.call)]
    return [*calls.open]


def write_json(w: Writer, declared: JsonCalls) -> None:
    opener = w.random.choice(declared.open) if declared.open else ""
    own_brace = opener.endswith("{")
    w.marker(opener.removesuffix("{") if own_brace else opener)
    array = declared.array or (bool(declared.open) and not own_brace and not declared.separator and w.chance(0.2))
    separator = "," if array else declared.separator
    if not own_brace:
        w.put(w.space())
    w.put("[" * array)
    for number in range(w.random.randint(1, 1 + w.size) if separator else 1):
        if number:
            w.put(w.space(), separator, w.space())
        write_object(w, declared)
    w.put(w.space() if array else "", "]" * array)
    if declared.close:
        w.put(w.space())
        w.marker(declared.close[0])


def write_object(w: Writer, declared: JsonCalls) -> None:
    name, arguments = w.random.choice(NAMES), w.any_arguments()
    if declared.name is None:
        keys = [(name, w.json_text(arguments))]
    else:
        keys = [(declared.name, json.dumps(name)), (w.random.choice(declared.arguments), w.json_text(arguments))]
        if w.chance(0.3):
            keys.insert(w.random.randint(0, 2), ("id", '"a1"'))
        if w.chance(0.3):
            keys[0], keys[-1] = keys[-1], keys[0]
        if not arguments and w.chance(0.3):
            keys = [keys[0] if keys[0][0] == declared.name else (declared.name, json.dumps(name))]
    w.put("{")
    for number, (key, value) in enumerate(keys):
        w.put(", " if number else "", w.space() if number else "", f'"{key}"', w.space(), ":", w.space(), value)
    w.put(w.space(), "}")
    w.call(arguments, name)


def write_header_calls(w: Writer, declared: HeaderCalls) -> None:
    in_section = bool(declared.section) and w.chance(0.9)
    number_of_section = w.random.randrange(len(declared.section)) if in_section else 0
    if in_section:
        w.marker(declared.section[number_of_section])
        w.put(w.space())
    for number in range(w.random.randint(1, 1 + w.size)):
        if number:
            w.put(w.space())
        name, arguments = w.random.choice(NAMES), w.any_arguments()
        index = len(w.meant.calls)
        native_id = f"functions.{name}:{index}" if "{name}" not in declared.header[0] else f"a{index}B2c3D4e"[:9]
        header = w.random.choice(declared.header)
        w.marker(declared.call)
        for part in HOLE.split(w.marks.encode(header)):
            w.put({"name": name, "id": native_id}.get(part, part))
        w.put(w.space(), declared.fence, "\n" if declared.fence else "", w.json_text(arguments))
        w.put("\n```" if declared.fence else "")
        w.marker(declared.call_end)
        w.call(arguments, name, native_id if "{id}" in header else None)
    if in_section:
        w.put(w.space())
        w.marker(declared.section_end[number_of_section])


def fill(w: Writer, tag: str, values: dict[str, str]) -> None:
    """A tag with values in its holes, its attributes quoted in any way that the values allow."""
    encoded = w.marks.encode(tag)
    position = 0
    for hole in re.finditer(r'("?)\{(\w+)\}"?', encoded):
        value = values[hole[2]]
        w.put(encoded[position : hole.start()])
        if hole[1]:
            value = value.replace("&", "&amp;").replace('"', "&quot;").replace("'", "&#39;")
            bare = re.fullmatch(r"[\w.-]+", value) is not None
            w.put(w.random.choice([f'"{value}"', f'"{value}"', f"'{value}'", *([value] if bare else [])]))
        else:
            w.put(value)
        position = hole.end()
    w.put(encoded[position:])


def write_tagged_calls(w: Writer, declared: TaggedCalls) -> None:
    encode = w.marks.encode
    in_section = bool(declared.section)
    number_of_section = w.random.randrange(len(declared.section)) if in_section else 0
    if in_section:
        w.marker(declared.section[number_of_section])
        w.put(w.space())
    closers = [declared.parameter_end, prefix_of(declared.parameter), declared.call_end]
    for number in range(w.random.randint(1, 1 + w.size) if in_section else 1):
        if number:
            w.put(w.space())
        name = w.random.choice(NAMES)
        arguments = w.typed_arguments(name)
        name = name if arguments or declared.call.rpartition("}")[2] else w.random.choice(["now", "set_lamp"])
        attribute = bool(re.search(r'="\{key\}"', declared.parameter))
        if attribute and name == "unheard-of" and w.chance(0.3):
            arguments["rise & fall"] = "at noon"
        fill(w, declared.call, {"name": name, "index": str(number + 1)})
        w.put(w.space())
        for key, meant in arguments.items():
            value = meant
            frame = "\n" if declared.trim and w.chance(0.7) else ""
            if isinstance(value, str) and key != "note":
                ends = [
                    f"{newline}{encode(c)}" for c in closers if c for newline in ("", "\n" if declared.trim else "")
                ]
                value = w.text(pattern_of(ends), frame + encode(closers[0]))
                frame = "\n" if declared.trim and (not value or value[0] == "\n") else frame
            is_text = isinstance(value, str)
            types = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
            kind = types.get(type(value), "null")
            fill(w, declared.parameter, {"key": key, "type": kind, "string": str(is_text).lower()})
            if declared.value:
                w.put(w.space())
                w.marker(declared.value)
            written = value if is_text else json.dumps(value, ensure_ascii=w.chance(0.3))
            if not is_text and any(c and c in written for c in [*map(encode, closers), *closers]):
                value = {"tags": [], "spot": {}}.get(key, value)
                written = json.dumps(value)
            arguments[key] = w.marks.text(value) if is_text else value
            w.put(frame, written, frame)
            w.marker(declared.parameter_end)
            w.put(w.space())
        w.marker(declared.call_end)
        w.call(arguments, name)
    if in_section:
        w.put(w.space())
        w.marker(declared.section_end[number_of_section])


def write_elements(w: Writer, declared: ElementCalls) -> None:
    def element(name: str, value: Any) -> None:
        w.marker(f"{declared.namespace}<{name}>")
        if isinstance(value, dict):
            for key, child in value.items():
                element(key, child)
        elif isinstance(value, list):
            for child in value:
                element(declared.item, child)
        else:
            w.put(value if isinstance(value, str) else json.dumps(value))
        w.marker(f"{declared.namespace}</{name}>")

    w.marker(declared.section[0])
    w.put(w.space())
    for number in range(w.random.randint(1, 1 + w.size)):
        if number:
            w.put(w.space())
        name = w.random.choice(NAMES)
        arguments = w.typed_arguments(name, plain=True)
        fill(w, declared.call, {"name": name})
        for key, value in arguments.items():
            element(key, value)
        w.marker(declared.call_end)
        w.call(arguments, name)
    w.put(w.space())
    w.marker(declared.section_end[0])


def write_pythonic_calls(w: Writer, declared: PythonicCalls) -> None:
    def literal(value: Any) -> str:
        if isinstance(value, dict):
            inside = ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items())
            return f"{{{inside}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(literal, value))}]"
        return repr(value) if w.chance(0.5) else json.dumps(value, ensure_ascii=w.chance(0.3))

    if declared.open:
        w.marker(w.random.choice(declared.open))
        w.put("\n" if declared.lines else w.space())
    w.put("" if declared.lines else "[")
    for number in range(w.random.randint(1, 1 + w.size)):
        if number:
            w.put("\n" if declared.lines else w.random.choice([", ", ",", ",\n"]))
        name = w.random.choice(NAMES)
        arguments = {key: w.any_value() for key in w.random.sample(["room", "level", "from", "on"], w.some(3))}
        w.put(name, "(")
        for position, (key, value) in enumerate(arguments.items()):
            w.put(", " if position else "", key, "=", literal(value))
        w.put(")")
        w.call(arguments, name)
    w.put("" if declared.lines else "]")
    if declared.close:
        w.put("\n" if declared.lines else w.space())
        w.marker(declared.close[0])


def write_quoted_map(w: Writer, declared: QuotedMapCalls) -> None:
    quote = w.marks.encode(declared.quote)

    def value_of(value: Any) -> str:
        if isinstance(value, dict):
            return f"{{{','.join(f'{k}:{value_of(v)}' for k, v in value.items())}}}"
        if isinstance(value, list):
            return f"[{','.join(map(value_of, value))}]"
        return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)

    w.marker(w.random.choice(declared.open))
    name = w.random.choice(NAMES)
    arguments = w.typed_arguments(name, plain=declared.quoted == "schema" or len(quote) > 1)
    fill(w, declared.call, {"name": name})
    w.put("{")
    for number, (key, value) in enumerate(arguments.items()):
        w.put("," if number else "", key, ":", value_of(value))
    w.put("}")
    w.marker(declared.close[0])
    w.call(arguments, name)


def write_channels(w: Writer, declared: Channels) -> None:
    encode = w.marks.encode
    ends = pattern_of([*map(encode, declared.ends), encode(declared.start), encode(declared.channel)])
    bodies: dict[str, list[str]] = {"thought": [], "text": []}
    begun = w.chance(0.5)
    w.prompt = encode(declared.start) + "assistant" if begun else ""
    for number in range(w.random.randint(1, 2 + w.size)):
        if number or (not begun and w.chance(0.5)):
            w.marker(declared.start)
            w.put("assistant")
        kind = w.random.choice(["thought", "text", "call"])
        end = encode(w.random.choice(declared.ends))
        body = w.text(ends, end)
        if kind == "call":
            name, arguments = w.random.choice(NAMES), w.any_arguments()
            recipient = f" {declared.recipient}{declared.prefix if w.chance(0.7) else ''}{name}"
            before = w.chance(0.3)
            w.put(recipient if before else "")
            w.marker(declared.channel)
            w.put("commentary", "" if before else recipient, " " if w.chance(0.5) else "")
            if w.chance(0.5):
                w.marker(declared.dropped[0])
                w.put("json")
            body = json.dumps(arguments)
            if ends.search(body):
                arguments, body = {}, "{}"
            w.call(arguments, name)
        else:
            w.marker(declared.channel)
            w.put(declared.reasoning[0] if kind == "thought" else w.random.choice(["final", "commentary"]))
        w.marker(declared.message)
        w.put(body, end)
        if kind != "call" and body:
            bodies[kind].append(w.marks.text(body))
    w.meant.reasoning, w.meant.content = map("\n".join, bodies.values())


WRITERS: dict[type, Any] = {
    JsonCalls: write_json,
    HeaderCalls: write_header_calls,
    TaggedCalls: write_tagged_calls,
    ElementCalls: write_elements,
    PythonicCalls: write_pythonic_calls,
    QuotedMapCalls: write_quoted_map,
}
