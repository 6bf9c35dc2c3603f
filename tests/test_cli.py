"""The command line, as a shell sees it: what it prints where, and how it ends."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy import __version__
from proxy.cli import main
from tests.tokenizers import model_folder

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "config"
DEMO = str(EXAMPLES / "demo.yaml")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m proxy` with these arguments, to its end."""
    command = [sys.executable, "-m", "proxy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False)


def ends(*arguments: str) -> str | int | None:
    """How the command ends in this process: a status, or the words on standard error of a status of 1."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code


@contextmanager
def started(*arguments: str, until: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`python -m proxy` with these arguments, once it has printed a line with `until`; and what it printed up to it."""
    command = [sys.executable, "-m", "proxy", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out = process.stdout if arguments[0] == "demo" else process.stderr
        assert out is not None
        said = ""
        try:
            while until not in said and (line := out.readline()):
                said += line
            assert until in said, said
            yield process, said
        finally:
            if process.poll() is None:
                process.kill()


# Help and versions


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), ["serve", "check", "demo", "engine", "--version"]),
        (("serve",), ["--config FILE", "--host HOST", "--port PORT", "SIGINT or SIGTERM"]),
        (("check",), ["--config FILE", "print what would run", "Exits with 1"]),
        (("demo",), ["--port PORT", "default: 8000", "default: 127.0.0.1", "Ctrl-C ends both", "[demo]"]),
        (("engine",), ["--until-stdin-closes", "/inference/v1/generate", "default: 8000"]),
    ],
)
def test_help(command: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(*command, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: {' '.join(['derender-proxy', *command])}")
    assert [word for word in words if word not in text] == []


def test_the_module_and_the_script_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("derender-proxy")
    expected = (0, f"derender-proxy {__version__}\n", "")
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == expected
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "required: COMMAND"),
        (("sreve",), "invalid choice: 'sreve'"),
        (("serve",), "required: --config"),
        (("check", "--config", DEMO, "--prot", "1"), "unrecognized arguments: --prot"),
        (("demo", "--port", "http"), "'http' is not a port; give a number from 0 to 65535"),
        (("demo", "--port", "65536"), "'65536' is not a port"),
        (("engine", "--port", "-1"), "'-1' is not a port"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_says_what_is_wrong(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("usage: derender-proxy")


# check


def test_check_prints_what_the_demo_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "--config", DEMO])
    listen, model, parsers, size, pool, engine = capsys.readouterr().out.splitlines()
    assert listen == "listen on http://127.0.0.1:8000"
    assert model == "model smollm2-135m-instruct: embedded, pool demo"
    assert parsers == "  tool calls: none, reasoning: none"
    assert "vocabulary of 49152" in size
    assert pool == "pool demo: least_requests"
    assert engine == "  vllm engine http://127.0.0.1:8200"


@pytest.mark.parametrize(
    ("options", "address"),
    [
        (["--port", "9001"], "http://127.0.0.1:9001"),
        (["--host", "0.0.0.0"], "http://0.0.0.0:8000"),
        (["--host", "::1", "--port", "0"], "http://[::1]:0"),
    ],
)
def test_the_command_line_overrides_where_to_listen(
    options: list[str], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", "--config", DEMO, *options])
    assert capsys.readouterr().out.startswith(f"listen on {address}\n")


def test_check_of_the_sidecar_takes_its_model_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL", str(model_folder(tmp_path / "tiny")))
    monkeypatch.setenv("MAX_MODEL_LEN", "512")
    main(["check", "--config", str(EXAMPLES / "sidecar.yaml")])
    out = capsys.readouterr().out
    assert f"model tiny: {tmp_path / 'tiny'}, pool engine\n" in out
    assert "512 tokens of context" in out


def test_check_of_the_pool_reads_the_key_file_and_says_when_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("Qwen3-8B", "Llama-3.3-70B-Instruct"):
        model_folder(tmp_path / name)
    monkeypatch.setenv("MODELS", str(tmp_path))
    monkeypatch.setenv("BIG_ENGINE_KEY", "secret-1")
    config = tmp_path / "pool.yaml"
    config.write_text((EXAMPLES / "pool.yaml").read_text("utf-8").replace("/run/secrets", str(tmp_path)), "utf-8")

    assert "gpu-b-key" in str(ends("check", "--config", str(config)))

    (tmp_path / "gpu-b-key").write_text("secret-2\n", "utf-8")
    main(["check", "--config", str(config)])
    out = capsys.readouterr().out
    assert "model qwen3-8b (also default, gpt-4o-mini)" in out
    assert "  vllm engine https://gpu-b.example.com/engine" in out
    assert "secret" not in out.replace(str(tmp_path), "")


def test_check_takes_a_hub_model_from_the_cache_and_says_when_it_is_not_there(tmp_path: Path) -> None:
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = run("check", "--config", str(EXAMPLES / "one-engine.yaml"), **offline)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Qwen/Qwen3-8B" in done.stderr
    assert "Traceback" not in done.stderr

    cached = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    model_folder(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc", "utf-8")
    done = run("check", "--config", str(EXAMPLES / "one-engine.yaml"), **offline)
    assert (done.returncode, "model qwen3-8b: Qwen/Qwen3-8B, pool gpu" in done.stdout) == (0, True), done.stderr


WORKING = """\
models:
  - model: {folder}
pools:
  cpu:
    engines: [http://127.0.0.1:8200]
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("pools:", "pool:"), r"(?s)c\.yaml:1: pools: missing.*c\.yaml:3: pool: unknown key"),
        (("engines:", "engine:"), r"c\.yaml:5: pools\.cpu\.engine: .*engines"),
        (("models:", "models: ["), r"c\.yaml:\d+: "),
        (("http://127.0.0.1:8200", "127.0.0.1:8200"), r"c\.yaml:5: .*http or https URL"),
        (("{folder}", "${{NO_SUCH_NAME}}"), r"c\.yaml:2: models\[0\]\.model: .*NO_SUCH_NAME"),
        (("{folder}", "{folder}/nowhere"), r"nowhere"),
        (("{folder}", "{folder}\n    chat_template: '{{%'"), r"chat template 'default', line 1"),
        (("{folder}", "{folder}\n    max_model_len: 0"), r"c\.yaml:3: models\[0\]\.max_model_len: .*greater than 0"),
    ],
)
def test_check_says_what_is_broken_and_ends_with_1(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    config = tmp_path / "c.yaml"
    text = WORKING.replace(*change).format(folder=model_folder(tmp_path / "tiny"))
    config.write_text(text, encoding="utf-8")
    assert re.search(words, str(ends("check", "--config", str(config))))


def test_check_of_a_broken_tokenizer_names_the_file_and_its_line(tmp_path: Path) -> None:
    (model_folder(tmp_path / "tiny") / "tokenizer.json").write_text('{\n  "version": \n}', encoding="utf-8")
    config = tmp_path / "c.yaml"
    config.write_text(WORKING.format(folder=tmp_path / "tiny"), encoding="utf-8")
    assert "tokenizer.json" in str(ends("check", "--config", str(config)))


def test_a_reason_goes_to_standard_error_with_status_1_and_no_traceback(tmp_path: Path) -> None:
    done = run("check", "--config", str(tmp_path / "nowhere.yaml"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "nowhere.yaml" in done.stderr
    assert "Traceback" not in done.stderr


# serve


def test_serve_names_the_port_that_it_took_and_ends_with_0(tmp_path: Path) -> None:
    with started("serve", "--config", DEMO, "--port", "0", until=" on http://") as (process, said):
        url = urlsplit(said.split()[-1])
        assert (url.hostname, url.port) != ("127.0.0.1", 0)
        connection = HTTPConnection("127.0.0.1", url.port or 0, timeout=30)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert (process.returncode, "Traceback" in stderr) == (0, False)


@pytest.mark.parametrize("command", [("serve", "--config", DEMO), ("engine",), ("demo",)])
def test_a_taken_port_is_named_with_what_to_do_and_ends_with_1(command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(*command, "--port", str(port))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(rf"cannot listen on \S*127\.0\.0\.1:{port}: .*address already in use", done.stderr, re.IGNORECASE)
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


# demo


def test_what_the_demo_prints_works_as_it_is_and_ctrl_c_ends_both_processes() -> None:
    with started("demo", "--port", "0", until="Ctrl-C ends both.") as (process, said):
        [curl] = re.findall(r"^curl .*?(?=\n\n)", said, re.MULTILINE | re.DOTALL)
        [program] = re.findall(r"^from openai.*?(?=\n\nCtrl-C)", said, re.MULTILINE | re.DOTALL)
        engine = children(process.pid)

        events = answer_to(curl).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
        assert "".join(delta.get("content", "") for delta in deltas).strip()

        snippet = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
        )
        assert snippet.stdout.strip()

        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in stderr) == (0, False)
    for pid in engine:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def children(pid: int) -> list[int]:
    """The processes that it has started, where there is a way to know."""
    if shutil.which("pgrep") is None:
        return []
    return [int(line) for line in subprocess.check_output(["pgrep", "-P", str(pid)], text=True).split()]


def answer_to(curl: str) -> str:
    """What the command prints; without curl, the same request is sent by hand."""
    if shutil.which("curl"):
        return subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=120, check=True).stdout
    words = shlex.split(curl)
    url = urlsplit(next(word for word in words if word.startswith("http")))
    header, value = words[words.index("-H") + 1].split(": ")
    connection = HTTPConnection(url.hostname or "", url.port or 0, timeout=120)
    connection.request("POST", url.path, words[words.index("-d") + 1], {header: value})
    return connection.getresponse().read().decode()
