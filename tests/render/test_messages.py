import copy
from typing import Any

import pytest

from proxy.protocol.errors import BadRequest
from proxy.render.messages import NormalisedMessages, normalise
from proxy.render.template_facts import ContentFormat

Message = dict[str, Any]


def normalised(*messages: Message, to: ContentFormat = "string", knows_developer: bool = False) -> NormalisedMessages:
    given = copy.deepcopy(list(messages))
    result = normalise(list(messages), content_format=to, knows_developer=knows_developer)
    assert list(messages) == given, "the input was changed"
    return result


def text(value: str) -> Message:
    return {"type": "text", "text": value}


# content, as a string, as parts
CONTENTS: list[tuple[Any, str, list[Message]]] = [
    ("hello", "hello", [text("hello")]),
    ("", "", [text("")]),
    (None, "", []),
    ([], "", []),
    ([text("a"), text("b")], "a\nb", [text("a"), text("b")]),
    ([text(""), text("b")], "b", [text(""), text("b")]),
    (["a", text("b")], "a\nb", [text("a"), text("b")]),
    ([{"type": "input_text", "text": "a"}], "a", [text("a")]),
    ([{"type": "output_text", "text": "a", "annotations": []}], "a", [text("a")]),
    ([{"type": "refusal", "refusal": "no"}], "no", [text("no")]),
    ([{"type": "thinking", "thinking": "hm"}, text("b")], "hm\nb", [text("hm"), text("b")]),
    ([{"type": "text", "text": " a\n", "cache_control": {}}], " a\n", [text(" a\n")]),
]


@pytest.mark.parametrize(("content", "as_string", "as_parts"), CONTENTS)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "custom"])
def test_a_content_becomes_what_the_template_reads(
    role: str, content: Any, as_string: str, as_parts: list[Message]
) -> None:
    message = {"role": role, "content": content}
    assert normalised(message).messages == [{"role": role, "content": as_string}]
    assert normalised(message, to="parts").messages == [{"role": role, "content": as_parts}]


def test_a_missing_content_is_an_empty_one() -> None:
    assert normalised({"role": "assistant"}).messages == [{"role": "assistant", "content": ""}]
    assert normalised({"role": "assistant"}, to="parts").messages == [{"role": "assistant", "content": []}]


@pytest.mark.parametrize("to", ["string", "parts"])
@pytest.mark.parametrize(
    ("content", "expected"), [("a", "a"), ([text("a"), text("b")], "a\nb"), (["a"], "a"), ([], ""), (None, "")]
)
def test_a_tool_result_of_text_is_a_string_for_every_template(to: ContentFormat, content: Any, expected: str) -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": content}
    assert normalised(message, to=to).messages == [{**message, "content": expected}]


def test_a_tool_result_with_an_image_stays_parts() -> None:
    message = {"role": "tool", "content": [text("a"), {"type": "image_url", "image_url": {"url": "u"}}]}
    result = normalised(message, to="parts")
    assert result.messages[0]["content"] == [text("a"), {"type": "image"}]
    assert result.content_parts == [{"type": "image_url", "url": "u"}]


def test_other_keys_of_a_message_stay() -> None:
    message = {"role": "user", "content": "a", "name": "Ann", "task": "x"}
    assert normalised(message).messages == [message]


@pytest.mark.parametrize(("knows", "role"), [(True, "developer"), (False, "system")])
def test_developer_becomes_system_where_the_template_does_not_know_it(knows: bool, role: str) -> None:
    result = normalised({"role": "developer", "content": "a"}, knows_developer=knows)
    assert result.messages == [{"role": role, "content": "a"}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"a": {"b": [1, null]}}', {"a": {"b": [1, None]}}),
        ({"a": 1}, {"a": 1}),
        ("{}", {}),
        ("", {}),
        (" \n", {}),
        (None, {}),
        ('{"ü": "\\u00fc", "n": 12345678901234567890}', {"ü": "ü", "n": 12345678901234567890}),
    ],
)
def test_the_arguments_of_earlier_calls_become_objects(given: Any, expected: Message) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    (message,) = normalised({"role": "assistant", "content": None, "tool_calls": [call]}).messages
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": expected}}]
    assert message["content"] == ""


