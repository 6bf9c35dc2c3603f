"""What `auto` finds, and where it refuses."""

import pytest

from proxy.formats.auto import Evidence
from proxy.formats.table import Formats, UnknownFormat

HERMES = (
    """{%- if tools %}Return {"name": <function>, "arguments": <object>} within <tool_call></tool_call>.{%- endif %}"""
)
QWEN_XML = HERMES + "<function={{ name }}><parameter={{ key }}>{{ value }}</parameter></function>"
GLM = "{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>"
SWITCHED = "{%- if enable_thinking is false %}<think></think>{%- endif %}"
LLAMA = 'Answer with {"name": function name, "parameters": dictionary of argument name and its value}.'
PYTHONIC = "Answer with [func_name1(params_name1=params_value1), func_name2(params)]."
DEEPSEEK_V31 = """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ arguments }}
<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""


def names(template: str | None, *tokens: str) -> tuple[str | None, str | None]:
    evidence = Evidence((template,) if template else (), frozenset(tokens))
    pair = Formats().pair("auto", "auto", evidence)
    return pair.tool_call_parser, pair.reasoning_parser


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (HERMES, "hermes"),
        (QWEN_XML, "qwen3_coder"),
        (GLM, "glm45"),
        (LLAMA, "llama3_json"),
        (PYTHONIC, "pythonic"),
        (DEEPSEEK_V31, "deepseek_v31"),
        (DEEPSEEK_V31 + "\n```json\n", "deepseek_v3"),
        ("Hello {{ messages }}", None),
    ],
)
def test_the_template_tells_how_calls_are_written(template: str, found: str | None) -> None:
    assert names(template)[0] == found


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (SWITCHED, "qwen3"),
        (SWITCHED + GLM, "glm45"),
        ("{{ '<think>' }}{{ content.split('</think>') }}", "deepseek_r1"),
        ("<seed:think></seed:think>", "seed_oss"),
        ("Hello {{ messages }}", None),
    ],
)
def test_the_template_tells_how_reasoning_is_written(template: str, found: str | None) -> None:
    assert names(template)[1] == found


def test_without_a_template_the_tokens_tell() -> None:
    assert names(None, "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]") == ("mistral", "mistral")


def test_tokens_that_the_template_never_writes_are_not_enough() -> None:
    assert names("Hello {{ messages }}", "<tool_call>", "</tool_call>", "<think>", "</think>") == (None, None)


def test_two_syntaxes_that_fit_alike_are_named_and_refused() -> None:
    template = "<function_calls></function_calls><|tool_call_start|><|tool_call_end|>"
    with pytest.raises(UnknownFormat, match="auto: lfm2, olmo3 fit this model alike; name one of them"):
        Formats().pair("auto", None, Evidence((template,), frozenset()))


def test_what_was_found_is_said_with_the_names_that_mean_the_same() -> None:
    pair = Formats().pair("auto", "auto", Evidence((HERMES,), frozenset()))
    assert pair.notes == (
        "tool_call_parser auto: hermes (the same as ernie45, granite4, qwen3_json)",
        "reasoning_parser auto: nothing fits this model's template and vocabulary, so there is none",
    )


def test_a_name_that_was_given_is_taken_whatever_the_template_says() -> None:
    pair = Formats().pair("pythonic", None, Evidence((HERMES,), frozenset()))
    assert (pair.tool_call_parser, pair.notes) == ("pythonic", ())
