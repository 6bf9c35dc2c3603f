"""A streamed answer, put together as a client does it, is the whole answer: the same events are fed to both."""

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.derender.answer import Form, Head, Prompts, StreamedAnswer, WholeAnswer
from proxy.derender.chat import ChatForm
from proxy.derender.choice import ChoiceContext, ChoiceStream, Delta, ToolCallDelta
from proxy.derender.completion import CompletionForm
from proxy.derender.logprobs import LogprobWriter
from proxy.derender.stop import StopRule
from proxy.derender.vocabulary import Vocabulary
from proxy.protocol.generate import JsonObject, Outcome, TokenDelta, TokenLogprob
from tests import tokenizers

HEAD = Head("chatcmpl-1", 1_700_000_000, "lamp")
DONE = b"data: [DONE]\n\n"

Feed = tuple[int, TokenDelta]
"""A choice's index over all prompts, and an event for it."""


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary.of_tokenizer(tokenizers.byte_level())


class ScriptedStream:
    """Gives deltas that were written by hand, one per feed, and counts a token for each."""

    def __init__(self, deltas: Iterable[Delta]) -> None:
        self._deltas = iter(deltas)
        self.tokens = 0
        self.finish_reason: str | None = None

    def feed(self, *_: Any) -> Delta:
        delta = next(self._deltas)
        self.tokens += 1
        self.finish_reason = delta.finish_reason
        return delta


def sse_events(body: bytes) -> list[JsonObject]:
    """The events of a complete stream, whose framing is checked."""
    assert body.endswith(DONE)
    *events, rest = body[: -len(DONE)].split(b"\n\n")
    assert rest == b""
    for event in events:
        assert event.startswith(b"data: ")
        assert b"\n" not in event
        assert b"\r" not in event
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def streamed(
    form: Form,
    streams: Sequence[Any],
    prompts: Prompts,
    feeds: Iterable[Feed],
    outcomes: Sequence[Outcome],
    **asked: bool,
) -> list[JsonObject]:
    answer = StreamedAnswer(HEAD, form, streams, prompts, **asked)
    events = sse_events(b"".join(answer.feed(index, event) for index, event in feeds) + answer.end(outcomes))
    for event in events:
        assert (event["id"], event["created"], event["model"]) == (HEAD.id, HEAD.created, HEAD.model)
        assert event["object"] == form.chunk_object
    return events


def whole(
    form: Form, streams: Sequence[Any], prompts: Prompts, feeds: Iterable[Feed], outcomes: Sequence[Outcome]
) -> JsonObject:
    answer = WholeAnswer(HEAD, form, streams, prompts)
    assert all(answer.feed(index, event) == b"" for index, event in feeds)
    body: JsonObject = json.loads(answer.end(outcomes))
    assert (body["id"], body["created"], body["model"]) == (HEAD.id, HEAD.created, HEAD.model)
    assert body["object"] == form.whole_object
    return body


def chunks_of(events: list[JsonObject], index: int) -> list[JsonObject]:
    """A choice's own chunks; the finish reason must be in the last, and nothing else with it."""
    chunks = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    assert all(chunk["finish_reason"] is None for chunk in chunks[:-1])
    assert chunks[-1]["finish_reason"] is not None
    assert not chunks[-1].get("delta") and not chunks[-1].get("text")
    return chunks


