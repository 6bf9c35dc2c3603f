"""The markup machine for outputs that are messages with a header each (harmony).

The law is that of `markup.py`. The header says what the body is: reasoning, content, or the arguments of a call. Text
without any header is content.
"""

import re
from collections.abc import Mapping
from typing import Any

from proxy.derender.codecs.base import LONGEST_HEADER
from proxy.derender.markers import Literals, Marks, Quiet
from proxy.derender.markup import CallSink, Found
from proxy.formats.kinds import Channels


class ChannelRules:
    def __init__(self, declaration: Channels, marks: Marks) -> None:
        encode = marks.encode
        self.declaration, self.marks = declaration, marks
        self.message, self.channel, self.start = (
            encode(marker) for marker in (declaration.message, declaration.channel, declaration.start)
        )
        ends = [encode(marker) for marker in declaration.ends]
        self.ends = frozenset(ends)
        self.in_header = Literals([self.message])
        self.in_body = Literals([*ends, self.start, self.channel])
        self.quiet = Quiet(self.in_body.firsts.union(marks.by_id.values()).isdisjoint)
        inside = [self.channel, self.start, *map(encode, declaration.dropped)]
        stop = "|".join(map(re.escape, inside))
        self.recipient = re.compile(rf"{re.escape(declaration.recipient)}((?:(?!{stop})\S)+)")
        self.channel_name = re.compile(rf"{re.escape(self.channel)}\s*(\w+)")
        self._tail = re.compile(rf".*{re.escape(self.start)}\s*\w*", re.DOTALL)
        self.header_begins = tuple({self.start, self.channel, self.message, *map(encode, declaration.dropped)})

    def header_in(self, tail: str) -> str:
        """What the end of a prompt wrote of the answer's first message, behind the role."""
        return self._tail.sub("", tail) if self.start in tail else ""


class ChannelMarkup:
    """The state of one choice; `place` is "header", or what the body is: "reasoning", "content" or "call"."""

    __slots__ = ("_begun", "_held", "_rules", "_said", "_sink", "in_reasoning", "place", "quiet")

    def __init__(self, rules: ChannelRules, sink: CallSink, header: str) -> None:
        """`header` is what the prompt wrote of the first message already."""
        self._rules, self._sink = rules, sink
        self.place = "header"
        self._held = ""
        self._said: list[str] = []
        """What there has been of reasoning and content: a second body of either begins on a new line."""
        self._begun = False
        self.feed(header, Found())

    @property
    def called(self) -> bool:
        return self._sink.called

    def _settle(self) -> None:
        self.in_reasoning = self.place == "reasoning"
        self.quiet: Quiet | None = self._rules.quiet if self._begun and not self._held else None

    def feed(self, text: str, found: Found) -> None:
        self._sink.found = found
        self._read(self._held + text, False, found)
        self._settle()

    def finish(self, found: Found, stopped: bool) -> None:
        self._sink.found = found
        self._read(self._held, True, found)
        if self.place == "header" and stopped and self._held.strip() and not self._is_start(self._held):
            self._say("content", self._held, found)
        self._sink.active = False
        self._held = ""
        self._settle()

    def _is_start(self, header: str) -> bool:
        """Whether nothing but the beginning of a next message stands there, which says nothing."""
        return header.strip() == "" or header.startswith(self._rules.start)

    def _read(self, text: str, last: bool, found: Found) -> None:
        at, more = 0, True
        while more:
            if self.place == "header":
                at, more = self._header(text, at, last)
            else:
                at, more = self._body(text, at, last, found)
        self._held = text[at:]

    def _header(self, text: str, at: int, last: bool) -> tuple[int, bool]:
        rules = self._rules
        end, marker = rules.in_header.find(text, at, last)
        header = text[at:end]
        if len(header) > LONGEST_HEADER or not self._can_begin(header):
            self.place = "content"
            return at, True
        if marker is None:
            return at, False
        recipient = rules.recipient.search(header)
        channel = rules.channel_name.search(header)
        if recipient:
            self.place = "call"
            self._sink.begin(recipient[1].removeprefix(rules.declaration.prefix))
        else:
            thinks = channel is not None and channel[1] in rules.declaration.reasoning
            self.place = "reasoning" if thinks else "content"
        return end + len(marker), True

    def _can_begin(self, header: str) -> bool:
        """Whether it is a header, or can become one: a role, a recipient, or a marker come first."""
        bare = header.lstrip()
        if not bare or bare.startswith(self._rules.header_begins):
            return True
        return any(
            bare.startswith(word) or word.startswith(bare) for word in ("assistant", self._rules.declaration.recipient)
        )

    def _body(self, text: str, at: int, last: bool, found: Found) -> tuple[int, bool]:
        rules = self._rules
        end, marker = rules.in_body.find(text, at, last)
        if end > at:
            self._say(self.place, text[at:end], found)
        if marker is None:
            return end, False
        if self.place == "call":
            self._sink.end()
        self.place, self._begun = "header", False
        return (end + len(marker) if marker in rules.ends else end), True

    def _say(self, place: str, text: str, found: Found) -> None:
        if place == "call":
            self._sink.arguments(text)
            return
        pieces = found.content if place == "content" else found.reasoning
        if not self._begun:
            self._begun = True
            if place in self._said:
                pieces.append("\n")
            else:
                self._said.append(place)
        pieces.append(self._rules.marks.text(text))

    def dump(self) -> Any:
        held = self._rules.marks.dump(self._held)
        state = {"place": self.place, "held": held, "said": self._said, "begun": self._begun}
        return state | {"sink": self._sink.dump()}

    def load(self, state: Any) -> None:
        """Raises ValueError for what `dump` did not write."""
        places = ("header", "reasoning", "content", "call")
        said = state.get("said") if isinstance(state, Mapping) else None
        if not isinstance(said, list) or state.get("place") not in places or type(state.get("begun")) is not bool:
            raise ValueError("the state of the markup is not as it was dumped")
        if len(said) > 2 or any(place not in ("content", "reasoning") for place in said):
            raise ValueError("the state of the markup is not as it was dumped")
        self.place, self._said, self._begun = state["place"], list(said), state["begun"]
        self._held = self._rules.marks.load(state.get("held"))
        self._sink.load(state.get("sink"))
        self._settle()
