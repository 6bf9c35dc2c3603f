"""The routes besides generation, and what any route says to bodies and requests that nobody should send."""

import asyncio
import contextlib
import gzip
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from yarl import URL

from proxy import __version__
from proxy.api.draining import Draining
from proxy.api.routes import application
from proxy.app import built
from proxy.config import Config
from proxy.protocol.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.api.talk import CHAT, COMPLETIONS, END, HELLO, Json, Talk, error_in, ids_of, only, speaks, talk, text_of
from tests.engines.scripted import ScriptedEngine, scripted
from tests.server import proxy
from tests.tokenizers import END_TURN, TURN, model_folder

POSTS = (CHAT, COMPLETIONS, "/tokenize", "/detokenize")
PROMPT = f"<s>{TURN}user\nHello{END_TURN}{TURN}assistant\n"


# Models


@contextlib.asynccontextmanager
async def two_models(tmp_path: Path, *engines: ScriptedEngine) -> AsyncIterator[Talk]:
    """`org/big` alias `big`, and `small`, each with a pool of its own."""
    big, small = engines
    model = {"model": str(model_folder(tmp_path)), "max_model_len": 4096}
    config = Config.model_validate(
        {
            "models": [
                {**model, "served_model_name": ["org/big", "big"], "pool": "gpu"},
                {**model, "served_model_name": "small 1", "pool": "cpu"},
            ],
            "pools": {"gpu": {"engines": [{"url": big.url}]}, "cpu": {"engines": [{"url": small.url}]}},
        }
    )
    async with built(config) as models:
        app = application(models, Draining(), keep_alive_interval=0, max_body_size=1 << 20)
        async with TestClient(TestServer(app)) as client:
            yield Talk(client, big)


@contextlib.asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[Talk]:
    async with scripted(speaks("Hi")) as engine, two_models(tmp_path, engine, engine) as talking:
        yield talking


async def test_every_name_is_listed_as_a_model(tmp_path: Path) -> None:
    async with served(tmp_path) as t, t.client.get("/v1/models") as response:
        listed = await response.json()
    assert listed["object"] == "list"
    assert [(card["id"], card["parent"], card["max_model_len"]) for card in listed["data"]] == [
        ("org/big", None, 4096),
        ("big", "org/big", 4096),
        ("small 1", None, 4096),
    ]
    assert {(card["object"], card["owned_by"], type(card["created"])) for card in listed["data"]} == {
        ("model", "derender-proxy", int)
    }


@pytest.mark.parametrize(
    ("path", "name"),
    [("org/big", "org/big"), ("org%2Fbig", "org/big"), ("big", "big"), ("small%201", "small 1"), ("big?x=1", "big")],
)
async def test_a_model_is_found_under_each_of_its_names(tmp_path: Path, path: str, name: str) -> None:
    url = URL(f"/v1/models/{path}", encoded=True)
    async with served(tmp_path) as t, t.client.get(url) as response:
        assert (response.status, (await response.json())["id"]) == (200, name)


@pytest.mark.parametrize("path", ["nope", "org", "org/big/", "big/x", "%00", "%ff", "../models/x"])
async def test_another_name_is_not_found(tmp_path: Path, path: str) -> None:
    url = URL(f"/v1/models/{path}", encoded=True)
    async with served(tmp_path) as t, t.client.get(url) as response:
        assert response.status == 404
        assert (await error_in(response))["type"] == "not_found_error"


async def test_each_model_is_asked_on_its_own_pool_and_one_must_be_named(tmp_path: Path) -> None:
    async with (
        scripted(speaks("big")) as big,
        scripted(speaks("small")) as small,
        two_models(tmp_path, big, small) as t,
    ):
        assert only((await t.complete(model="small 1"))["choices"])["text"] == "small"
        assert only((await t.complete(model="big"))["choices"])["text"] == "big"
        error = await t.refused(COMPLETIONS, {"prompt": "Hello"})
    assert (error["param"], error["message"]) == ("model", "model is missing; name one of org/big, big, small 1")