@pytest.mark.parametrize("calls", [None, []])
def test_empty_tool_calls_go(calls: Any) -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": calls}
    assert normalised(message).messages == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reasoning": "r"}, {"reasoning": "r", "reasoning_content": "r"}),
        ({"reasoning_content": "r"}, {"reasoning": "r", "reasoning_content": "r"}),
        ({"reasoning": None, "reasoning_content": "r"}, {"reasoning": "r", "reasoning_content": "r"}),
        ({"reasoning": "a", "reasoning_content": "b"}, {"reasoning": "a", "reasoning_content": "b"}),
        ({"reasoning": ""}, {"reasoning": "", "reasoning_content": ""}),
        ({}, {}),
    ],
)
def test_reasoning_is_given_under_both_names(given: Message, expected: Message) -> None:
    (message,) = normalised({"role": "assistant", "content": "a", **given}).messages
    assert message == {"role": "assistant", "content": "a", **expected}


def test_the_reasoning_of_others_is_left_alone() -> None:
    message = {"role": "user", "content": "a", "reasoning": "r"}
    assert normalised(message).messages == [message]


# part, what the template sees, what the engine gets
MEDIA: list[tuple[Message, str, Message]] = [
    ({"type": "image_url", "image_url": {"url": "u", "detail": "low"}}, "image", {"type": "image_url", "url": "u"}),
    ({"type": "image_url", "image_url": "u", "uuid": "i"}, "image", {"type": "image_url", "url": "u", "uuid": "i"}),
    ({"type": "input_image", "image_url": "u"}, "image", {"type": "image_url", "url": "u"}),
    ({"type": "image", "image": "u"}, "image", {"type": "image_url", "url": "u"}),
    ({"type": "image", "url": "u", "uuid": 7}, "image", {"type": "image_url", "url": "u", "uuid": "7"}),
    ({"type": "audio_url", "audio_url": {"url": "u"}}, "audio", {"type": "audio_url", "url": "u"}),
    ({"type": "audio", "audio": "u"}, "audio", {"type": "audio_url", "url": "u"}),
    (
        {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}},
        "audio",
        {"type": "audio_url", "url": "data:audio/wav;base64,QQ=="},
    ),
    ({"type": "video_url", "video_url": {"url": "u"}}, "video", {"type": "video_url", "url": "u"}),
    ({"type": "video", "video": "u"}, "video", {"type": "video_url", "url": "u"}),
]


@pytest.mark.parametrize(("part", "seen", "sent"), MEDIA)
def test_a_medium_is_a_placeholder_for_the_template_and_an_url_for_the_engine(
    part: Message, seen: str, sent: Message
) -> None:
    result = normalised({"role": "user", "content": [text("a"), part]}, to="parts")
    assert result.messages == [{"role": "user", "content": [text("a"), {"type": seen}]}]
    assert result.content_parts == [sent]


def test_media_are_collected_in_order_over_all_messages() -> None:
    def image(url: str) -> Message:
        return {"type": "image_url", "image_url": {"url": url}}

    result = normalised(
        {"role": "user", "content": [image("1"), text("a"), image("2")]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [image("3")]},
        to="parts",
    )
    assert [part["url"] for part in result.content_parts] == ["1", "2", "3"]


@pytest.mark.parametrize("part", [part for part, _, _ in MEDIA])
def test_a_medium_is_refused_where_the_template_takes_text_only(part: Message) -> None:
    with pytest.raises(BadRequest, match="takes text only") as caught:
        normalised({"role": "user", "content": [part]})
    assert caught.value.param == "messages[0].content[0]"


