"""llama.cpp in this process, asked for one token at a time.

Its own server listens on a loopback port behind a random key. A step is one request with all ids so far, which costs
one token thanks to its prompt cache. That way the ids are exact: its streams lose ids that end inside a UTF-8
character. It leaves out such a token's logprobs too, so they come from a second look at the same position.
"""

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import orjson

from proxy.embedded import EmbeddedMissing
from proxy.embedded.choice import Token

PARALLEL: Final = 8
CONTEXT: Final = 4096  # tokens of prompt and output together; every slot has room for as many

CHUNK: Final = 64  # prompt tokens read at once: how long a long prompt holds up the other streams

_CERTAIN: Final = 1000.0  # a logit bias that leaves no other token a chance


class LlamaError(RuntimeError):
    """llama.cpp failed at a step that was asked for correctly."""


class Llama:
    def __init__(self, server: Any, session: aiohttp.ClientSession, eos_token_id: int, vocab_size: int) -> None:
        self._server = server
        self._session = session
        self._eos_token_id = eos_token_id
        self._vocab_size = vocab_size

    @classmethod
    async def start(cls, model: Path, *, eos_token_id: int, vocab_size: int) -> Self:
        """Load the model, in about a second. Raises `EmbeddedMissing` without the runtime."""
        key = secrets.token_hex()
        server = await asyncio.to_thread(_load, model, key)
        session = aiohttp.ClientSession(
            server.listening_address,
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return cls(server, session, eos_token_id, vocab_size)

    async def close(self) -> None:
        await self._session.close()
        self._server = None  # the last reference: its destructor stops the threads

    async def read(self, token_ids: Sequence[int], slot: int) -> None:
        """Take the start of a prompt into the slot's cache."""
        await self._complete(token_ids, slot, {"n_predict": 0})

    async def next_token(
        self, token_ids: Sequence[int], slot: int, settings: Mapping[str, Any], ranked: int = 0
    ) -> Token:
        """The token after `token_ids`, with the `ranked` most likely ones. Cancelling it stops the step."""
        answer = await self._complete(token_ids, slot, {**settings, "n_predict": 1, "n_probs": ranked})
        [token_id] = answer["tokens"]
        if not ranked:
            return Token(token_id)
        if "completion_probabilities" in answer:
            sampled = answer["completion_probabilities"][0]
            return Token(token_id, sampled["logprob"], _ranking(sampled))
        for count in (ranked, self._vocab_size):
            ranking = await self._rank(token_ids, slot, settings, count)
            logprob = dict(ranking).get(token_id)
            if logprob is not None:
                return Token(token_id, logprob, ranking)
        raise LlamaError(f"llama.cpp gave no logprob for the token {token_id}")

    async def _rank(
        self, token_ids: Sequence[int], slot: int, settings: Mapping[str, Any], count: int
    ) -> tuple[tuple[int, float], ...]:
        """The most likely next tokens. Logprobs are of raw logits: a bias that decides the sampling does not show."""
        certain = {"logit_bias": [[self._eos_token_id, _CERTAIN]], "temperature": 0, "n_predict": 1, "n_probs": count}
        answer = await self._complete(token_ids, slot, {**settings, **certain})
        return _ranking(answer["completion_probabilities"][0])

    async def _complete(self, token_ids: Sequence[int], slot: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        body = orjson.dumps(
            {
                **settings,
                "prompt": token_ids,
                "id_slot": slot,
                "stream": False,
                "cache_prompt": True,
                "return_tokens": True,
                "response_fields": ["tokens", "completion_probabilities"],
            }
        )
        try:
            return await self._post(body)
        except aiohttp.ClientConnectionError:
            # A kept connection may be closed by the server just as it is used again; a step is the same each time.
            try:
                return await self._post(body)
            except aiohttp.ClientError as error:
                raise LlamaError(f"llama.cpp went away: {error}") from error

    async def _post(self, body: bytes) -> dict[str, Any]:
        async with self._session.post("/completion", data=body) as response:
            content = await response.read()
            if response.status != 200:
                raise LlamaError(f"llama.cpp answered {response.status}: {content[:300].decode(errors='replace')}")
            answer: dict[str, Any] = orjson.loads(content)
            return answer


def _ranking(entry: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    return tuple((top["id"], top["logprob"]) for top in entry["top_logprobs"])


def _load(model: Path, key: str) -> Any:
    os.environ["OMP_WAIT_POLICY"] = "passive"  # spinning threads starve each other, and the proxy, on busy cores
    try:
        import xllamacpp
    except ImportError:
        raise EmbeddedMissing("the runtime of the embedded engine (package xllamacpp)") from None
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_parallel = PARALLEL
    params.n_ctx = PARALLEL * CONTEXT
    params.kv_unified = (
        False  # in a shared cache the neighbours' cells change a sequence's logits, and so what a seed gives
    )
    params.n_batch = PARALLEL * CHUNK  # a pass is filled in the order of slots, so it must have room for all of them
    params.n_ubatch = 2 * CHUNK
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_threads_http = 4 * PARALLEL
    params.cache_ram_mib = 0
    params.fit_params = False
    params.warmup = False
    params.ui = False
    params.port = 0
    params.api_keys = [key]
    params.verbosity = -1
    return xllamacpp.Server(params)
