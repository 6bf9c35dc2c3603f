"""Keeps the text of users from becoming control tokens.

A tokenizer turns the text of a special token, `<|im_end|>` say, into that token wherever it stands, so that a user who
writes it could end his own turn. Here each such text inside a system, developer, user or tool message, a tool, a
document or a template variable of the request is broken by a mark after its first character, before the template runs;
whoever encodes the prompt cuts it at the special tokens that are left, which the template or the assistant wrote,
removes the marks from the pieces and encodes those as plain text.

Promise: no special token's text begins inside escaped text, not even one that would end in the text after it (two
parts that a template writes side by side); and `unescape` gives back every string exactly, also where a template wrote
it as JSON in ASCII or as Python writes a list, which turns the mark into `\\ufdd0`. What the assistant said is left
alone, as is everything when there is nothing to escape, which costs one search per string.

Templates see the marked text. Only tokens that are marked special are escaped, so a template that looks for
`</think>` in a message still finds it, where that token is not special.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import JsonObject
from proxy.render.messages import Json

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_ANY_NONCHARACTER = re.compile(r"[\ufdd0-\ufdef]|\\ufd[de][0-9a-f]")
_CODE_POINTS = 0x110000

# The values under these keys are names that templates look for, as keys are. A name that is one plain word is left as
# it is, even where a special token is part of such a word.
_NAMES = frozenset({"role", "type"})


@dataclass(frozen=True, slots=True)
class Escaped:
    """`mark` is None when nothing had to be escaped; the rest is then the input itself."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None
    documents: list[JsonObject] | None
    mark: str | None
    variables: JsonObject | None = None


class SpecialTextEscaper:
    """Made once per tokenizer from the texts of its special tokens.

    A token of one character cannot be broken. It is replaced by 2d marks and the character that is d code points after
    it, with the smallest d >= 1 for which that character occurs in no special token.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._tokens = sorted({token for token in special_tokens if token})
        self._shifts = _shifts([token for token in self._tokens if len(token) == 1], set("".join(self._tokens)))
        self._beginnings = re.compile(_pattern_of_beginnings(self._tokens))

    def escape(
        self,
        messages: list[JsonObject],
        tools: list[JsonObject] | None,
        documents: list[JsonObject] | None,
        variables: JsonObject | None = None,
    ) -> Escaped:
        """`variables` are what a request gives the template besides.

        Raises BadRequest when the text holds all of the noncharacters U+FDD0 to U+FDEF.
        """
        guarded = [message for message in messages if not _is_assistant(message)]
        if not any(map(self._beginnings.search, _strings([guarded, tools, documents, variables]))):
            return Escaped(messages, tools, documents, None, variables)
        mark = self._unused_mark([messages, tools, documents, variables])
        return Escaped(
            [message if _is_assistant(message) else self._marked(message, mark) for message in messages],
            self._marked(tools, mark),
            self._marked(documents, mark),
            mark,
            self._marked(variables, mark),
        )

    def _marked(self, value: Json, mark: str, is_name: bool = False) -> Json:
        if isinstance(value, str):
            if is_name and value.isidentifier():
                return value
            return self._beginnings.sub(lambda match: self._broken(match[0], mark), value)
        if isinstance(value, list):
            return [self._marked(item, mark, is_name) for item in value]
        if isinstance(value, dict):
            return {
                self._marked(key, mark, True): self._marked(item, mark, key in _NAMES) for key, item in value.items()
            }
        return value

    def _broken(self, first: str, mark: str) -> str:
        if (shift := self._shifts.get(first)) is None:
            return first + mark
        return mark * (2 * shift) + chr((ord(first) + shift) % _CODE_POINTS)

    def _unused_mark(self, values: Json) -> str:
        used = {found for text in _strings(values) for found in _ANY_NONCHARACTER.findall(text)}
        used.update(*self._tokens)
        for mark in _NONCHARACTERS:
            if mark not in used and _written_in_ascii(mark) not in used:
                return mark
        raise BadRequest(
            "The request's text holds all of the noncharacters U+FDD0 to U+FDEF and the text of a special token; "
            "remove one of the noncharacters.",
            param="messages",
        )


def unescape(text: str, mark: str) -> str:
    """The text as it was before `escape`."""
    text = text.replace(_written_in_ascii(mark), mark)
    if mark not in text:
        return text
    return re.sub(f"({mark}+)(.?)", _restored, text, flags=re.DOTALL)


def _written_in_ascii(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _restored(match: re.Match[str]) -> str:
    marks, following = match.groups()
    if (shift := len(marks) // 2) == 0 or not following:
        return following
    return chr((ord(following) - shift) % _CODE_POINTS)


def _is_assistant(message: JsonObject) -> bool:
    return message.get("role") == "assistant"


def _strings(value: Json, is_name: bool = False) -> Iterator[str]:
    """Every string inside, keys too, but for names that are plain words."""
    if isinstance(value, str):
        if not (is_name and value.isidentifier()):
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, is_name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key, True)
            yield from _strings(item, key in _NAMES)


def _shifts(singles: list[str], used: set[str]) -> dict[str, int]:
    def usable(code: int) -> bool:
        character = chr(code)
        return character not in used and character not in _NONCHARACTERS and not 0xD800 <= code < 0xE000

    return {
        single: next(d for d in range(1, _CODE_POINTS) if usable((ord(single) + d) % _CODE_POINTS))
        for single in singles
    }


class _Node(dict[str, "_Node"]):
    ends = False


def _pattern_of_beginnings(tokens: list[str]) -> str:
    """The first character of each occurrence, overlapping ones too, and of one that the end of the text cuts off.

    The tokens are laid out as a tree, so that the search at one place does not try a thousand tokens one by one.
    """
    root = _Node()
    for token in tokens:
        node = root
        for character in token:
            node = node.setdefault(character, _Node())
        node.ends = True
    firsts = [re.escape(first) + ("" if node.ends else f"(?={_rest(node)})") for first, node in sorted(root.items())]
    return "|".join(firsts) or "(?!)"


def _rest(node: _Node) -> str:
    if node.ends:
        return ""
    ways = [re.escape(character) + _rest(child) for character, child in sorted(node.items())]
    return f"(?:{'|'.join(ways)}|\\Z)"
