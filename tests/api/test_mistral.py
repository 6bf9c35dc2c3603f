"""A model that comes with a tekken.json, through every route and from the configuration on."""

import sys
from pathlib import Path
from typing import Any

import pytest

from proxy import CannotStart
from proxy.app import built, check
from tests.api.talk import CHAT, COMPLETIONS, joined, only, talk
from tests.server import config
from tests.tokenizers import tekken_folder

ENGINE = "http://127.0.0.1:1"
BOS, EOS, INST, END_INST, CALLS = 1, 2, 3, 4, 9
USER = [{"role": "user", "content": "[INST]"}]


def ids(text: str) -> list[int]:
    """A byte per id."""
    return [30 + byte for byte in text.encode()]


async def test_a_chat_goes_to_the_engine_as_mistral_common_writes_it(tmp_path: Path) -> None:
    folder = tekken_folder(tmp_path, params={"max_seq_len": 4096}, generation_config={"temperature": 0.5})
    async with talk(folder, [*ids("ok"), EOS]) as t:
        answer = await t.chat(messages=USER)
        begin, opening, *text, closing = t.sent["token_ids"]
        assert (begin, opening, closing) == (BOS, INST, END_INST)
        assert INST not in text
        assert t.params == {"stop_token_ids": [EOS], "temperature": 0.5, "max_tokens": 4096 - len(text) - 3}
    choice = only(answer["choices"])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ok", "stop")


@pytest.mark.parametrize(("skip", "shown"), [(True, "a🕯 b"), (False, "[TOOL_CALLS]a🕯 b")])
async def test_a_character_that_is_spread_over_events_comes_whole(tmp_path: Path, skip: bool, shown: str) -> None:
    events = [CALLS, *([token_id] for token_id in ids("a🕯 b")), EOS]
    async with talk(tekken_folder(tmp_path, "v13"), *events) as t:
        chunks = await t.chat_chunks(skip_special_tokens=skip)
        whole = await t.chat(skip_special_tokens=skip)
    assert joined(chunks)[0]["text"] == only(whole["choices"])["message"]["content"] == shown
    assert not any("\ufffd" in choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def test_a_stop_string_ends_the_answer(tmp_path: Path) -> None:
    async with talk(tekken_folder(tmp_path), ids("one two"), ids(" three")) as t:
        choice = only((await t.chat(stop=" two"))["choices"])
    assert (choice["message"]["content"], choice["stop_reason"]) == ("one", " two")


async def test_log_probabilities_have_the_exact_bytes(tmp_path: Path) -> None:
    first, *_ = "🕯".encode()
    async with talk(tekken_folder(tmp_path), [30 + first, EOS]) as t:
        content = only((await t.chat(logprobs=True))["choices"])["logprobs"]["content"]
    assert content[0]["bytes"] == [first]


async def test_a_text_is_completed(tmp_path: Path) -> None:
    async with talk(tekken_folder(tmp_path), [*ids("ok"), EOS]) as t:
        answer = await t.complete(prompt="<s>lamp", echo=True)
        assert t.sent["token_ids"][0] == BOS
        assert BOS not in t.sent["token_ids"][1:]
    assert only(answer["choices"])["text"] == "<s>lampok"


async def test_texts_and_chats_are_tokenized_and_back(tmp_path: Path) -> None:
    async with talk(tekken_folder(tmp_path)) as t:
        plain = await t.ask("/tokenize", {"prompt": "xy", "return_token_strs": True})
        bare = await t.ask("/tokenize", {"prompt": "xy", "add_special_tokens": False})
        chat = await t.ask("/tokenize", {"messages": [{"role": "user", "content": "xy"}]})
        assert (plain["tokens"], plain["token_strs"]) == ([BOS, *ids("xy")], ["<s>", "x", "y"])
        assert bare["tokens"] == ids("xy")
        assert chat["tokens"] == [BOS, INST, *ids("xy"), END_INST]
        assert await t.ask("/detokenize", {"tokens": chat["tokens"]}) == {"prompt": "<s>[INST]xy[/INST]"}
        assert await t.ask("/detokenize", {"tokens": [30 + 0xF0]}) == {"prompt": "\ufffd"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * (9 << 20)}]}, None),
        (COMPLETIONS, {"prompt": " " * 1_000_000 + "x"}, None),
        ("/tokenize", {"messages": USER, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
    ],
)
async def test_what_cannot_be_is_a_400_with_its_place(
    tmp_path: Path, path: str, body: dict[str, Any], param: str | None
) -> None:
    async with talk(tekken_folder(tmp_path)) as t:
        assert (await t.refused(path, body))["param"] == param


async def test_check_says_who_renders_the_chats(tmp_path: Path) -> None:
    lines = await check(config(tekken_folder(tmp_path, "v13", params={"max_seq_len": 4096}), ENGINE))
    assert any(
        "4096 tokens of context, chats by mistral-common (tokenizer v13)" in line and "vocabulary of 3" in line
        for line in lines
    )


async def test_without_the_extra_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "proxy.render.mistral", raising=False)
    for module in [name for name in sys.modules if name.split(".")[0] == "mistral_common"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    with pytest.raises(CannotStart, match=r"pip install 'derender-proxy\[mistral\]'"):
        async with built(config(tekken_folder(tmp_path), ENGINE)):
            pass


@pytest.mark.parametrize(
    ("tekken", "model", "message"),
    [
        ("{", {}, "tekken.json cannot be loaded: Expecting property name"),
        ('{"config": {"version": "v0"}}', {}, "tekken.json cannot be loaded: Unknown version: v0"),
        (None, {"split_special_tokens": False}, "split_special_tokens: false: has no meaning"),
        (None, {"chat_template": "{{ 1 }}"}, "chat_template: has no meaning"),
    ],
)
async def test_what_cannot_be_served_is_said_at_the_start(
    tmp_path: Path, tekken: str | None, model: dict[str, Any], message: str
) -> None:
    folder = tekken_folder(tmp_path)
    if tekken is not None:
        (folder / "tekken.json").write_text(tekken)
    with pytest.raises(CannotStart) as failure:
        async with built(config(folder, ENGINE, **model)):
            pass
    assert message in str(failure.value)
