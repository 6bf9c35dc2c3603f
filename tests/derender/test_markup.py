"""The rules that all formats share, each as a table of what a model wrote and what a client reads.

Property tests of the same machine are in `test_markup_properties.py`.
"""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from proxy.derender.choice import ChoiceStream
from proxy.derender.codecs.base import MarkupLimits
from proxy.derender.output_format import ToolUse
from proxy.derender.stop import StopRule
from tests.derender.readings import ASKED, LAMP, NOW, TIDE, Message, Plain, known_format, read, reloaded, said

QWEN = ("hermes", "qwen3")
CODER = ("qwen3_xml", "qwen3")
KIMI = ("kimi_k2", "kimi_k2")
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW_CALL = [("now", "{}")]


def sorted_into(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.reasoning, message.content, message.written_calls


@pytest.mark.parametrize(
    ("reasoning", "prompt", "variables", "inside"),
    [
        ("qwen3", "", {}, True),
        ("qwen3", "<think>\n", {}, True),
        ("qwen3", "<think>\n\n</think>\n\n", {}, False),
        ("qwen3", "</think> so much for the last turn<|turn|>assistant\n", {}, True),
        ("qwen3", "<think><|turn|>assistant\n", {"enable_thinking": False}, False),
        ("qwen3", "", {"enable_thinking": False}, False),
        ("qwen3", "", {"enable_thinking": True}, True),
        ("qwen3", "<think>\n", {"enable_thinking": False}, True),
        ("deepseek_v3", "", {}, False),
        ("deepseek_v3", "", {"thinking": True}, True),
        ("deepseek_v3", "<think>", {}, True),
        ("deepseek_v3", "</think>", {"thinking": True}, False),
        ("deepseek_v4", "", {"reasoning_effort": "none"}, False),
        ("deepseek_v4", "", {"reasoning_effort": "high"}, True),
        ("deepseek_r1", "", {"enable_thinking": False}, True),
        ("gemma4", "", {}, False),
        ("gemma4", "<|channel>thought\n", {}, True),
        ("step3", "", {}, True),
    ],
)
def test_where_an_answer_begins_is_read_from_the_prompt_then_from_the_request(
    reasoning: str, prompt: str, variables: dict[str, Any], inside: bool
) -> None:
    form = known_format(None, reasoning)
    turn = form.vocabulary.added_texts[form.turn]
    before, found, after = prompt.partition(turn)
    ids = form.ids(form.marks.encode(before)) + ([form.turn] if found else []) + form.ids(form.marks.encode(after))
    assert form.output.reasoning_ended(ids, variables) is not inside
    message = read(form.context(ASKED, ids, variables=variables), form.ids("low tide"))
    assert (message.reasoning, message.content) == (("low tide", "") if inside else ("", "low tide"))


@pytest.mark.parametrize(
    ("names", "text", "reasoning", "content", "calls"),
    [
        pytest.param(QWEN, "hm</think>\n\nyes", "hm", "\n\nyes", [], id="a closer"),
        pytest.param(QWEN, "<think>hm</think>yes", "hm", "yes", [], id="an opener where it is open already"),
        pytest.param(QWEN, "hm</think></think>yes", "hm", "yes", [], id="a second closer is absorbed"),
        pytest.param(QWEN, "hm</think>yes</think> so", "hm", "yes so", [], id="also later"),
        pytest.param(QWEN, "hm", "hm", "", [], id="reasoning that never ends"),
        pytest.param(QWEN, f"hm{CALL}", "hm", "", NOW_CALL, id="a call ends the reasoning"),
        pytest.param(CODER, "hm<tool_call>\n<function=now>\n</function>\n</tool_call>", "hm", "", NOW_CALL, id="XML"),
        pytest.param(
            KIMI,
            "hm <|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            "hm",
            "",
            NOW_CALL,
            id="a section ends it, and the white space before goes by the reasoning's rule",
        ),
        pytest.param(
            ("hermes", "deepseek_r1"), f"hm{CALL}</think>{CALL}", f"hm{CALL}", "", NOW_CALL, id="DeepSeek R1 thinks on"
        ),
        pytest.param(("hermes", "kimi_k2"), " hm \n</think>\n yes \n", " hm", "\n yes \n", [], id="trimmed at the end"),
        pytest.param(
            (None, "granite"),
            "Here is my thought process: low tide.\nHere is my response: wait.",
            "low tide.",
            " wait.",
            [],
            id="sentences",
        ),
        pytest.param(
            (None, "hunyuan_a13b"),
            "<think>\nhm\n</think>\n<answer>\nyes\n</answer>",
            "hm",
            "\nyes",
            [],
            id="an answer in tags",
        ),
        pytest.param((None, "ernie45"), "hm</think><response>yes</response>", "hm", "yes", [], id="a response in tags"),
        pytest.param((None, "deepseek_v3"), "<think>hm</think>", "", "<think>hm</think>", [], id="not announced"),
        pytest.param((None, "mistral"), "[THINK]hm[/THINK]yes", "hm", "yes", [], id="opened by the model"),
        pytest.param((None, "mistral"), "so [THINK]hm", "", "so [THINK]hm", [], id="opened in the middle of a text"),
        pytest.param(("kimi_k3", "kimi_k3"), "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>yes"
                     "<|close|>response<|sep|><|close|>message<|sep|>", "hm", "yes", [], id="markers of three tokens"),
    ],
)  # fmt: skip
def test_where_reasoning_ends(
    names: tuple[str | None, str], text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert sorted_into(said(names, text)) == (reasoning, content, calls)
    assert sorted_into(said(names, text, by_id=False)) == (reasoning, content, calls)


@pytest.mark.parametrize("tool", ["llama4_json", "pythonic"])
def test_a_marker_behind_what_could_have_been_a_call_is_found(tool: str) -> None:
    for text in ("{", "[", "[f("):
        message = said((tool, "hunyuan_a13b"), f"<think>hm</think><answer>\n{text}\n</answer>")
        assert (message.content, message.calls) == (text, [])


def test_the_same_characters_in_ordinary_tokens_are_text_where_a_marker_is_a_token() -> None:
    spelled = said(
        ("qwen3_xml", "qwen3"), "hm", Plain(" </think> and <tool_call> "), "done</think>yes", Plain("</think>")
    )
    assert sorted_into(spelled) == ("hm </think> and <tool_call> done", "yes</think>", [])


def test_hermes_calls_count_also_where_they_are_spelled() -> None:
    assert sorted_into(said(QWEN, "</think>", Plain(CALL))) == ("", "", NOW_CALL)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (QWEN, "The <tool_call> marker begins a call."),
        (QWEN, "<tool_call>"),
        (QWEN, '<tool_call>{"room": "attic"}</tool_call> is no call'),
        (QWEN, "a </tool_call> ends one"),
        (CODER, "Write <tool_call> and then <function=f; see below."),
        (CODER, "<function= is how it begins"),
        (("glm45", "glm45"), "The <tool_call> tag"),
        (("deepseek_v3", None), "<｜tool▁calls▁begin｜> and <｜tool▁call▁begin｜>"),
        (KIMI, "so <|tool_call_begin|>functions"),
        (("mistral", None), "[TOOL_CALLS] is a token"),
        (("minimax_m2", None), '<minimax:tool_call> then <invoke name="'),
        (("llama3_json", None), '{"room": "attic", "level": 4}'),
        (("llama3_json", None), '{"tide": "low"'),
        (("xlam", None), "[1, 2, 3]"),
        (("granite", None), "<|tool_call|>[1]"),
        (("apertus", None), "<|tools_prefix|>[now]"),
    ],
)
def test_markup_that_never_becomes_a_call_is_prose(names: tuple[str, str | None], text: str) -> None:
    close = "</think>" if names[1] else ""
    for by_id in (True, False):
        assert sorted_into(said(names, close + text, by_id=by_id)) == ("", text, [])


