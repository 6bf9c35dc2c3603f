"""Chats and texts of models that come with a tekken.json, as mistral-common writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.errors import BadRequest
from proxy.protocol.openai import ChatRequest
from proxy.render.mistral import MistralRenderer, TekkenTokenizer
from proxy.render.renderer import ChatSettings
from tests.tokenizers import TEKKEN_SPECIAL, tekken_folder

Json = dict[str, Any]
Load = Callable[[str], TekkenTokenizer]

USER: Json = {"role": "user", "content": "the tide"}
TOOL: Json = {"type": "function", "function": {"name": "turn", "parameters": {"type": "object"}}}
SETTINGS = ChatSettings({}, {}, {}, trust_request_chat_template=False, split_special_tokens=True)


def call(call_id: str, arguments: object = '{"n": 1}', **more: object) -> Json:
    tool_call = {"id": call_id, "function": {"name": "turn", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [tool_call], **more}


def result(call_id: str, content: object = "ok") -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """The tokenizer of a version, loaded once."""
    loaded: dict[str, TekkenTokenizer] = {}

    def of(version: str) -> TekkenTokenizer:
        if version not in loaded:
            folder = tekken_folder(tmp_path_factory.mktemp(version), version)
            loaded[version] = TekkenTokenizer(str(folder / "tekken.json"))
        return loaded[version]

    return of


def ids(tokenizer: TekkenTokenizer, *messages: Json, **fields: Any) -> list[int]:
    request = ChatRequest.model_validate({"messages": list(messages), **fields})
    request.check()
    return MistralRenderer(tokenizer, SETTINGS).render(request, lambda _: None).token_ids


def text(tokenizer: TekkenTokenizer, *messages: Json, **fields: Any) -> str:
    return tokenizer.decode(ids(tokenizer, *messages, **fields), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("version", "messages", "prompt"),
    [
        ("v3", [USER], "<s>[INST]the tide[/INST]"),
        ("v3", [{"role": "system", "content": "lamp"}, USER], "<s>[INST]lamp\n\nthe tide[/INST]"),
        (
            "v13",
            [{"role": "system", "content": "lamp"}, USER],
            "<s>[SYSTEM_PROMPT]lamp[/SYSTEM_PROMPT][INST]the tide[/INST]",
        ),
        (
            "v13",
            [{"role": "developer", "content": "a"}, USER],
            "<s>[SYSTEM_PROMPT]a[/SYSTEM_PROMPT][INST]the tide[/INST]",
        ),
        (
            "v3",
            [{"role": "user", "content": ["a", {"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}]}],
            "<s>[INST]a\n\nb\n\nc[/INST]",
        ),
        ("v3", [{"role": "user", "content": None}], "<s>[INST][/INST]"),
        (
            "v3",
            [USER, {"role": "assistant", "content": "ah"}, USER],
            "<s>[INST]the tide[/INST]ah</s>[INST]the tide[/INST]",
        ),
        (
            "v3",
            [USER, call("abcdefghi", '{"n":  "é"}'), result("abcdefghi", '{"a":1}')],
            '<s>[INST]the tide[/INST][TOOL_CALLS][{"name": "turn", "arguments": {"n": "é"}, "id": "abcdefghi"}]</s>'
            '[TOOL_RESULTS]{"content": {"a": 1}, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
        ),
        (
            "v13",
            [USER, call("abcdefghi", {"n": 1}), result("abcdefghi", [{"type": "text", "text": "ok"}])],
            '<s>[INST]the tide[/INST][TOOL_CALLS]turn[ARGS]{"n": 1}</s>[TOOL_RESULTS]ok[/TOOL_RESULTS]',
        ),
        (
            "v13",
            [USER, call("abcdefghi", " ", content=""), result("abcdefghi")],
            "<s>[INST]the tide[/INST][TOOL_CALLS]turn[ARGS]{}</s>[TOOL_RESULTS]ok[/TOOL_RESULTS]",
        ),
        (
            "v13",
            [USER, {"role": "assistant", "content": "ah", "reasoning_content": "hm"}, USER],
            "<s>[INST]the tide[/INST][THINK]hm[/THINK]ah</s>[INST]the tide[/INST]",
        ),
        (
            "v13",
            [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, "ah"]}, USER],
            "<s>[INST]the tide[/INST][THINK]hm[/THINK]ah</s>[INST]the tide[/INST]",
        ),
        (
            "v3",
            [USER, {"role": "assistant", "content": "ah", "reasoning": "", "tool_calls": []}, USER],
            "<s>[INST]the tide[/INST]ah</s>[INST]the tide[/INST]",
        ),
    ],
)
def test_a_conversation_is_written_as_its_tokenizer_version_has_it(
    load: Load, version: str, messages: list[Json], prompt: str
) -> None:
    assert text(load(version), *messages) == prompt


@pytest.mark.parametrize("version", ["v3", "v13"])
def test_tools_stand_before_the_user_message(load: Load, version: str) -> None:
    written = '{"type": "function", "function": {"name": "turn", "description": "", "parameters": {"type": "object"}}}'
    tools = f"[AVAILABLE_TOOLS][{written}][/AVAILABLE_TOOLS]"
    assert text(load(version), USER, tools=[TOOL]) == f"<s>{tools}[INST]the tide[/INST]"
    assert text(load(version), USER, tools=[]) == "<s>[INST]the tide[/INST]"


@pytest.mark.parametrize(
    ("version", "fields", "settings"),
    [
        ("v15", {"reasoning_effort": "high"}, '[MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS]'),
        ("v15", {}, '[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS]'),
        ("v13", {"reasoning_effort": "high"}, ""),
    ],
)
def test_a_reasoning_effort_is_written_where_the_tokenizer_version_has_it(
    load: Load, version: str, fields: Json, settings: str
) -> None:
    assert text(load(version), USER, **fields) == f"<s>{settings}[INST]the tide[/INST]"


def test_the_final_message_is_continued_without_an_end(load: Load) -> None:
    messages = [USER, {"role": "assistant", "content": "the lamp"}]
    continued = text(load("v3"), *messages, continue_final_message=True)
    assert continued == "<s>[INST]the tide[/INST]the lamp"


@pytest.mark.parametrize("version", ["v3", "v13", "v15"])
@given(content=st.lists(st.sampled_from([*TEKKEN_SPECIAL, "<SPECIAL_27>", "the", " ", "\n", "🌊"])).map("".join))
def test_no_text_of_anybody_becomes_a_control_token(load: Load, version: str, content: str) -> None:
    tokenizer = load(version)

    def control_tokens(text: str) -> list[int]:
        conversation = [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            call("abcdefghi", {"n": text}),
            result("abcdefghi", text),
            {"role": "assistant", "content": text + "."},
            USER,
        ]
        tools = [{**TOOL, "function": {**TOOL["function"], "description": text}}]
        return [i for i in ids(tokenizer, *conversation, tools=tools) if i in tokenizer.special_texts]

    assert control_tokens(content) == control_tokens("the tide")


def test_a_text_holds_no_control_token_but_the_bos(load: Load) -> None:
    tokenizer = load("v3")
    with_bos, without = (tokenizer.encode("[INST]the</s>", add_special_tokens=special) for special in (True, False))
    assert with_bos == [1, *without]
    assert not set(without) & tokenizer.special_texts.keys()
    assert tokenizer.decode(with_bos, skip_special_tokens=True) == "[INST]the</s>"


def test_a_token_is_shown_as_text(load: Load) -> None:
    tokenizer = load("v3")
    assert tokenizer.token_strings([1, 9, 30 + ord("a"), 30 + 0xE7, 10**6]) == [
        "<s>",
        "[TOOL_CALLS]",
        "a",
        "\ufffd",
        "",
    ]


@pytest.mark.parametrize(
    ("sent", "written"),
    [
        ("abcdefghi", "abcdefghi"),
        ("chatcmpl-tool-0123456789abcdef", "789abcdef"),
        ("call_1", "74196fe72"),
        ("functions.turn:0", "c1f3950b8"),
    ],
)
def test_an_id_of_a_tool_call_becomes_one_that_the_tokenizer_takes(load: Load, sent: str, written: str) -> None:
    prompt = text(load("v3"), USER, call(sent), result(sent))
    assert f'"id": "{written}"' in prompt
    assert f'"call_id": "{written}"' in prompt


def test_ids_that_end_alike_stay_apart_and_stay_the_same_as_the_conversation_goes_on(load: Load) -> None:
    first = [USER, call("a-123456789"), result("a-123456789")]
    second = [{"role": "assistant", "content": "ah"}, USER, call("b-123456789"), result("b-123456789")]
    before, after = text(load("v3"), *first), text(load("v3"), *first, *second)
    assert after.startswith(before)
    assert after.count("123456789") == 2


@pytest.mark.parametrize(
    ("messages", "fields", "param", "message"),
    [
        ([USER], {"chat_template": "x"}, "chat_template", "this model has none"),
        ([USER], {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "this model has none"),
        ([USER], {"documents": [{"a": 1}]}, "documents", "this model has none"),
        ([USER], {"reasoning_effort": "heroic"}, "reasoning_effort", "must be one of none, minimal, low"),
        ([USER], {"continue_final_message": True}, "continue_final_message", "the last one is not the assistant's"),
        ([USER, {"role": "assistant", "content": "a"}], {}, "messages", "set `continue_final_message`"),
        ([{"role": "critic", "content": "a"}], {}, "messages[0].role", "is 'critic'; this model knows system"),
        ([USER, {"role": "tool", "content": "a"}], {}, "messages[1].tool_call_id", "must be the id of a tool call"),
        ([USER, call("a", "nope"), result("a")], {}, "messages[1].tool_calls[0].function.arguments", "is not JSON"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]}],
            {},
            "messages[0].content[0]",
            "is of type 'image_url', but chats of this model take text only",
        ),
        ([{"role": "user", "content": [{"type": "smell"}]}], {}, "messages[0].content[0]", "not a known part"),
        ([USER, call("a", content="ah"), result("a")], {}, "messages", "either content or tool_calls, but not both"),
        ([USER, {"role": "assistant", "content": "a", "reasoning": "b"}, USER], {}, "messages", "ThinkChunk"),
        ([USER, call("a"), result("a", "[" * 100_000)], {}, "messages", "it is nested too deeply"),
        ([USER, call("a"), {**result("a"), "name": 3}], {}, "messages", "name: Input should be a valid string"),
        ([{"role": "user", "content": " " * 1_000_000 + "x"}], {}, "messages", "Regex error"),
        ([USER], {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "Function name was a b"),
        (
            [USER],
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "smell"}}}]},
            "tools",
            "Invalid tool schema: 'smell'",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_with_its_place(
    load: Load, messages: list[Json], fields: Json, param: str, message: str
) -> None:
    with pytest.raises(BadRequest) as failure:
        ids(load("v3"), *messages, **fields)
    assert failure.value.param == param
    assert message in failure.value.message


def test_a_text_that_the_pattern_cannot_take_is_refused(load: Load) -> None:
    with pytest.raises(BadRequest, match="the text cannot be tokenized: Regex error"):
        load("v3").encode(" " * 1_000_000 + "x", add_special_tokens=True)


def test_the_length_is_checked_before_anything_is_tokenized(load: Load) -> None:
    seen: list[int] = []

    def refuse(characters: int) -> None:
        seen.append(characters)
        raise BadRequest("too long")

    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": ["a" * 1000, "b" * 1000]}]})
    with pytest.raises(BadRequest, match="too long"):
        MistralRenderer(load("v3"), SETTINGS).render(request, refuse)
    assert 2000 <= seen[0] < 2050


def test_settings_of_chat_templates_are_refused(load: Load) -> None:
    settings = ChatSettings({}, {}, {"a": 1}, trust_request_chat_template=True, split_special_tokens=False)
    named = (
        "default_chat_template_kwargs, trust_request_chat_template: true, split_special_tokens: false: has no meaning"
    )
    with pytest.raises(ValueError, match=named):
        MistralRenderer(load("v3"), settings)


def test_a_file_that_is_no_tekken_table_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text('{"config": {"version": "v0"}}')
    with pytest.raises(ValueError, match="Unknown version: v0"):
        TekkenTokenizer(str(tmp_path / "tekken.json"))
