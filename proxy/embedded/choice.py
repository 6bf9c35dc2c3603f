"""One output sequence of the embedded engine, from its first token to its finish reason.

No I/O. It says how the next token is to be sampled, is fed with what came, and gives the part of the answer that a
client sees. A token that ends the sequence belongs to it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from proxy.embedded.sampling import GenerateRequest, step_seed

RANKED: Final = 100  # how many of the most likely tokens are looked at; a sampled token beyond them has no rank


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token; `ranking` is the most likely (id, logprob) pairs, best first, if logprobs were asked for."""

    token_id: int
    logprob: float = 0.0
    ranking: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Choice:
    request: GenerateRequest
    index: int
    seed: int
    eos_token_ids: Collection[int]
    context: int
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def ranked(self) -> int:
        """How many of the most likely tokens the next step must rank; 0 if no logprobs are asked for."""
        return 0 if self.request.sampling_params.logprobs is None else RANKED

    def next_settings(self) -> dict[str, Any]:
        """llama.cpp's sampling fields for the next token."""
        params = self.request.sampling_params
        never_yet = (*self.eos_token_ids, *params.stop_token_ids) if len(self.output) < params.min_tokens else ()
        return params.llama_settings(
            self.output, never_yet, step_seed(self.seed, self.index, len(self.output)), self.context
        )

    def feed(self, token: Token) -> dict[str, Any]:
        """Take the next token and return its event's choice."""
        self.output.append(token.token_id)
        self.finish_reason, stop_reason = self._finish(token.token_id)
        return self._part([token.token_id], stop_reason, self._logprobs(token))

    def abort(self) -> dict[str, Any]:
        """End the sequence where it is and return its last event's choice."""
        self.finish_reason = "abort"
        return self._part([], None, None)

    def _finish(self, token_id: int) -> tuple[str | None, int | None]:
        params = self.request.sampling_params
        if token_id in self.eos_token_ids and not params.ignore_eos:
            return "stop", token_id
        if token_id in params.stop_token_ids:
            return "stop", token_id
        room = self.context - len(self.request.token_ids)
        if len(self.output) >= min(room, params.max_tokens or room):
            return "length", None
        return None, None

    def _logprobs(self, token: Token) -> dict[str, Any] | None:
        count = self.request.sampling_params.logprobs
        if count is None:
            return None
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.ranking, start=1)}
        sampled = {"token_id": token.token_id, "logprob": token.logprob, "rank": ranks.get(token.token_id)}
        others = [
            {"token_id": token_id, "logprob": logprob, "rank": ranks[token_id]}
            for token_id, logprob in token.ranking[:count]
            if token_id != token.token_id
        ]
        return {"content": [{**sampled, "top_logprobs": [sampled, *others]}]}

    def _part(self, token_ids: list[int], stop_reason: int | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": self.index,
            "finish_reason": self.finish_reason,
            "stop_reason": stop_reason,
            "token_ids": token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
            "logprobs": logprobs,
        }