def test_an_unfinished_beginning_of_a_call_is_given_back_when_the_model_stopped_and_dropped_when_it_was_cut() -> None:
    for text in ('so <tool_call>\n{"na', "so <tool_call>", 'so <tool_call>{"arguments": {"room": "attic"}'):
        assert said(QWEN, "</think>", text, finish="stop").content == text
        assert said(QWEN, "</think>", text, finish="length").content == "so "
        assert said(QWEN, "</think>", text, finish="abort").content == "so "
    assert said(QWEN, "hm<tool_call>{", finish="stop").reasoning == "hm<tool_call>{"


def test_half_a_marker_at_the_end_is_text() -> None:
    for finish in ("stop", "length"):
        assert said((None, "qwen3"), "</think>so </thi", by_id=False, finish=finish).content == "so </thi"
        assert said((None, "qwen3"), "so </thi", by_id=False, finish=finish).reasoning == "so </thi"


@pytest.mark.parametrize(
    ("names", "text", "arguments"),
    [
        (QWEN, '<tool_call>{"name": "set_lamp", "arguments": {"room": "att', '{"room": "att'),
        (QWEN, '<tool_call>{"name": "set_lamp", "arguments": {"room": "attic"}', '{"room": "attic"}'),
        (QWEN, '<tool_call>{"name": "set_lamp", "argum', ""),
        (CODER, "<tool_call><function=set_lamp><parameter=room>\natt", '{"room": "att'),
        (CODER, "<tool_call><function=set_lamp><parameter=level>\n4", '{"level": '),
        (CODER, "<tool_call><function=set_lamp>", ""),
        (CODER, "<tool_call><function=set_lamp><parameter=lev", ""),
        (CODER, "<tool_call><function=set_lamp><param", ""),
        (KIMI, "<|tool_call_begin|>functions.set_lamp:0<|tool_call_argument_begin|>{", "{"),
    ],
)
def test_a_call_that_was_cut_stays_open(names: tuple[str, str], text: str, arguments: str) -> None:
    message = said(names, "</think>", text, finish="length")
    assert (message.content, message.written_calls) == ("", [("set_lamp", arguments)])
    assert message.finish_reason == "length"


