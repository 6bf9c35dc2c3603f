"""One YAML document as plain data, with the line of everything in it, and its problems by line.

PyYAML composes nodes, which know their lines; the walk over them here applies YAML 1.2's plain types (so `no` and
`1:30` are text, `1e3` is a number), refuses duplicate keys, and expands `${NAME}`, `${NAME:-default}` and `$$` in
values. A value that is one whole `${...}` is typed as if it stood in the file itself. Nothing here knows the keys.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import yaml
from pydantic import JsonValue

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


@dataclass(frozen=True, order=True)
class Problem:
    line: int
    path: str
    message: str

    def at(self, source: str) -> str:
        return ": ".join(part for part in (f"{source}:{self.line}", self.path, self.message) if part)


_PLAIN = "plain scalar"
_STR = "tag:yaml.org,2002:str"
_MERGE = "<<"
_TAGGED = "bears a YAML tag; tags are not used here, leave it out"
_REFERENCE = re.compile(r"\$\$|\$\{(?P<inside>[^}]*)(?P<closed>\}?)")
_VARIABLE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-(?!.*\$\{)(?P<value>.*))?", re.DOTALL)


class _Loader(yaml.BaseLoader):
    """Composes only; leaves open what a plain scalar is, so that `8000` and `!!str 8000` can be told apart."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN
        return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]


def _typed(plain: str) -> JsonValue:
    """A plain scalar under YAML 1.2's core schema, without the infinities and NaN that JSON lacks."""
    if plain in ("", "~", "null", "Null", "NULL"):
        return None
    if plain in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return plain.lower() == "true"
    if re.fullmatch(r"[-+]?[0-9]{1,20}", plain):
        return int(plain)
    if re.fullmatch(r"0o[0-7]+|0x[0-9a-fA-F]+", plain):
        return int(plain, 0)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", plain):
        number = float(plain)
        return number if math.isfinite(number) else plain
    return plain


class Document:
    """One YAML document as plain data, the line of everything in it, and what is wrong with it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.problems: set[Problem] = set()
        self.unreadable = False
        self.expanded: dict[KeyPath, str] = {}  # the text of each value in which a `${...}` was replaced
        self._variables: dict[KeyPath, str] = {}
        self._lines: dict[KeyPath, int] = {(): 1}
        self._unread: set[KeyPath] = set()
        self._open: set[int] = set()  # the nodes that the walk is inside of, so that a circle of aliases ends
        self._env = env

    def read(self, text: str) -> JsonValue:
        try:
            node = yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            # These messages of PyYAML end in a word of the file, which is a secret that lacks its quotes at worst.
            problem = re.sub(r"(alias|anchor|tag handle) .*", r"\1", error.problem or "cannot be read")
            self._stop(mark.line + 1 if mark else 1, f"is not YAML: {problem}")
        except yaml.reader.ReaderError as error:
            self._stop(text.count("\n", 0, error.position) + 1, "is not YAML: holds a control character")
        except RecursionError:
            self._stop(1, "is nested too deeply")
        else:
            if isinstance(node, yaml.MappingNode):
                return self._value(node, ())
            self._stop(1, "should be a mapping with the keys server, models and pools")
        return None

    def report(self, path: KeyPath, message: str) -> None:
        """Adds a problem, unless the value could not be read: then whatever else is wrong with it is an echo."""
        if self.known(path) not in self._unread:
            self.problems.add(Problem(self._lines[self.known(path)], dotted(path), message))

    def known(self, path: KeyPath) -> KeyPath:
        """The longest beginning of `path` that stands in the file."""
        return next(path[:end] for end in range(len(path), -1, -1) if path[:end] in self._lines)

    def shown(self, path: KeyPath, value: object) -> str:
        """A wrong value as a message may repeat it; what came out of the environment may be a secret."""
        if variables := self._variables.get(self.known(path)):
            return f"the value of {variables}"
        match value:
            case dict():
                return "a mapping"
            case list():
                return "a list"
            case None:
                return "nothing"
            case bool():
                return str(value).lower()
            case str() if len(value) > 60:
                return f"{value[:60]!r}..."
            case _:
                return repr(value)

    def _stop(self, line: int, message: str) -> None:
        self.unreadable = True
        self.problems.add(Problem(line, "", message))

    def _refuse(self, path: KeyPath, message: str) -> JsonValue:
        self.report(path, message)
        self._unread.add(path)
        return None

    def _value(self, node: yaml.Node, path: KeyPath) -> JsonValue:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            return self._refuse(path, "is an alias for something that it is part of")
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            return self._refuse(path, _TAGGED)
        self._open.add(id(node))
        value: JsonValue
        if isinstance(node, yaml.MappingNode):
            value = {}
            for key, (key_node, value_node) in self._pairs(node, path).items():
                self._lines[*path, key] = key_node.start_mark.line + 1
                value[key] = self._value(value_node, (*path, key))
        else:
            value = []
            for index, item in enumerate(cast(yaml.SequenceNode, node).value):
                self._lines[*path, index] = item.start_mark.line + 1
                value.append(self._value(item, (*path, index)))
        self._open.remove(id(node))
        return value

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """A mapping's own pairs over those it merges with `<<`, of which earlier ones win."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.problems.add(Problem(line, dotted(path), "a key should be plain text, not a list or a mapping"))
            elif key.value == _MERGE and key.tag == _PLAIN:
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(source, yaml.MappingNode) or id(source) in self._open:
                        problem = "should name one mapping from elsewhere, or a list of them"
                        self.problems.add(Problem(line, dotted((*path, _MERGE)), problem))
                        continue
                    self._open.add(id(source))
                    merged = self._pairs(source, path) | merged
                    self._open.remove(id(source))
            elif key.value in own:
                first = own[key.value][0].start_mark.line + 1
                self.problems.add(Problem(line, dotted((*path, key.value)), f"the key is already on line {first}"))
            else:
                own[key.value] = (key, value)
        return merged | own

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> JsonValue:
        if node.tag not in (_PLAIN, _STR):
            return self._refuse(path, _TAGGED)
        names: list[str] = []
        text = _REFERENCE.sub(lambda reference: self._replacement(reference, path, names), node.value)
        if not names:
            return _typed(text) if node.tag == _PLAIN else text
        self.expanded[path] = text
        self._variables[path] = ", ".join(f"${{{name}}}" for name in names)
        return _typed(text) if re.fullmatch(r"\$\{[^}]*\}", node.value) else text

    def _replacement(self, reference: re.Match[str], path: KeyPath, names: list[str]) -> str:
        if reference[0] == "$$":
            return "$"
        variable = _VARIABLE.fullmatch(reference["inside"])
        if variable is None or not reference["closed"]:
            self._refuse(path, "should hold ${NAME} or ${NAME:-default}, not nested; write $$ for a dollar sign")
            return ""
        name = variable["name"]
        names.append(name)
        value = self._env.get(name, "") or variable["value"] or ""
        if not value and variable["default"] is None:
            state = "empty" if name in self._env else "not set"
            advice = f"set it, or write ${{{name}:-}} if it may be empty"
            self._refuse(path, f"the environment variable {name} is {state}; {advice}")
        return value
