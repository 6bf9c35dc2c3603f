"""The real OpenAI SDK, the real proxy as a process of its own, and the real embedded engine behind it."""

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from proxy.demo import demo_config
from proxy.embedded import MODEL_NAME

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Why do ships need a harbour?"}]
COMMON = r"the|of|and|to|a|in|is|it|that|for|are|as|with|on|be|by|or|can|they|this|from|which|have"


@contextmanager
def running(*arguments: str) -> Iterator[str]:
    """A command of the proxy's, and the URL that it names once it serves."""
    with subprocess.Popen(
        [sys.executable, "-m", "proxy", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        while not (url := re.search(r" on (http://\S+)\n", said)) and (line := process.stdout.readline()):
            said += line
        try:
            assert url, said
            yield url[1]
        finally:
            process.terminate()
            process.communicate()


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with running("engine", "--port", "0") as url:
        yield url


@pytest.fixture(scope="module")
def base_url(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = tmp_path_factory.mktemp("config") / "proxy.json"
    config.write_text(json.dumps(demo_config("127.0.0.1", 0, engine_url)), encoding="utf-8")
    with running("serve", "--config", str(config)) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def is_english(text: str) -> bool:
    """Whether common words make up a good part of it, and letters nearly all."""
    words = re.findall(r"[a-z]+", text.lower())
    letters = sum(c.isascii() and (c.isalpha() or c in " .,\n'") for c in text)
    return (
        len(words) > 10
        and len(re.findall(rf"\b({COMMON})\b", text.lower())) > len(words) / 5
        and letters > 0.9 * len(text)
    )


def test_the_model_answers_in_english(client: OpenAI) -> None:
    completion = client.chat.completions.create(model=MODEL_NAME, messages=QUESTION, max_tokens=60, temperature=0)

    message = completion.choices[0].message
    assert message.role == "assistant"
    assert message.content is not None
    assert is_english(message.content), message.content
    assert re.search("ship|harbou?r|port", message.content)
    assert completion.usage is not None
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    assert completion._request_id is not None
    assert completion.id == f"chatcmpl-{completion._request_id}"


def test_a_streamed_answer_has_the_same_ids_and_text_as_a_whole_one(client: OpenAI) -> None:
    request: Any = {"model": MODEL_NAME, "messages": QUESTION, "max_tokens": 40, "temperature": 0}
    request["extra_body"] = {"return_token_ids": True}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))

    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    choice = whole.choices[0]
    assert "".join(part.delta.content or "" for part in deltas) == choice.message.content
    ids = [token_id for part in deltas for token_id in (part.model_extra or {}).get("token_ids", [])]
    assert ids == (choice.model_extra or {})["token_ids"]
    assert len(ids) == 40
    assert [part.finish_reason for part in deltas][-1] == choice.finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert len(deltas) > 20, "it came in pieces"


def posted(url: str, body: Any) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer: bytes = response.read()
        return answer


def test_the_stages_by_hand_give_the_answer_of_the_chat_route(client: OpenAI, base_url: str) -> None:
    request: Any = {"model": MODEL_NAME, "messages": QUESTION, "max_tokens": 30, "temperature": 0}
    direct = client.chat.completions.create(**request)

    generate = json.loads(posted(f"{base_url}/chat/completions/render", {**request, "stream": True}))
    generate_url = f"{base_url.removesuffix('/v1')}/inference/v1/generate"
    response = json.loads(posted(generate_url, {**generate, "stream": False}))
    common = {"chat_request": request, "prompt_tokens": len(generate["token_ids"])}
    common["prompt_token_ids"] = generate["token_ids"]
    derender = f"{base_url}/chat/completions/derender"
    whole = json.loads(posted(derender, {**common, "generate_response": response}))
    text, state = "", None
    for event in posted(generate_url, generate).decode().split("\n\n")[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        step = {**common, "stream": True, "generate_chunk": chunk, "stream_state": state}
        answer = json.loads(posted(derender, step))
        state = answer["stream_state"]
        text += "".join(choice["delta"].get("content") or "" for choice in answer["chunk"]["choices"])

    assert whole["choices"][0]["message"]["content"] == direct.choices[0].message.content == text
    assert direct.usage is not None
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [whole["usage"][count] for count in counts] == [getattr(direct.usage, count) for count in counts]


def test_the_sdks_own_accumulation_of_a_stream_is_the_whole_answer(client: OpenAI) -> None:
    request: Any = {"model": MODEL_NAME, "messages": QUESTION, "stop": ".", "temperature": 0, "logprobs": True}
    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**request)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].logprobs is not None and whole.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_are_two_answers(client: OpenAI, stream: bool) -> None:
    request: Any = {"model": MODEL_NAME, "messages": QUESTION, "max_tokens": 30, "n": 2, "seed": 5, "temperature": 0.8}
    if stream:
        texts = ["", ""]
        for chunk in client.chat.completions.create(**request, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content or "" for choice in client.chat.completions.create(**request).choices]
    assert texts[0] != texts[1]
    assert all(map(is_english, texts)), texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer(client: OpenAI, stream: bool) -> None:
    request: Any = {"model": MODEL_NAME, "messages": QUESTION, "max_tokens": 200, "temperature": 0, "stop": [".", "!"]}
    if stream:
        parts = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True)]
        text, last = "".join(part.delta.content or "" for part in parts), parts[-1]
    else:
        last = client.chat.completions.create(**request).choices[0]
        text = last.message.content or ""
    assert text and "." not in text
    assert (last.finish_reason, (last.model_extra or {})["stop_reason"]) == ("stop", ".")


