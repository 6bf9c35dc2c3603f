"""One choice, one state machine, no history.

The law: everything that derendering has to remember about one output sequence lives in `ChoiceStream`. It is fed token
ids and gives deltas; it does no I/O, knows no clock and no HTTP, and its cost per token does not depend on how many
came before. The concatenated deltas do not depend on how the ids were grouped, nor on `dump` and `load` in between.

The way of a token: `Decoder` -> `Reader` (the markup machine, where the model's format has one) -> `StopMatcher`, on
content only -> `Delta`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from proxy.derender.detokenizer import decoder_for
from proxy.derender.markup import Found, Reader
from proxy.derender.output_format import MarkupPlan
from proxy.derender.stop import StopMatcher, StopRule
from proxy.derender.vocabulary import Vocabulary
from proxy.protocol.generate import TokenLogprob

STATE_VERSION = 2
STATE_KEYS = {"v", "decoder", "markup", "held", "end", "chars", "tokens", "finish"}
LARGEST_COUNT = 1 << 53


@dataclass(frozen=True, slots=True)
class ChoiceContext:
    """What is constant over a request and shared by its choices.

    `end_token_ids` end a generation (EOS unless `ignore_eos`, and the request's `stop_token_ids`); of them
    `stop_token_ids` are those that the request named, which a response reports as `stop_reason`. Without `markup` all
    of the output is content. `include_reasoning` false drops the reasoning, and what would tell of it: the ids and
    log probabilities of its tokens. `forced_function`: calls are what was asked for, and end with `stop`.
    """

    vocabulary: Vocabulary
    prompt_token_ids: Sequence[int]
    end_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop: StopRule | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    markup: MarkupPlan | None = None
    include_reasoning: bool = True
    forced_function: bool = False


@dataclass(slots=True)
class ToolCallDelta:
    """A call's first delta has `id` and `name`; the following ones continue `arguments`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Delta:
    """What one `feed` adds to a choice. `token_ids` and `logprobs` are of the tokens it counted, those of hidden
    reasoning left out, `offsets` where each of those begins in the decoded text, in characters, where there is no
    markup. `finish_reason` comes once, with the last delta."""

    content: str
    token_ids: Sequence[int]
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    offsets: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChoiceStream:
    """See the module. `tokens` counts the ids consumed so far: those after the end of a stop string are not."""

    __slots__ = ("_chars", "_context", "_decoder", "_end", "_marks", "_reader", "_stop", "finish_reason", "tokens")

    def __init__(self, context: ChoiceContext, name: str = "") -> None:
        """`name` tells the choice from all others there ever are; the ids of its tool calls are made from it."""
        self._context = context
        self._decoder = decoder_for(
            context.vocabulary,
            context.prompt_token_ids,
            skip_special_tokens=context.skip_special_tokens,
            spaces_between_special_tokens=context.spaces_between_special_tokens,
        )
        self._reader: Reader | None = context.markup.reader(name) if context.markup else None
        self._marks: dict[int, str] = context.markup.marks.by_id if context.markup else {}
        self._stop = StopMatcher(context.stop) if context.stop else None
        self._end: int | None = None  # an end token that came last and is not shown until it is known to be text
        self._chars = 0
        self.tokens = 0
        self.finish_reason: str | None = None

    @property
    def place(self) -> str:
        """What the output is at: "reasoning", "content", "call", or the "header" of a message."""
        return "content" if self._reader is None else self._reader.place

    def feed(
        self,
        token_ids: Sequence[int],
        logprobs: list[TokenLogprob] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> Delta:
        """The next ids, none negative, and with the last of them the engine's finish reason. Once a stop string or
        a finish reason ended the choice, whatever else comes is ignored."""
        if self.finish_reason is not None:
            return Delta("", ())
        if finish_reason == "stop" and stop_reason is None:  # not every engine says at which id it stopped
            stop_reason = token_ids[-1] if token_ids else self._end
        late, pieces, tail = self._decode(token_ids, finish_reason, stop_reason)
        delta = Delta("", token_ids, logprobs=logprobs)
        if self._is_quiet(late, pieces, finish_reason):
            if self._reader.in_reasoning:  # type: ignore[union-attr]
                delta.reasoning = pieces[0]
            else:
                delta.content = pieces[0]
            self.tokens += 1
            return delta
        if self._reader is None:
            if logprobs is not None:
                starts = accumulate(map(len, pieces[:-1]), initial=self._chars + len(late))
                delta.offsets = list(starts) if pieces else []
            self._chars += len(late) + sum(map(len, pieces)) + len(tail)
        if self._reader is None and self._stop is None:
            delta.content = pieces[0] if len(pieces) == 1 and not late and not tail else "".join((late, *pieces, tail))
            self.tokens += len(token_ids)
        else:
            self._sort(delta, late, pieces, tail, finish_reason)
        if finish_reason is not None and delta.finish_reason is None:
            delta.finish_reason = finish_reason
            if isinstance(stop_reason, str) or stop_reason in self._context.stop_token_ids:
                delta.stop_reason = stop_reason
        called = self._reader is not None and self._reader.called
        if delta.finish_reason == "stop" and called and not self._context.forced_function:
            delta.finish_reason = "tool_calls"
        self.finish_reason = delta.finish_reason
        return delta

    def _is_quiet(self, late: str, pieces: list[str], finish_reason: str | None) -> bool:
        """The common case in a stream with markup: one token, of which nothing has to be known but its text."""
        reader = self._reader
        if reader is None or reader.quiet is None or self._stop is not None or len(pieces) != 1:
            return False
        if late or finish_reason is not None or not reader.quiet[pieces[0]]:
            return False
        return self._context.include_reasoning or not reader.in_reasoning

    def _decode(
        self, token_ids: Sequence[int], finish_reason: str | None, stop_reason: int | str | None
    ) -> tuple[str, list[str], str]:
        """The text of a token of an earlier feed, the text of each id, and what the decoder held back at the end.

        The id that ended a generation is not text. It may come before the event that says so, so an end token at
        the end of a feed waits for what follows it.
        """
        feed, ends = self._text if self._marks else self._decoder.feed, self._context.end_token_ids
        if finish_reason is None and self._end is None and not (token_ids and token_ids[-1] in ends):
            return "", [feed(i) for i in token_ids], ""

        stopped = finish_reason == "stop"
        dropped = stopped and not self._context.include_stop_str_in_output
        late = ""
        if self._end is not None and (token_ids or finish_reason is not None):
            if token_ids or not dropped:
                late = feed(self._end)
            self._end = None
        pieces = [feed(i) for i in token_ids[:-1]]
        if token_ids:
            last = token_ids[-1]
            is_end = last in ends
            if is_end and finish_reason is None:
                self._end = last
            pieces.append("" if is_end and (dropped or finish_reason is None) else feed(last))
        return late, pieces, self._decoder.flush() if finish_reason is not None else ""

    def _text(self, token_id: int) -> str:
        """A token's text, or its mark in place of it, be the token special or not."""
        mark = self._marks.get(token_id)
        if mark is None:
            return self._decoder.feed(token_id)
        late = self._decoder.flush()
        self._decoder.feed(token_id)
        return late + mark

    def _sort(self, delta: Delta, late: str, pieces: list[str], tail: str, finish_reason: str | None) -> None:
        """Token by token into reasoning, calls and content, up to the token that completes a stop string."""
        reader, matcher, found = self._reader, self._stop, Found()
        unarmed = self._context.min_tokens - self.tokens if self._context.min_tokens else -1
        hides = not self._context.include_reasoning
        hidden: set[int] = set()
        content: list[str] = []
        used = len(pieces)
        texts = [late, *pieces]
        if finish_reason is not None:
            texts.append(tail)
        for number, text in enumerate(texts, -1):  # the number of the id that it is of
            if reader is None:
                found.content.append(text)
            else:
                before = reader.in_reasoning
                if text:
                    self._read(reader, text, found)
                if hides and (before or reader.in_reasoning):
                    hidden.add(number)
                if finish_reason is not None and number == len(pieces):
                    reader.finish(found, finish_reason == "stop")
            if matcher is None:
                continue
            passed = matcher.feed("".join(found.content), armed=min(number, len(pieces) - 1) >= unarmed)
            found.content.clear()
            content.append(passed.text)
            if passed.stop is not None:
                used = min(number + 1, len(pieces))
                delta.finish_reason, delta.stop_reason = "stop", passed.stop
                break
        else:
            if matcher is not None and finish_reason is not None:
                content.append(matcher.flush())
        delta.content = "".join(content if matcher is not None else found.content)
        if not hides:
            delta.reasoning = "".join(found.reasoning)
        delta.tool_calls = [ToolCallDelta(c.index, "".join(c.arguments), c.id, c.name) for c in found.calls]
        self.tokens += used
        if used < len(pieces) or hidden:
            self._show_only(delta, [number for number in range(used) if number not in hidden])

    @staticmethod
    def _read(reader: Reader, text: str, found: Found) -> None:
        quiet = reader.quiet
        if quiet is None or not quiet[text]:
            reader.feed(text, found)
        elif reader.in_reasoning:
            found.reasoning.append(text)
        else:
            found.content.append(text)

    @staticmethod
    def _show_only(delta: Delta, numbers: list[int]) -> None:
        delta.token_ids = [delta.token_ids[number] for number in numbers]
        if delta.logprobs is not None:
            delta.logprobs = [delta.logprobs[number] for number in numbers if number < len(delta.logprobs)]
        if delta.offsets is not None:
            delta.offsets = [delta.offsets[number] for number in numbers if number < len(delta.offsets)]

    def dump(self) -> dict[str, Any]:
        """The state as JSON, of a size that does not depend on the length of the output."""
        return {
            "v": STATE_VERSION,
            "decoder": self._decoder.dump(),
            "markup": self._reader.dump() if self._reader is not None else None,
            "held": self._stop.held if self._stop is not None else "",
            "end": self._end,
            "chars": self._chars,
            "tokens": self.tokens,
            "finish": self.finish_reason,
        }

    @classmethod
    def load(cls, context: ChoiceContext, state: Any, name: str = "") -> "ChoiceStream":
        """A stream that goes on where the dumped one was; the context must be that of the same request, except that
        its prompt may be left out.

        The state may come from anybody: raises ValueError that says what in it no `dump` can have written.
        """
        _expect(type(state) is dict, "it is not an object")
        _expect(state.get("v") == STATE_VERSION, f"its version is not {STATE_VERSION}")
        missing = STATE_KEYS - state.keys()
        _expect(not missing, f"{', '.join(sorted(missing))} is missing")
        held, end, finish = state["held"], state["end"], state["finish"]
        most_held = 0 if context.stop is None else context.stop.suffix_held(held) if type(held) is str else -1
        _expect(type(held) is str and len(held) == most_held, "held does not begin a stop string")
        _expect(end is None or (type(end) is int and end in context.end_token_ids), "end is not an end token")
        _expect(finish is None or type(finish) is str, "finish is not a finish reason")
        for count in ("chars", "tokens"):
            _expect(type(state[count]) is int and 0 <= state[count] < LARGEST_COUNT, f"{count} is not a count")
        stream = cls(context, name)
        stream._decoder.load(state["decoder"])
        if stream._reader is not None:
            stream._reader.load(state["markup"])
        if stream._stop is not None:
            stream._stop.held = held
        stream._end, stream._chars, stream.tokens, stream.finish_reason = end, state["chars"], state["tokens"], finish
        return stream


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
