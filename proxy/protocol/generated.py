"""What an answer of the generate protocol holds besides ids, checked, from whoever sent it: an engine, or a client of
the derender routes.

Each function returns what it was given, and raises ValueError that says what is not as the protocol has it.
"""

import re
from typing import Any

from proxy.protocol.generate import JsonObject, TokenLogprob

TOKEN_KEY = re.compile("[0-9]{1,10}")
TOKEN_ID = re.compile("token_id:([0-9]{1,10})")


def checked_logprobs(logprobs: Any, ids: int) -> list[TokenLogprob] | None:
    """`{"content": [...]}` with an entry for each of so many ids, or with null."""
    _expect(type(logprobs) is dict, "logprobs is not an object")
    _expect("content" in logprobs, "'content' is missing in logprobs")
    entries = logprobs["content"]
    if entries is None:
        return None
    _expect(type(entries) is list, "logprobs.content is not a list")
    _expect(len(entries) == ids, f"logprobs.content has {len(entries)} entries for {ids} token ids")
    for entry in entries:
        _expect(_is_logprob(entry), "logprobs.content has an entry without token_id and logprob")
        others = entry.get("top_logprobs")
        are_logprobs = others is None or (type(others) is list and all(map(_is_logprob, others)))
        _expect(are_logprobs, "logprobs.content has top_logprobs without token_id and logprob")
    return entries  # type: ignore[no-any-return]


def _give_id(entry: Any) -> None:
    """Older engines write an id as `"token": "token_id:7"`."""
    if type(entry) is dict and "token_id" not in entry:
        written = TOKEN_ID.fullmatch(str(entry.get("token")))
        if written is not None:
            entry["token_id"] = int(written[1])


def _is_logprob(entry: Any) -> bool:
    _give_id(entry)
    if type(entry) is not dict or not is_count(entry.get("token_id")):
        return False
    return type(entry.get("logprob")) in (float, int) and (entry.get("rank") is None or is_count(entry["rank"]))


def checked_prompt_logprobs(prompt_logprobs: Any) -> list[JsonObject | None] | None:
    """Per prompt token null or `{id: {logprob, ...}}`."""
    if prompt_logprobs is None:
        return None
    _expect(type(prompt_logprobs) is list, "prompt_logprobs is not a list")
    for entry in prompt_logprobs:
        _expect(entry is None or type(entry) is dict, "prompt_logprobs has an entry that is neither null nor an object")
        for token, facts in (entry or {}).items():
            is_id = TOKEN_KEY.fullmatch(token) is not None
            is_logprob = type(facts) is dict and type(facts.get("logprob")) in (float, int)
            _expect(is_id and is_logprob, "prompt_logprobs has an entry without a token id and its logprob")
    return prompt_logprobs  # type: ignore[no-any-return]


def checked_usage(usage: Any) -> JsonObject:
    _expect(type(usage) is dict, "usage is not an object")
    details = usage.get("prompt_tokens_details")
    for count in ("prompt_tokens", "completion_tokens"):
        _expect(usage.get(count) is None or is_count(usage[count]), f"usage.{count} is not a number")
    if details is not None:
        _expect(type(details) is dict, "usage.prompt_tokens_details is not an object")
        cached = details.get("cached_tokens")
        _expect(cached is None or is_count(cached), "usage.prompt_tokens_details.cached_tokens is not a number")
    return usage  # type: ignore[no-any-return]


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
