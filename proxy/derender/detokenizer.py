"""Token ids to text, one id at a time, with a state that is small however long the text gets.

The law: the pieces of any sequence of ids, joined with the final `flush`, are what the library's `decode` of the whole
sequence says, however the ids were grouped. Text of the prompt is never part of it; the prompt only decides whether the
output begins a text (and loses a leading space) or goes on with one.

Two cases of byte-fallback tokens are different on purpose, since neither can be streamed. Where a run of them is not
valid UTF-8 as a whole, the library turns all of it into U+FFFD, the valid characters included; here only the broken
bytes are. And a word boundary mark that is spelled in bytes stays one, whatever the order of the decoder's steps.
"""

import codecs
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

from proxy.derender.vocabulary import Vocabulary

codecs.register_error(
    "replace_each_byte",
    lambda error: ("\ufffd" * (error.end - error.start), error.end),  # type: ignore[attr-defined]
)

PENDING = re.compile("([0-9a-f]{2}){0,3}")
"""The bytes of an incomplete character, as a state has them."""


class Decoder(Protocol):
    """`dump` gives JSON that `load` takes back; between them the state is a few bytes or ids. `load` raises ValueError
    for what no `dump` can have written."""

    def feed(self, token_id: int) -> str: ...
    def flush(self) -> str: ...
    def dump(self) -> Any: ...
    def load(self, state: Any) -> None: ...


def decoder_for(
    vocabulary: Vocabulary,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool,
) -> Decoder:
    """A decoder for the output that follows `prompt_token_ids`."""
    if vocabulary.table is None:
        return WindowDecoder(vocabulary, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
    return TableDecoder(vocabulary, prompt_token_ids, skip_special_tokens)


class TableDecoder:
    """Looks every token up; holds back at most three bytes, while a character is incomplete.

    `spaces_between_special_tokens` has no meaning here: such a tokenizer never writes spaces of its own.
    """

    __slots__ = ("_bytes_errors", "_lead", "_pending", "_plain", "_starts", "_table", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        assert vocabulary.table is not None and vocabulary.rules is not None
        self._vocabulary = vocabulary
        self._table = vocabulary.shown_table if skip_special_tokens else vocabulary.table
        self._bytes_errors = "replace_each_byte" if vocabulary.rules.each_byte else "replace"
        self._pending = b""
        self._starts, self._lead = vocabulary.rules.first_differs, vocabulary.rules.lead_spaces
        self._plain = not (self._starts or self._lead)
        for token_id in prompt_token_ids:
            if self._plain:
                break
            self.feed(token_id)
            if self._pending:  # a character is begun, and so is the text
                self._pending, self._lead, self._plain = b"", 0, True

    def feed(self, token_id: int) -> str:
        try:
            piece = self._table[token_id]
        except IndexError:
            return ""
        if isinstance(piece, str) and self._plain:
            return piece
        if piece is not None and self._starts:
            self._starts = False
            piece = self._vocabulary.first_piece(token_id)
        if piece is None:
            return ""
        if isinstance(piece, str):
            text = self.flush() + piece
        else:
            data = self._pending + piece
            text, used = codecs.utf_8_decode(data, self._bytes_errors, False)
            self._pending = data[used:]
        if self._lead and text:
            bare = text.lstrip(" ")
            taken = min(self._lead, len(text) - len(bare))
            text = text[taken:]
            self._lead = 0 if text or bare else self._lead - taken
        self._plain = not (self._pending or self._lead)
        return text

    def flush(self) -> str:
        """What an incomplete character at the end of the text shows as."""
        if not self._pending:
            return ""
        text = codecs.utf_8_decode(self._pending, self._bytes_errors, True)[0]
        self._pending = b""
        return text

    def dump(self) -> Any:
        return [self._pending.hex(), self._lead, self._starts]

    def load(self, state: Any) -> None:
        rules = self._vocabulary.rules
        assert rules is not None
        match state:
            case [str(pending), int(lead), bool(starts)] if (
                PENDING.fullmatch(pending) and lead in range(rules.lead_spaces + 1) and starts <= rules.first_differs
            ):
                self._pending, self._lead, self._starts = bytes.fromhex(pending), int(lead), starts
            case _:
                raise ValueError("decoder is not the state of this tokenizer's decoder")
        self._plain = not (self._pending or self._lead or self._starts)


class WindowDecoder:
    """The library's own `decode` over a window of the last few ids, for decoders that no table can stand for.

    The steps of `tokenizers.DecodeStream`, whose state cannot be read and which keeps the tail of a text for itself:
    `_shown` ids have been emitted and give context, `_held` ids do not end in a whole character yet. More than
    `MOST_HELD` of those are shown as they are, so that invalid bytes cannot make the window grow.
    """

    MOST_HELD = 8
    CONTEXT = 6

    __slots__ = ("_added_last", "_held", "_shown", "_skip", "_spaces", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int], skip: bool, spaces: bool) -> None:
        self._vocabulary, self._skip, self._spaces = vocabulary, skip, spaces or skip
        visible = filter(self._is_visible, reversed(prompt_token_ids))
        self._shown: list[int] = list(islice(visible, self.CONTEXT))[::-1]
        self._held: list[int] = []
        self._added_last = False

    def _is_visible(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocabulary.size and not (self._skip and token_id in self._vocabulary.special_ids)

    def _decode(self, ids: list[int]) -> str:
        return self._vocabulary.decode(ids, skip_special_tokens=self._skip)

    def feed(self, token_id: int) -> str:
        if not self._is_visible(token_id):
            return ""
        self._held.append(token_id)
        before = self._decode(self._shown)
        after = self._decode(self._shown + self._held)
        text = after[len(before) :]
        if text.endswith("\ufffd") and len(self._held) < self.MOST_HELD:
            return ""
        if text:
            self._shown, self._held = self._held, []
        elif len(self._held) >= self.MOST_HELD:  # tokens that show nothing
            self._held = []
        added = self._vocabulary.added_texts.get(token_id)
        if added is not None and self._added_last and not self._spaces:
            text = added
        self._added_last = added is not None
        return text

    def flush(self) -> str:
        if not self._held:
            return ""
        text = self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]
        self._shown, self._held = self._held, []
        return text

    def dump(self) -> Any:
        return [self._shown, self._held, self._added_last]

    def load(self, state: Any) -> None:
        match state:
            case [list(shown), list(held), bool(added_last)] if self._is_window(shown) and self._is_window(held):
                self._shown, self._held, self._added_last = shown, held, added_last
            case _:
                raise ValueError("decoder is not the state of this tokenizer's decoder")

    def _is_window(self, ids: list[Any]) -> bool:
        return len(ids) <= self.MOST_HELD and all(type(i) is int and self._is_visible(i) for i in ids)
