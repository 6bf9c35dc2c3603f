"""Calls with a header and JSON arguments."""

from typing import Any

import pytest

from proxy.derender.codecs.header_calls import HeaderSyntax
from proxy.formats.kinds import HeaderCalls
from tests.derender.codecs.driver import marks_for, run

SECTION = HeaderCalls(section=("<s>",), section_end=("</s>",), call="<c>", header=("{name}<sep>",), call_end="</c>")
FENCED = HeaderCalls(call="<c>", header=("function<sep>{name}",), fence="```json", call_end="</c>")
NATIVE = HeaderCalls(call="<c>", header=("{id}<sep>",), call_end="</c>")
OPEN = HeaderCalls(call="[C]", header=("{name}[ID]{id}[ARGS]", "{name}[ARGS]", "{name}"))


def read(declaration: HeaderCalls, text: str, **options: Any) -> Any:
    marks = marks_for(declaration)
    return run(HeaderSyntax(declaration, marks), marks, text, **options)


@pytest.mark.parametrize(
    ("declaration", "text", "calls", "prose"),
    [
        (SECTION, '<s><c>f<sep>{"a": 1}</c><c>g<sep>{}</c></s>', [("f", '{"a": 1}'), ("g", "{}")], ""),
        (SECTION, "<s>\n<c> f <sep>\n{}\n</c>\n</s> so", [("f", "{}")], " so"),
        (SECTION, "<c>f<sep>{}</c>", [("f", "{}")], ""),
        (SECTION, "<s><c>f<sep>{}</s>", [("f", "{}")], ""),
        (SECTION, "<s><c>f<sep></c></s>", [("f", "{}")], ""),
        (SECTION, '<s><c>f<sep>{"a": "</c>"}</c></s>', [("f", '{"a": "</c>"}')], ""),
        (FENCED, '<c>function<sep>f\n```json\n{"a": 1}\n```</c>', [("f", '{"a": 1}')], ""),
        (FENCED, "<c>function<sep>f\n{}</c>", [("f", "{}")], ""),
        (NATIVE, "<c>functions.get.tide:12<sep>{}</c>", [("get.tide", "{}")], ""),
        (NATIVE, "<c>f<sep>{}</c>", [("f", "{}")], ""),
        (OPEN, "[C]f[ID]a1B2c3D4e[ARGS]{}[C]g[ARGS]{}[C]h{} so", [("f", "{}"), ("g", "{}"), ("h", "{}")], " so"),
    ],
)
def test_headers_and_their_arguments(
    declaration: HeaderCalls, text: str, calls: list[tuple[str, str]], prose: str
) -> None:
    assert read(declaration, text) == ([(*call, True) for call in calls], prose)


@pytest.mark.parametrize(
    ("declaration", "text"),
    [
        (SECTION, "<s> is a marker"),
        (SECTION, "<c> is a marker"),
        (SECTION, "<c>two words<sep>{}"),
        (SECTION, "<c>f{}"),
        (SECTION, "<c>f<sep> and so on"),
        (FENCED, "<c>procedure<sep>f"),
        (FENCED, "<c>function<sep>f\n```python"),
        (OPEN, "[C] {}"),
        (OPEN, "[C]" + "f" * 600 + "{}"),
    ],
)
def test_what_has_no_header_is_no_call(declaration: HeaderCalls, text: str) -> None:
    assert read(declaration, text) == ([], text)


def test_a_call_that_was_cut_is_open() -> None:
    assert read(SECTION, '<s><c>f<sep>{"a": "b', stopped=False) == ([("f", '{"a": "b', False)], "")


def test_a_fence_that_comes_later_is_content() -> None:
    text = "<s><c>f<sep>{}</c></s>\n```\ncode\n```"
    assert read(SECTION, text) == ([("f", "{}", True)], "\n```\ncode\n```")
    assert read(FENCED, "<c>function<sep>f\n```json\n{}\n```</c>\n```\ncode\n```")[1] == "\n```\ncode\n```"
