"""Calls as Python writes them: `[f(a=1), g()]`, or one per line between markers.

The law: a call begins when its name and its first keyword are there, so that prose in brackets stays prose. Values are
translated as they come, strings while they are open. Only what stands in parentheses is held, until a comma or the end
says whether it is a tuple. Where a call goes on as no Python would, it ends as far as it came.
"""

import re
from typing import Any, ClassVar

from proxy.derender.codecs.base import (
    LONGEST_HEADER,
    Between,
    Codec,
    MarkupLimits,
    Schemas,
    Sink,
    Step,
    skip_space,
)
from proxy.derender.codecs.json_text import quoted
from proxy.derender.codecs.scalar import literal
from proxy.derender.markers import Marks
from proxy.formats.kinds import PythonicCalls

_STATES = frozenset(
    ("list", "call", "after call", "close", "first", "next", "value", "string", "join", "colon", "after", "cut")
)
"""Where the reader is. Between calls: before the list, before a call, after one, after the list. Inside a call: before
the first part of a container or before a further one, before a value that must come, in a string, after a string that
another may continue, after a dictionary's key, after a part. "cut": the output ended in a part that says nothing."""

_CLOSERS = {"[": "]", "(": ")", "g": ")", "{": "}"}
"""What is open -> what closes it. "g": parentheses that may be a tuple, or only group."""

_HEAD = re.compile(r"([^\W\d][\w.-]*)\([ \t\r\n]*(?:\)|[^\W\d]\w*[ \t\r\n]*=(?!=))")
_HEAD_PREFIX = re.compile(r"[^\W\d][\w.-]*(?:\([ \t\r\n]*(?:[^\W\d]\w*[ \t\r\n]*=?)?)?\Z")
_KEYWORD = re.compile(r"([^\W\d]\w*)[ \t\r\n]*=")
_KEYWORD_PREFIX = re.compile(r"[^\W\d]\w*[ \t\r\n]*\Z")
_ATOM = re.compile(r"[^\s,:=<>#'\"()\[\]{}\ud800-\udfff]+")

_STOPS = {
    "'": re.compile(r"['\\]"),
    '"': re.compile(r'["\\]'),
    "'''": re.compile(r"'''|\\|'{1,2}\Z"),
    '"""': re.compile(r'"""|\\|"{1,2}\Z'),
}
"""The opening quote -> what ends a stretch of plain text in the string."""
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][\da-fA-F]{2})\\u([dD][c-fC-F][\da-fA-F]{2})|u([\da-fA-F]{4})|x([\da-fA-F]{2})"
    r"|U([\da-fA-F]{8})|([0-7]{1,3})|(\r\n|.))",
    re.DOTALL,
)
_ESCAPE_PREFIX = re.compile(
    r"\\(?:[0-7]{0,2}|x[\da-fA-F]?|U[\da-fA-F]{0,7}|u[\da-fA-F]{0,3}|\r"
    r"|u[dD][89abAB][\da-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][\da-fA-F]?)?)?)?)?)\Z"
)
_LETTERS = {
    "\n": "", "\r": "", "\r\n": "", "\\": "\\", "'": "'", '"': '"',
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v",
}  # fmt: skip


class PythonicSyntax:
    def __init__(self, declaration: PythonicCalls, marks: Marks) -> None:
        self.openers = tuple(map(marks.encode, declaration.open))
        self.bare = frozenset() if declaration.open else frozenset("[")
        self.marks = marks
        self.lines = declaration.lines
        closers = tuple(map(marks.encode, declaration.close))
        self.closers = frozenset(closers)
        self.after_list = Between(*closers)
        self.after_call = Between(*closers, ",", "]")

    def codec(self, opener: str, schemas: Schemas, limits: MarkupLimits) -> "PythonicCodec":
        return PythonicCodec(self, limits)


class _Broken(Exception):
    """What stands here cannot go on the call."""