def test_logprobs_are_of_the_tokens_that_were_said(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL_NAME, messages=QUESTION, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = completion.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes or []) for token in tokens).decode() == choice.message.content
    for token in tokens:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "without temperature the most likely token is taken"


def test_a_seed_repeats_an_answer(client: OpenAI) -> None:
    def answer(seed: int) -> str | None:
        completion = client.chat.completions.create(
            model=MODEL_NAME, messages=QUESTION, max_tokens=20, temperature=1, seed=seed
        )
        return completion.choices[0].message.content

    assert answer(1) == answer(1)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_completions_of_several_prompts(client: OpenAI) -> None:
    prompts = ["The tide comes in", "Ships sail on the"]
    completion = client.completions.create(model=MODEL_NAME, prompt=prompts, max_tokens=8, temperature=0, echo=True)
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice, prompt in zip(completion.choices, prompts, strict=True):
        assert choice.text.startswith(prompt)
        assert len(choice.text) > len(prompt)
    assert completion.usage is not None and completion.usage.completion_tokens == 16


def test_a_streamed_completion_with_logprobs_is_the_whole_one(client: OpenAI) -> None:
    request: Any = {"model": MODEL_NAME, "prompt": "The sea is", "max_tokens": 10, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**request).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**request, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    assert whole.logprobs is not None and whole.logprobs.tokens is not None
    assert "".join(whole.logprobs.tokens) == whole.text
    streamed = [part.logprobs for part in parts if part.logprobs is not None]
    assert [token for columns in streamed for token in columns.tokens or []] == whole.logprobs.tokens
    assert [at for columns in streamed for at in columns.text_offset or []] == whole.logprobs.text_offset
    assert all(len(top) >= 2 for top in whole.logprobs.top_logprobs or [])


def test_a_prompt_of_token_ids(client: OpenAI, base_url: str) -> None:
    tokens = client.post(f"{base_url[:-3]}/tokenize", body={"prompt": "The sea is"}, cast_to=dict[str, Any])["tokens"]
    by_text = client.completions.create(model=MODEL_NAME, prompt="The sea is", max_tokens=6, temperature=0)
    by_ids = client.completions.create(model=MODEL_NAME, prompt=tokens, max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_the_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    model = client.models.retrieve(MODEL_NAME)
    assert (model.id, (model.model_extra or {})["max_model_len"]) == (MODEL_NAME, 4096)


async def test_many_requests_at_once_do_not_disturb_each_other(base_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:

        async def answer(question: str) -> str | None:
            completion = await client.chat.completions.create(
                model=MODEL_NAME, messages=[{"role": "user", "content": question}], max_tokens=12, temperature=0
            )
            return completion.choices[0].message.content

        questions = ["What is a ship?", "What is the sea?", "Who keeps a lighthouse?", "Where do gulls live?"]
        alone = [await answer(question) for question in questions]
        together = await asyncio.gather(*(answer(question) for question in questions * 2))
    assert together == alone * 2


async def test_a_client_that_leaves_frees_the_engine(base_url: str, engine_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client, aiohttp.ClientSession(engine_url) as engine:
        stream = await client.chat.completions.create(
            model=MODEL_NAME, messages=QUESTION, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        assert await load_of(engine) == 1
        await stream.close()
        async with asyncio.timeout(5):
            while await load_of(engine):
                pass


async def load_of(engine: aiohttp.ClientSession) -> int:
    async with engine.get("/load") as response:
        load: int = (await response.json())["server_load"]
        return load


def test_an_unknown_model_is_a_not_found_error(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/gpt-9")


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_a_bad_request_error_streamed_or_not(client: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL_NAME, messages=QUESTION, temperature=-1, stream=stream)
    assert raised.value.param == "temperature"
    assert raised.value.type == "invalid_request_error"
    assert raised.value.request_id is not None


def test_a_prompt_beyond_the_context_has_openais_code(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as raised:
        client.chat.completions.create(model=MODEL_NAME, messages=[{"role": "user", "content": "tide " * 5000}])
    assert raised.value.code == "context_length_exceeded"


def test_what_the_engine_cannot_do_is_a_bad_request_that_names_it(client: OpenAI, engine_url: str) -> None:
    class Tide(BaseModel):
        height: float

    with pytest.raises(openai.BadRequestError, match="cannot constrain its output") as raised:
        client.chat.completions.parse(model=MODEL_NAME, messages=QUESTION, response_format=Tide)
    assert engine_url in raised.value.message