# Tokens


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"prompt": "Seven gulls"}, ids_of("Seven gulls")),
        ({"prompt": ""}, []),
        ({"prompt": f"Seven{END_TURN}"}, [*ids_of("Seven"), END]),
        ({"prompt": "Seven " * 5000}, ids_of("Seven " * 5000)),
        ({"messages": HELLO}, ids_of(PROMPT)),
        ({"messages": HELLO, "add_generation_prompt": False}, ids_of(PROMPT.removesuffix(f"{TURN}assistant\n"))),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
            ids_of(PROMPT + "Well"),
        ),
        ({"messages": HELLO, "model": "m", "prompt": None, "unknown": 1}, ids_of(PROMPT)),
    ],
)
async def test_tokenize_gives_the_ids_of_a_text_or_of_a_conversation(
    tmp_path: Path, body: Json, ids: list[int]
) -> None:
    async with talk(tmp_path, max_model_len=100) as t:
        answer = await t.ask("/tokenize", body)
    assert answer == {"count": len(ids), "tokens": ids, "max_model_len": 100, "token_strs": None}


TEMPLATE = "{{ mood }}{{ reasoning_effort }}{% for t in tools or documents or [] %}{{ t.title }}{% endfor %}"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"chat_template_kwargs": {"mood": "wild"}},
        {"reasoning_effort": "high"},
        {"documents": [{"title": "ebb"}]},
        {"tools": [{"type": "function", "function": {"name": "f"}, "title": "tide"}]},
        {"messages": [{"role": "user", "content": f"{END_TURN}"}]},
    ],
)
async def test_tokenize_renders_a_conversation_as_the_chat_route_does(tmp_path: Path, fields: Json) -> None:
    config = {"eos_token": END_TURN, "chat_template": TEMPLATE + "{{ messages[0].content }}"}
    folder = model_folder(tmp_path / "model", tokenizer_config=config)
    async with talk(folder, default_chat_template_kwargs={"mood": "calm"}) as t:
        await t.chat(**fields)
        assert (await t.ask("/tokenize", {"messages": HELLO, **fields}))["tokens"] == t.sent["token_ids"]