def chat_choice(events: list[JsonObject], index: int) -> JsonObject:
    """A choice as a client puts it together."""
    chunks = chunks_of(events, index)
    deltas = [chunk["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    calls: dict[int, JsonObject] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if "id" in call:
            assert call["index"] == len(calls)
            calls[call["index"]] = {"id": call["id"], "type": call["type"], "function": dict(call["function"])}
        else:
            assert call.keys() == {"index", "function"}
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    content = "".join(delta.get("content") or "" for delta in deltas)
    message = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
        "reasoning": "".join(delta.get("reasoning") or "" for delta in deltas) or None,
    }
    if calls:
        message["tool_calls"] = list(calls.values())
    logprobs = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    choice = {
        "index": index,
        "message": message,
        "logprobs": {"content": logprobs} if logprobs else None,
        "finish_reason": chunks[-1]["finish_reason"],
        "stop_reason": chunks[-1]["stop_reason"],
    }
    if any("token_ids" in chunk for chunk in chunks):
        choice["token_ids"] = [token_id for chunk in chunks for token_id in chunk.get("token_ids", ())]
    return choice


def completion_choice(events: list[JsonObject], index: int) -> JsonObject:
    chunks = chunks_of(events, index)
    columns = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    choice = {
        "index": index,
        "text": "".join(chunk["text"] for chunk in chunks),
        "logprobs": {key: [value for part in columns for value in part[key]] for key in columns[0]}
        if columns
        else None,
        "finish_reason": chunks[-1]["finish_reason"],
        "stop_reason": chunks[-1]["stop_reason"],
    }
    if any("token_ids" in chunk for chunk in chunks):
        choice["token_ids"] = [token_id for chunk in chunks for token_id in chunk.get("token_ids", ())]
    if "prompt_token_ids" in chunks[0]:
        choice["prompt_token_ids"] = chunks[0]["prompt_token_ids"]
    return choice


def usage_of(events: list[JsonObject], include_usage: bool, continuous: bool) -> JsonObject | None:
    """The usage of the last chunk, after looking at those of the others."""
    if not include_usage:
        assert all("usage" not in event for event in events)
        return None
    last = events[-1]
    assert last["choices"] == []
    seen = [event["usage"] for event in events[:-1]]
    if continuous:
        totals = [usage["completion_tokens"] for usage in seen]
        assert totals == sorted(totals)
        assert totals[-1] == last["usage"]["completion_tokens"]
    else:
        assert all(usage is None for usage in seen)
    usage: JsonObject = last["usage"]
    return usage


def logprobs_of(ids: Sequence[int]) -> list[TokenLogprob]:
    return [
        {
            "token_id": token_id,
            "logprob": -0.5 - token_id,
            "top_logprobs": [{"token_id": token_id, "logprob": -0.5 - token_id}, {"token_id": 7, "logprob": -0.25}],
        }
        for token_id in ids
    ]


@st.composite
def feeds_of(draw: st.DrawFn, choices: int, with_logprobs: bool) -> list[Feed]:
    """Events of several choices, each in any pieces and all in any order, some after a choice has ended."""
    v = vocabulary()
    ends = [v.tokenizer.token_to_id(token) for token in (tokenizers.EOS, tokenizers.TURN)]
    of_choice: list[list[TokenDelta]] = []
    for index in range(choices):
        texts = st.sampled_from(["灯台🌊", "the tide", '"\\\n\u2028\x00', "é"]).map(
            lambda text: v.tokenizer.encode(text).ids
        )
        ids = st.one_of(texts, st.lists(st.integers(0, v.size), max_size=3), st.just(ends[:1]))
        events = []
        for part in draw(st.lists(ids, max_size=4)):
            events.append(TokenDelta(index, part, logprobs_of(part) if with_logprobs else None))
        finish = draw(st.sampled_from(["stop", "length", "abort"]))
        last = draw(st.sampled_from([[], ends[:1], ends[1:], [30]])) if finish == "stop" else []
        last = last or ends[:1]
        events.append(TokenDelta(index, last, logprobs_of(last) if with_logprobs else None, finish, last[0]))
        of_choice.append(events)
    order = draw(st.permutations([index for index, events in enumerate(of_choice) for _ in events]))
    waiting = [iter(events) for events in of_choice]
    return [(index, next(waiting[index])) for index in order]


def streams_of(prompts: int, n: int, stop: list[str]) -> list[ChoiceStream]:
    v = vocabulary()
    (eos, turn) = (v.tokenizer.token_to_id(token) for token in (tokenizers.EOS, tokenizers.TURN))
    context = ChoiceContext(
        v, (), frozenset([eos, turn]), frozenset([turn]), StopRule(stop) if stop else None, skip_special_tokens=False
    )
    return [ChoiceStream(replace(context)) for _ in range(prompts * n)]


stops = st.lists(st.sampled_from(["tide", "台", "e", '"']), max_size=2)
some = settings(deadline=None, max_examples=150)


@some
@given(
    data=st.data(),
    n=st.integers(1, 3),
    stop=stops,
    logprobs=st.booleans(),
    token_ids=st.booleans(),
    include_usage=st.booleans(),
    continuous=st.booleans(),
    echo=st.sampled_from(["", "The lamp "]),
)
def test_the_chunks_of_a_chat_are_its_whole_message(
    data: st.DataObject,
    n: int,
    stop: list[str],
    logprobs: bool,
    token_ids: bool,
    include_usage: bool,
    continuous: bool,
    echo: str,
) -> None:
    feeds = data.draw(feeds_of(n, logprobs))
    form = ChatForm(
        echo=echo,
        logprobs=LogprobWriter(vocabulary(), 1, False) if logprobs else None,
        prompt_token_ids=[3, 4] if token_ids else None,
    )
    prompts, outcomes = Prompts([2], n), [Outcome(usage={"prompt_tokens": 2})]
    message = whole(form, streams_of(1, n, stop), prompts, feeds, outcomes)
    events = streamed(
        form,
        streams_of(1, n, stop),
        prompts,
        feeds,
        outcomes,
        include_usage=include_usage,
        continuous_usage_stats=include_usage and continuous,
        return_token_ids=token_ids,
    )
    for index in range(n):
        choice = chat_choice(events, index)
        if logprobs and choice["logprobs"] is None:
            choice["logprobs"] = {"content": []}
        if token_ids:
            choice.setdefault("token_ids", [])
        assert choice == message["choices"][index]
    usage = usage_of(events, include_usage, continuous)
    assert usage is None or usage == message["usage"]
    assert events[0].get("prompt_token_ids") == message.get("prompt_token_ids") == ([3, 4] if token_ids else None)


@some
@given(
    data=st.data(),
    prompts=st.integers(1, 3),
    n=st.integers(1, 2),
    stop=stops,
    logprobs=st.booleans(),
    token_ids=st.booleans(),
    include_usage=st.booleans(),
    continuous=st.booleans(),
    echo=st.booleans(),
)
def test_the_chunks_of_a_completion_are_its_whole_text(
    data: st.DataObject,
    prompts: int,
    n: int,
    stop: list[str],
    logprobs: bool,
    token_ids: bool,
    include_usage: bool,
    continuous: bool,
    echo: bool,
) -> None:
    feeds = data.draw(feeds_of(prompts * n, logprobs))
    form = CompletionForm(
        n,
        [f"Prompt {number}: " for number in range(prompts)],
        [[number, 9] for number in range(prompts)],
        echo,
        token_ids,
        LogprobWriter(vocabulary(), 1, False) if logprobs else None,
    )
    lengths = Prompts([2] * prompts, n)
    outcomes = [Outcome(usage={"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}})] * prompts
    text = whole(form, streams_of(prompts, n, stop), lengths, feeds, outcomes)
    events = streamed(
        form,
        streams_of(prompts, n, stop),
        lengths,
        feeds,
        outcomes,
        include_usage=include_usage,
        continuous_usage_stats=include_usage and continuous,
        return_token_ids=token_ids,
    )
    for index in range(prompts * n):
        choice = completion_choice(events, index)
        if logprobs and choice["logprobs"] is None:
            choice["logprobs"] = {key: [] for key in ("text_offset", "token_logprobs", "tokens", "top_logprobs")}
        if token_ids:
            choice.setdefault("token_ids", [])
        assert choice == text["choices"][index]
        assert not echo or choice["text"].startswith(f"Prompt {index // n}: ")
        assert not token_ids or choice["prompt_token_ids"] == [index // n, 9]
    usage = usage_of(events, include_usage, continuous)
    assert usage is None or usage == text["usage"]


def call(index: int, arguments: str, name: str | None = None) -> ToolCallDelta:
    return ToolCallDelta(index, arguments, f"call_{index}" if name else None, name)


REASONED = [
    Delta("", (), reasoning="The tide "),
    Delta("", (), reasoning="is low."),
    Delta("Two calls:", (), reasoning="\n"),
    Delta("", (), tool_calls=[call(0, "", "turn")]),
    Delta("", (), tool_calls=[call(0, '{"times"')]),
    Delta("", (), tool_calls=[call(0, ": 2}"), call(1, "{}", "stop")]),
    Delta(" done", (), tool_calls=[call(2, "", "log"), call(2, '{"x": "')]),
    Delta("", (), tool_calls=[call(2, 'é"}')], finish_reason="tool_calls"),
]


def test_reasoning_and_tool_calls_have_the_chunks_of_the_openai_api() -> None:
    feeds = [(0, TokenDelta(0, [1]))] * len(REASONED)
    events = streamed(ChatForm(), [ScriptedStream(REASONED)], Prompts([2], 1), feeds, [Outcome()])
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "The tide "},
        {"reasoning": "is low."},
        {"reasoning": "\n", "content": "Two calls:"},
        {
            "tool_calls": [
                {"index": 0, "id": "call_0", "type": "function", "function": {"name": "turn", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"times"'}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": ": 2}"}},
                {"index": 1, "id": "call_1", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
            ]
        },
        {
            "content": " done",
            "tool_calls": [
                {"index": 2, "id": "call_2", "type": "function", "function": {"name": "log", "arguments": ""}},
                {"index": 2, "function": {"arguments": '{"x": "'}},
            ],
        },
        {"tool_calls": [{"index": 2, "function": {"arguments": 'é"}'}}]},
        {},
    ]
    assert chat_choice(events, 0)["finish_reason"] == "tool_calls"


def test_reasoning_and_tool_calls_are_the_same_in_a_whole_message() -> None:
    feeds = [(0, TokenDelta(0, [1]))] * len(REASONED)
    message = whole(ChatForm(), [ScriptedStream(REASONED)], Prompts([2], 1), feeds, [Outcome()])
    events = streamed(ChatForm(), [ScriptedStream(REASONED)], Prompts([2], 1), feeds, [Outcome()])
    assert message["choices"] == [chat_choice(events, 0)]
    assert message["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Two calls: done",
        "refusal": None,
        "reasoning": "The tide is low.\n",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "turn", "arguments": '{"times": 2}'}},
            {"id": "call_1", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
            {"id": "call_2", "type": "function", "function": {"name": "log", "arguments": '{"x": "é"}'}},
        ],
    }


def test_a_message_of_calls_alone_has_no_content() -> None:
    deltas = [Delta("", (), tool_calls=[call(0, "{}", "turn")], finish_reason="tool_calls")]
    message = whole(ChatForm(), [ScriptedStream(deltas)], Prompts([2], 1), [(0, TokenDelta(0, [1]))], [Outcome()])
    assert message["choices"][0]["message"]["content"] is None


def test_the_deltas_that_one_choice_gave_belong_to_no_other() -> None:
    """A choice that collects arguments must not write into the deltas, which may be shared."""
    delta = Delta("", (), tool_calls=[call(0, "", "turn")])
    more = Delta("", (), tool_calls=[call(0, "{}")], finish_reason="tool_calls")
    feeds = [(index, TokenDelta(index, [1])) for index in (0, 0, 1, 1)]
    message = whole(ChatForm(), [ScriptedStream([delta, more]) for _ in range(2)], Prompts([2], 2), feeds, [Outcome()])
    assert [c["message"]["tool_calls"][0]["function"]["arguments"] for c in message["choices"]] == ["{}", "{}"]
    assert delta.tool_calls[0].arguments == ""


ODD = '"quoted" \\ \n \r \u2028 \u2029 \x00 🌊 \x7f \ufffd \ufdd0 </script>'


@some
@given(st.lists(st.one_of(st.text(), st.just(ODD), st.just("\x00"), st.just('"\\u0000"')), min_size=1, max_size=4))
def test_a_spliced_event_is_what_the_slow_way_writes(texts: list[str]) -> None:
    def answer(head: Head, form: Form, include_usage: bool) -> StreamedAnswer:
        streams: Any = [ScriptedStream([Delta("opening", ()), *(Delta(text, ()) for text in texts)])]
        return StreamedAnswer(head, form, streams, Prompts([2], 1), include_usage=include_usage)

    for head in (HEAD, Head('id"\x00', 1, '"\x00')):
        for form in (ChatForm(), CompletionForm(1, [ODD], [[1]], echo=True)):
            for include_usage in (False, True):
                spliced, slow = answer(head, form, include_usage), answer(head, form, include_usage)
                slow._splices = [None]
                for text in ["opening", *texts]:
                    written = spliced.feed(0, TokenDelta(0, [1]))
                    assert written == slow.feed(0, TokenDelta(0, [1]))
                    (choice,) = json.loads(written.split(b"data: ")[-1])["choices"] if written else [{"text": ""}]
                    assert choice.get("text", choice.get("delta", {}).get("content")) == text


def test_nothing_is_written_for_tokens_that_show_nothing() -> None:
    streams: Any = [ScriptedStream([Delta("a", ()), Delta("", [1]), Delta("", (), logprobs=[], offsets=[])])]
    answer = StreamedAnswer(HEAD, ChatForm(), streams, Prompts([2], 1))
    assert answer.feed(0, TokenDelta(0, [1])) != b""
    assert answer.feed(0, TokenDelta(0, [1])) == b""
    assert answer.feed(0, TokenDelta(0, [1])) == b""


def test_every_choice_opens_before_the_first_text() -> None:
    streams: Any = [ScriptedStream([Delta("a", (), finish_reason="length")]) for _ in range(3)]
    answer = StreamedAnswer(HEAD, ChatForm(echo="So: ", prompt_token_ids=[5]), streams, Prompts([1], 3))
    events = sse_events(answer.feed(2, TokenDelta(2, [1])) + DONE)
    opening = {"role": "assistant", "content": ""}
    assert [(event["choices"][0]["index"], event["choices"][0]["delta"]) for event in events] == [
        *((index, delta) for index in range(3) for delta in (opening, {"content": "So: "})),
        (2, {"content": "a"}),
        (2, {}),
    ]


def test_an_answer_knows_which_choices_have_ended() -> None:
    for kind in (StreamedAnswer, WholeAnswer):
        answer = kind(HEAD, ChatForm(), streams_of(1, 2, ["tide"]), Prompts([1], 2))
        ids = vocabulary().tokenizer.encode("the tide").ids
        answer.feed(0, TokenDelta(0, ids))
        answer.feed(1, TokenDelta(1, ids[:1]))
        assert (answer.ended(0), answer.ended(1)) == (True, False)
        answer.feed(1, TokenDelta(1, [], None, "abort"))
        assert answer.ended(1)


@pytest.mark.parametrize(
    ("outcomes", "prompt", "details"),
    [
        ([Outcome(), Outcome()], 5, None),
        ([Outcome(usage={"prompt_tokens": 40}), Outcome()], 43, None),
        ([Outcome(usage={"prompt_tokens": 0}), Outcome(usage={"prompt_tokens": None})], 3, None),
        ([Outcome(usage={"prompt_tokens_details": {}}), Outcome(usage={"prompt_tokens_details": None})], 5, None),
        ([Outcome(usage={"prompt_tokens_details": {"cached_tokens": None}}), Outcome()], 5, None),
        ([Outcome(usage={"prompt_tokens_details": {"cached_tokens": 0}}), Outcome()], 5, {"cached_tokens": 0}),
        (
            [
                Outcome(usage={"prompt_tokens_details": {"cached_tokens": 1}}),
                Outcome(usage={"prompt_tokens_details": {"cached_tokens": 2, "other": 3}}),
            ],
            5,
            {"cached_tokens": 3},
        ),
    ],
)
def test_usage_sums_what_engines_say_of_prompts_and_what_was_counted_here(
    outcomes: list[Outcome], prompt: int, details: JsonObject | None
) -> None:
    streams: Any = [ScriptedStream([]) for _ in range(4)]
    for number, stream in enumerate(streams):
        stream.tokens = number
    usage = {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    expected = usage | ({"prompt_tokens_details": details} if details else {})
    assert Prompts([2, 3], 2).usage(streams, outcomes) == expected


def test_what_an_engine_says_of_the_whole_request_is_in_the_whole_answer() -> None:
    outcome = Outcome(prompt_logprobs=[None, {"1": {"logprob": -1.0}}], kv_transfer_params={"host": "a"})
    chat = ChatForm(prompt_logprobs=LogprobWriter(vocabulary(), 1, False))
    feeds = [(0, TokenDelta(0, [1], None, "length"))]
    message = whole(chat, streams_of(1, 1, []), Prompts([2], 1), feeds, [outcome])
    text = vocabulary().text_of(1)
    assert message["prompt_logprobs"] == [None, {"1": {"logprob": -1.0, "decoded_token": text}}]
    assert message["kv_transfer_params"] == {"host": "a"}


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        ([None], None),
        ([{"host": "a"}], {"host": "a"}),
        ([{"host": "a"}, {"host": "a"}], {"host": "a"}),
        ([{"host": "a"}, {"host": "b"}], None),
        ([{"host": "a"}, None], None),
        ([None, {"host": "a"}], None),
    ],
)
def test_transfer_parameters_are_shown_where_all_prompts_have_the_same(
    params: list[JsonObject | None], shown: JsonObject | None
) -> None:
    form = CompletionForm(1, [""] * len(params), [[1]] * len(params))
    feeds = [(index, TokenDelta(index, [1], None, "length")) for index in range(len(params))]
    outcomes = [Outcome(kv_transfer_params=one) for one in params]
    text = whole(form, streams_of(len(params), 1, []), Prompts([1] * len(params), 1), feeds, outcomes)
    assert text.get("kv_transfer_params") == shown