class PythonicCodec(Codec):
    STATE: ClassVar[dict[str, type]] = {
        "state": str, "bracketed": bool, "called": bool, "stack": str, "key": bool, "quote": str,
        "held": list, "size": int,
    }  # fmt: skip

    def __init__(self, syntax: PythonicSyntax, limits: MarkupLimits) -> None:
        self._syntax, self._limits = syntax, limits
        self._out: list[str] = []
        self.state = "list"
        self.bracketed = self.called = False
        self.stack = ""
        """What is open inside a call, outermost first."""
        self.key = False
        """The string or the word that is being read is a dictionary's key."""
        self.quote = ""
        self.held: list[str] = []
        """JSON inside parentheses of which it is not known what they are; "" stands where they opened."""
        self.size = 0
        """How many characters have been read since something is held."""

    def load(self, state: Any, marks: Marks) -> None:
        super().load(state, marks)
        known = self.state in _STATES and set(self.stack) <= _CLOSERS.keys() and (self.quote or "'") in _STOPS
        if not known or self.held.count("") != self.stack.count("g"):
            raise ValueError("the state of a pythonic call is none that a call can be in")

    def read(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        if sink.active:
            return self._arguments(text, at, last, sink)
        if self.state == "list":
            at = skip_space(text, at)
            if at == len(text):
                return at, Step.FAILED if last else Step.WAIT
            self.bracketed = text[at] == "["
            if not (self.bracketed or self._syntax.lines):
                return at, Step.FAILED
            at += self.bracketed
            self.state = "call"
        elif self.state == "after call":
            start, marker = self._syntax.after_call.next(text, at, last)
            if marker == "":
                return at, Step.WAIT
            if marker is None and last and skip_space(text, at) == len(text):
                return len(text), Step.DONE
            if marker in self._syntax.closers:
                return start, Step.DONE
            if self.bracketed != (marker is not None):
                return at, Step.FAILED
            at = start
            self.state = "close" if marker == "]" else "call"
        if self.state == "call":
            return self._head(text, at, last, sink)
        at, marker = self._syntax.after_list.next(text, at, last)
        return at, Step.WAIT if marker == "" else Step.DONE

    def _head(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        """Reads up to the first keyword of a call, or its end where it has no arguments."""
        at = skip_space(text, at)
        if at == len(text):
            return at, Step.WAIT if not last else Step.DONE if self.called else Step.FAILED
        if text[at] == "]" and self.called and self.bracketed:
            self.state = "close"
            return at + 1, Step.DROP
        head = _HEAD.match(text, at)
        if head is None or (head.end() == len(text) and text[-1] == "=" and not last):
            possible = len(text) - at <= LONGEST_HEADER and _HEAD_PREFIX.match(text, at) is not None
            return at, Step.WAIT if possible and not last else Step.FAILED
        if head.end() - at > LONGEST_HEADER:
            return at, Step.FAILED
        self.called = True
        self.state = "first"
        sink.begin(head[1])
        return head.end(1) + 1, Step.GO

    def _arguments(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        out = self._out = []
        end = len(text)
        step = Step.WAIT
        try:
            while step is Step.WAIT:
                if self.state != "string":
                    at = skip_space(text, at)
                if at == end:
                    break
                if not self.stack and text[at] == ")" and self.state in ("first", "next", "after"):
                    self._emit("{}" if self.state == "first" else "}")
                    at += 1
                    step, self.state = Step.GO, "after call"
                elif (reached := self._part(text, at, last)) is not None:
                    self.size = self.size + reached - at if self.held else 0
                    at = reached
                    if self.size > self._limits.held:
                        raise _Broken
                elif last:
                    at, self.state = end, "cut"
                else:
                    break
        except _Broken:
            step = Step.DONE
        if last or step is Step.DONE:
            if self.state == "join":
                self._close_string()
            self._release()
        if arguments := "".join(out):
            sink.arguments(arguments)
        if step is not Step.WAIT:
            sink.end()
        return at, step

    def _part(self, text: str, at: int, last: bool) -> int | None:
        """Reads one part of the arguments; gives the position behind it, None where its end is not there yet."""
        state, char = self.state, text[at]
        if state == "string":
            return self._string(text, at, last)
        if state == "join":
            if char in "'\"":
                return self._open_string(text, at, last, "")
            self._close_string()
            return at
        if state == "colon":
            if char != ":":
                raise _Broken
            self._emit(": ")
            self.state, self.key = "value", False
            return at + 1
        top = self.stack[-1:]
        if state != "value" and char == _CLOSERS.get(top):
            return self._close(at)
        if state == "after":
            if char != ",":
                raise _Broken
            if top == "g":
                self._resolve("[")
                self.stack = self.stack[:-1] + "("
            self.state = "next"
            return at + 1
        between = ", " if state == "next" else ""
        if state != "value" and not top:
            return self._keyword(text, at, between or "{")
        self.key = state != "value" and top == "{"
        return self._value(text, at, last, between)

    def _keyword(self, text: str, at: int, between: str) -> int | None:
        keyword = _KEYWORD.match(text, at)
        if keyword is None or keyword.end() - at > LONGEST_HEADER:
            if keyword is None and len(text) - at <= LONGEST_HEADER and _KEYWORD_PREFIX.match(text, at):
                return None
            raise _Broken
        self._emit(f'{between}"{quoted(keyword[1])}": ')
        self.state = "value"
        return keyword.end()

    def _value(self, text: str, at: int, last: bool, between: str) -> int | None:
        char = text[at]
        if char in "'\"":
            return self._open_string(text, at, last, between + '"')
        if char in "[{(":
            if self.key or len(self.stack) >= self._limits.depth:
                raise _Broken
            if char == "(":
                self._emit(between)
                self.held.append("")
            else:
                self._emit(between + char)
            self.stack += "g" if char == "(" else char
            self.state = "first"
            return at + 1
        atom = _ATOM.match(text, at)
        if atom is None or atom.end() - at > LONGEST_HEADER:
            raise _Broken
        value = literal(atom[0])
        if atom.end() == len(text) and (not last or value is None):
            return None
        if value is None or (self.key and value[0] != '"'):
            value = f'"{quoted(value or atom[0])}"'
        self._emit(between + value)
        self.state = "colon" if self.key else "after"
        return atom.end()

    def _close(self, at: int) -> int:
        top = self.stack[-1]
        if top == "g":
            self._resolve("[]" if self.state == "first" else "")
        else:
            self._emit("}" if top == "{" else "]")
        self.stack = self.stack[:-1]
        self.state = "after"
        return at + 1

    def _open_string(self, text: str, at: int, last: bool, emitted: str) -> int | None:
        quote = text[at : at + 3]
        if quote != text[at] * 3:
            if len(quote) < 3 and quote == text[at] * len(quote) and not last:
                return None
            quote = text[at]
        self._emit(emitted)
        self.state, self.quote = "string", quote
        return at + len(quote)

    def _string(self, text: str, at: int, last: bool) -> int | None:
        stop = _STOPS[self.quote].search(text, at)
        end = stop.start() if stop else len(text)
        if self.held:
            end = min(end, at + self._limits.held + 1 - self.size)
        if end > at:
            self._emit(quoted(self._syntax.marks.text(text[at:end])))
            return end
        assert stop is not None
        if stop[0] == self.quote:
            self.state = "join"
            return stop.end()
        if stop[0] != "\\":
            return None
        if len(text) - at < 12 and _ESCAPE_PREFIX.match(text, at):
            return None
        escape = _ESCAPE.match(text, at)
        assert escape is not None
        self._emit(quoted(self._syntax.marks.text(_unescaped(escape))))
        return escape.end()

    def _close_string(self) -> None:
        self._emit('"')
        self.state = "colon" if self.key else "after"

    def _emit(self, text: str) -> None:
        if not self.held:
            self._out.append(text)
        elif text:
            self.held.append(text)

    def _resolve(self, opener: str) -> None:
        """It is known what the innermost held parentheses are: `opener` is written where they opened."""
        start = len(self.held) - 1 - self.held[::-1].index("")
        inside = opener + "".join(self.held[start:])
        del self.held[start:]
        self._emit(inside)

    def _release(self) -> None:
        """What is held is given as it is, because no more will be known."""
        self._out.extend(self.held)
        self.held.clear()
        self.stack = self.stack.replace("g", "(")

    def finish(self, sink: Sink, stopped: bool) -> None:
        if stopped and not self.stack and self.state in ("next", "after"):
            sink.arguments("}")


def _unescaped(escape: re.Match[str]) -> str:
    high, low, short, byte, long, octal, letter = escape.groups()
    if letter is not None:
        return _LETTERS.get(letter, escape[0])
    if high is not None:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
    code = int(octal, 8) if octal is not None else int(short or byte or long, 16)
    if code > 0x10FFFF:
        return escape[0]
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else chr(code)
