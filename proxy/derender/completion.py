"""How `/v1/completions` writes its choices, streamed and whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.derender.answer import Collected
from proxy.derender.choice import Delta
from proxy.derender.logprobs import NO_ENTRY, LogprobWriter
from proxy.protocol.generate import JsonObject, Outcome, TokenLogprob


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """`prompts` and `prompt_token_ids` have one entry per prompt, `n` choices belong to each.

    `echo` repeats the prompt before the text, and its log probabilities before the others where they are wanted.
    """

    n: int
    prompts: Sequence[str]
    prompt_token_ids: Sequence[Sequence[int]]
    echo: bool = False
    return_token_ids: bool = False
    logprobs: LogprobWriter | None = None
    prompt_logprobs: LogprobWriter | None = None

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def opening(self, index: int) -> list[JsonObject]:
        if not (self.echo or self.return_token_ids):
            return []
        choice = _choice(index, self.prompts[index // self.n] if self.echo else "")
        if self.return_token_ids:
            choice["prompt_token_ids"] = list(self.prompt_token_ids[index // self.n])
        return [choice]

    def piece(self, index: int, delta: Delta) -> JsonObject:
        choice = _choice(index, delta.content)
        if self.logprobs is not None and delta.logprobs is not None and delta.offsets is not None:
            start = len(self.prompts[index // self.n]) if self.echo else 0
            choice["logprobs"] = self.logprobs.completion(delta.logprobs, [start + o for o in delta.offsets])
        if self.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def closing(self, index: int, delta: Delta) -> JsonObject:
        return _choice(index, "") | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}

    def whole(self, index: int, collected: Collected, outcome: Outcome) -> JsonObject:
        prompt = self.prompts[index // self.n] if self.echo else ""
        prompt_ids = self.prompt_token_ids[index // self.n]
        choice = _choice(index, prompt + "".join(collected.content))
        choice |= {"finish_reason": collected.finish_reason, "stop_reason": collected.stop_reason}
        if self.logprobs is not None:
            echoed = _echoed(prompt_ids, outcome.prompt_logprobs or []) if self.echo else []
            starts = self.logprobs.starts(prompt_ids[: len(echoed)], prompt)
            offsets = [*starts, *(len(prompt) + offset for offset in collected.offsets)]
            choice["logprobs"] = self.logprobs.completion([*echoed, *collected.logprobs], offsets)
        if self.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.prompt_logprobs.prompt(outcome.prompt_logprobs or [])
        if self.return_token_ids:
            choice |= {"token_ids": collected.token_ids, "prompt_token_ids": list(prompt_ids)}
        return choice

    def top(self, outcomes: Sequence[Outcome] | None) -> JsonObject:
        if not outcomes:
            return {}
        first = outcomes[0].kv_transfer_params
        same = first is not None and all(outcome.kv_transfer_params == first for outcome in outcomes)
        return {"kv_transfer_params": first} if same else {}


def _choice(index: int, text: str) -> JsonObject:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _echoed(prompt_ids: Sequence[int], prompt_logprobs: Sequence[JsonObject | None]) -> list[TokenLogprob]:
    """An engine's `prompt_logprobs` in the shape of generated ones; the first token has none."""
    entries: list[TokenLogprob] = []
    for token_id, facts in zip(prompt_ids, prompt_logprobs, strict=False):
        tops = [{"token_id": int(i), "logprob": f["logprob"], "rank": f.get("rank")} for i, f in (facts or {}).items()]
        own = next((top["logprob"] for top in tops if top["token_id"] == token_id), NO_ENTRY)
        entries.append({"token_id": token_id, "logprob": own, "top_logprobs": tops})  # type: ignore[typeddict-item]
    return entries
