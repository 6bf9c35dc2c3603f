"""What every token id of a tokenizer stands for, as text or bytes, worked out once when a model is loaded.

Most decoders of the `tokenizers` library write each token's bytes one after the other, whatever stands around it:
byte-level BPE, and SentencePiece's word boundary mark with byte fallback. For those a table replaces the library, and a
token costs one look-up (`detokenizer.TableDecoder`). The few exceptions at the very start of a text are two numbers in
`TableRules`. A decoder of any other kind leaves `table` None and is run by the library (`detokenizer.WindowDecoder`).
A tokenizer that is a table of bytes itself, as Mistral's tekken is, needs no library at all (`Vocabulary.of_table`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

Piece = str | bytes | None
"""A token's text; its bytes where they are not whole characters; None for an id that means nothing."""


@dataclass(frozen=True, slots=True)
class TableRules:
    """How a table decoder's text differs from the plain concatenation of its pieces.

    `lead_spaces`: so many spaces are taken off the start of the text (`Strip` in the library). `first_differs`: the
    first token loses its word boundary marks (`Metaspace`). `each_byte`: bytes that are no character become one U+FFFD
    each (`ByteFallback`) instead of one per broken sequence.
    """

    lead_spaces: int = 0
    first_differs: bool = False
    each_byte: bool = False


Reader = Callable[[str, bool], Piece]
"""What a token stands for, given how the vocabulary writes it and whether it is the first of a text."""


class Vocabulary:
    """The tokens of one tokenizer. `size` is the highest id plus one; ids at or above it decode to nothing. `longest`
    bounds the characters that one token stands for. `added_texts` has the text of every added token as it was declared,
    by id, those of `special_ids` among them; `tokenizer` is the library's, None where the table is all there is."""

    def __init__(
        self,
        size: int,
        longest: int,
        *,
        added_texts: Mapping[int, str],
        special_ids: frozenset[int],
        rules: TableRules | None = None,
        table: list[Piece] | None = None,
        tokenizer: Tokenizer | None = None,
        reader: Reader | None = None,
    ) -> None:
        self.size, self.longest = size, longest
        self.added_texts, self.special_ids = added_texts, special_ids
        self.rules, self.table = rules, table
        self.tokenizer, self._reader = tokenizer, reader

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> "Vocabulary":
        ids = tokenizer.get_vocab(with_added_tokens=True)
        size = max(ids.values(), default=-1) + 1
        added = tokenizer.get_added_tokens_decoder()
        decoder = tokenizer.decoder
        read = _reader(json.loads(decoder.__getstate__())) if decoder is not None else None
        rules, reader = read or (None, None)
        table: list[Piece] | None = None
        if reader is not None:
            # By id and not by text: the list of a Unigram model may have a text twice.
            texts = map(tokenizer.id_to_token, range(size))
            table = [None if text is None else reader(text, False) for text in texts]
        return cls(
            size,
            max(map(len, ids), default=1),
            added_texts={i: token.content for i, token in added.items()},
            special_ids=frozenset(i for i, token in added.items() if token.special),
            rules=rules,
            table=table,
            tokenizer=tokenizer,
            reader=reader,
        )

    @classmethod
    def of_table(cls, tokens: Sequence[bytes], special_texts: Mapping[int, str]) -> "Vocabulary":
        """Of a tokenizer that is a list of the bytes of every token, by id, and of the texts of its special ones."""
        table = [special_texts.get(i) or _whole(data) for i, data in enumerate(tokens)]
        return cls(
            len(table),
            max(map(len, table), default=1),
            added_texts=special_texts,
            special_ids=frozenset(special_texts),
            rules=TableRules(),
            table=list(table),
        )

    @property
    def special_texts(self) -> tuple[str, ...]:
        return tuple(self.added_texts[i] for i in self.special_ids)

    @cached_property
    def shown_table(self) -> list[Piece]:
        """`table` with the special tokens left out, as `skip_special_tokens` shows it."""
        assert self.table is not None
        shown = list(self.table)
        for token_id in self.special_ids:
            shown[token_id] = None
        return shown

    def first_piece(self, token_id: int) -> Piece:
        """What a token stands for at the start of a text, where the tokenizer's `rules.first_differs`."""
        assert self.tokenizer is not None and self._reader is not None
        text = self.tokenizer.id_to_token(token_id)
        return None if text is None else self._reader(text, True)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """What the library makes of a few ids, for tokenizers that have no table."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """The exact bytes of one token, special or not; empty for an id outside the vocabulary."""
        if not 0 <= token_id < self.size:
            return b""
        if self.table is None:
            return self.text_of(token_id).encode()
        piece = self.table[token_id]
        return piece.encode() if isinstance(piece, str) else piece or b""

    def text_of(self, token_id: int) -> str:
        """One token as text, a broken character as U+FFFD."""
        if not 0 <= token_id < self.size:
            return ""
        if self.table is None:
            return self.added_texts.get(token_id) or self.decode([token_id], skip_special_tokens=False)
        piece = self.table[token_id]
        return piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece or ""


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _whole(data: bytes) -> str | bytes:
    """`data` as text where it consists of whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _byte_level(text: str, _first: bool) -> Piece:
    """A token with a character outside the alphabet, as added tokens may have, stands for its own UTF-8 bytes."""
    try:
        return _whole(bytes([_BYTE_OF_CHAR[c] for c in text]))
    except KeyError:
        return text


def _fallback_byte(text: str) -> bytes | None:
    """The byte that a token such as `<0xE4>` stands for."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)
    return bytes.fromhex(match[1]) if match else None


def _reader(decoder: dict[str, Any]) -> tuple[TableRules, Reader] | None:
    """How a table reads tokens in place of this decoder, None where it cannot.

    `decoder` is as in tokenizer.json. The order of a sequence matters: `Strip` means the start of the whole text only
    after `Fuse`, and the start of every token before it.
    """
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return TableRules(), _byte_level

    replacements: list[tuple[str, str, str]] = []  # what, by what, and by what in the first token
    byte_fallback = fused = False
    lead_spaces = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                replacements.append((old, new, new))
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme} if not fused:
                replacements.append((mark, " ", " " if scheme == "never" else ""))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                lead_spaces += start
            case _:
                return None

    def piece(text: str, first: bool) -> Piece:
        if byte_fallback and (byte := _fallback_byte(text)) is not None:
            return _whole(byte)
        for old, new, new_in_first in replacements:
            text = text.replace(old, new_in_first if first else new)
        return text

    first_differs = any(new != new_in_first for _, new, new_in_first in replacements)
    return TableRules(lead_spaces, first_differs, byte_fallback), piece
