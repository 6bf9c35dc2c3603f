"""Names, and what they stand for."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import proxy.formats
from proxy.formats.__main__ import FAMILIES, page
from proxy.formats.auto import Evidence
from proxy.formats.kinds import (
    KINDS,
    Calls,
    Channels,
    ElementCalls,
    HeaderCalls,
    JsonCalls,
    QuotedMapCalls,
    Reasoning,
    check,
    markers,
)
from proxy.formats.reasoning import HARMONY, REASONING
from proxy.formats.table import NOT_HERE, Formats, UnknownFormat
from proxy.formats.tools import HERMES, QWEN3_XML, TOOLS

NOTHING = Evidence((), frozenset())

VLLM_TOOLS = """
apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 dots ernie45
functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling
internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5
minimax_m2 minimax_m3 mistral muse olmo3 openai phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder qwen3_json
qwen3_xml seed_oss solar_open2 step3 step3p5 step5 xlam
"""
VLLM_REASONING = """
cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 gemma4 glm45 glm47 granite
granite_thinking_parser holo2 hunyuan_a13b hy_v3 hy_v4 inkling k2_horizon kimi_k2 kimi_k3 ling3 mimo minimax_m2
minimax_m2_append_think minimax_m3 mistral nemotron_v3 olmo3 openai_gptoss poolside_v1 qwen3 seed_oss solar_open2 step3
step3p5
"""


def test_every_parser_name_of_vllm_is_accepted_or_refused_with_a_reason() -> None:
    assert [name for name in VLLM_TOOLS.split() if name not in TOOLS and name not in NOT_HERE] == []
    assert [name for name in VLLM_REASONING.split() if name not in REASONING and name not in NOT_HERE] == []
    assert [name for name in NOT_HERE if name in TOOLS and name in REASONING] == []


@pytest.mark.parametrize("declaration", [*(c for calls in TOOLS.values() for c in calls), *REASONING.values()])
def test_every_declaration_passes_its_own_check(declaration: Reasoning | Calls) -> None:
    check(declaration)


def test_a_pair_is_what_the_two_names_declare() -> None:
    pair = Formats().pair("hermes", "qwen3", NOTHING)
    assert (pair.calls, pair.reasoning) == ((HERMES,), REASONING["qwen3"])
    assert (pair.tool_call_parser, pair.reasoning_parser) == ("hermes", "qwen3")


def test_either_name_may_be_missing() -> None:
    assert Formats().pair(None, "qwen3", NOTHING).calls == ()
    assert Formats().pair("hermes", None, NOTHING).reasoning is None


def test_channels_do_both_whichever_of_the_names_is_given() -> None:
    for names in (("openai", None), (None, "openai_gptoss"), ("openai", "openai_gptoss")):
        pair = Formats().pair(*names, NOTHING)
        assert (pair.calls, pair.reasoning) == ((HARMONY,), None)


def test_channels_do_not_go_with_another_syntax_of_calls() -> None:
    with pytest.raises(UnknownFormat, match="another syntax than tool_call_parser hermes"):
        Formats().pair("hermes", "openai_gptoss", NOTHING)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("hermis", None), "tool_call_parser 'hermis' is not known; did you mean hermes"),
        (("qwen3coder", None), "did you mean qwen3_coder"),
        ((None, "deepseek-r1"), "reasoning_parser 'deepseek-r1' is not known; did you mean deepseek_r1"),
        (("zzz", None), "known are apertus, deepseek_v3"),
        (("cohere_command3", None), "of vLLM's is not supported: its grammar lives in"),
    ],
)
def test_a_name_that_does_not_exist_is_an_error_with_the_nearest(
    names: tuple[str | None, str | None], message: str
) -> None:
    with pytest.raises(UnknownFormat, match=message):
        Formats().pair(*names, NOTHING)


@pytest.mark.parametrize(
    ("declaration", "problem"),
    [
        (Reasoning(close=()), "close is missing"),
        (JsonCalls(open=("<a>", "")), "open has an empty text"),
        (JsonCalls(open=("<{name}>",)), r"open has the hole \{name\}"),
        (HeaderCalls(call="<c>", header=()), "header is missing"),
        (HeaderCalls(call="<c>", header=("<sep>",)), r"header needs the hole \{name\} or \{id\}"),
        (HeaderCalls(call="<c>", header=("{named}",)), r"header has the hole \{named\}"),
        (replace(QWEN3_XML, call="<function>"), r"call needs the hole \{name\}"),
        (replace(QWEN3_XML, parameter="<parameter={name}>"), r"parameter needs the hole \{key\}"),
        (replace(QWEN3_XML, parameter_end=""), "parameter_end is missing"),
        (replace(QWEN3_XML, parameter="<parameter={key}{x}>"), r"parameter has the hole \{x\}"),
        (ElementCalls(namespace="", call="<i={name}>", call_end="</i>"), "namespace is missing"),
        (QuotedMapCalls(open=("<c>",), close=(), quote=""), "quote is missing"),
        (replace(HARMONY, message=""), "message is missing"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused_with_its_field(declaration: Calls, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check(declaration)


def test_words_of_a_declaration_are_no_markers() -> None:
    assert set(markers(HERMES)) == {"<tool_call>", "</tool_call>", ""}
    assert "enable_thinking" not in set(markers(REASONING["qwen3"]))


def test_every_family_in_the_page_is_a_name_of_the_tables() -> None:
    assert FAMILIES.keys() <= TOOLS.keys() | REASONING.keys()


def test_the_page_is_what_the_declarations_say() -> None:
    written = (Path(proxy.formats.__file__).parent / "README.md").read_text("utf-8")
    assert written == "\n".join(page()) + "\n"
    for name in (*TOOLS, *REASONING, *NOT_HERE, *KINDS):
        assert f"`{name}`" in written


def test_the_page_is_made_by_a_command() -> None:
    made = subprocess.run([sys.executable, "-m", "proxy.formats"], capture_output=True, text=True, check=True)
    assert made.stdout == "\n".join(page()) + "\n"


def test_channels_stand_under_both_names() -> None:
    assert isinstance(REASONING["openai_gptoss"], Channels)
    assert TOOLS["openai"] == (REASONING["openai_gptoss"],)
