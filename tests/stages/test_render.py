"""The render routes: what the proxy would send to an engine, and sends."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.talk import CHAT, COMPLETIONS, HELLO, Json, ids_of, talk, text_of, with_bos
from tests.stages.talk import GENERATE, RENDER, RENDER_COMPLETION
from tests.tokenizers import model_folder

WISHES: Json = {
    "messages": HELLO,
    "temperature": 0.5,
    "seed": 3,
    "n": 2,
    "stop": ["x"],
    "cache_salt": "s",
    "priority": 4,
}


async def test_what_is_rendered_is_what_the_proxy_itself_sends(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        rendered = await t.ask(RENDER, {**WISHES, "stream": True, "stream_options": {"include_usage": True}})
        await t.stream(CHAT, WISHES)
        sent = t.sent
    assert rendered.pop("request_id").startswith("chatcmpl-")
    assert rendered == {key: value for key, value in sent.items() if key != "request_id"}


async def test_what_is_rendered_reaches_the_engine_as_it_is(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        rendered = await t.ask(RENDER, {**WISHES, "model": "m"})
        await t.ask(GENERATE, {**rendered, "extra": {"kept": [1]}})
    assert rendered.pop("model") == "m"  # the client's name for it, which is no engine's
    assert {**t.sent, "request_id": rendered["request_id"]} == {**rendered, "extra": {"kept": [1]}}


@pytest.mark.parametrize(
    ("wishes", "stream", "options"),
    [
        ({}, False, None),
        ({"stream": True}, True, None),
        ({"stream": True, "stream_options": {"include_usage": False}}, True, {"include_usage": False}),
    ],
)
async def test_how_the_client_wants_it_streamed_is_kept(
    tmp_path: Path, wishes: Json, stream: bool, options: Any
) -> None:
    async with talk(tmp_path) as t:
        rendered = await t.ask(RENDER, {"messages": HELLO, **wishes})
    assert (rendered["stream"], rendered.get("stream_options")) == (stream, options)


async def test_max_tokens_is_what_is_left_of_the_context(tmp_path: Path) -> None:
    async with talk(tmp_path, max_model_len=512) as t:
        rendered = await t.ask(RENDER, {"messages": HELLO})
    assert rendered["sampling_params"]["max_tokens"] == 512 - len(rendered["token_ids"])


async def test_completions_are_rendered_one_by_one(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        rendered: Any = await t.ask(RENDER_COMPLETION, {"prompt": ["Seven", "gulls"], "request_id": "r"})
    assert [one["token_ids"] for one in rendered] == [ids_of("Seven"), ids_of("gulls")]
    assert [one["request_id"] for one in rendered] == ["cmpl-r-0", "cmpl-r-1"]


async def test_offsets_say_where_each_token_stands_in_the_text(tmp_path: Path) -> None:
    text = "Seven gulls 🦀 sat"
    async with talk(tmp_path) as t:
        (rendered,) = await t.ask(RENDER_COMPLETION, {"prompt": text, "return_token_offsets": True})
        chat = await t.ask(RENDER, {"messages": HELLO, "return_token_offsets": True})
        (ids,) = await t.ask(RENDER_COMPLETION, {"prompt": [1, 2], "return_token_offsets": True})
    assert "".join(text[start:end] for start, end in rendered["token_offsets"]) == text
    assert len(rendered["token_offsets"]) == len(rendered["token_ids"])
    prompt = text_of(chat["token_ids"])
    assert [prompt[start:end] for start, end in chat["token_offsets"]] == [text_of([i]) for i in chat["token_ids"]]
    assert "token_offsets" not in ids


async def test_what_the_tokenizer_puts_before_a_text_takes_no_room_in_it(tmp_path: Path) -> None:
    model_folder(tmp_path, with_bos())
    async with talk(tmp_path) as t:
        (rendered,) = await t.ask(RENDER_COMPLETION, {"prompt": "Seven gulls", "return_token_offsets": True})
    assert rendered["token_offsets"][0] == [0, 0]
    assert rendered["token_offsets"][1][0] == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        (RENDER, {"messages": []}, 400, "messages", "at least 1 item"),
        (RENDER, {"messages": HELLO, "model": "nope"}, 404, "model", "does not exist"),
        (
            RENDER,
            {"messages": [{"role": "user", "content": "gulls " * 600}]},
            400,
            "input_tokens",
            "maximum context length",
        ),
        (RENDER, {"messages": HELLO, "max_tokens": 513}, 400, "max_tokens", "maximum context length"),
        (
            RENDER,
            {"messages": HELLO, "tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            400,
            "tool_choice",
            "not in tools",
        ),
        (RENDER, {"messages": HELLO, "chat_template": "x"}, 400, "chat_template", "chat_template"),
        (RENDER, {"messages": HELLO, "use_beam_search": True}, 400, "use_beam_search", "beam search"),
        (RENDER, {"messages": HELLO, "top_p": 2}, 400, "top_p", "less than or equal to 1"),
        (RENDER_COMPLETION, {"prompt": []}, 400, "prompt", "prompts"),
        (RENDER_COMPLETION, {"prompt": "x", "use_beam_search": True}, 400, "use_beam_search", "beam search"),
        (RENDER_COMPLETION, {"prompt": [10**9]}, 400, "prompt", "not in the vocabulary"),
    ],
)
async def test_what_cannot_be_rendered_is_refused(
    tmp_path: Path, path: str, body: Json, status: int, param: str, words: str
) -> None:
    async with talk(tmp_path, max_model_len=512) as t:
        error = await t.refused(path, body, status)
    assert (error["param"], words in error["message"]) == (param, True), error


async def test_nothing_that_is_only_rendered_reaches_an_engine(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        await t.ask(RENDER, {"messages": HELLO})
        await t.ask(RENDER_COMPLETION, {"prompt": "Hello"})
        assert t.engine.exchanges == []
        await t.ask(COMPLETIONS, {"prompt": "Hello"})
        assert len(t.engine.exchanges) == 1
