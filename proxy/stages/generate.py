"""generate alone: a client's own generate request through the model's pool, with its balancing, limits and retries.

The request's body goes to the engine as it came; what is checked here is what an engine could die of. What comes back
is written in vLLM's words, whatever protocol the engine speaks.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

import orjson

from proxy.derender.answer import DONE, sse, usage_of
from proxy.generate.engines.base import Flow
from proxy.models import ServedModel
from proxy.pipeline import Writer
from proxy.protocol.generate import GenerateRequest, JsonObject, Outcome, TokenDelta
from proxy.protocol.tokens import GenerateBody
from proxy.render.sampling import check_prompt_length, check_token_ids

ID_PREFIX = "generate-tokens-"


class TokenAnswer(Protocol):
    """Where engine events go; as `derender.answer.Answer`, but of ids."""

    def feed(self, event: TokenDelta) -> bytes: ...
    def aborted(self) -> bytes:
        """Ends every choice that has not finished."""

    def end(self, outcome: Outcome) -> bytes: ...


def token_request(model: ServedModel, body: GenerateBody, sent: JsonObject, engine_request_id: str) -> GenerateRequest:
    """What the pool takes, around the body as it was sent. Raises `ApiError` for ids that the model does not have."""
    size = model.limits.engine_vocabulary_size or model.limits.vocabulary_size
    params = body.sampling_params
    check_token_ids(body.token_ids, size, "token_ids")
    check_token_ids(params.stop_token_ids or (), size, "sampling_params.stop_token_ids")
    check_token_ids(params.allowed_token_ids or (), size, "sampling_params.allowed_token_ids")
    check_token_ids(params.biased, size, "sampling_params.logit_bias")
    check_prompt_length(len(body.token_ids), model.limits.max_model_len)
    return GenerateRequest(
        request_id=engine_request_id,
        token_ids=body.token_ids,
        sampling_params={"n": params.n or 1},
        stream=bool(body.stream),
        vocabulary_size=model.limits.engine_vocabulary_size,
        body=sent,
    )


def token_answer(model: ServedModel, body: GenerateBody, request_id: str) -> "TokenAnswer":
    n, prompt = body.sampling_params.n or 1, body.token_ids
    if not body.stream:
        return WholeTokens(model.name, request_id, n, len(prompt))
    options = body.stream_options
    return StreamedTokens(
        request_id,
        n,
        len(prompt),
        include_usage=bool(options and options.usage),
        continuous_usage_stats=bool(options and options.usage and options.continuous_usage_stats),
        prompt_token_ids=prompt if body.return_token_ids else None,
    )


def _choice(event: TokenDelta) -> JsonObject:
    return {
        "index": event.index,
        "finish_reason": event.finish_reason,
        "stop_reason": event.stop_reason,
        "token_ids": event.token_ids,
        "logprobs": None if event.logprobs is None else {"content": event.logprobs},
    }


class StreamedTokens:
    """An event per choice and step, then the usage where it was asked for, then `[DONE]`."""

    def __init__(
        self,
        request_id: str,
        n: int,
        prompt_tokens: int,
        *,
        include_usage: bool,
        continuous_usage_stats: bool,
        prompt_token_ids: list[int] | None,
    ) -> None:
        self._request_id, self._prompt_tokens = request_id, prompt_tokens
        self._include_usage, self._continuous = include_usage, continuous_usage_stats
        self._first = {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}
        self._unfinished = set(range(n))
        self._tokens = 0

    def feed(self, event: TokenDelta) -> bytes:
        self._tokens += len(event.token_ids)
        if event.finish_reason is not None:
            self._unfinished.discard(event.index)
        usage = usage_of(self._prompt_tokens, self._tokens) if self._continuous else None
        data = self._event([_choice(event)], usage, self._first)
        self._first = {}
        return data

    def _event(self, choices: list[JsonObject], usage: JsonObject | None, more: JsonObject) -> bytes:
        return sse(
            {"request_id": self._request_id, "usage": usage, "output_mode": "tokens", "choices": choices, **more}
        )

    def aborted(self) -> bytes:
        return b"".join(self.feed(TokenDelta(index, [], None, "abort")) for index in sorted(self._unfinished))

    def end(self, outcome: Outcome) -> bytes:
        usage = outcome.usage or usage_of(self._prompt_tokens, self._tokens)
        return (self._event([], usage, {}) if self._include_usage else b"") + DONE


class WholeTokens:
    """The engine's own answer where there is one, else the choices as they stand."""

    def __init__(self, model: str, request_id: str, n: int, prompt_tokens: int) -> None:
        self._model, self._request_id, self._prompt_tokens = model, request_id, prompt_tokens
        self._choices = {index: TokenDelta(index, []) for index in range(n)}

    def feed(self, event: TokenDelta) -> bytes:
        self._choices[event.index] = event
        return b""

    def aborted(self) -> bytes:
        for choice in self._choices.values():
            choice.finish_reason = choice.finish_reason or "abort"
        return b""

    def end(self, outcome: Outcome) -> bytes:
        choices = list(self._choices.values())
        usage = outcome.usage or usage_of(self._prompt_tokens, sum(len(choice.token_ids) for choice in choices))
        made: JsonObject = {"choices": [_choice(choice) for choice in choices], "usage": usage, "output_mode": "tokens"}
        named = {"request_id": self._request_id, "model": self._model}
        return orjson.dumps({**(outcome.answer or made), **named})


class Running:
    """The generate requests that run, by the id that their answers bear, so that they can be aborted."""

    def __init__(self) -> None:
        self._tasks: dict[str, set[asyncio.Task[Outcome]]] = {}
        self._aborted: set[asyncio.Task[Outcome]] = set()

    async def run(
        self, request_id: str, model: ServedModel, request: GenerateRequest, answer: TokenAnswer, writer: Writer
    ) -> bytes:
        """Generates into `answer`. The bytes that end it are returned, not written. Raises `ApiError`."""
        flow = Flow()

        def sink(events: list[TokenDelta]) -> None:
            data = b"".join([answer.feed(event) for event in events])
            if data and writer.write(data):
                flow.pause(writer.ready)

        task = asyncio.ensure_future(model.pool.generate(request, sink, flow))
        tasks = self._tasks.setdefault(request_id, set())
        tasks.add(task)
        try:
            return answer.end(await task)
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if task not in self._aborted or (own is not None and own.cancelling()):
                raise
            return answer.aborted() + answer.end(Outcome())
        finally:
            self._aborted.discard(task)
            tasks.discard(task)
            if not tasks and self._tasks.get(request_id) is tasks:
                del self._tasks[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Those that do not run any more, or never did, are passed over."""
        for request_id in request_ids:
            for task in self._tasks.get(request_id, ()):
                self._aborted.add(task)
                task.cancel()