def test_a_broken_call_harms_neither_its_neighbours_nor_the_text_around_it() -> None:
    broken = '<tool_call>{"nome": "now"}</tool_call>'
    message = said(QWEN, f"</think>first {CALL} then {broken} last {CALL} end")
    assert message.content == f"first  then {broken} last  end"
    assert message.written_calls == NOW_CALL * 2


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"\n\n{CALL}", ""),
        (f"\n\n{CALL}\n", ""),
        (f"{CALL}\n \n{CALL}", ""),
        (f"so:\n\n{CALL}\n", "so:\n\n"),
        (f"{CALL}\n\nso", "\n\nso"),
        (f" {CALL}\nthen\n{CALL}\n", "\nthen\n"),
        ("\n\n", "\n\n"),
        ("\n\nso\n", "\n\nso\n"),
    ],
)
def test_white_space_with_nothing_else_beside_a_call_is_the_templates(text: str, content: str) -> None:
    assert said(QWEN, "</think>", text).content == content


def test_white_space_is_no_longer_the_templates_where_there_is_too_much_of_it() -> None:
    assert said(QWEN, "</think>", " " * 2000, CALL).content == " " * 2000


def calls_of(*names: str) -> str:
    return "\n".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in names)


@pytest.mark.parametrize("names", [QWEN, ("hermes", None)])
def test_where_no_call_is_allowed_markup_is_content_for_kinds_that_are_not_hidden(names: Any) -> None:
    text = f"so {CALL}"
    close = "</think>" if names[1] else ""
    for use in (ToolUse(), ToolUse(tools=(NOW,))):
        message = said(names, close, text, use=use)
        assert (message.content, message.calls, message.finish_reason) == (text, [], "stop")


def test_where_no_call_is_allowed_hidden_kinds_show_nothing_of_it() -> None:
    message = said(CODER, "</think>so <tool_call>\n<function=now>\n</function>\n</tool_call>", use=ToolUse())
    assert (message.content, message.calls, message.finish_reason) == ("so ", [], "stop")


def test_a_call_where_none_is_allowed_still_ends_the_reasoning() -> None:
    message = said(QWEN, f"hm{CALL}", use=ToolUse())
    assert (message.reasoning, message.content) == ("hm", CALL)


REQUIRED = replace(ASKED, required=True)
ONLY_LAMP = replace(REQUIRED, only="set_lamp")


def test_a_call_that_must_be_may_come_as_a_json_list() -> None:
    text = '[{"name": "now", "parameters": {}}, {"name": "set_lamp", "parameters": {"level": 4}}]'
    message = said(QWEN, "</think>\n\n", text, use=REQUIRED)
    assert sorted_into(message) == ("", "", [("now", "{}"), ("set_lamp", '{"level": 4}')])
    assert message.finish_reason == "tool_calls"
    assert said(QWEN, "</think>", text).content == text


def test_a_call_that_must_be_is_also_read_in_the_models_own_syntax() -> None:
    assert said(QWEN, "</think>", CALL, use=REQUIRED).written_calls == NOW_CALL
    assert said(QWEN, "</think>", CALL, use=replace(REQUIRED, only="now")).written_calls == NOW_CALL


def test_the_arguments_alone_are_a_call_of_the_one_function_that_may_be_called() -> None:
    message = said(QWEN, '</think>{"level": 4}', use=ONLY_LAMP, forced_function=True)
    assert sorted_into(message) == ("", "", [("set_lamp", '{"level": 4}')])
    assert message.finish_reason == "stop"


