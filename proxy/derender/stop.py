"""Stop strings over text that comes in pieces.

The law: the result does not depend on how the text was cut into pieces. The match that is complete first wins, and of
those that are complete with the same character the longest. Only a suffix that really begins a stop string is held.
"""

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

    __slots__ = ("_firsts", "_inner", "_longest", "include", "strings")

    def __init__(self, strings: Sequence[str], include_in_output: bool = False) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.include = include_in_output
        self._firsts = frozenset(string[0] for string in self.strings)
        self._inner = frozenset("".join(string[:-1] for string in self.strings))
        self._longest = max(map(len, self.strings), default=1) - 1

    def suffix_held(self, text: str) -> int:
        """How many characters at the end of `text` begin a stop string.

        The search for where that suffix begins goes forward only, from one piece of a text to the next, since what
        comes before it is not held: so even the worst strings cost little per character.
        """
        if text[-1:] not in self._inner:
            return 0
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start] in self._firsts:
                suffix = text[start:]
                if any(len(string) > len(suffix) and string.startswith(suffix) for string in self.strings):
                    return len(suffix)
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