async def test_tokenize_can_show_the_tokens(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        answer = await t.ask("/tokenize", {"prompt": f"½ gulls{END_TURN}", "return_token_strs": True})
    assert answer["token_strs"][-1] == END_TURN
    assert len(answer["token_strs"]) == answer["count"]


@pytest.mark.parametrize("ids", [[], ids_of("Seven ½ gulls"), [*ids_of("Seven"), END]])
async def test_detokenize_gives_the_text_of_ids_with_its_special_tokens(tmp_path: Path, ids: list[int]) -> None:
    async with talk(tmp_path) as t:
        assert await t.ask("/detokenize", {"tokens": ids}) == {"prompt": text_of(ids)}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, None, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, None, "give either prompt or messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "should be a valid string"),
        ("/tokenize", {"messages": []}, "messages", "at least 1 item"),
        ("/tokenize", {"messages": [{"role": ""}]}, "messages[0].role", "non-empty"),
        ("/tokenize", {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template", "not accepted here"),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, "tools[0].function", "field required"),
        (
            "/tokenize",
            {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "set one of them",
        ),
        ("/detokenize", {}, "tokens", "field required"),
        ("/detokenize", {"tokens": "1"}, "tokens", "should be a valid list"),
        ("/detokenize", {"tokens": [1, "2"]}, "tokens[1]", "should be a valid integer"),
        ("/detokenize", {"tokens": [1, -2]}, "tokens[1]", "greater than or equal to 0"),
        ("/detokenize", {"tokens": [506]}, "tokens", "token id 506 in tokens is not in the vocabulary (0 to 505)"),
    ],
)
async def test_what_cannot_be_tokenized_is_told_why(
    tmp_path: Path, path: str, body: Json, param: str | None, words: str
) -> None:
    async with talk(tmp_path) as t:
        error = await t.refused(path, body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


# Health


async def test_the_process_is_healthy_whatever_its_engines_are(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        await t.engine.stop()
        async with t.client.get("/health") as response:
            assert (response.status, await response.read()) == (200, b"")


async def test_it_is_ready_while_any_pool_has_an_engine_that_is_up(tmp_path: Path) -> None:
    async with scripted(speaks("Hi")) as big, scripted(speaks("Hi")) as small, two_models(tmp_path, big, small) as t:
        async with t.client.get("/ready") as response:
            assert (response.status, await response.json()) == (200, {"pools": {"gpu": True, "cpu": True}})
        small.healthy = False
        async with t.client.get("/ready") as response:
            assert (response.status, await response.json()) == (200, {"pools": {"gpu": True, "cpu": False}})
        await big.stop()
        async with t.client.get("/ready") as response:
            error = await error_in(response)
            assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert (error["message"], error["code"]) == ("no engine is up in gpu, cpu", "not_ready")


async def test_one_engine_of_a_pool_is_enough(tmp_path: Path) -> None:
    async with scripted(speaks("Hi")) as down, scripted(speaks("Hi")) as up:
        down.healthy = False
        async with proxy(tmp_path, down.url, up.url) as client, client.get("/ready") as response:
            assert response.status == 200


async def test_the_version_is_the_packages(tmp_path: Path) -> None:
    async with talk(tmp_path) as t, t.client.get("/version") as response:
        assert await response.json() == {"version": __version__}


# What nobody should send


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/chat/completions", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("PUT", COMPLETIONS, 405),
        ("OPTIONS", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/m", 405),
        ("POST", "/health", 405),
    ],
)
async def test_a_wrong_route_or_method_is_an_error_as_any_other(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with talk(tmp_path) as t, t.client.request(method, path) as response:
        assert response.status == status
        error = await error_in(response)
        assert path in error["message"]
        assert method in error["message"]
        assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b"  ", "the body is not JSON"),
        (b"hello", "the body is not JSON"),
        (b"prompt=hello&model=m", "the body is not JSON"),
        (b'{"prompt": "a"', "the body is not JSON"),
        (b'{"prompt": "a"} {}', "the body is not JSON"),
        (b"{'prompt': 'a'}", "the body is not JSON"),
        (b'{"prompt": "a",}', "the body is not JSON"),
        (b'{"prompt": "\xff"}', "the body is not JSON"),
        (b'{"prompt": "\\ud800"}', "the body is not JSON"),
        ('{"prompt": "a"}'.encode("utf-16"), "the body is not JSON"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "the body is not JSON"),
        (b'{"temperature": NaN}', "the body is not JSON"),
        (b'{"temperature": Infinity}', "the body is not JSON"),
        (b'{"temperature": 1e999}', "the body is not JSON"),
        (b"null", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b'"prompt"', "must be a JSON object"),
        (b"5", "must be a JSON object"),
        (b'{"a":' * 5000, "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"a":' * 400 + b"1" + b"}" * 400, "nested deeper than 128 levels"),
        (b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", "nested deeper than 128 levels"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_body_that_is_no_json_object_is_refused_by_every_route(tmp_path: Path, body: bytes, words: str) -> None:
    async with talk(tmp_path) as t:
        for path in POSTS:
            error = await t.refused(path, body)
            assert words in error["message"]
            assert (error["type"], error["param"]) == ("invalid_request_error", None)


async def test_of_a_key_that_comes_twice_the_last_value_holds(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        async with t.client.post(COMPLETIONS, data=b'{"prompt": "Seven", "prompt": "gulls"}') as response:
            assert response.status == 200
        assert t.prompt == "gulls"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "nonsense"},
        {"authorization": "Bearer whatever", "openai-organization": "x"},
    ],
)
async def test_a_body_is_json_whatever_its_content_type_says(tmp_path: Path, headers: dict[str, str]) -> None:
    body = json.dumps({"prompt": "Wer zählt"}).encode()
    async with talk(tmp_path) as t, t.client.post(COMPLETIONS, data=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert t.prompt == "Wer zählt"


async def test_a_compressed_body_is_read_and_a_broken_one_refused_and_the_connection_closed(tmp_path: Path) -> None:
    headers = {"content-encoding": "gzip"}
    async with talk(tmp_path) as t:
        data = gzip.compress(b'{"prompt": "Seven"}')
        async with t.client.post(COMPLETIONS, data=data, headers=headers) as response:
            assert response.status == 200
        async with t.client.post(COMPLETIONS, data=b"Seven", headers=headers) as response:
            assert (response.status, response.headers["connection"]) == (400, "close")
            assert "content-encoding: gzip" in (await error_in(response))["message"]
        async with t.client.get("/health") as response:
            assert response.status == 200


@pytest.mark.parametrize("compressed", [False, True])
async def test_a_body_that_is_too_large_is_refused_with_the_limit(tmp_path: Path, compressed: bool) -> None:
    body = json.dumps({"prompt": "a" * 100_000}).encode()
    data, headers = (gzip.compress(body), {"content-encoding": "gzip"}) if compressed else (body, {})
    async with scripted(speaks("Hi")) as engine, proxy(tmp_path, engine.url, max_body_size=50_000) as client:
        for path in POSTS:
            async with client.post(path, data=data, headers=headers) as response:
                assert response.status == 413
                assert "50000 bytes (max_body_size)" in (await error_in(response))["message"]


# Anything at all


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
LIKELY = st.sampled_from(
    [
        *(True, False, 0, 1, -1, 2, 0.5, 10**6, 2**63, 1e300, "", "a", "auto", [], [1], ["a"], [[1]], {}, {"1": 1}),
        *({"type": "function", "function": {"name": "f"}}, {"type": "json_object"}, {"include_usage": True}),
        *(
            [{"role": "assistant", "content": ["a"]}],
            [{"role": "tool", "content": None}],
            [{"function": {"name": "f"}}],
        ),
        *(
            "\x00",
            "\ufdd0",
            END_TURN,
            "function",
            "assistant",
            "{{ 1 }}",
            "{}",
            "[1]",
            '{"a": NaN}',
            '{"a": "\\ud800"}',
        ),
    ]
)
ROUTES: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}

CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Hull"}'}}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"$defs": {"a": {}}, "type": "object"}}}
RICH: Json = {
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": f"Tide? {END_TURN}"}], "name": "keeper"},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "ebb"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "tide"}},
    "documents": [{"title": "a", "text": "b"}],
    "stop": ["a", "b"],
    "logit_bias": {"17": 1},
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"a": 1},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "kv_transfer_params": {"do_remote_decode": True},
    "vllm_xargs": {"a": [1]},
    "stop_token_ids": [7],
    "stream_options": {"include_usage": True},
    "stream": True,
}
GOOD: dict[str, list[Json]] = {
    CHAT: [RICH, {**RICH, "tool_choice": "required", "structured_outputs": {"regex": "a"}, "response_format": None}],
    COMPLETIONS: [
        {"prompt": ["Hello", "Seven"], "echo": True, "logprobs": 1},
        {"prompt": [[1], [2, 3]], "stream": True},
    ],
    "/tokenize": [{"prompt": "Hello"}, {"messages": RICH["messages"], "tools": RICH["tools"]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Anything; or some of the route's fields with anything in them; or a good body with a few values replaced."""
    names = st.sampled_from(sorted(ROUTES[path].model_fields))
    fields = st.dictionaries(names, LIKELY | JSON, max_size=5)
    some = st.builds(lambda body, fields: {**body, **fields}, st.sampled_from(GOOD[path]), fields)
    replacements = st.lists(st.tuples(st.integers(0, 60), LIKELY | JSON), min_size=1, max_size=3)
    replaced = st.builds(with_replaced, st.sampled_from(GOOD[path]), replacements)
    return JSON | fields | some | replaced


def with_replaced(body: Json, replacements: list[tuple[int, Any]]) -> Json:
    """The values at these places, counted in the order in which they are written, are others."""
    at = dict(replacements)
    count = itertools.count()

    def replaced(value: Any) -> Any:
        if (place := next(count)) in at:
            return at[place]
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        return [replaced(item) for item in value] if isinstance(value, list) else value

    return {key: replaced(value) for key, value in body.items()}


@pytest.mark.parametrize("path", POSTS)
def test_no_body_makes_a_server_error_or_hangs(tmp_path: Path, path: str) -> None:
    loop = asyncio.new_event_loop()
    template = "{% for m in messages %}{{ m.role }}{{ m | tojson }}{% endfor %}{{ tools }}{{ documents | tojson }}"
    folder = model_folder(tmp_path, tokenizer_config={"eos_token": END_TURN, "chat_template": template})
    context = talk(folder, "Hi", max_model_len=2000)
    t = loop.run_until_complete(context.__aenter__())

    async def send(body: Any) -> None:
        async with asyncio.timeout(20), t.client.post(path, data=json.dumps(body)) as response:
            text = await response.text()
            assert response.status in (200, 400, 404), text
            assert response.status == 200 or json.loads(text)["error"]["message"]

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(bodies(path))
    def any_body(body: Any) -> None:
        loop.run_until_complete(send(body))

    try:
        any_body()
    finally:
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.close()
