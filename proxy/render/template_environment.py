"""The Jinja dialect that chat templates are written in: what `transformers` 5 gives a template, nothing more.

A template is a program from elsewhere. It runs in Jinja's immutable sandbox, sees only values, and can neither change
what it is given nor reach Python's internals. Everything here is about the language; which template runs on what is in
`chat_template.py`, and what a template from a request may cost is in `bounded_template.py`.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class RaisedByTemplate(TemplateError):
    """The template called `raise_exception`: it understood the messages and does not accept them."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """`now` is the clock of `strftime_now`, in the server's local time."""

    def __init__(self, now: Callable[[], datetime], *, optimized: bool = True) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], optimized=optimized
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)
        self.globals["dict"] = DictMaker()
        self.globals["namespace"] = GuardedNamespace


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote, for training; here it is just its body.

    The body is a scope of its own, as in `transformers`: a variable set inside is not seen outside.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

    def render_body(self, caller: Macro) -> str:
        return caller()


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML, which a model must not see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplate(str(message))


class DictMaker:
    """Stands for the class `dict`, of which a template needs the two ways to make one and may have nothing else."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class GuardedNamespace(Namespace):
    """A namespace without names that begin with an underscore: those would reach into the object itself.

    It prints as its kind only; the attributes may be of any size.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that an attribute may be called `self`
        self, *pairs = args
        attributes = dict(*pairs, **kwargs)
        for name in attributes:
            check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"an attribute of a namespace may not begin with an underscore, as {name!r} does")
