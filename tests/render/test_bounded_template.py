import threading
from typing import Any

import pytest

from proxy.protocol.errors import BadRequest
from proxy.render.chat_template import ChatTemplates

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def trusting() -> ChatTemplates:
    return ChatTemplates(
        {"default": "D", "rag": "R"}, {"bos_token": "<s>"}, trusted=True, request_template_size=200_000
    )


def refusal(templates: ChatTemplates, template: str) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        templates.render(MESSAGES, template=template)
    return caught.value


def grown(step: str, start: str = "'a'") -> str:
    """A template that grows `ns.x` a hundred times."""
    return "{% set ns = namespace(x=" + start + ") %}{% for i in range(100) %}" + step + "{% endfor %}"


BLOW_UPS = {
    "loops in loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "text in loops": "{% for i in range(100000) %}0123456789{% endfor %}",
    "a condition in a loop": "{% for i in range(100000) if range(9999) | list and false %}{% endfor %}",
    "doubling with ~": grown("{% set ns.x = ns.x ~ ns.x %}"),
    "doubling with +": grown("{% set ns.x = ns.x + ns.x %}"),
    "doubling lists": grown("{% set ns.x = ns.x + ns.x %}", "[1]"),
    "nesting lists": grown("{% set ns.x = [ns.x, ns.x] %}", "[1]"),
    "nesting tuples": grown("{% set ns.x = (ns.x, ns.x) %}", "[1]"),
    "nesting dicts": grown("{% set ns.x = {1: ns.x, 2: ns.x} %}", "1"),
    "nesting made dicts": grown("{% set ns.x = dict(a=ns.x, b=ns.x) %}", "1"),
    "nesting arguments": "{% macro f() %}{% set ns.x = varargs %}{% endmacro %}" + grown("{{ f(ns.x, ns.x) }}", "1"),
    "doubling set blocks": grown("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubling macros": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + grown("{% set ns.x = f(ns.x) %}"),
    "replacing": grown("{% set ns.x = ns.x.replace('a', 'aa') %}"),
    "replacing by filter": grown("{% set ns.x = ns.x | replace('a', 'aa') %}"),
    "joining": grown("{% set ns.x = ns.x.join(['b'] * 99) %}"),
    "joining by filter": grown("{% set ns.x = range(99) | join(ns.x) %}"),
    "escaping": grown("{% set ns.x = ns.x | string | escape | string | replace('&', '&&') %}", "'&'"),
    "repeating": "{{ 'a' * 10 ** 9 }}",
    "repeating the other way": "{{ 10 ** 9 * 'a' }}",
    "repeating a list": "{% set x = [0] * 10 ** 9 %}",
    "powers": "{{ 10 ** 10 ** 10 ** 10 ** 10 }}",
    "squares": grown("{% set ns.x = ns.x * ns.x %}", "9"),
    "exponential macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loops": "{% for x in 'ab' recursive %}{{ loop('ab') }}{% endfor %}",
    "padding": "{{ 'a'.center(10 ** 9) }}",
    "padding by item": "{{ 'a'['center'](10 ** 9) }}",
    "padding by filter": "{{ 'a' | center(10 ** 9) }}",
    "padding by a mapped attribute": "{{ (['a'] | map(attribute='center') | first)(10 ** 9) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format by a mapped attribute": "{{ (['{:>999999999}'] | map(attribute='format') | first)(1) }}",
    "format by operator": "{{ '%999999999d' % 1 }}",
    "bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "indented JSON": "{{ [1] | tojson(indent=10 ** 9) }}",
    "indented text": "{{ 'a' | indent(10 ** 9, first=true) }}",
    "rounding": "{{ 5 | round(-10 ** 9) }}",
    "filling": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "lorem ipsum": "{{ lipsum(n=10 ** 9) }}",
    "dates": "{{ strftime_now('%A' * 9999) }}",
    "mapped defaults": "{{ range(99999) | map(attribute='x', default='a' * 9999) | list }}",
    "defaults in a map": "{{ [none] * 999 | map('default', 'a' * 9999, true) | list }}",
    "made keys": "{{ dict.fromkeys(range(99999), 'a' * 9999) }}",
    "deep nesting": "{{ " + "[" * 20000 + "]" * 20000 + " }}",
    "much source": "{{ x }}" * 20000,
}


@pytest.mark.parametrize("template", BLOW_UPS.values(), ids=BLOW_UPS)
def test_a_template_in_a_request_cannot_blow_up(trusting: ChatTemplates, template: str) -> None:
    error = refusal(trusting, template)
    assert error.status == 400
    assert error.param in ("chat_template", "messages")


ALLOWED = [
    ("{% for i in range(20000) %}ab{% endfor %}", "ab" * 20000),
    ("{{ '-' * 1000 }}", "-" * 1000),
    ("{{ ['a', 'b'] | join(', ') | upper }}{{ {'k': [1]} | tojson(indent=2) }}", 'A, B{\n  "k": [\n    1\n  ]\n}'),
    (grown("{% set ns.x = ns.x + [i] %}", "[]") + "{{ ns.x | length }}", "100"),
    (grown("{% set ns.x = ns.x ~ 'piece ' %}", "''") + "{{ ns.x }}", "piece " * 100),
    ("{{ bos_token ~ messages[0].role.upper() + messages[0].content.replace('i', 'o') }}", "<s>USERHo"),
    ("{{ messages[0].items() | list }}{{ messages[0].get('x', 1) }}", "[('role', 'user'), ('content', 'Hi')]1"),
    ("{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}{% call f(3) %}c{% endcall %}", "32c"),
    ("{{ strftime_now('%%') }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ [1, 2] == [1, 2] }}{{ 'i' in 'Hi' }}", "%31024TrueTrue"),
    ("{% for k, v in messages[0].items() if k == 'role' %}{{ loop.index }}{{ v }}{% endfor %}", "1user"),
]


@pytest.mark.parametrize(("template", "expected"), ALLOWED)
def test_what_templates_usually_do_is_within_bounds(trusting: ChatTemplates, template: str, expected: str) -> None:
    assert trusting.render(MESSAGES, template=template) == expected


def test_a_template_in_a_request_is_refused_unless_trusted() -> None:
    error = refusal(ChatTemplates({"default": "D", "rag": "R"}, {}), "{{ messages }}")
    assert error.param == "chat_template"
    assert "`trust_request_chat_template`" in error.message
    assert "default, rag" in error.message


def test_a_known_name_is_no_template_of_the_request() -> None:
    assert ChatTemplates({"default": "D", "rag": "R"}, {}).render(MESSAGES, template="rag") == "R"


def test_the_size_that_was_exceeded_is_named(trusting: ChatTemplates) -> None:
    error = refusal(trusting, BLOW_UPS["text in loops"])
    assert error.param == "chat_template"
    assert "200000" in error.message


def test_a_template_in_a_request_is_bounded_in_time() -> None:
    readings = iter(range(10**6))
    templates = ChatTemplates({}, {}, trusted=True, request_template_seconds=5.0, clock=lambda: float(next(readings)))
    error = refusal(templates, "{% for i in range(100) %}{{ i }}{% endfor %}")
    assert error.param == "chat_template"
    assert "5.0 seconds" in error.message
    assert templates.render(MESSAGES, template="ok") == "ok"


def test_what_one_rendering_spends_is_not_missing_in_the_next(trusting: ChatTemplates) -> None:
    texts = [trusting.render(MESSAGES, template="{% for i in range(10000) %}a{% endfor %}") for _ in range(20)]
    assert texts == ["a" * 10000] * 20


def test_two_threads_have_a_budget_each(trusting: ChatTemplates) -> None:
    lengths = []

    def render() -> None:
        lengths.append(len(trusting.render(MESSAGES, template="{% for i in range(20000) %}a{% endfor %}")))

    threads = [threading.Thread(target=render) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [20000] * 8


def test_a_template_in_a_request_that_is_not_jinja_is_a_400(trusting: ChatTemplates) -> None:
    error = refusal(trusting, "a\n{% if %}")
    assert error.param == "chat_template"
    assert error.message.startswith("the chat template of the request, line 2")


def test_a_template_in_a_request_is_compiled_once(trusting: ChatTemplates) -> None:
    assert trusting.select("{{ 1 }}", None) is trusting.select("{{ 1 }}", None)
