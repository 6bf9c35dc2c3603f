"""What the tests of the routes have in common: an engine that says given words, a proxy before it, and clients' words.

Everything is over real sockets. `Talk` asks as a client would, streamed and whole, and shows what the engine was sent.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.engines.scripted import Exchange, Script, ScriptedEngine, choice, scripted
from tests.server import proxy
from tests.tokenizers import BOS, END_TURN, byte_level

Json = dict[str, Any]

TOKENIZER = byte_level()
END = TOKENIZER.encode(END_TURN).ids[0]
"""The model's EOS."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def text_of(ids: Sequence[int]) -> str:
    text: str = TOKENIZER.decode(list(ids), skip_special_tokens=False)
    return text


def with_bos() -> Tokenizer:
    """The same tokenizer, but it puts a BOS before a text, as Llama's does."""
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, TOKENIZER.encode(BOS).ids[0])]
    )
    return tokenizer


def logprob(token_id: int, count: int) -> Json:
    """What an engine says of a token when asked for `count` alternatives: the token comes second, after the next id."""
    other = (token_id + 1) % TOKENIZER.get_vocab_size()
    own = {"token_id": token_id, "logprob": -1.5, "rank": 2}
    return {**own, "top_logprobs": [own, {"token_id": other, "logprob": -0.5, "rank": 1}][: count + 1]}


def speaks(*events: str | int | Sequence[int]) -> Script:
    """An engine whose choices all say this: a text, an id or some ids per event. It reports log probabilities as asked,
    and stops as a tokens-only vLLM does: at a stop token that it was given, whose id is then the stop reason."""
    batches = [ids_of(e) if isinstance(e, str) else [e] if isinstance(e, int) else list(e) for e in events]

    async def script(exchange: Exchange) -> None:
        body, params = exchange.body, exchange.body["sampling_params"]
        n, count, last = params.get("n", 1), params.get("logprobs"), batches[-1][-1]
        stop = last if last in params.get("stop_token_ids", ()) else None

        def said(index: int, ids: Sequence[int], is_last: bool) -> Json:
            logprobs = None if count is None else {"content": [logprob(i, count) for i in ids]}
            ends: Json = {"finish": "length" if stop is None else "stop", "stop": stop} if is_last else {}
            return choice(ids, index=index, logprobs=logprobs, **ends)

        lengths = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": n * sum(map(len, batches))}
        if body["stream"]:
            await exchange.begin()
            for number, batch in enumerate(batches):
                for index in range(n):
                    await exchange.event(said(index, batch, number == len(batches) - 1))
            await exchange.event(usage=lengths)
            await exchange.end()
            return
        whole = [i for batch in batches for i in batch]
        answer: Json = {"choices": [said(index, whole, True) for index in range(n)], "usage": lengths}
        if "prompt_logprobs" in params:
            rest = [{str(i): {"logprob": -0.25, "rank": 1, "decoded_token": None}} for i in body["token_ids"][1:]]
            answer["prompt_logprobs"] = [None, *rest]
        if "kv_transfer_params" in body:
            answer["kv_transfer_params"] = {"remote_block_ids": [7]}
        await exchange.status("200 OK", json.dumps(answer).encode(), "content-type: application/json\r\n")

    return script


@dataclass
class Talk:
    client: TestClient[Any, Any]
    engine: ScriptedEngine

    @property
    def sent(self) -> Json:
        """The body of the last request to the engine."""
        body: Json = self.engine.exchanges[-1].body
        return body

    @property
    def params(self) -> Json:
        params: Json = self.sent["sampling_params"]
        return params

    @property
    def prompt(self) -> str:
        """The last request's prompt as text, special tokens and all."""
        return text_of(self.sent["token_ids"])

    async def ask(self, path: str, body: Json) -> Json:
        """The JSON of an answer that is not streamed."""
        async with self.client.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            answer: Json = await response.json()
            return answer

    async def stream(self, path: str, body: Json) -> list[Json]:
        """The chunks of a streamed answer."""
        async with self.client.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            return chunks_in(await response.text())

    async def refused(self, path: str, body: Any, status: int = 400) -> Json:
        """The error that a body, JSON or bytes, is answered with."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(path, data=data) as response:
            assert response.status == status, await response.text()
            return await error_in(response)

    async def chat(self, **fields: Any) -> Json:
        return await self.ask(CHAT, {"messages": HELLO, **fields})

    async def chat_chunks(self, **fields: Any) -> list[Json]:
        return await self.stream(CHAT, {"messages": HELLO, **fields})

    async def complete(self, **fields: Any) -> Json:
        return await self.ask(COMPLETIONS, {"prompt": "Hello", **fields})

    async def completion_chunks(self, **fields: Any) -> list[Json]:
        return await self.stream(COMPLETIONS, {"prompt": "Hello", **fields})


def chunks_in(stream: str) -> list[Json]:
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def error_in(response: ClientResponse) -> Json:
    """The error of a response, which has the shape that the OpenAI SDK reads."""
    assert response.content_type == "application/json"
    assert response.headers["x-request-id"]
    body = await response.json()
    assert body.keys() == {"error"}
    error: Json = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@contextlib.asynccontextmanager
async def talk(tmp_path: Path, *events: str | int | Sequence[int], **model: Any) -> AsyncIterator[Talk]:
    """A proxy whose engine says these events (or "Hi"); `model` adds keys to the model's configuration."""
    async with talk_to(tmp_path, speaks(*(events or ("Hi",))), **model) as talking:
        yield talking


@contextlib.asynccontextmanager
async def talk_to(tmp_path: Path, script: Script, **model: Any) -> AsyncIterator[Talk]:
    async with scripted(script) as engine, proxy(tmp_path, engine.url, **model) as client:
        yield Talk(client, engine)


def only(choices: list[Json]) -> Json:
    (choice,) = choices
    return choice


def joined(chunks: list[Json]) -> dict[int, Json]:
    """What the chunks of each choice add up to; of both routes."""
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "finish_reason": None, "stop_reason": None})
            assert whole["finish_reason"] is None, "nothing comes after a finish reason"
            delta = part.get("delta", part)
            whole["text"] += delta.get("content", delta.get("text", ""))
            if "role" in delta:
                whole["role"] = delta["role"]
            if part.get("token_ids"):
                whole["token_ids"] = whole.get("token_ids", []) + part["token_ids"]
            for column, values in (part["logprobs"] or {}).items():
                columns = whole.setdefault("logprobs", {})
                columns[column] = columns.get(column, []) + values
            if part["finish_reason"] is not None:
                whole |= {"finish_reason": part["finish_reason"], "stop_reason": part["stop_reason"]}
    return choices


def spoken(answer: Json) -> dict[int, Json]:
    """The choices of a whole answer in the shape of `joined`."""
    choices = {}
    for part in answer["choices"]:
        whole = {key: part[key] for key in ("finish_reason", "stop_reason", "token_ids", "logprobs") if part.get(key)}
        message = part.get("message")
        whole |= {"text": part["text"]} if message is None else {"text": message["content"], "role": message["role"]}
        choices[part["index"]] = {"finish_reason": None, "stop_reason": None, **whole}
    return choices
