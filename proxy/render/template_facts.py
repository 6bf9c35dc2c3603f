"""What a chat template's syntax tree tells about the messages that it expects.

Read once per template, without running it. Names are followed through assignments and macro calls but not through
scopes and branches, so an answer is an informed guess, as that of vLLM's `--chat-template-content-format auto` is.
"""

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "parts"]

# Filters that give back a list's elements, or some of them; any other filter makes something else of a content.
_ELEMENT_FILTERS = frozenset({"list", "default", "d", "select", "reject", "selectattr", "rejectattr", "reverse"})
LONGEST_CHAIN = 8

_PART_FILTERS = frozenset({"selectattr", "rejectattr", "map"})


def content_format(tree: nodes.Template) -> ContentFormat:
    """`parts` if the template walks through a message's content as a list of parts, `string` if it only prints it."""
    names = _names_of_content(tree)
    return "parts" if any(_takes_apart(node, names) for node in _walk(tree)) else "string"


def knows_developer(tree: nodes.Template) -> bool:
    """Whether the template has a word for the `developer` role."""
    return any(constant.value == "developer" for constant in tree.find_all(nodes.Const))


def _takes_apart(node: nodes.Node, names: set[str]) -> bool:
    match node:
        case nodes.For(iter=walked):
            return _is_content(walked, names)
        case nodes.Filter(node=nodes.Expr() as filtered, name=name) if name in _PART_FILTERS:
            return _is_content(filtered, names)
        case nodes.Getattr(node=nodes.Getitem(node=indexed, arg=nodes.Const(value=int()))):
            return _is_content(indexed, names)
        case nodes.Getitem(
            node=nodes.Getitem(node=indexed, arg=nodes.Const(value=int())), arg=nodes.Const(value=str())
        ):
            return _is_content(indexed, names)
    return False


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
        case nodes.Getitem(node=sliced, arg=nodes.Slice()):
            return _is_content(sliced, names)
        case nodes.Filter(node=nodes.Expr() as filtered, name=name) if name in _ELEMENT_FILTERS:
            return _is_content(filtered, names)
        case nodes.Or(left=left, right=right) | nodes.CondExpr(expr1=left, expr2=nodes.Expr() as right):
            return _is_content(left, names) or _is_content(right, names)
        case nodes.CondExpr(expr1=only):
            return _is_content(only, names)
    return False


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Variables and macro parameters that are given a message's content somewhere; `content` is taken to be one.

    Through a few names at most: a template from a request could make a chain of thousands.
    """
    macros = {macro.name: [parameter.name for parameter in macro.args] for macro in tree.find_all(nodes.Macro)}
    names = {"content"}
    for _ in range(LONGEST_CHAIN):
        found = {name for node in _walk(tree) for name in _named_content(node, names, macros)}
        if found <= names:
            break
        names |= found
    return names


def _named_content(node: nodes.Node, names: set[str], macros: dict[str, list[str]]) -> Iterator[str]:
    match node:
        case nodes.Assign(target=nodes.Name(name=target), node=value) if _is_content(value, names):
            yield target
        case nodes.Call(node=nodes.Name(name=macro)) if macro in macros:
            given = [*zip(macros[macro], node.args, strict=False), *((k.key, k.value) for k in node.kwargs)]
            yield from (parameter for parameter, value in given if _is_content(value, names))


def _walk(tree: nodes.Node) -> Iterator[nodes.Node]:
    return tree.find_all(nodes.Node)
