"""Outputs that are messages with a header each, as gpt-oss writes them."""

import pytest

from proxy.derender.choice import ChoiceStream
from proxy.derender.output_format import ToolUse
from tests.derender.readings import ASKED, Plain, known_format, said

OSS = ("openai", "openai_gptoss")
ASSISTANT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.set_lamp <|constrain|>json<|message|>{"level": 4}<|call|>'


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<|channel|>final<|message|>low tide<|return|>", "", "low tide", []),
        (
            f"<|channel|>analysis<|message|>hm<|end|>{ASSISTANT}<|channel|>final<|message|>low<|return|>",
            "hm",
            "low",
            [],
        ),
        (f"<|channel|>analysis<|message|>hm<|end|>{ASSISTANT}{CALL}", "hm", "", [("set_lamp", '{"level": 4}')]),
        (
            " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
            "",
            "",
            [("now", "{}")],
        ),
        ("<|channel|>commentary to=now<|message|>{}<|call|>", "", "", [("now", "{}")]),
        ("<|channel|>commentary<|message|>First, the lamp.<|end|>", "", "First, the lamp.", []),
        (f"{CALL}{ASSISTANT}{CALL}", "", "", [("set_lamp", '{"level": 4}')] * 2),
        (
            f"<|channel|>analysis<|message|>a<|end|>{ASSISTANT}{CALL}{ASSISTANT}<|channel|>analysis<|message|>b",
            "a\nb",
            "",
            [("set_lamp", '{"level": 4}')],
        ),
        ("<|channel|>final<|message|>a<|channel|>final<|message|>b", "", "a\nb", []),
        ("low tide", "", "low tide", []),
        ("assistant of the harbour", "", "assistant of the harbour", []),
    ],
)
def test_a_header_says_what_its_body_is(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]], by_id: bool
) -> None:
    message = said(OSS, text, prompt=ASSISTANT, by_id=by_id)
    assert (message.reasoning, message.content, message.written_calls) == (reasoning, content, calls)
    assert message.finish_reason == ("tool_calls" if calls else "stop")


def test_the_prompt_may_have_begun_the_header() -> None:
    message = said(OSS, "hm<|end|>", prompt=f"{ASSISTANT}<|channel|>analysis<|message|>")
    assert (message.reasoning, message.content) == ("hm", "")
    message = said(OSS, "nal<|message|>low", prompt=f"{ASSISTANT}<|channel|>fi")
    assert (message.reasoning, message.content) == ("", "low")


def test_markers_in_ordinary_tokens_are_text() -> None:
    message = said(OSS, "<|channel|>final<|message|>low", Plain("<|end|> tide"), prompt=ASSISTANT)
    assert message.content == "low<|end|> tide"


def test_arguments_of_a_call_that_was_cut_stay_open() -> None:
    message = said(OSS, CALL.removesuffix(" 4}<|call|>"), prompt=ASSISTANT, finish="length")
    assert (message.written_calls, message.finish_reason) == ([("set_lamp", '{"level":')], "length")


def test_a_header_that_was_never_finished_is_given_back_when_the_model_stopped_and_dropped_when_it_was_cut() -> None:
    for finish, content in (("stop", "<|channel|>commentary to=functions.now"), ("length", "")):
        message = said(OSS, "<|channel|>commentary to=functions.now", prompt=ASSISTANT, finish=finish)
        assert (message.content, message.calls) == (content, [])


def test_the_beginning_of_a_next_message_says_nothing() -> None:
    assert said(OSS, f"<|channel|>final<|message|>low<|end|>{ASSISTANT}", prompt=ASSISTANT).content == "low"


def test_calls_that_no_tool_asked_for_are_not_shown() -> None:
    message = said(OSS, CALL, prompt=ASSISTANT, use=ToolUse())
    assert (message.content, message.calls, message.finish_reason) == ("", [], "stop")


def test_hidden_reasoning_leaves_no_trace_in_ids() -> None:
    form = known_format(*OSS)
    header, secret, tide = (
        form.ids(form.marks.encode(text)) for text in ("<|channel|>analysis<|message|>", "🌊" * 5, "low tide")
    )
    final = form.ids(form.marks.encode(f"<|end|>{ASSISTANT}<|channel|>final<|message|>"))
    context = form.context(ASKED, form.ids(form.marks.encode(ASSISTANT)), include_reasoning=False)
    for size in (1, 4, 1000):
        stream, shown = ChoiceStream(context), []
        ids = header + secret + final + tide
        for at in range(0, len(ids), size):
            delta = stream.feed(ids[at : at + size])
            assert delta.reasoning == ""
            shown += delta.token_ids
        assert not set(secret) & set(shown)
        assert shown[-len(tide) :] == tide
