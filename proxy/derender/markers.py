"""Finding markers in text that comes in pieces.

The law: a marker that is one added token of the vocabulary is found by its id, everything else by its characters. To
read both in the same way, such a token stands in the text as one character that no text can contain (half of a
surrogate pair), its *mark*; whatever leaves the markup machine is given the token's text again. What is held back at
the end of a text is a real prefix of a marker, and nothing else.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

FIRST_MARK, MOST_MARKS = 0xD800, 0x800
_SUFFIXED = re.compile(r"<(/?\w+):[0-9a-f]{4,}>")
_MARK = re.compile("([\ud800-\udfff])")


class Marks:
    """The added tokens that occur in the markers of a format, each with its mark."""

    def __init__(self, added_texts: Mapping[int, str], markers: Iterable[str]) -> None:
        wanted = "\0".join(markers)
        ids = [
            i for i, text in sorted(added_texts.items()) if text.strip() and len(text) > 1 and _plain(text) in wanted
        ]
        self.by_id: dict[int, str] = {i: chr(FIRST_MARK + number) for number, i in enumerate(ids[:MOST_MARKS])}
        self._texts = {mark: added_texts[i] for i, mark in self.by_id.items()}
        self._translation = {ord(mark): text for mark, text in self._texts.items()}
        by_text = {_plain(text): mark for mark, text in self._texts.items()}
        longest_first = sorted(map(re.escape, by_text), key=len, reverse=True)
        self._tokens = re.compile("|".join(longest_first) or "(?!)")
        self._by_text = by_text

    def encode(self, marker: str) -> str:
        """A marker of a declaration, as it stands in the text."""
        return self._tokens.sub(lambda match: self._by_text[match[0]], marker)

    def text(self, text: str) -> str:
        """What is shown: with the texts of the tokens in place of their marks."""
        return text if text.isascii() else text.translate(self._translation)

    def dump(self, text: str) -> Any:
        """As JSON, which cannot hold marks: a string, or a list in which every second element is a mark's number."""
        parts: list[Any] = _MARK.split(text)
        if len(parts) == 1:
            return text
        parts[1::2] = [ord(mark) - FIRST_MARK for mark in parts[1::2]]
        return parts

    def load(self, value: Any) -> str:
        """Raises ValueError for what `dump` did not write."""
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts[::2]):
            raise ValueError("a text is not as it was dumped")
        if not all(type(part) is int and 0 <= part < len(self._texts) for part in parts[1::2]):
            raise ValueError("a text names a marker that there is not")
        text = "".join(part if isinstance(part, str) else chr(FIRST_MARK + part) for part in parts)
        if any("\ud800" <= c <= "\udfff" and c not in self._texts for c in text):
            raise ValueError("a text holds half of a surrogate pair")
        return text


def _plain(text: str) -> str:
    """A token's text without the suffix that some checkpoints give each of their tags, as in `<tool_call:6124c78e>`."""
    return _SUFFIXED.sub(r"<\1>", text)


class Prefixes:
    """Which end of a text may begin one of some strings."""

    __slots__ = ("_all", "_ends", "_longest", "firsts")

    def __init__(self, strings: Collection[str]) -> None:
        self._all = frozenset(string[:length] for string in strings for length in range(1, len(string)))
        self._ends = frozenset(prefix[-1] for prefix in self._all)
        self._longest = max(map(len, self._all), default=0)
        self.firsts = frozenset(string[0] for string in strings)

    def start(self, text: str, at: int = 0) -> int:
        """Where, from `at` on, the longest such end begins; the length of the text where nothing does."""
        end = len(text)
        if at < end and text[-1] in self._ends:
            for start in range(max(at, end - self._longest), end):
                if text[start] in self.firsts and text[start:] in self._all:
                    return start
        return end


class Literals:
    """A set of markers to look for. The first in the text wins, and of those that begin together the longest."""

    __slots__ = ("_pattern", "_prefixes", "firsts")

    def __init__(self, strings: Collection[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or "(?!)")
        self._prefixes = Prefixes(strings)
        self.firsts = self._prefixes.firsts

    def find(self, text: str, at: int, last: bool) -> tuple[int, str | None]:
        """Where the first marker begins, and the marker. None instead of it: what begins there may become one, or, at
        the length of the text, there is none. `last`: no more text will come."""
        match = self._pattern.search(text, at)
        held = len(text) if last else self._prefixes.start(text, at)
        if match is not None and match.start() < held:
            return match.start(), match[0]
        return held, None

    def at(self, text: str, at: int, last: bool) -> str | None:
        """The marker that begins exactly there; "" where one still may, None where none does."""
        start, marker = self.find(text[at : at + 256], 0, last) if at < len(text) else (0, None)
        if marker is not None:
            return marker if start == 0 else None
        return "" if start == 0 and not last else None


class Quiet(dict[str, bool]):
    """Whether a token's text is nothing but text, by the text: no marker begins in it. Worked out once per token."""

    MOST = 1 << 18

    def __init__(self, is_quiet: Callable[[str], bool]) -> None:
        super().__init__()
        self._is_quiet = is_quiet

    def __missing__(self, text: str) -> bool:
        if len(self) >= self.MOST:
            self.clear()
        quiet = self[text] = self._is_quiet(text)
        return quiet
