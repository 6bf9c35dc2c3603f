"""Stop strings over text that comes in pieces.

The law: the result does not depend on how the text was cut into pieces. The match that is complete first wins, and of
those that are complete with the same character the longest. Only a suffix that really begins a stop string is held.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Passed(NamedTuple):
    """`text` may be shown. Where `stop` is not None the text ends there, and `used` characters of the last piece were
    needed to know it."""

    text: str
    stop: str | None = None
    used: int = 0


class StopRule:
    """The stop strings of one request: shared by its choices, and constant."""

    __slots__ = ("_prefixes_by_end", "include", "strings")

    def __init__(self, strings: Sequence[str], include_in_output: bool = False) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.include = include_in_output
        prefixes = defaultdict(list)
        for string in self.strings:
            for length in range(1, len(string)):
                prefixes[string[length - 1]].append((length, string))
        self._prefixes_by_end = {end: sorted(found, reverse=True) for end, found in prefixes.items()}

    def suffix_held(self, text: str) -> int:
        """How many characters at the end of `text` begin a stop string."""
        for length, string in self._prefixes_by_end.get(text[-1:], ()):
            if text.endswith(string[:length]):
                return length
        return 0


class StopMatcher:
    """The state of one choice: the text held back because it may begin a stop string."""

    __slots__ = ("_rule", "held")

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self.held = ""

    def feed(self, piece: str, armed: bool = True) -> Passed:
        """`armed` is false while a match may not end the text yet (`min_tokens`); it may begin then all the same."""
        text = self.held + piece
        if armed and piece:
            found: tuple[int, int, str] | None = None
            for string in self._rule.strings:
                at = text.find(string, max(0, len(self.held) - len(string) + 1))
                if at >= 0 and (found is None or (at + len(string), at) < found[:2]):
                    found = at + len(string), at, string
            if found is not None:
                end, at, string = found
                used = end - len(self.held)
                self.held = ""
                return Passed(text[: end if self._rule.include else at], string, used)
        keep = self._rule.suffix_held(text)
        self.held = text[len(text) - keep :]
        return Passed(text[: len(text) - keep])

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        text, self.held = self.held, ""
        return text
