"""Text to token ids, with the two readings of a special token's text.

What a template writes is read with its special tokens. What users wrote is not: `escaping.py` has put marks into it,
and `encode_marked` encodes the stretches of text that have some with a second tokenizer, to which special tokens are
text. Only those stretches: they end at special tokens, where tokenization starts afresh, so all other ids stay.
"""

import secrets
from functools import cached_property

from tokenizers import AddedToken, Tokenizer

from proxy.render.escaping import unescape


class PromptTokenizer:
    """`size` is the highest id plus one. The methods may be called from any thread; `encode` does not hold the GIL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        # Text before it makes a stretch an inner one: some tokenizers treat the start of a text in a way of its own.
        self._anchor = f"\ufdef{secrets.token_hex(8)}\ufdef"

    @cached_property
    def _literal(self) -> Tokenizer:
        literal = Tokenizer.from_str(self._tokenizer.to_str())
        literal.add_tokens([AddedToken(self._anchor, normalized=False, special=False)])
        literal.encode_special_tokens = True
        return literal

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`add_special_tokens`: with what the tokenizer puts around a text, such as a BOS."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_marked(self, text: str, mark: str, *, add_special_tokens: bool) -> list[int]:
        """Like `encode`, for a text with marks: what they stand in is never a special token."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = []
        stretch: list[int] = []
        start = 0

        def close(end: int) -> None:
            plain = unescape(text[start:end], mark)
            if plain != text[start:end]:
                ids.extend(self._encode_literally(plain, inner=start > 0))
            else:
                ids.extend(stretch)
            stretch.clear()

        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self._special_ids:
                stretch.append(token_id)
            elif begin == end:  # put there by the tokenizer, not by the text
                close(begin) if begin > start else None
                ids.append(token_id)
            else:
                close(begin)
                ids.append(token_id)
                start = end
        close(len(text))
        return ids

    def _encode_literally(self, text: str, *, inner: bool) -> list[int]:
        (encoding,) = self._literal.encode_batch_fast(
            [self._anchor + text if inner else text], add_special_tokens=False
        )
        return encoding.ids[1:] if inner else encoding.ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Each token as the vocabulary writes it; empty for an id that it does not have."""
        return [self._tokenizer.id_to_token(i) or "" for i in token_ids]
