"""Templates that come with a request: the same dialect, with a price on everything.

A client must not be able to hold the process with loops in loops, or to fill its memory by doubling strings. So the
syntax tree is rewritten before it is compiled: each loop turn, macro call, filter, call and piece of output pays from a
budget, and what is made larger pays its size *before* it is made. The invariant: no value is ever larger, counted
through all that it holds, than the request's data plus what was paid, so that no single operation can take long, and
the clock is read between any two. Methods and filters that have no price here do not exist for such a template.
"""

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sized, ValuesView
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from proxy.render.template_environment import ChatEnvironment, DictMaker

LONGEST_SOURCE = 50_000  # characters; the templates of real models have at most some 30 000
_LONGEST_DATE_FORMAT = 200
_LARGEST_INDENT = 16
_LARGEST_PRECISION = 20
_MOST_BITS = 4096
_ELEMENT = 8  # the price of an element of a container, in characters
_FROM_JINJA = frozenset({"_loop_vars", "_block_vars"})  # what compiled templates add to the arguments of a call


class BudgetExceeded(Exception):
    """Says which bound was met."""


class Budget:
    """What one rendering may spend: `size` units (a character or a step is one) until `deadline`."""

    __slots__ = ("_clock", "_deadline", "_left", "_seconds", "_size")

    def __init__(self, size: int, seconds: float, clock: Callable[[], float]) -> None:
        self._size = self._left = size
        self._seconds = seconds
        self._clock = clock
        self._deadline = clock() + seconds

    def spend(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise BudgetExceeded(f"it makes more than {self._size} characters and steps")
        if self._clock() > self._deadline:
            raise BudgetExceeded(f"it runs longer than {self._seconds} seconds")

    def weigh(self, value: Any, per_level: int = 0) -> int:
        """Pays for a value and all that it holds, `per_level` more for each level of depth; returns the price."""
        total = 0
        pending = [(value, 0)]
        while pending:
            item, depth = pending.pop()
            price = _ELEMENT + depth * per_level + (len(item) if isinstance(item, str) else 0)
            self.spend(price)
            total += price
            if isinstance(item, dict):
                pending.extend((part, depth + 1) for pair in item.items() for part in pair)
            elif isinstance(item, list | tuple | ItemsView | KeysView | ValuesView):
                pending.extend((part, depth + 1) for part in item)
        return total

    def text(self, value: Any) -> str:
        """`str(value)`, having paid for the characters of a container; those of a plain value are few."""
        if isinstance(value, str):
            return value
        self.weigh(value)
        return str(value)

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(1)
            yield item


_budget: ContextVar[Budget] = ContextVar("budget")


class _NarrowEnvironment(ChatEnvironment):
    """Of text, numbers and containers, only the methods that are known to be cheap or have a price."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _ATTRIBUTES.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """No stand-in for `str.format`, which Jinja would give before it asks whether the attribute is safe."""


class BoundedEnvironment(_NarrowEnvironment):
    """Compiles and runs templates under a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(now, optimized=False)  # nothing may be evaluated while compiling, where nobody pays
        plain = _NarrowEnvironment(now)
        self.filters = {name: _priced(plain, name, price) for name, price in _FILTERS.items()}
        self.filters |= {_TICK: _tick, _EMIT: _emit, _CONCAT: _concat, _LITERAL: _literal}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["strftime_now"] = lambda format: _format_date(now(), format)

    def compile_bounded(self, tree: nodes.Template) -> Template:
        """Takes the tree over: it is rewritten in place."""
        rewritten: nodes.Template = _Instrument().visit(tree)
        rewritten.set_environment(self)
        return self.from_string(rewritten)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        owner = getattr(__obj, "__self__", None)
        given = {name: value for name, value in kwargs.items() if name not in _FROM_JINJA}
        if isinstance(owner, str):
            pay: Price = _METHODS.get(__obj.__name__, _free)
            pay(budget, owner, *args, **given)
        elif not isinstance(owner, dict | list | tuple):
            budget.weigh([*args, *given.values()])
        result = super().call(__context, __obj, *args, **kwargs)
        budget.spend(_length(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _pay_for_operator(_budget.get(), operator, left, right)
        return super().call_binop(context, operator, left, right)


def render_bounded(template: Template, budget: Budget, variables: dict[str, Any]) -> str:
    token = _budget.set(budget)
    try:
        return template.render(variables)
    finally:
        _budget.reset(token)


# Rewriting. The names have a character that no identifier has, so that a template cannot write them.

_TICK, _EMIT, _CONCAT, _LITERAL = "tick!", "emit!", "concat!", "literal!"


class _Instrument(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node.lineno))
        if node.test is not None:
            node.test = nodes.And(_paying(nodes.Const(True, lineno=node.lineno), _TICK), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node.lineno))
        return node

    visit_CallBlock = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_paying(child, _EMIT) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *others = node.nodes
        return _paying(first, _CONCAT, others)

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _paying(node, _LITERAL)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _paying(node, _LITERAL) if node.ctx == "load" else node


def _paying(value: nodes.Expr, name: str, others: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(value, name, others or [], [], None, None, lineno=value.lineno)


def _tick_statement(line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_paying(nodes.Const(True, lineno=line), _TICK), lineno=line)


# A filter that takes the context is never evaluated while compiling.


@pass_context
def _tick(context: Context, value: Any) -> Any:
    _budget.get().spend(1)
    return value


@pass_context
def _emit(context: Context, value: Any) -> str:
    budget = _budget.get()
    text = budget.text(value)
    budget.spend(len(text))
    return text


@pass_context
def _concat(context: Context, *values: Any) -> str:
    budget = _budget.get()
    texts = [budget.text(value) for value in values]
    _pay_for_longer(budget, len(texts[0]), sum(map(len, texts[1:])))
    return "".join(texts)


@pass_context
def _literal(context: Context, value: Any) -> Any:
    _budget.get().weigh(value)
    return value


# Prices. A price is paid before the operation; what every result pays afterwards is its length.


def _pay_for_longer(budget: Budget, old: int, added: int) -> None:
    """Appending: the old part only has to be copied, which is cheap, or a loop that collects pieces would cost its
    square."""
    budget.spend(1 + (old >> 6) + added)


def _pay_for_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    budget.spend(1)
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    integers = isinstance(left, int) and isinstance(right, int)
    if operator == "+" and isinstance(left, str) and isinstance(right, str):
        _pay_for_longer(budget, len(left), len(right))
    elif operator == "+" and isinstance(left, list | tuple):
        _pay_for_longer(budget, len(left), budget.weigh(right))
    elif operator == "*" and integers:
        _check_bits(left.bit_length() + right.bit_length())
    elif operator == "*" and not numbers:
        repeated, times = (right, left) if isinstance(left, int) else (left, right)
        budget.spend(budget.weigh(repeated) * max(0, times) if isinstance(times, int) else 1)
    elif operator == "**" and integers:
        _check_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        raise SecurityError("a template in a request may not format with `%`; use `~`")


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise SecurityError(f"a template in a request may not make numbers of more than {_MOST_BITS} bits")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


def _format_date(now: datetime, format: str) -> str:
    if len(format) > _LONGEST_DATE_FORMAT:
        raise SecurityError(f"a template in a request may not use date formats over {_LONGEST_DATE_FORMAT} characters")
    return now.strftime(format)


# The parameters after the budget are those of the filter or method, by the same names.
Price = Callable[..., object]


def _free(budget: Budget, *args: Any, **kwargs: Any) -> None:
    budget.spend(1)


def _price_of_replace(budget: Budget, s: Any, old: Any, new: Any, count: Any = None) -> None:
    budget.spend(1 + budget.text(s).count(str(old)) * len(str(new)))


def _price_of_str_join(budget: Budget, separator: str, items: Any) -> None:
    budget.spend((1 + len(separator)) * _length(items) + budget.weigh(items))


def _price_of_join(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    _price_of_str_join(budget, str(d), value)


def _price_of_indent(budget: Budget, s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    added = len(width) if isinstance(width, str) else max(0, width)
    budget.spend((1 + budget.text(s).count("\n")) * added)


def _price_of_json(
    budget: Budget,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > _LARGEST_INDENT or (separators and sum(map(len, separators)) > _LARGEST_INDENT):
        raise SecurityError(f"a template in a request may not indent JSON by more than {_LARGEST_INDENT}")
    budget.weigh(value, per_level=max(0, width))


def _price_of_round(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> None:
    if abs(precision) > _LARGEST_PRECISION:
        raise SecurityError(f"a template in a request may not round to more than {_LARGEST_PRECISION} digits")


def _price_of_default(budget: Budget, value: Any, default_value: Any = "", boolean: Any = False) -> None:
    budget.weigh([value, default_value])


def _price_of_map(budget: Budget, items: Any, *args: Any, **kwargs: Any) -> None:
    if "default" in kwargs:
        raise SecurityError("a template in a request may not use `map` with a default")


def _price_of_text(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    budget.spend(1 + len(budget.text(value)))


_FILTERS: dict[str, Price] = {
    "abs": _free,
    "capitalize": _price_of_text,
    "count": _free,
    "d": _price_of_default,
    "default": _price_of_default,
    "dictsort": _free,
    "e": _price_of_text,
    "escape": _price_of_text,
    "first": _free,
    "float": _free,
    "indent": _price_of_indent,
    "int": _free,
    "items": _free,
    "join": _price_of_join,
    "last": _free,
    "length": _free,
    "list": _free,
    "lower": _price_of_text,
    "map": _price_of_map,
    "max": _free,
    "min": _free,
    "reject": _free,
    "rejectattr": _free,
    "replace": _price_of_replace,
    "reverse": _free,
    "round": _price_of_round,
    "safe": _price_of_text,
    "select": _free,
    "selectattr": _free,
    "sort": _free,
    "string": _price_of_text,
    "title": _price_of_text,
    "tojson": _price_of_json,
    "trim": _price_of_text,
    "unique": _free,
    "upper": _price_of_text,
    "wordcount": _price_of_text,
}

_METHODS: dict[str, Price] = {"replace": _price_of_replace, "join": _price_of_str_join}

# fmt: off
_TEXT_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper",
})
# fmt: on

_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(),
    float: frozenset({"is_integer"}),
    DictMaker: frozenset(),
}


def _priced(plain: ChatEnvironment, name: str, price: Price) -> Callable[..., Any]:
    @pass_context
    def priced(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        price(budget, value, *args, **kwargs)
        result = plain.call_filter(name, value, args, kwargs, context, context.eval_ctx)
        if isinstance(result, Iterator):
            return list(budget.counted(result))
        budget.spend(_length(result))
        return result

    return priced
