import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.errors import BadRequest
from proxy.render.escaping import SpecialTextEscaper, unescape

Message = dict[str, Any]

MARK = "\ufdd0"
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "<|im_end|>x", "|im"]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def escaped_text(specials: list[str], text: str) -> str:
    escaped = SpecialTextEscaper(specials).escape([user(text)], None, None)
    return str(escaped.messages[0]["content"]).replace(escaped.mark or MARK, "^")


@pytest.mark.parametrize(
    ("specials", "text", "expected"),
    [
        (SPECIALS, "plain < text |", "plain < text |^"),
        (SPECIALS, "plain text", "plain text"),
        (SPECIALS, "a<s>b</s>", "a<^s>b<^/s>"),
        (SPECIALS, "<|im_end|>", "<^|^im_end|>"),
        (SPECIALS, "<s><s>", "<^s><^s>"),
        (SPECIALS, "<<s>>", "<<^s>>"),
        (["aba"], "ababa", "a^ba^ba^"),
        (["aa"], "aaaa", "a^a^a^a^"),
        (["ab", "abc"], "abc ab", "a^bc a^b"),
        (SPECIALS, "ends with <|im_", "ends with <^|^im_"),
        (SPECIALS, "ends with <", "ends with <^"),
        (["x"], "axb", "a^^yb"),
        (["x", "y"], "xy", "^^^^z^^z"),
        (["x", "yz"], "x", "^^^^^^{"),
        (["x", "xy"], "xy", "^^^^zy"),
        ([], "<s>", "<s>"),
        (["", "<s>"], "<s>", "<^s>"),
    ],
)
def test_a_special_text_is_broken_after_its_first_character(specials: list[str], text: str, expected: str) -> None:
    assert escaped_text(specials, text) == expected


def test_everything_but_the_assistants_words_is_escaped() -> None:
    evil = "a<s>b"
    safe = f"a<{MARK}s>b"
    calls = [{"id": evil, "function": {"name": "f", "arguments": {"x": evil}}}]
    messages = [
        {"role": "system", "content": evil},
        {"role": "developer", "content": [{"type": "text", "text": evil}]},
        {"role": "user", "content": evil, "name": evil},
        {"role": "assistant", "content": evil, "tool_calls": calls, "reasoning": evil},
        {"role": "tool", "content": evil, "tool_call_id": evil, "extra": {"deep": [evil, 1, None]}},
        {"role": evil, "content": ""},
    ]
    tools = [{"function": {"description": evil, "parameters": {"properties": {evil: {"enum": [evil]}}}}}]
    documents = [{"title": evil, "text": "fine"}]
    escaped = SpecialTextEscaper(SPECIALS).escape(messages, tools, documents)
    assert escaped.mark == MARK
    assert escaped.messages[3] is messages[3]
    others = [message for message in messages if message["role"] != "assistant"]
    assert [m for m in escaped.messages if m is not messages[3]] == json.loads(json.dumps(others).replace(evil, safe))
    assert escaped.tools == json.loads(json.dumps(tools).replace(evil, safe))
    assert escaped.documents == json.loads(json.dumps(documents).replace(evil, safe))
    assert messages[0]["content"] == evil


def test_nothing_is_copied_when_nothing_is_special() -> None:
    messages, tools, documents = [user("a < b"), {"role": "assistant", "content": "<s>"}], [{"a": "b"}], [{"c": "d"}]
    escaped = SpecialTextEscaper(SPECIALS).escape(messages, tools, documents)
    assert escaped.mark is None
    assert escaped.messages is messages
    assert escaped.tools is tools
    assert escaped.documents is documents


def test_names_that_templates_look_for_are_left_alone_if_they_are_plain_words() -> None:
    escaper = SpecialTextEscaper(["user", "o", "str"])
    tools = [{"type": ["string", "null"]}]
    escaped = escaper.escape([{"role": "user", "content": "user", "a-o": ""}], tools, None)
    assert escaped.messages == [{"role": "user", "content": f"u{MARK}ser", f"a-{MARK * 2}p": ""}]
    assert escaped.tools == tools


def test_two_parts_written_side_by_side_make_no_special_text() -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "start|>"}]
    escaped = SpecialTextEscaper(["<|im_start|>"]).escape([user(parts)], None, None)
    written = "".join(part["text"] for part in escaped.messages[0]["content"])
    assert "<|im_start|>" not in written
    assert unescape(written, escaped.mark or "") == "<|im_start|>"


