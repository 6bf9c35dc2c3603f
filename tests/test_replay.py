"""Looking at how an output is read: the command, and the files that a server keeps for it."""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import main
from proxy.protocol.generate import TokenDelta
from proxy.record import Record
from proxy.recorder import FileRecorder
from tests.api.talk import END, HELLO, ids_of, speaks
from tests.engines.scripted import Exchange, scripted
from tests.server import proxy
from tests.tokenizers import model_folder

CALL = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}\n</tool_call>'
OUTPUT = f"<think>\nLook.\n</think>\n\nHere:{CALL}"
TIDE = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_auto_tool_choice": True}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration file with one model, `m`."""
    model = {"served_model_name": "m", "model": str(model_folder(tmp_path / "model")), "pool": "p", **PARSERS}
    path = tmp_path / "proxy.yaml"
    path.write_text(json.dumps({"models": [model], "pools": {"p": {"engines": ["http://127.0.0.1:1"]}}}))
    return path


def replay(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    main(["replay", *map(str, arguments)])
    return capsys.readouterr().out.splitlines()


def refused(*arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as end:
        main(["replay", *map(str, arguments)])
    return str(end.value.code)


def message(lines: list[str]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(lines[-1])["message"]
    return said


def written(tmp_path: Path, text: str, name: str = "output.txt") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_shows_each_token_the_state_and_what_it_adds(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = replay(capsys, "--config", config, written(tmp_path, OUTPUT))
    assert lines[:2] == ["choice 0", "id       text                   state      delta"]
    rows = lines[2 : lines.index("")]
    assert len(rows) == len(ids_of(OUTPUT))
    assert [row.split()[0] for row in rows] == [str(token_id) for token_id in ids_of(OUTPUT)]
    assert any("reasoning  reasoning" in row for row in rows)
    assert any('call       tool_calls [{"index": 0, "name": "tide", "arguments": ""}]' in row for row in rows)
    assert 'reasoning: "\\nLook.\\n"' in lines
    assert 'finish_reason: "tool_calls"' in lines
    assert lines[-1].startswith("tool call call_")
    assert lines[-1].endswith(': tide {"port": "Brest"}')


def test_json_has_an_object_per_token_and_one_with_the_message(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = replay(capsys, "--config", config, "--json", written(tmp_path, OUTPUT))
    tokens = [json.loads(line) for line in lines[:-1]]
    assert [token["id"] for token in tokens] == ids_of(OUTPUT)
    assert "".join(token["text"] for token in tokens) == OUTPUT
    assert {token["state"] for token in tokens} == {"reasoning", "content", "call"}
    assert message(lines)["content"] == "\n\nHere:"
    assert [(call["name"], call["arguments"]) for call in message(lines)["tool_calls"]] == [
        ("tide", '{"port": "Brest"}')
    ]


def test_token_ids_are_taken_as_they_are(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = replay(capsys, "--config", config, "--json", written(tmp_path, json.dumps(ids_of("</think>Hi"))))
    assert (message(lines)["reasoning"], message(lines)["content"]) == (None, "Hi")


def test_standard_input_is_read_where_no_file_is_named(config: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "replay", "--config", str(config), "--json"],
        input="</think>Hi",
        capture_output=True,
        text=True,
        check=True,
    )
    assert message(done.stdout.splitlines())["content"] == "Hi"


def test_the_prompt_says_where_the_answer_begins(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = written(tmp_path, "Hi")
    inside = message(replay(capsys, "--config", config, "--json", output))
    outside = message(replay(capsys, "--config", config, "--json", "--prompt", "<think></think>", output))
    assert (inside["reasoning"], inside["content"]) == ("Hi", None)
    assert (outside["reasoning"], outside["content"]) == (None, "Hi")


def test_the_choice_of_tools_decides_what_is_a_call(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, tools = written(tmp_path, f"</think>{CALL}"), written(tmp_path, json.dumps([TIDE]), "tools.json")
    arguments = ("--config", config, "--json", "--tools", tools, "--tool-choice")
    assert message(replay(capsys, *arguments, "none", output))["content"] == CALL
    assert message(replay(capsys, *arguments, "tide", output))["finish_reason"] == "stop"
    assert message(replay(capsys, *arguments, "auto", output))["finish_reason"] == "tool_calls"


def test_an_output_that_was_cut_is_read_as_such(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = written(tmp_path, '</think><tool_call>\n{"name": "ti')
    lines = replay(capsys, "--config", config, "--json", "--finish-reason", "length", output)
    assert message(lines) == {"reasoning": None, "content": None, "tool_calls": [], "finish_reason": "length"}


def test_a_model_needs_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = replay(capsys, "--model", model_folder(tmp_path / "model"), "--json", written(tmp_path, "Hi"))
    assert message(lines)["content"] == "Hi"


def test_what_cannot_be_replayed_is_refused_with_the_reason(config: Path, tmp_path: Path) -> None:
    output = written(tmp_path, "Hi")
    assert refused(output) == "replay needs --config, or --model with a directory or a Hub id"
    assert refused("--config", config, "--model", "n", output) == "there is no model 'n'; the file has m"
    assert "nowhere.txt cannot be read" in refused("--config", config, tmp_path / "nowhere.txt")
    assert "token id 999999 is beyond the vocabulary" in refused("--config", config, written(tmp_path, "[999999]"))
    assert "integers from 0 on" in refused("--config", config, written(tmp_path, "[-1]"))
    assert "it is a record of version 9" in refused("--config", config, written(tmp_path, '{"record": 9}'))
    assert "it is not as a record is written" in refused("--config", config, written(tmp_path, '{"record": 1}'))
    choice = refused("--config", config, "--tool-choice", "tide", written(tmp_path, "Hi"))
    assert "tool_choice names the function 'tide', which is not in tools" in choice
    broken = written(tmp_path, "{", "tools.json")
    assert "this cannot be replayed" in refused("--config", config, "--tools", broken, written(tmp_path, "Hi"))


# What a server keeps


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted(directory.glob("*.json"))]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_chat_is_kept_and_read_again(
    stream: bool, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    async with (
        scripted(speaks("</think>", "Here:", CALL, END)) as engine,
        proxy(tmp_path / "model", engine.url, server={"record_dir": str(kept)}, **PARSERS) as client,
    ):
        choice = {"type": "function", "function": {"name": "tide"}}
        body = {"messages": HELLO, "tools": [TIDE], "tool_choice": choice, "n": 2, "stream": stream}
        async with client.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
            await response.read()
    (record,) = records(kept)
    assert record["model"] == "m"
    assert (record["request"]["tools"], record["request"]["tool_choice"]) == ([TIDE], choice)
    assert "messages" not in record["request"]
    assert [event["index"] for event in record["events"]].count(1) == 4, "in the engine's own pieces"
    lines = await asyncio.to_thread(replay, capsys, "--config", config, "--json", next(kept.glob("*.json")))
    messages = [said for line in lines if (said := json.loads(line).get("message"))]
    assert [(m["content"], m["tool_calls"][0]["arguments"]) for m in messages] == 2 * [("Here:", '{"port": "Brest"}')]


async def test_of_the_prompt_only_what_the_template_wrote_is_kept(config: Path, tmp_path: Path) -> None:
    bodies = {}
    for prompts in (False, True):
        kept = tmp_path / f"kept-{prompts}"
        async with (
            scripted(speaks("</think>Hi", END)) as engine,
            proxy(
                tmp_path / "model",
                engine.url,
                server={"record_dir": str(kept), "record_prompts": prompts},
                **PARSERS,
            ) as client,
        ):
            question = [{"role": "user", "content": "Where is the tide table?"}]
            async with client.post("/v1/chat/completions", json={"messages": question}) as response:
                await response.read()
            sent = engine.exchanges[-1].body["token_ids"]
        (record,) = records(kept)
        bodies[prompts] = record["prompt_token_ids"]
    assert bodies[True] == sent
    assert bodies[False] == sent[-len(bodies[False]) :]
    assert 0 < len(bodies[False]) <= len(ids_of("assistant\n")) + 2


async def test_what_came_before_an_engine_broke_off_is_kept(config: Path, tmp_path: Path) -> None:
    async def breaks_off(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event({"index": 0, "token_ids": ids_of("half"), "finish_reason": None, "stop_reason": None})

    kept = tmp_path / "kept"
    async with (
        scripted(breaks_off) as engine,
        proxy(tmp_path / "model", engine.url, server={"record_dir": str(kept)}, **PARSERS) as client,
        client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True}) as response,
    ):
        assert "error" in (await response.text())
    (record,) = records(kept)
    assert [event["token_ids"] for event in record["events"]] == [ids_of("half")]


async def test_a_disk_that_cannot_be_written_is_a_warning_and_no_failed_request(
    config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = written(tmp_path, "", "taken")
    with caplog.at_level(logging.WARNING, "proxy"):
        async with (
            scripted(speaks("Hi", END)) as engine,
            proxy(tmp_path / "model", engine.url, server={"record_dir": str(taken)}, **PARSERS) as client,
            client.post("/v1/chat/completions", json={"messages": HELLO}) as response,
        ):
            assert response.status == 200
    assert "record_dir: the record of chatcmpl-" in caplog.text


def record_of(request_id: str) -> Record:
    return Record(request_id, "m", {}, [], True, [TokenDelta(0, [1, 2], None, "stop", None)])


def test_only_the_last_records_are_kept(tmp_path: Path) -> None:
    recorder = FileRecorder(str(tmp_path / "kept"), 3, with_prompts=False)
    for number in range(10):
        recorder.keep(record_of(f"r{number}"))
    recorder.close()
    assert [record["id"] for record in records(tmp_path / "kept")] == ["r7", "r8", "r9"]
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_an_id_that_a_client_chose_names_no_other_place(tmp_path: Path) -> None:
    recorder = FileRecorder(str(tmp_path / "kept"), 3, with_prompts=False)
    recorder.keep(record_of("../../etc/passwd\x00" + "x" * 500))
    recorder.close()
    (path,) = (tmp_path / "kept").iterdir()
    assert path.name.endswith("-______etc_passwd_" + "x" * 63 + ".json")
    assert {entry.name for entry in tmp_path.iterdir()} == {"kept"}


def test_a_record_is_read_as_it_was_written() -> None:
    record = record_of("r")
    assert Record.load(json.loads(record.dump())) == record
