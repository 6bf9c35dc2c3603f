"""One choice, one state machine, no history.

The law: everything that derendering has to remember about one output sequence lives in `ChoiceStream`. It is fed token
ids and gives deltas; it does no I/O, knows no clock and no HTTP, and its cost per token does not depend on how many
came before. The concatenated deltas do not depend on how the ids were grouped, nor on `dump` and `load` in between.

The way of a token: `Decoder` -> markup (to come: the syntaxes that fill `Delta.reasoning` and `tool_calls`) ->
`StopMatcher`, on content only -> `Delta`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from proxy.derender.detokenizer import decoder_for
from proxy.derender.stop import StopMatcher, StopRule
from proxy.derender.vocabulary import Vocabulary
from proxy.protocol.generate import TokenLogprob

STATE_VERSION = 1
STATE_KEYS = {"v", "decoder", "held", "end", "chars", "tokens", "finish"}
LARGEST_COUNT = 1 << 53


@dataclass(frozen=True, slots=True)
class ChoiceContext:
    """What is constant over a request and shared by its choices.

    `end_token_ids` end a generation (EOS unless `ignore_eos`, and the request's `stop_token_ids`); of them
    `stop_token_ids` are those that the request named, which a response reports as `stop_reason`.
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


@dataclass(slots=True)
class ToolCallDelta:
    """A call's first delta has `id` and `name`; the following ones continue `arguments`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Delta:
    """What one `feed` adds to a choice. `token_ids` and `logprobs` are of the tokens it counted, `offsets` where each
    of those begins in the decoded text, in characters. `finish_reason` comes once, with the last delta."""

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

    __slots__ = ("_chars", "_context", "_decoder", "_end", "_stop", "finish_reason", "tokens")

    def __init__(self, context: ChoiceContext) -> None:
        self._context = context
        self._decoder = decoder_for(
            context.vocabulary,
            context.prompt_token_ids,
            skip_special_tokens=context.skip_special_tokens,
            spaces_between_special_tokens=context.spaces_between_special_tokens,
        )
        self._stop = StopMatcher(context.stop) if context.stop else None
        self._end: int | None = None  # an end token that came last and is not shown until it is known to be text
        self._chars = 0
        self.tokens = 0
        self.finish_reason: str | None = None

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
        text, late, pieces = self._decode(token_ids, finish_reason, stop_reason)
        offsets = None
        if logprobs is not None:
            offsets = list(accumulate(map(len, pieces[:-1]), initial=self._chars + late)) if pieces else []
        self._chars += len(text)
        delta = Delta(text, token_ids, logprobs=logprobs, offsets=offsets)
        if self._stop is not None:
            self._cut_at_stop(self._stop, delta, late, pieces, last=finish_reason is not None)
        self.tokens += len(delta.token_ids)
        if finish_reason is not None and delta.finish_reason is None:
            delta.finish_reason = finish_reason
            if isinstance(stop_reason, str) or stop_reason in self._context.stop_token_ids:
                delta.stop_reason = stop_reason
        self.finish_reason = delta.finish_reason
        return delta

    def _decode(
        self, token_ids: Sequence[int], finish_reason: str | None, stop_reason: int | str | None
    ) -> tuple[str, int, list[str]]:
        """The text, how much of it is late (of a token of an earlier feed), and the text of each id.

        The id that ended a generation is not text. It may come before the event that says so, so an end token at
        the end of a feed waits for what follows it.
        """
        feed, ends = self._decoder.feed, self._context.end_token_ids
        if finish_reason is None and self._end is None and not (token_ids and token_ids[-1] in ends):
            pieces = [feed(i) for i in token_ids]
            return (pieces[0] if len(pieces) == 1 else "".join(pieces)), 0, pieces

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
        tail = self._decoder.flush() if finish_reason is not None else ""
        return late + "".join(pieces) + tail, len(late), pieces

    def _cut_at_stop(self, matcher: StopMatcher, delta: Delta, late: int, pieces: list[str], last: bool) -> None:
        """Shows of the delta's content what cannot be, or become, part of a stop string, and counts tokens up to the
        one that completed it."""
        text, shown, start = delta.content, "", 0
        unarmed = self._context.min_tokens - self.tokens
        if self._context.min_tokens and unarmed >= 0:
            start = late + sum(map(len, pieces[:unarmed])) if unarmed < len(pieces) else len(text)
            shown = matcher.feed(text[:start], armed=False).text
        passed = matcher.feed(text[start:])
        delta.content = shown + passed.text
        if passed.stop is not None:
            ends_at = accumulate(map(len, pieces), initial=late)
            used = next((i for i, end in enumerate(ends_at) if end >= start + passed.used), len(pieces))
            delta.token_ids = delta.token_ids[:used]
            if delta.logprobs is not None and delta.offsets is not None:
                delta.logprobs, delta.offsets = delta.logprobs[:used], delta.offsets[:used]
            delta.finish_reason, delta.stop_reason = "stop", passed.stop
        elif last:
            delta.content += matcher.flush()

    def dump(self) -> dict[str, Any]:
        """The state as JSON, of a size that does not depend on the length of the output."""
        return {
            "v": STATE_VERSION,
            "decoder": self._decoder.dump(),
            "held": self._stop.held if self._stop is not None else "",
            "end": self._end,
            "chars": self._chars,
            "tokens": self.tokens,
            "finish": self.finish_reason,
        }

    @classmethod
    def load(cls, context: ChoiceContext, state: Any) -> "ChoiceStream":
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
        stream = cls(context)
        stream._decoder.load(state["decoder"])
        if stream._stop is not None:
            stream._stop.held = held
        stream._end, stream._chars, stream.tokens, stream.finish_reason = end, state["chars"], state["tokens"], finish
        return stream


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