def test_an_answer_that_should_have_been_json_calls_has_no_text() -> None:
    names = ("internlm", None)
    assert sorted_into(said(names, "so [", use=REQUIRED)) == ("", "", [])
    assert said(names, "so [").content == "so ["


def test_only_the_first_call_is_shown_where_one_at_most_is_asked_for() -> None:
    one = replace(ASKED, parallel=False)
    assert said(QWEN, "</think>", calls_of("set_lamp", "now"), use=one).written_calls == [("set_lamp", "{}")]
    assert said(QWEN, "</think>", f"a{CALL}b{CALL}c", use=one).content == "abc"
    two = '<|tools_prefix|>[{"now": {}}, {"set_lamp": {}}]<|tools_suffix|>'
    assert said(("apertus", None), two, use=one).written_calls == NOW_CALL


def test_ids_are_made_unique_and_the_same_again() -> None:
    text = calls_of("now", "now", "set_lamp")
    ids = [call.id for call in said(QWEN, "</think>", text).calls]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", i) for i in ids)
    assert ids == [call.id for call in said(QWEN, "</think>", text).calls]
    form = known_format(*QWEN)
    other = ChoiceStream(form.context(ASKED), "another choice")
    delta = other.feed(form.ids(form.marks.encode("</think>" + CALL)))
    assert delta.tool_calls[0].id not in ids