def calls(*given: Any) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": list(given)}


def with_arguments(arguments: Any) -> Message:
    return calls({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}})


MALFORMED: list[tuple[str, Any]] = [
    ("", "text"),
    ("", None),
    (".role", {"content": "a"}),
    (".role", {"role": 1, "content": "a"}),
    (".role", {"role": "", "content": "a"}),
    (".content", {"role": "user", "content": 1}),
    (".content", {"role": "user", "content": {"type": "text", "text": "a"}}),
    (".content", {"role": "tool", "content": {"answer": 42}}),
    (".content[1]", {"role": "user", "content": ["a", 1]}),
    (".content[0].type", {"role": "user", "content": [{"text": "a"}]}),
    (".content[0].type", {"role": "user", "content": [{"type": 1}]}),
    (".content[1]", {"role": "user", "content": ["a", {"type": "smell"}]}),
    (".content[0].text", {"role": "user", "content": [{"type": "text"}]}),
    (".content[0].text", {"role": "user", "content": [{"type": "text", "text": 1}]}),
    (".content[0].refusal", {"role": "assistant", "content": [{"type": "refusal", "text": "a"}]}),
    (".content[0].image_url", {"role": "user", "content": [{"type": "image_url"}]}),
    (".content[0].image_url", {"role": "user", "content": [{"type": "image_url", "image_url": 1}]}),
    (".content[0].image_url.url", {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
    (".content[0].input_audio", {"role": "user", "content": [{"type": "input_audio"}]}),
    (".content[0].input_audio.data", {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}),
    (
        ".content[0].input_audio.format",
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "QQ=="}}]},
    ),
    (".reasoning", {"role": "assistant", "content": "a", "reasoning": {"text": "r"}}),
    (".reasoning_content", {"role": "assistant", "content": "a", "reasoning_content": ["r"]}),
    (".tool_calls", {"role": "assistant", "tool_calls": {"name": "f"}}),
    (".tool_calls[0]", calls("f")),
    (".tool_calls[0].type", calls({"type": "custom", "custom": {}})),
    (".tool_calls[0].function", calls({"id": "c"})),
    (".tool_calls[0].function.name", calls({"function": {"arguments": "{}"}})),
    (".tool_calls[0].function.arguments", with_arguments("not JSON")),
    (".tool_calls[0].function.arguments", with_arguments('{"cut": ')),
    (".tool_calls[0].function.arguments", with_arguments("[1]")),
    (".tool_calls[0].function.arguments", with_arguments("null")),
    (".tool_calls[0].function.arguments", with_arguments([1])),
    (".tool_calls[0].function.arguments", with_arguments(7)),
    (".tool_calls[0].function.arguments", with_arguments('{"a":' * 100_000)),
]


@pytest.mark.parametrize(("place", "message"), MALFORMED)
@pytest.mark.parametrize("to", ["string", "parts"])
def test_a_malformed_message_is_refused_by_its_place(to: ContentFormat, place: str, message: Any) -> None:
    if (to == "string" and ".image_url" in place) or ".input_audio" in place:
        to = "parts"
    with pytest.raises(BadRequest) as caught:
        normalise([{"role": "user", "content": "a"}, message], content_format=to, knows_developer=False)
    assert caught.value.param == f"messages[1]{place}"
    assert f"messages[1]{place}" in caught.value.message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "a"}, "`messages[0].role` must be a non-empty string, but is missing."),
        ({"role": "user", "content": 1}, "`messages[0].content` must be a string or a list of parts, but is a number."),
        (with_arguments("[1]"), "`messages[0].tool_calls[0].function.arguments` must be a JSON object, but is a list."),
        (calls({"type": "custom"}), "`messages[0].tool_calls[0].type` must be 'function', but is 'custom'."),
    ],
)
def test_an_error_says_what_was_expected_and_what_came(message: Message, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        normalised(message)
    assert caught.value.message == says
