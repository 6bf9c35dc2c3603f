"""Calls as trees of elements: one per argument, nested for objects and lists, each tag after a namespace.

The law: whether an element is a list, and what an element without a type is, shows only at its end; so the arguments
of a call come in one piece, at its end. No recursion: a stack of open elements, and the values they have so far.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.derender.codecs.base import LONGEST_HEADER, Between, Codec, MarkupLimits, Schemas, Sink, Step
from proxy.derender.codecs.json_text import quoted
from proxy.derender.codecs.tagged_calls import Tag
from proxy.derender.markers import Literals, Marks
from proxy.derender.schemas import typed, types_of
from proxy.formats.kinds import ElementCalls

TEXT = "$text"
"""The key of the text that stands beside elements."""
_NAME = re.compile(r"[\w.-]+")


class ElementSyntax:
    bare: frozenset[str] = frozenset()

    def __init__(self, declaration: ElementCalls, marks: Marks) -> None:
        encode = marks.encode
        self.marks, self.item = marks, declaration.item
        self.call = Tag(encode(declaration.call))
        self.call_end = encode(declaration.call_end)
        sections = tuple(map(encode, declaration.section))
        self.section_ends = tuple(map(encode, declaration.section_end))
        self.openers = (*sections, self.call.prefix)
        self.between = Between(self.call.prefix, *self.section_ends)
        self.ends_tag = Literals([self.call.end])
        self.ends_body = Literals([self.call_end, self.call.prefix, *self.section_ends])
        self.tag = re.compile(re.escape(encode(declaration.namespace)) + r"<(/?)([^\s<>/]+)\s*(/?)>")

    def codec(self, opener: str, schemas: Schemas, limits: MarkupLimits) -> "ElementCodec":
        return ElementCodec(self, opener == self.call.prefix, schemas, limits)


class ElementCodec(Codec):
    STATE: ClassVar[dict[str, type]] = {"state": str, "called": bool, "name": str, "held": list, "size": int}

    def __init__(self, syntax: ElementSyntax, in_tag: bool, schemas: Schemas, limits: MarkupLimits) -> None:
        self._syntax, self._schemas, self._limits = syntax, schemas, limits
        self.state = "tag" if in_tag else "between"
        self.called = False
        self.name = ""
        self.held: list[str] = []
        self.size = 0

    def read(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        if sink.active:
            return self._body(text, at, last, sink)
        if self.state == "between":
            at, marker = self._syntax.between.next(text, at, last)
            if marker == "":
                return at, Step.WAIT
            if marker != self._syntax.call.prefix:
                return at, Step.DONE if self.called else Step.FAILED
            self.state = "tag"
        return self._tag(text, at, last, sink)

    def _tag(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        inside = text[at : at + LONGEST_HEADER]
        end, closing = self._syntax.ends_tag.find(inside, 0, last)
        if closing is None:
            return at, Step.WAIT if len(inside) < LONGEST_HEADER and not last else Step.FAILED
        name = _NAME.fullmatch(self._syntax.call.read(inside[:end]).get("name", ""))
        if name is None:
            return at, Step.FAILED
        self.name, self.called, self.state = name[0], True, "between"
        sink.begin(self.name)
        return at + end + len(closing), Step.GO

    def _body(self, text: str, at: int, last: bool, sink: Sink) -> tuple[int, Step]:
        end, marker = self._syntax.ends_body.find(text, at, last)
        room = self._limits.held - self.size
        if end - at > room:
            # Too much to hold: the call ends without arguments, and what it held is text.
            sink.prose("".join(self.held) + text[at : at + room])
            sink.end()
            return at + room, Step.DONE
        self.held.append(text[at:end])
        self.size += end - at
        if marker is None:
            return end, Step.WAIT
        body = "".join(self.held)
        self.held, self.size = [], 0
        tree = _Tree(self._syntax, self._schemas, self.name, self._limits.depth)
        sink.arguments(tree.read(body))
        if tree.stray:
            sink.prose(tree.stray)
        sink.end()
        # Another call, or the section's end, also ends a call whose own end is missing.
        return end + (len(marker) if marker == self._syntax.call_end else 0), Step.GO


Child = tuple[str, str, bool]
"""The name of an element, its value as JSON, and whether the schema has a list there and nothing else."""


class _Node:
    """An element that is open: the values of the elements in it, and the text beside them."""

    __slots__ = ("children", "name", "schema", "texts", "types")

    def __init__(self, name: str, schema: Mapping[str, Any] | None, types: frozenset[str]) -> None:
        self.name, self.schema, self.types = name, schema, types
        self.children: list[Child] = []
        self.texts: list[str] = []


class _Tree:
    def __init__(self, syntax: ElementSyntax, schemas: Schemas, function: str, depth: int) -> None:
        self._syntax, self._schemas, self._function, self._depth = syntax, schemas, function, depth
        self._open = [_Node("", None, frozenset({"object"}))]
        self.stray = ""
        """Text that stands between the arguments and belongs to none."""

    def read(self, body: str) -> str:
        """The arguments that the elements of `body` are, as JSON."""
        at = 0
        for tag in self._syntax.tag.finditer(body):
            closes, name, empty = tag.groups()
            if not closes and len(self._open) > self._depth:
                continue  # as deep as it goes, tags are text
            self._text(body[at : tag.start()])
            at = tag.end()
            if closes:
                self._close(name)
            else:
                self._open.append(self._node(name))
                if empty:
                    self._close(name)
        self._text(body[at:])
        while len(self._open) > 1:
            self._close(self._open[-1].name)
        root = self._open[0]
        self.stray = "".join(root.texts).strip()
        return _object(root.children)

    def _text(self, text: str) -> None:
        if text:
            self._open[-1].texts.append(self._syntax.marks.text(text))

    def _node(self, name: str) -> _Node:
        parent = self._open[-1]
        shown = self._syntax.marks.text(name)
        if len(self._open) == 1:
            schema = self._schemas.parameter(self._function, shown)
            return _Node(shown, schema, self._schemas.types(self._function, shown))
        schema = _inside(parent.schema, "properties", shown) or _inside(parent.schema, "items")
        return _Node(shown, schema, types_of(schema))

    def _close(self, name: str) -> None:
        shown = self._syntax.marks.text(name)
        if not any(node.name == shown for node in self._open[1:]):
            self._close_unopened(name)
            return
        while True:
            node = self._open.pop()
            self._open[-1].children.append(self._child(node))
            if node.name == shown:
                return

    def _close_unopened(self, name: str) -> None:
        """The text before a closing tag without an opening one is its element's: models leave the first one out."""
        parent = self._open[-1]
        if parent.texts and parent.texts[-1].strip():
            text = parent.texts.pop()
            node = self._node(name)
            node.texts = [text.lstrip("\r\n")]
            parent.children.append(self._child(node))

    def _child(self, node: _Node) -> Child:
        return node.name, self._value(node), node.types == {"array"}

    def _value(self, node: _Node) -> str:
        text = "".join(node.texts)
        if not node.children:
            return self._leaf(node, text)
        beside = text.strip()
        named_items = all(name == self._syntax.item for name, _, _ in node.children)
        if not beside and ("array" in node.types or (named_items and "object" not in node.types)):
            return _list([value for _, value, _ in node.children])
        return _object([*node.children, (TEXT, f'"{quoted(beside)}"', False)] if beside else node.children)

    def _leaf(self, node: _Node, text: str) -> str:
        if not text.strip() and "string" not in node.types:
            if "array" in node.types:
                return "[]"
            if "object" in node.types:
                return "{}"
        value = typed(text, node.types)
        if "array" in node.types and value[0] == '"':
            # One of the list's elements, as a list with a name of its own for each of them is written.
            return typed(text, types_of(_inside(node.schema, "items")) | (node.types & {"string"}))
        return value


def _inside(schema: Mapping[str, Any] | None, *path: str) -> Mapping[str, Any] | None:
    inside: Any = schema
    for key in path:
        inside = inside.get(key) if isinstance(inside, Mapping) else None
    return inside if isinstance(inside, Mapping) else None


def _object(children: list[Child]) -> str:
    """Elements of one name are one key with a list."""
    grouped: dict[str, list[str]] = {}
    lists = set()
    for name, value, is_list in children:
        grouped.setdefault(name, []).append(value)
        if is_list:
            lists.add(name)
    parts = []
    for name, values in grouped.items():
        one = len(values) == 1 and not (name in lists and values[0][0] != "[")
        parts.append(f'"{quoted(name)}": {values[0] if one else _list(values)}')
    return "{" + ", ".join(parts) + "}"


def _list(values: list[str]) -> str:
    return "[" + ", ".join(values) + "]"
