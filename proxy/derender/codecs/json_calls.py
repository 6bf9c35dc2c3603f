"""Calls that are JSON objects with a name and arguments: one between markers, an array of them, or the whole answer.

The law: the text of the arguments is passed on as it was written. Keys may come in any order; arguments that come
before the name are held until it does. An object without a name is no call.
"""

import orjson

from proxy.derender.codecs.base import LONGEST_HEADER, Between, Codec, MarkupLimits, Schemas, Sink, Step, skip_space
from proxy.derender.codecs.json_text import JsonValue, json_string
from proxy.derender.markers import Marks
from proxy.formats.kinds import JsonCalls

_SMALL_KEYS = ("id", "type", "tool_call_id")


class JsonSyntax:
    """`only`: the one function that may be called. Without an opener, the first keys must be those of a call, so that
    an answer in JSON is not held for long."""

    def __init__(self, declaration: JsonCalls, marks: Marks, only: str | None = None) -> None:
        self.declaration, self.marks, self.only = declaration, marks, only
        spelled = declaration.by_text
        self.openers = (*map(marks.encode, declaration.open), *(declaration.open if spelled else ()))
        self.bare = frozenset() if self.openers else frozenset("[" if declaration.array else "{")
        closers = (*map(marks.encode, declaration.close), *(declaration.close if spelled else ()))
        self.after = Between(*closers, *self.openers)
        self.keys = frozenset((declaration.name or "", *declaration.arguments, *_SMALL_KEYS))

    def codec(self, opener: str, schemas: Schemas, limits: MarkupLimits) -> "JsonCodec":
        return JsonCodec(self, limits, opener.endswith("{"))