@pytest.mark.parametrize(
    ("content", "mark"),
    [
        ("<s>", "\ufdd0"),
        ("<s>\ufdd0", "\ufdd1"),
        ("<s>\ufdd1", "\ufdd0"),
        ("<s>\\ufdd0", "\ufdd1"),
        ("<s>" + "".join(map(chr, range(0xFDD0, 0xFDEF))), "\ufdef"),
    ],
)
def test_the_mark_is_a_noncharacter_that_the_input_does_not_hold(content: str, mark: str) -> None:
    escaped = SpecialTextEscaper(SPECIALS).escape([user(content)], None, None)
    assert escaped.mark == mark
    assert unescape(escaped.messages[0]["content"], mark) == content


def test_the_mark_is_not_in_the_assistants_words_either() -> None:
    messages = [user("<s>"), {"role": "assistant", "content": "\ufdd0"}]
    assert SpecialTextEscaper(SPECIALS).escape(messages, None, None).mark == "\ufdd1"


def test_an_input_that_holds_every_noncharacter_is_refused() -> None:
    every = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    assert SpecialTextEscaper(SPECIALS).escape([user(every)], None, None).mark is None
    with pytest.raises(BadRequest, match="U\\+FDD0"):
        SpecialTextEscaper(SPECIALS).escape([user("<s>" + every)], None, None)


@pytest.mark.parametrize("write", [repr, json.dumps, lambda value: json.dumps(value, ensure_ascii=False)])
def test_a_mark_is_removed_in_whatever_way_a_template_writes_it(write: Any) -> None:
    content = 'say "<s>" \\<|im_end|> \\'
    escaped = SpecialTextEscaper(SPECIALS).escape([user([content])], None, None)
    written = write(escaped.messages[0]["content"])
    assert not any(special in written for special in SPECIALS)
    assert unescape(written, escaped.mark or "") == write([content])


ALPHABET = "ab<|>\\\U0010ffff\ufdd0\ufdd1 "
texts = st.text(ALPHABET, max_size=12)


@given(st.lists(st.text("ab<|>\U0010ffff", min_size=1, max_size=4), max_size=6), texts)
def test_no_special_text_is_left_and_the_original_comes_back(specials: list[str], text: str) -> None:
    escaped = SpecialTextEscaper(specials).escape([user(text)], None, None)
    content = escaped.messages[0]["content"]
    assert not any(special in content for special in specials)
    assert (unescape(content, escaped.mark) if escaped.mark else content) == text


@given(
    st.lists(st.text("ab<|>", min_size=1, max_size=4), max_size=6), st.text("ab<|>", max_size=12), st.integers(0, 12)
)
def test_no_special_text_begins_in_escaped_text_and_ends_behind_it(specials: list[str], text: str, cut: int) -> None:
    escaped = SpecialTextEscaper(specials).escape([user(text[:cut])], None, None)
    first = escaped.messages[0]["content"]
    written = first + text[cut:]
    starts = [at for special in specials for at in range(len(written)) if written.startswith(special, at)]
    assert all(at >= len(first) for at in starts)


@given(st.lists(texts, max_size=4), st.lists(st.text("ab<|>", min_size=1, max_size=3), max_size=4))
def test_every_string_comes_back_at_any_depth(values: list[str], specials: list[str]) -> None:
    messages = [user([{"type": "text", "text": value, "more": {"x": [value]}} for value in values])]
    escaped = SpecialTextEscaper(specials).escape(messages, None, None)

    def restored(value: Any) -> Any:
        if isinstance(value, str):
            return unescape(value, escaped.mark) if escaped.mark else value
        if isinstance(value, list):
            return [restored(item) for item in value]
        return {restored(key): restored(item) for key, item in value.items()}

    assert [restored(message) for message in escaped.messages] == messages


def test_many_special_tokens_and_a_long_text_are_searched_as_one() -> None:
    specials = [f"<|reserved_{i}|>" for i in range(2000)]
    text = "<|reserved_ x <|reserved_77 |> " * 2000
    assert SpecialTextEscaper(specials).escape([user(text)], None, None).mark is None
