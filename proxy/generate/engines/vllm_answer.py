"""The answers of `POST /inference/v1/generate` as `TokenDelta`s: vLLM's protocol without its sockets.

An event is read once and checked whole: what is not as the protocol says is an `EngineProtocolError` with the engine's
name in it, what the engine says of itself an `EngineFailed`. What came before a failure is given out first. An engine's
own words are repeated, cut and without the keys that it was given.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.generate.errors import EngineDisconnected, EngineError, EngineFailed, EngineProtocolError
from proxy.generate.sse import EventSplitter
from proxy.protocol.generate import Outcome, TokenDelta
from proxy.protocol.generated import checked_logprobs, checked_prompt_logprobs, checked_usage, is_count

WORDS_SHOWN = 2000
ANY_VOCABULARY = 1 << 31

MALFORMED = (ValueError, KeyError)


class AnswerReader:
    """One answer, of `n` choices. `secrets` never show in an error."""

    def __init__(self, engine: str, n: int, vocabulary_size: int | None = None, secrets: Sequence[str] = ()) -> None:
        self._engine, self._secrets = engine, secrets
        self._ids = range(ANY_VOCABULARY if vocabulary_size is None else vocabulary_size)
        self._splitter = EventSplitter()
        self._unfinished = set(range(n))
        self.done = False
        self.failure: EngineError | None = None
        self.outcome = Outcome()

    @property
    def complete(self) -> bool:
        """Whether every choice has its finish reason."""
        return not self._unfinished

    def feed(self, piece: bytes) -> list[TokenDelta]:
        """What the events that `piece` completes say, up to the first that makes a `failure`."""
        deltas: list[TokenDelta] = []
        try:
            for data in self._splitter.feed(piece):
                if data == b"[DONE]":
                    self.done = True
                    break
                self._read(orjson.loads(data), deltas)
        except EngineError as error:
            self.failure = error
        except MALFORMED as error:
            self.failure = self._not_protocol("an event", error)
        return deltas

    def whole(self, body: bytes) -> list[TokenDelta]:
        """The answer to a request with `stream: false`; raises what is wrong with it."""
        deltas: list[TokenDelta] = []
        try:
            answer = orjson.loads(body)
            self._read(answer, deltas)
            self.outcome.answer = answer
            self.outcome.prompt_logprobs = checked_prompt_logprobs(answer.get("prompt_logprobs"))
            self.outcome.kv_transfer_params = answer.get("kv_transfer_params")
            if self._unfinished:
                raise ValueError(f"choice {self._left()} has no finish_reason")
        except MALFORMED as error:
            raise self._not_protocol("the answer", error) from None
        return deltas

    def check_complete(self) -> None:
        """Raises `EngineDisconnected` for a stream that ended before every choice had finished."""
        if self._unfinished:
            how = "sent [DONE]" if self.done else "ended the stream"
            if self._splitter.pending:
                how = "ended the stream inside an event"
            raise EngineDisconnected(self._engine, f"{how} before choice {self._left()} had a finish_reason")

    def _read(self, event: Any, deltas: list[TokenDelta]) -> None:
        if type(event) is not dict:
            raise ValueError("a JSON object was expected")
        if event.get("error") is not None:
            raise self._failed(complaint(event)[0])
        choices = event["choices"]
        if type(choices) is not list:
            raise ValueError("choices is not a list")
        for choice in choices:
            if type(choice) is not dict:
                raise ValueError("a choice is not an object")
            index, ids, finish = choice["index"], choice["token_ids"] or [], choice.get("finish_reason")
            if type(index) is not int or index not in self._unfinished:
                raise ValueError(f"choice {index!r:.20} was not asked for or has finished")
            if type(ids) is not list or not all(type(i) is int and i in self._ids for i in ids):
                raise ValueError(self._wrong_ids(ids))
            stop, logprobs = choice.get("stop_reason"), choice.get("logprobs")
            if stop is not None and type(stop) not in (int, str):
                raise ValueError("stop_reason is neither a token id nor a string")
            entries = None if logprobs is None else checked_logprobs(logprobs, len(ids))
            if finish == "error":
                deltas.append(TokenDelta(index, ids, entries))
                raise self._failed("finish_reason error")
            if finish is not None:
                if type(finish) is not str:
                    raise ValueError("finish_reason is not a string")
                self._unfinished.discard(index)
            deltas.append(TokenDelta(index, ids, entries, finish, stop))
        if (usage := event.get("usage")) is not None:
            self.outcome.usage = checked_usage(usage)

    def _wrong_ids(self, ids: Any) -> str:
        if type(ids) is list and all(is_count(i) for i in ids):
            return f"token id {max(ids)} is outside the model's vocabulary; does the engine serve the same model?"
        return "token_ids is not a list of token ids"

    def _failed(self, words: str) -> EngineFailed:
        return EngineFailed(self._engine, f"failed while it generated: {quoted(words, self._secrets)}")

    def _not_protocol(self, what: str, error: Exception) -> EngineProtocolError:
        if isinstance(error, orjson.JSONDecodeError):
            return EngineProtocolError(self._engine, f"{what} is not JSON: {error}")
        detail = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        return EngineProtocolError(self._engine, f"{what} is not of the generate protocol: {detail}")

    def _left(self) -> str:
        return ", ".join(map(str, sorted(self._unfinished)))


def complaint(body: Any) -> tuple[str, str | None]:
    """What an error says and the parameter it names, from the usual places; all of it where it is none of the usual."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return (error if isinstance(error, str) else orjson.dumps(error).decode()), None
    words, param = error.get("message") or error.get("detail"), error.get("param")
    words = words if isinstance(words, str) else orjson.dumps(error).decode()
    return words, param if isinstance(param, str) else None


def quoted(words: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        words = words.replace(secret, "***")
    return words if len(words) <= WORDS_SHOWN else words[:WORDS_SHOWN] + "..."