def kimi(*ids: str) -> str:
    calls = (f"<|tool_call_begin|>{i}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for i in ids)
    return f"</think><|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def test_ids_that_a_model_wrote_are_kept() -> None:
    message = said(KIMI, kimi("functions.now:3", "functions.set_lamp:4"))
    assert [(c.id, c.name) for c in message.calls] == [("functions.now:3", "now"), ("functions.set_lamp:4", "set_lamp")]


def test_an_id_that_a_model_wrote_twice_is_used_once() -> None:
    first, second = said(KIMI, kimi("functions.now:0", "functions.now:0")).calls
    assert (first.id, first.name, second.name) == ("functions.now:0", "now", "now")
    assert second.id not in ("", first.id)


def test_mistrals_ids_are_nine_letters_and_digits() -> None:
    text = '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]set_lamp[CALL_ID]a1B2c3D4e[ARGS]{"level": 4}[TOOL_CALLS]now{}'
    first, second, third = said(("mistral", None), text).calls
    assert second.id == "a1B2c3D4e"
    for made in (first.id, third.id):
        assert re.fullmatch(r"[0-9A-Za-z]{9}", made)
    assert first.id != third.id


def test_markers_in_arguments_come_out_as_they_were_written() -> None:
    text = '</think><tool_call>{"name": "set_lamp", "arguments": {"room": "</think> <tool_call>"}}</tool_call>'
    assert said(QWEN, text).written_calls == [("set_lamp", '{"room": "</think> <tool_call>"}')]


@pytest.mark.parametrize(
    ("finish", "calls", "forced", "reason"),
    [
        ("stop", True, False, "tool_calls"),
        ("stop", True, True, "stop"),
        ("stop", False, False, "stop"),
        ("length", True, False, "length"),
        ("abort", True, False, "abort"),
    ],
)
def test_the_finish_reason(finish: str, calls: bool, forced: bool, reason: str) -> None:
    text = CALL if calls else "low tide"
    assert said(QWEN, "</think>", text, finish=finish, forced_function=forced).finish_reason == reason


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_hidden_reasoning_leaves_no_trace_in_ids_or_logprobs(size: int) -> None:
    form = known_format(*QWEN)
    hidden = form.ids(form.marks.encode("<think>secret tide</think>"))
    shown = form.ids(form.marks.encode(f"low{CALL}"))
    ids = hidden + shown
    stream, message = ChoiceStream(form.context(ASKED, include_reasoning=False)), Message()
    for at in range(0, len(ids), size):
        part = ids[at : at + size]
        message.add(stream.feed(part, [{"token_id": i, "logprob": -1.0} for i in part]))
    message.add(stream.feed((), None, "stop"))
    assert sorted_into(message) == ("", "low", NOW_CALL)
    assert message.token_ids == shown
    assert [entry["token_id"] for entry in message.logprobs] == shown
    assert stream.tokens == len(ids)


def test_stop_strings_work_on_content_only() -> None:
    call = CALL.replace("{}", '{"tide": 1}')
    message = said(QWEN, f"tide</think>{call}low tide, high", stop=StopRule(["tide"]))
    assert sorted_into(message) == ("tide", "low ", [("now", '{"tide": 1}')])


LIMITED = MarkupLimits(depth=3, held=50)


def limited(names: tuple[str, str | None], text: str, finish: str = "stop") -> Message:
    form = known_format(*names, limits=LIMITED)
    return read(form.context(ASKED), form.ids(form.marks.encode(text)), finish)


@pytest.mark.parametrize(
    ("names", "before", "after"),
    [
        (("hermes", None), '<tool_call>{"name": "now", "arguments": ', "}</tool_call>"),
        (("deepseek_v31", None), "<｜tool▁call▁begin｜>now<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ],
)
def test_arguments_nest_only_so_deep_and_the_call_ends_there(
    names: tuple[str, str | None], before: str, after: str
) -> None:
    deep = '{"a": [[1]]}'
    assert limited(names, before + deep + after).written_calls == [("now", deep)]
    message = limited(names, before + '{"a": [[[1]]]}' + after + "low tide")
    ((name, arguments),) = message.written_calls
    assert name == "now"
    assert '{"a": [[[1]]]}'.startswith(arguments)
    assert message.content.endswith("low tide")


def test_only_so_much_is_held_until_a_name_comes() -> None:
    late = '<tool_call>{"arguments": {"a": "%s"}, "name": "now"}</tool_call>'
    assert limited(("hermes", None), late % ("x" * 20)).written_calls == [("now", f'{{"a": "{"x" * 20}"}}')]
    message = limited(("hermes", None), late % ("x" * 60))
    assert (message.content, message.calls) == (late % ("x" * 60), [])


def test_a_value_that_is_no_string_may_only_be_so_long() -> None:
    text = "<tool_call><function=set_lamp><parameter=level>\n{}</parameter></function></tool_call>low"
    message = limited(("qwen3_xml", None), text.replace("{}", "4" * 60))
    assert message.written_calls == [("set_lamp", '{"level": ')]
    assert message.content.endswith("low")
    text = text.replace("level", "room").replace("{}", "4" * 60)
    assert limited(("qwen3_xml", None), text).written_calls == [("set_lamp", f'{{"room": "{"4" * 60}"}}')]


@pytest.mark.parametrize(
    ("names", "beginning"),
    [
        (QWEN, ""),
        (QWEN, "</think>"),
        (QWEN, '</think><tool_call>{"name": "set_lamp", "arguments": {"room": "'),
        (CODER, "</think><tool_call><function=set_lamp><parameter=room>"),
        (("openai", None), "<|channel|>analysis<|message|>"),
        (("kimi_k2", None), kimi(*(f"functions.now:{number}" for number in range(300)))),
    ],
)
def test_the_state_does_not_grow_with_the_output(names: tuple[str, str | None], beginning: str) -> None:
    form = known_format(*names)
    context = form.context(ASKED)
    stream = ChoiceStream(context)
    stream.feed(form.ids(form.marks.encode(beginning)))
    for _ in range(200):
        stream.feed(form.ids("the harbour lamp turns\n\n twice a minute; "))
        stream = reloaded(context, stream)
    assert len(json.dumps(stream.dump())) < (600 if "kimi" not in names[0] else 2500)


@pytest.mark.parametrize("state", [None, [], {}, {"place": "call"}, {"place": "harbour"}, "content", 4])
def test_a_state_that_was_not_dumped_is_refused(state: Any) -> None:
    for names in (QWEN, ("openai", None)):
        context = known_format(*names).context(ASKED)
        with pytest.raises(ValueError):
            ChoiceStream.load(context, ChoiceStream(context).dump() | {"markup": state})


def test_a_state_is_refused_by_another_syntax() -> None:
    form = known_format(*QWEN)
    stream = ChoiceStream(form.context(ASKED))
    stream.feed(form.ids(form.marks.encode('</think><tool_call>{"name": "now", "arguments": {')))
    with pytest.raises(ValueError):
        ChoiceStream.load(known_format(*KIMI).context(ASKED), stream.dump())


def test_schemas_of_the_request_decide_what_a_value_is() -> None:
    text = "</think><tool_call><function=harbour.get_tide><parameter=room>4</parameter></function></tool_call>"
    assert said(CODER, text, use=ToolUse(tools=(TIDE,), asked=True)).written_calls == [
        ("harbour.get_tide", '{"room": "4"}')
    ]
    text = text.replace("harbour.get_tide", "set_lamp").replace("room", "level")
    assert said(CODER, text, use=ToolUse(tools=(LAMP,), asked=True)).written_calls == [("set_lamp", '{"level": 4}')]
    assert said(CODER, text, use=ToolUse(tools=(NOW,), asked=True)).written_calls == [("set_lamp", '{"level": "4"}')]