class JsonCodec(Codec):
    STATE = {  # noqa: RUF012
        "state": str,
        "array": bool,
        "key": str,
        "name": str,
        "read_arguments": bool,
        "direct": bool,
        "held": list,
        "size": int,
        "value": JsonValue,
    }

    def __init__(self, syntax: JsonSyntax, limits: MarkupLimits, opened: bool) -> None:
        self._syntax, self._limits = syntax, limits
        self._strict = opened or bool(syntax.bare)
        self.state = "key" if opened else "start"
        self.array = False
        self._next_object()

    def _next_object(self) -> None:
        self.key = self.name = ""
        self.read_arguments = self.direct = False
        self.held: list[str] = []
        self.size = 0
        self.value = JsonValue()

    def read(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        while True:
            if self.state == "after":
                return self._after(text, at, last)
            if not (self.state in ("arguments", "other") and self.value.started):
                at = skip_space(text, at)
            if at == len(text):
                return at, Step.WAIT
            character = text[at]
            match self.state:
                case "start":
                    bare, array = self._syntax.bare, self._syntax.declaration.array
                    if character == "[" and (array or not bare):
                        self.state, self.array = "element", True
                    elif character == "{" and not (array and bare):
                        self.state = "key"
                    else:
                        return at, Step.FAILED
                    at += 1
                case "element":
                    if character == "]":
                        self.state = "after"
                        return at + 1, Step.DROP
                    if character == "{":
                        self.state = "key"
                    elif character != ",":
                        return at, Step.FAILED
                    at += 1
                case "key" if character == ",":
                    at += 1
                case "key" if character == "}":
                    return self._end(at + 1, sink)
                case "key":
                    end, key = json_string(text, at, LONGEST_HEADER)
                    if key is None:
                        return (at, Step.WAIT) if end >= 0 and not last else self._broken(at, sink)
                    if self._strict and not self.name and not self._is_of_a_call(key):
                        return end, Step.FAILED
                    self.key, self.state, at = key, "colon", end
                case "colon":
                    if character != ":":
                        return self._broken(at, sink)
                    at += 1
                    self.state = self._value_of(self.key)
                    self.value = JsonValue()
                    if self.state == "arguments" and self._syntax.declaration.name is None:
                        self.name = self.key
                        sink.begin(self.name)
                        return at, Step.GO
                case "name":
                    end, name = json_string(text, at, LONGEST_HEADER)
                    if name is None:
                        return (at, Step.WAIT) if end >= 0 and not last else (at, Step.FAILED)
                    if not name or self._syntax.only not in (None, name):
                        return end, Step.FAILED
                    self.name, self.state = name, "key"
                    sink.begin(name)
                    if self.read_arguments:
                        self._release(sink)
                    return end, Step.GO
                case "arguments":
                    at, step = self._arguments(text, at, sink)
                    if step is not None:
                        return at, step
                case _:
                    at, ended = self.value.read(text, at, self._limits.depth)
                    if self.value.depth > self._limits.depth:
                        return self._broken(at, sink)
                    if ended:
                        self.state = "key"

    def _is_of_a_call(self, key: str) -> bool:
        return self._syntax.declaration.name is None or key in self._syntax.keys

    def _value_of(self, key: str) -> str:
        declaration = self._syntax.declaration
        if declaration.name is None:
            return "other" if self.name else "arguments"
        if key == declaration.name and not self.name:
            return "name"
        return "arguments" if key in declaration.arguments and not self.read_arguments else "other"

    def _arguments(self, text: str, at: int, sink: Sink) -> tuple[int, Step | None]:
        if not self.value.started:
            self.direct = text[at] in "{["
        room = self._limits.held - self.size
        end, ended = self.value.read(text, at, self._limits.depth)
        if self.value.depth > self._limits.depth:
            return self._broken(end, sink)
        piece = text[at:end]
        if self.direct and sink.active:
            sink.arguments(piece)
        elif len(piece) > room:
            return self._broken(at + room, sink)
        else:
            self.held.append(piece)
            self.size += len(piece)
        if ended:
            self.state, self.read_arguments = "key", True
            if not self.direct and sink.active:
                self._release(sink)
        return end, None

    def _release(self, sink: Sink) -> None:
        """What was held: arguments that came before the name, or that are no object but a string that holds one."""
        text = "".join(self.held)
        self.held, self.size = [], 0
        if not self.direct:
            try:
                value = orjson.loads(text)
            except orjson.JSONDecodeError:
                value = text
            if value is None or value == "":
                text = "{}"
            elif isinstance(value, str):
                text = value if value.lstrip().startswith("{") else text
        sink.arguments(text)

    def _broken(self, at: int, sink: Sink) -> tuple[int, Step]:
        if not sink.active:
            return at, Step.FAILED
        sink.end()
        return at, Step.DONE

    def _end(self, at: int, sink: Sink) -> tuple[int, Step]:
        if not self.name:
            return at, Step.FAILED
        if not self.read_arguments:
            sink.arguments("{}")
        sink.end()
        self._next_object()
        self.state = "element" if self.array else "after"
        return at, Step.GO

    def _after(self, text: str, at: int, last: bool) -> tuple[int, Step]:
        separator = self._syntax.declaration.separator
        if separator:
            start = skip_space(text, at)
            if text.startswith(separator, start):
                start = skip_space(text, start + len(separator))
            if start == len(text) and not last and start - at <= LONGEST_HEADER:
                return at, Step.WAIT
            if start < len(text) and text[start] == "{" and start > at:
                self.state = "start"
                return start, Step.DROP
            return at, Step.DONE
        end, marker = self._syntax.after.next(text, at, last)
        if marker is None:
            return at, Step.DONE
        if marker == "":
            return at, Step.WAIT
        if marker in self._syntax.openers:
            return at, Step.DONE
        return end, Step.DROP


class ArgumentsSyntax:
    """The arguments of the one function that may be called, alone: what a JSON schema for them makes of an answer."""

    openers: tuple[str, ...] = ()
    bare = frozenset("{")

    def __init__(self, function: str) -> None:
        self.function = function

    def codec(self, opener: str, schemas: Schemas, limits: MarkupLimits) -> "ArgumentsCodec":
        return ArgumentsCodec(self.function, limits)


class ArgumentsCodec(Codec):
    STATE = {"value": JsonValue, "begun": bool}  # noqa: RUF012

    def __init__(self, function: str, limits: MarkupLimits) -> None:
        self._function, self._limits = function, limits
        self.value = JsonValue()
        self.begun = False

    def read(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        if not self.begun:
            self.begun = True
            sink.begin(self._function)
            return at, Step.GO
        if not sink.active:
            return at, Step.DONE
        end, ended = self.value.read(text, at, self._limits.depth)
        sink.arguments(text[at:end])
        if not ended:
            return end, Step.WAIT
        sink.end()
        return end, Step.GO
