"""Log probabilities of token ids, as the two OpenAI routes write them.

An engine speaks of ids; here they get their text and exact bytes from the vocabulary. `top` counts the most likely
tokens by rank, the sampled one only if it is among them, as the OpenAI API says.
"""

from collections.abc import Sequence
from typing import Any

from proxy.derender.detokenizer import decoder_for
from proxy.derender.vocabulary import Vocabulary
from proxy.protocol.generate import JsonObject, TokenLogprob, TopLogprob

NO_ENTRY = -9999.0
"""What vLLM sends where it has no log probability; JSON has no -inf."""


def _by_rank(entry: TokenLogprob, top: int) -> list[TopLogprob]:
    """Where two are equally likely the engine's rank decides: it lists the sampled token first."""
    alternatives = entry.get("top_logprobs") or []
    return sorted(alternatives, key=lambda other: (-other["logprob"], other.get("rank") or 0))[:top]


class LogprobWriter:
    """How one request wants its log probabilities: `top` alternatives, tokens as text or as `token_id:N`."""

    __slots__ = ("_as_ids", "_top", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, top: int, tokens_as_ids: bool) -> None:
        self._vocabulary, self._top, self._as_ids = vocabulary, top, tokens_as_ids

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._vocabulary.text_of(token_id)

    def _chat_entry(self, entry: TopLogprob) -> JsonObject:
        token_id = entry["token_id"]
        return {
            "token": self._text(token_id),
            "logprob": max(entry["logprob"], NO_ENTRY),
            "bytes": list(self._vocabulary.bytes_of(token_id)),
        }

    def chat(self, entries: Sequence[TokenLogprob]) -> JsonObject:
        """`{"content": [{token, logprob, bytes, top_logprobs}]}`."""
        return {
            "content": [
                self._chat_entry(entry) | {"top_logprobs": [self._chat_entry(o) for o in _by_rank(entry, self._top)]}
                for entry in entries
            ]
        }

    def completion(self, entries: Sequence[TokenLogprob], offsets: Sequence[int]) -> JsonObject:
        """The legacy columns; `offsets` are where each token begins in the text, in characters."""
        columns: dict[str, list[Any]] = {
            "text_offset": list(offsets),
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for entry in entries:
            columns["tokens"].append(self._text(entry["token_id"]))
            columns["token_logprobs"].append(None if entry["logprob"] <= NO_ENTRY else entry["logprob"])
            shown = _by_rank(entry, self._top)
            if self._top and entry["logprob"] > NO_ENTRY:
                shown.append(entry)
            top: dict[str, float] = {}
            for other in shown:  # of tokens with the same text the first is the most likely
                top.setdefault(self._text(other["token_id"]), max(other["logprob"], NO_ENTRY))
            columns["top_logprobs"].append(top or None)
        return columns

    def starts(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Where each token of a prompt begins in its text, in characters.

        Special tokens that the tokenizer put before the text, such as a BOS, take no room in it.
        """
        vocabulary, starts, at = self._vocabulary, [], 0
        decoder = decoder_for(vocabulary, (), skip_special_tokens=False, spaces_between_special_tokens=True)
        for token_id in token_ids:
            starts.append(at)
            added = at == 0 and token_id in vocabulary.special_ids and not text.startswith(vocabulary.text_of(token_id))
            if not added:
                at = min(at + len(decoder.feed(token_id)), len(text))
        return starts

    def prompt(self, entries: Sequence[JsonObject | None]) -> list[JsonObject | None]:
        """vLLM's `prompt_logprobs`: per token None or `{id: {logprob, rank, decoded_token}}`, the texts filled in."""
        return [
            entry
            and {
                token: {**facts, "decoded_token": self._vocabulary.text_of(int(token))}
                for token, facts in entry.items()
            }
            for entry in entries
        ]
