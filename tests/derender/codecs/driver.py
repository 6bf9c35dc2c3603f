"""A caller of codecs, as small as one can be: it looks for openers, collects calls and prose, and carries state."""

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.derender.codecs.base import Codec, MarkupLimits, Step, Syntax
from proxy.derender.markers import Literals, Marks
from proxy.derender.schemas import ToolSchemas
from proxy.formats.kinds import Calls

Call = tuple[str, str, bool]
"""Name, the JSON of the arguments as far as it came, and whether the call ended."""


class Collected:
    """What came out. It checks that calls are begun before they are added to and ended, and never twice."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.text = ""
        self.active = False

    def begin(self, name: str, native_id: str | None = None) -> None:
        assert not self.active
        self.active = True
        self.calls.append((name, "", False))

    def arguments(self, text: str) -> None:
        assert self.active
        assert not any("\ud800" <= c <= "\udfff" for c in text)
        name, arguments, _ = self.calls[-1]
        self.calls[-1] = name, arguments + text, False

    def end(self) -> None:
        assert self.active
        self.active = False
        name, arguments, _ = self.calls[-1]
        self.calls[-1] = name, arguments, True

    def prose(self, text: str) -> None:
        self.text += text


def marks_for(declaration: Calls, tokens: Sequence[str] = ()) -> Marks:
    texts = [text for value in dataclasses.astuple(declaration) for text in ([value] if isinstance(value, str) else ())]
    texts += [text for value in dataclasses.astuple(declaration) if isinstance(value, tuple) for text in value]
    return Marks(dict(enumerate(tokens, 100)), texts)


class Driver:
    def __init__(
        self, syntax: Syntax, marks: Marks, tools: Sequence[Mapping[str, Any]] = (), limits: MarkupLimits | None = None
    ) -> None:
        self.syntax, self.marks = syntax, marks
        self.schemas, self.limits = ToolSchemas(tools), limits or MarkupLimits()
        self.sink = Collected()
        self._openers = Literals([*syntax.openers, *syntax.bare])
        self._unread = self._since = ""
        self._codec: Codec | None = None
        self._opener = ""

    def feed(self, piece: str, last: bool = False) -> None:
        text, at = self._unread + piece, 0
        while True:
            if self._codec is None:
                start, opener = self._openers.find(text, at, last)
                self.sink.prose(self.marks.text(text[at:start]))
                at = start
                if opener is None:
                    break
                self._opener = "" if opener in self.syntax.bare else opener
                at += len(self._opener)
                self._since = self._opener
                self._codec = self.syntax.codec(self._opener, self.schemas, self.limits)
            was, calls, active = at, len(self.sink.calls), self.sink.active
            at, step = self._codec.read(text, at, last, self.sink)
            assert was <= at <= len(text)
            self._since += text[was:at]
            if (active and not self.sink.active) or step is Step.DROP:
                self._since = ""
            assert len(self.sink.calls) - calls <= 1
            assert step is not Step.GO or at > was or self.sink.active != active
            if step is Step.WAIT:
                break
            if step is Step.FAILED:
                assert not self.sink.active
                self.sink.prose(self.marks.text(self._since))
            if step in (Step.DONE, Step.FAILED):
                assert not self.sink.active
                self._codec = None
        self._unread = text[at:]
        if last:
            assert at == len(text)

    def finish(self, stopped: bool) -> None:
        if self._codec is not None and self.sink.active:
            self._codec.finish(self.sink, stopped)

    def carry(self) -> None:
        """The codec is dumped and loaded into a new one, as when an answer goes on in another process."""
        if self._codec is not None:
            state = json.loads(json.dumps(self._codec.dump(self.marks)))
            self._codec = self.syntax.codec(self._opener, self.schemas, self.limits)
            self._codec.load(state, self.marks)


def run(
    syntax: Syntax,
    marks: Marks,
    text: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    limits: MarkupLimits | None = None,
    splits: random.Random | None = None,
    stopped: bool = True,
) -> tuple[list[Call], str]:
    """The calls and the prose of `text`, in which markers are written out. `splits` cuts it into pieces at random, and
    carries the state over some of the cuts."""
    text = marks.encode(text)
    driver = Driver(syntax, marks, tools, limits)
    at = 0
    while splits and at < len(text):
        length = splits.choice((1, 1, 2, 3, 7, 20))
        driver.feed(text[at : at + length])
        at += length
        if splits.random() < 0.4:
            driver.carry()
    driver.feed(text[at:], last=True)
    driver.finish(stopped)
    return driver.sink.calls, driver.sink.text


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
