"""What an engine is told of calls that are demanded, or that have to be right, and of the reasoning before them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.talk import END, Json, talk
from tests.tokenizers import CHAT_TEMPLATE, model_folder

SCHEMA = {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]}
TIDE: Json = {"type": "function", "function": {"name": "tide", "parameters": SCHEMA}}
STRICT: Json = {"type": "function", "function": {**TIDE["function"], "strict": True}}
LAMP: Json = {"type": "function", "function": {"name": "lamp", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "tide"}}
HERMES: Json = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_auto_tool_choice": True}


def tag_in(params: Json) -> Any:
    (constraint,) = params["structured_outputs"].items()
    assert constraint[0] == "structural_tag"
    return json.loads(constraint[1])["format"]


def thinking(folder: Path, opened: str) -> Path:
    """A model whose prompts end with `opened`."""
    template = CHAT_TEMPLATE.replace("assistant\n{% endif %}", f"assistant\n{opened}{{% endif %}}")
    model_folder(folder, tokenizer_config={"bos_token": "<s>", "eos_token": "<|end|>", "chat_template": template})
    return folder


async def test_a_named_call_is_constrained_in_the_models_own_syntax_and_read_from_it(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}\n</tool_call>'
    async with talk(tmp_path, call, END, **HERMES) as t:
        answer = await t.chat(tools=[LAMP, TIDE], tool_choice=NAMED)
        text = json.dumps(tag_in(t.params))
    assert '{\\"name\\": \\"tide\\", \\"arguments\\": ' in text
    assert "lamp" not in text
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "tide", "arguments": '{"port": "Brest"}'}


async def test_a_syntax_without_a_tag_is_constrained_by_a_schema(tmp_path: Path) -> None:
    async with talk(tmp_path, '{"port": "Brest"}', END, tool_call_parser="pythonic") as t:
        await t.chat(tools=[TIDE], tool_choice=NAMED)
        assert t.params["structured_outputs"] == {"json": SCHEMA}


async def test_strict_tools_are_constrained_where_the_model_calls_them(tmp_path: Path) -> None:
    async with talk(tmp_path, **HERMES) as t:
        await t.chat(tools=[STRICT, LAMP], parallel_tool_calls=False)
        tag = tag_in(t.params)
        text = json.dumps(tag)
        assert (tag["type"], tag["stop_after_first"]) == ("triggered_tags", True)
        assert text.count(json.dumps(SCHEMA)) == 1, "only of the strict tool"
        assert '{"type": "object"}' in text


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TIDE]},
        {"tools": [STRICT], "tool_choice": "none"},
        {"tools": [{**TIDE, "function": {**TIDE["function"], "strict": False}}]},
    ],
    ids=["not strict", "no calls", "strict false"],
)
async def test_other_calls_are_free(tmp_path: Path, fields: Json) -> None:
    async with talk(tmp_path, **HERMES) as t:
        await t.chat(**fields)
        assert "structured_outputs" not in t.params
        assert not {"reasoning_ended", "reasoning_parser_kwargs"} & t.sent.keys()


async def test_a_response_format_goes_before_strict_tools_and_a_forced_call_before_both(tmp_path: Path) -> None:
    form = {"type": "json_object"}
    async with talk(tmp_path, **HERMES) as t:
        await t.chat(tools=[STRICT], response_format=form)
        assert t.params["structured_outputs"] == {"json_object": True}
        await t.chat(tools=[STRICT], response_format=form, tool_choice="required")
        assert "<tool_call>" in json.dumps(tag_in(t.params))


@pytest.mark.parametrize(
    ("opened", "variables", "ended"),
    [
        ("<think>", {}, False),
        ("<think></think>", {}, True),
        ("", {}, False),
        ("", {"enable_thinking": False}, True),
    ],
)
@pytest.mark.parametrize(
    "constraint", [{"tools": [TIDE], "tool_choice": "required"}, {"response_format": {"type": "json_object"}}], ids=str
)
async def test_the_engine_is_told_whether_the_reasoning_is_over(
    tmp_path: Path, opened: str, variables: Json, ended: bool, constraint: Json
) -> None:
    async with talk(thinking(tmp_path, opened), **HERMES, default_chat_template_kwargs={"depth": 2}) as t:
        await t.chat(**constraint, chat_template_kwargs=variables)
        assert t.sent["reasoning_ended"] is ended
        assert t.sent["reasoning_parser_kwargs"] == {"chat_template_kwargs": {"depth": 2, **variables}}


async def test_without_a_reasoning_parser_nothing_is_said_of_reasoning(tmp_path: Path) -> None:
    async with talk(tmp_path, tool_call_parser="hermes") as t:
        await t.chat(tools=[TIDE], tool_choice="required")
        assert "structured_outputs" in t.params
        assert not {"reasoning_ended", "reasoning_parser_kwargs"} & t.sent.keys()


async def test_a_tag_of_channels_begins_with_the_reasoning_and_other_constraints_behind_it(tmp_path: Path) -> None:
    async with talk(tmp_path, tool_call_parser="openai", reasoning_parser="openai_gptoss") as t:
        await t.chat(tools=[TIDE], tool_choice="required")
        assert t.sent["reasoning_ended"] is True
        assert "<|channel|>analysis<|message|>" in json.dumps(tag_in(t.params))
        await t.chat(response_format={"type": "json_object"})
        assert t.sent["reasoning_ended"] is False


async def test_render_says_the_same(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [TIDE], "tool_choice": "required"}
    async with talk(tmp_path, **HERMES) as t:
        await t.chat(**body)
        rendered = await t.ask("/v1/chat/completions/render", body)
        assert rendered["sampling_params"] == t.params
        assert rendered["reasoning_ended"] == t.sent["reasoning_ended"]
        assert rendered["reasoning_parser_kwargs"] == t.sent["reasoning_parser_kwargs"]
