"""Text to token ids, with the two readings of a special token's text.

What a template writes is read with its special tokens. What users wrote is not: `escaping.py` has put marks into it,
and `encode_marked` encodes the stretches of text that have some with a second tokenizer, to which special tokens are
text. Only those stretches: they end at special tokens, where tokenization starts afresh, so all other ids stay.
"""

import contextlib
import re
import secrets
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from proxy.protocol.errors import BadRequest
from proxy.render.escaping import unescape


class PromptTokenizer:
    """The methods may be called from any thread; `encode` does not hold the GIL. Raises `BadRequest` for a text with
    half of a surrogate pair."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _keep_special_tokens_from_model(tokenizer)
        self._tokenizer = tokenizer
        self._special = {i: t.content.strip() for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        # Text before it makes a stretch an inner one: some tokenizers treat the start of a text in a way of its own.
        self._anchor = f"\ufdef{secrets.token_hex(8)}\ufdef"
        self._literal = _literal_tokenizer(tokenizer, self._anchor)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`add_special_tokens`: with what the tokenizer puts around a text, such as a BOS."""
        with _refusing_surrogates(text):
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_marked(self, text: str, mark: str, *, add_special_tokens: bool) -> list[int]:
        """Like `encode`, for a text with marks: what they stand in is never a special token."""
        with _refusing_surrogates(text):
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

        around = encoding.special_tokens_mask  # 1 for what the tokenizer put around the text
        before = next((at for at, put in enumerate(around) if not put), len(around))
        after = len(around) - next((at for at, put in enumerate(reversed(around)) if not put), 0)
        for token_id, (begin, end) in zip(encoding.ids[before:after], encoding.offsets[before:after], strict=True):
            # A special id that has other text is what the model gives an unknown character, such as the mark.
            if self._special.get(token_id) == text[begin:end].strip():
                close(begin)
                ids.append(token_id)
                start = end
            else:
                stretch.append(token_id)
        close(len(text))
        return [*encoding.ids[:before], *ids, *encoding.ids[after:]]

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


@contextlib.contextmanager
def _refusing_surrogates(text: str) -> Iterator[None]:
    """The library says TypeError to half of a surrogate pair, which JSON inside a string can bring."""
    try:
        yield
    except TypeError:
        if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
            raise
        raise BadRequest("the prompt holds half of a surrogate pair (\\ud800 to \\udfff); remove it") from None


def _keep_special_tokens_from_model(tokenizer: Tokenizer) -> None:
    """Some models have special tokens in their own vocabulary and would find them in any text, as Unigram models do.

    Their texts are split after the first character before the model sees them. One of a single character stays.
    """
    model = tokenizer.model
    found = [
        token.content
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and model.token_to_id(token.content) == token_id
        if any(piece.id == token_id for piece in model.tokenize(token.content))
    ]
    if found:
        firsts = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in found)
        steps = [] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.Split(Regex(firsts), "isolated")])


def _literal_tokenizer(tokenizer: Tokenizer, anchor: str) -> Tokenizer:
    """A tokenizer with the same model, to which special tokens are text, and `anchor` is a token."""
    literal = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        literal.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        literal.pre_tokenizer = tokenizer.pre_tokenizer
    # In the order of their ids, which those of tokens that are not the model's depend on.
    added = [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    literal.add_tokens([*added, AddedToken(anchor, normalized=False, special=False)])
    literal.encode_special_tokens = True
    return literal
