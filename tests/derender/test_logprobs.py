import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.derender.answer import Collected
from proxy.derender.completion import CompletionForm
from proxy.derender.logprobs import LogprobWriter
from proxy.derender.vocabulary import Vocabulary
from proxy.protocol.generate import JsonObject, Outcome, TokenLogprob
from tests import tokenizers


@functools.cache
def vocabulary(kind: str = "byte_level") -> Vocabulary:
    return Vocabulary.of_tokenizer(getattr(tokenizers, kind)())


def writer(top: int, tokens_as_ids: bool = False, kind: str = "byte_level") -> LogprobWriter:
    return LogprobWriter(vocabulary(kind), top, tokens_as_ids)


def bytes_as_ids(text: str) -> list[int]:
    """A text whose every byte is a token."""
    v = vocabulary()
    by_bytes = {v.bytes_of(token_id): token_id for token_id in range(v.size)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


A, B, C, D = bytes_as_ids("abcd")
(BOS, TURN) = (vocabulary().tokenizer.token_to_id(token) for token in (tokenizers.BOS, tokenizers.TURN))


def entry(token_id: int, logprob: float, *top: tuple[int, float], ranks: Sequence[int | None] = ()) -> TokenLogprob:
    """As vLLM sends it: the sampled token, and then among the others the most likely ones."""
    found: TokenLogprob = {"token_id": token_id, "logprob": logprob, "top_logprobs": []}
    for at, (other, other_logprob) in enumerate(top):
        found["top_logprobs"].append({"token_id": other, "logprob": other_logprob})
        if ranks:
            found["top_logprobs"][-1]["rank"] = ranks[at]
    return found


def chat(token: str, logprob: float, bytes_: bytes) -> JsonObject:
    return {"token": token, "logprob": logprob, "bytes": list(bytes_)}


def test_a_chat_entry_has_the_token_its_bytes_and_the_most_likely_others() -> None:
    entries = [entry(B, -1.5, (B, -1.5), (A, -0.5), (C, -2.0)), entry(C, -0.25, (C, -0.25))]
    assert writer(2).chat(entries) == {
        "content": [
            chat("b", -1.5, b"b") | {"top_logprobs": [chat("a", -0.5, b"a"), chat("b", -1.5, b"b")]},
            chat("c", -0.25, b"c") | {"top_logprobs": [chat("c", -0.25, b"c")]},
        ]
    }


@pytest.mark.parametrize(
    ("top", "sampled", "shown"),
    [
        (0, entry(A, -1.0), []),
        (0, entry(A, -1.0, (A, -1.0)), []),
        (1, entry(A, -3.0, (A, -3.0), (B, -1.0)), ["b"]),
        (2, entry(A, -3.0, (A, -3.0), (B, -1.0), (C, -2.0)), ["b", "c"]),
        (3, entry(A, -3.0, (A, -3.0), (B, -1.0), (C, -2.0)), ["b", "c", "a"]),
        (5, entry(A, -3.0, (A, -3.0), (B, -1.0)), ["b", "a"]),
        (1, entry(A, -1.0, (A, -1.0), (B, -1.0), ranks=[2, 1]), ["b"]),
        (2, entry(A, -1.0, (A, -1.0), (B, -1.0), ranks=[1, 2]), ["a", "b"]),
        (2, entry(A, -1.0, (A, -1.0), (B, -1.0), ranks=[None, None]), ["a", "b"]),
        (2, {"token_id": A, "logprob": -1.0}, []),
    ],
)
def test_the_sampled_token_is_among_the_top_only_by_its_rank(top: int, sampled: TokenLogprob, shown: list[str]) -> None:
    (written,) = writer(top).chat([sampled])["content"]
    assert written["token"] == "a"
    assert [other["token"] for other in written["top_logprobs"]] == shown


@pytest.mark.parametrize(
    ("top", "sampled", "shown"),
    [
        (0, entry(A, -1.0), None),
        (1, entry(A, -1.0, (A, -1.0)), {"a": -1.0}),
        (1, entry(A, -3.0, (A, -3.0), (B, -1.0)), {"b": -1.0, "a": -3.0}),
        (2, entry(A, -3.0, (A, -3.0), (B, -1.0), (C, -2.0)), {"b": -1.0, "c": -2.0, "a": -3.0}),
        (2, {"token_id": A, "logprob": -1.0}, {"a": -1.0}),
    ],
)
def test_a_completion_entry_always_has_the_sampled_token(
    top: int, sampled: TokenLogprob, shown: dict[str, float] | None
) -> None:
    columns = writer(top).completion([sampled], [7])
    assert columns == {
        "text_offset": [7],
        "token_logprobs": [sampled["logprob"]],
        "tokens": ["a"],
        "top_logprobs": [shown],
    }
    assert list(shown or ()) == list(columns["top_logprobs"][0] or ())


def test_of_two_tokens_with_one_text_the_more_likely_is_shown() -> None:
    one, other = bytes_as_ids("🧭")[:2]
    columns = writer(2).completion([entry(A, -0.5, (A, -0.5), (one, -1.0), (other, -2.0))], [0])
    assert columns["top_logprobs"] == [{"a": -0.5, "\ufffd": -1.0}]
    columns = writer(2).completion([entry(other, -2.0, (other, -2.0), (one, -1.0), (A, -1.5))], [0])
    assert columns["top_logprobs"] == [{"\ufffd": -1.0, "a": -1.5}]


@pytest.mark.parametrize("text", ["🧭", "é", "灯", "a灯b"])
def test_tokens_inside_a_character_have_its_exact_bytes(text: str) -> None:
    ids = bytes_as_ids(text)
    written = writer(0).chat([entry(token_id, -1.0) for token_id in ids])["content"]
    assert [one["bytes"] for one in written] == [[byte] for byte in text.encode()]
    assert all(one["token"] == ("\ufffd" if one["bytes"][0] > 127 else chr(one["bytes"][0])) for one in written)


@pytest.mark.parametrize(
    ("kind", "token", "text", "bytes_"),
    [
        ("byte_level", "Ġ", " ", b" "),
        ("byte_level", "<|end|>", "<|end|>", b"<|end|>"),
        ("byte_fallback", "<0xF0>", "\ufffd", b"\xf0"),
        ("byte_fallback", "▁", " ", b" "),
        ("metaspace", "▁", " ", b" "),
        ("word_piece", "t", "t", b"t"),
    ],
)
def test_a_token_is_written_as_it_stands_inside_a_text(kind: str, token: str, text: str, bytes_: bytes) -> None:
    token_id = vocabulary(kind).tokenizer.token_to_id(token)
    (written,) = writer(0, kind=kind).chat([entry(token_id, -1.0)])["content"]
    assert (written["token"], bytes(written["bytes"])) == (text, bytes_)


def test_tokens_can_be_written_as_ids() -> None:
    entries = [entry(A, -1.0, (A, -1.0), (B, -2.0))]
    (written,) = writer(2, tokens_as_ids=True).chat(entries)["content"]
    assert written["token"] == f"token_id:{A}"
    assert written["bytes"] == [ord("a")]
    assert [other["token"] for other in written["top_logprobs"]] == [f"token_id:{A}", f"token_id:{B}"]
    columns = writer(2, tokens_as_ids=True).completion(entries, [0])
    assert columns["tokens"] == [f"token_id:{A}"]
    assert columns["top_logprobs"] == [{f"token_id:{A}": -1.0, f"token_id:{B}": -2.0}]


def test_an_id_outside_the_vocabulary_has_no_text() -> None:
    (written,) = writer(0).chat([entry(vocabulary().size + 9, -1.0)])["content"]
    assert written == {"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []}


@pytest.mark.parametrize("none", [-9999.0, -10000.0, float("-inf")])
def test_where_the_engine_has_no_entry_there_is_none(none: float) -> None:
    (written,) = writer(1).chat([entry(A, none, (B, none))])["content"]
    assert written["logprob"] == written["top_logprobs"][0]["logprob"] == -9999.0
    columns = writer(1).completion([entry(A, none, (B, -1.0)), entry(A, none)], [0, 1])
    assert columns["token_logprobs"] == [None, None]
    assert columns["top_logprobs"] == [{"b": -1.0}, None]


def test_prompt_logprobs_get_their_texts() -> None:
    one = {str(A): {"logprob": -1.0, "rank": 1, "decoded_token": None}, str(BOS): {"logprob": -2.0, "rank": 2}}
    assert writer(1).prompt([None, one]) == [
        None,
        {
            str(A): {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
            str(BOS): {"logprob": -2.0, "rank": 2, "decoded_token": "<s>"},
        },
    ]


@pytest.mark.parametrize(
    ("kind", "ids", "text", "starts"),
    [
        ("byte_level", [], "", []),
        ("byte_level", bytes_as_ids("ab"), "ab", [0, 1]),
        ("byte_level", bytes_as_ids("a🧭b"), "a🧭b", [0, 1, 1, 1, 1, 2]),
        ("byte_level", [BOS, *bytes_as_ids("ab")], "ab", [0, 0, 1]),
        ("byte_level", [BOS, *bytes_as_ids("ab")], "<s>ab", [0, 3, 4]),
        ("byte_level", [BOS, TURN, A, TURN], "<|turn|>a<|turn|>", [0, 0, 8, 9]),
        ("byte_level", [BOS, BOS, A, BOS, BOS], "a", [0, 0, 0, 1, 1]),
        ("byte_level", [A, TURN, B], "a<|turn|>b", [0, 1, 9]),
        ("byte_fallback", ["▁", "a"], "a", [0, 0]),
        ("byte_fallback", ["<s>", "▁", "a"], "a", [0, 0, 0]),
        ("byte_fallback", ["<s>", "▁", "a"], "<s> a", [0, 3, 4]),
        ("metaspace", ["▁", "a", "▁", "b"], "a b", [0, 0, 1, 2]),
        ("word_piece", ["t", "t", "##t"], "t tt", [0, 1, 3]),
    ],
)
def test_prompt_tokens_begin_where_their_text_does(kind: str, ids: list[Any], text: str, starts: list[int]) -> None:
    ids = [vocabulary(kind).tokenizer.token_to_id(i) if isinstance(i, str) else i for i in ids]
    assert writer(0, kind=kind).starts(ids, text) == starts


OTHER_SPECIAL = [token for token in tokenizers.SPECIAL if token != tokenizers.BOS]


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=12), st.lists(st.sampled_from(OTHER_SPECIAL), max_size=2), st.booleans())
def test_prompt_tokens_begin_where_the_library_says(text: str, special: list[str], with_bos: bool) -> None:
    text = text.join(special) if special else text
    encoding = vocabulary().tokenizer.encode(text)
    starts = writer(0).starts([BOS] * with_bos + encoding.ids, text)
    assert starts == [0] * with_bos + [start for start, _ in encoding.offsets]


def test_echoed_log_probabilities_stand_before_the_others() -> None:
    prompt, output = bytes_as_ids("a🧭"), bytes_as_ids("bé")
    facts = [None] + [{str(token_id): {"logprob": -float(at), "rank": 1}} for at, token_id in enumerate(prompt[1:], 1)]
    collected = Collected(
        content=["bé"], logprobs=[entry(token_id, -0.5, (token_id, -0.5)) for token_id in output], offsets=[0, 1, 1]
    )
    form = CompletionForm(1, ["a🧭"], [prompt], echo=True, logprobs=writer(1))
    choice = form.whole(0, collected, Outcome(prompt_logprobs=facts))
    assert choice["text"] == "a🧭bé"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 1, 1, 1, 2, 3, 3],
        "token_logprobs": [None, -1.0, -2.0, -3.0, -4.0, -0.5, -0.5, -0.5],
        "tokens": ["a", *["\ufffd"] * 4, "b", "\ufffd", "\ufffd"],
        "top_logprobs": [None, *({"\ufffd": -float(at)} for at in range(1, 5)), {"b": -0.5}, *[{"\ufffd": -0.5}] * 2],
    }


def test_an_echoed_token_that_the_engine_left_out_of_its_entry_has_no_log_probability() -> None:
    form = CompletionForm(1, ["ab"], [[A, B]], echo=True, logprobs=writer(2))
    facts = [None, {str(C): {"logprob": -0.5, "rank": 1}, str(D): {"logprob": -1.5, "rank": None}}]
    columns = form.whole(0, Collected(), Outcome(prompt_logprobs=facts))["logprobs"]
    assert columns["tokens"] == ["a", "b"]
    assert columns["token_logprobs"] == [None, None]
    assert columns["top_logprobs"] == [None, {"c": -0.5, "d": -1.5}]


def test_without_echo_the_prompts_log_probabilities_are_a_field_of_their_own() -> None:
    form = CompletionForm(1, ["ab"], [[A, B]], prompt_logprobs=writer(1))
    choice = form.whole(0, Collected(), Outcome(prompt_logprobs=[None, {str(B): {"logprob": -0.5}}]))
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [None, {str(B): {"logprob": -0.5, "decoded_token": "b"}}]
