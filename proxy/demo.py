"""The demo: a real model on this machine's CPU behind the proxy, with nothing to configure.

The embedded engine is a child process that ends with its standard input, so it cannot outlive this process however that
dies; it is in a session of its own, so that Ctrl-C reaches the proxy alone, which drains before the engine goes.
The proxy is served in this process. An engine that dies takes the demo with it.
"""

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import IO, Any, Final, NoReturn

from proxy import CannotStart
from proxy.app import serve
from proxy.config import Config
from proxy.embedded import MODEL_NAME, model_path
from proxy.embedded.llama import CONTEXT
from proxy.embedded.server import listen

_LOADING: Final = 60.0  # seconds until an engine that does not answer is given up
_POLL: Final = 0.1
_LEAVING: Final = 10.0
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_NO_REPLY: Final = (OSError, http.client.HTTPException)


def demo_config(host: str, port: int, engine_url: str) -> dict[str, Any]:
    """The configuration that the demo serves, as the configuration file would say it."""
    return {
        "server": {"host": host, "port": port},
        "models": [
            {"served_model_name": MODEL_NAME, "model": "embedded", "max_model_len": CONTEXT, "pool": "demo"},
        ],
        "pools": {"demo": {"engines": [{"url": engine_url}]}},
    }


def run_demo(host: str, port: int) -> None:
    """Run the demo until SIGINT or SIGTERM. Raises `CannotStart`, also when the engine dies later."""
    signal.signal(signal.SIGTERM, _leave)  # until the proxy serves and has its own way of stopping
    model_path()
    port = _free_port(host, port)
    engine_port = _free_port("127.0.0.1", 0)
    command = [sys.executable, "-m", "proxy", "engine", "--host", "127.0.0.1", "--port", str(engine_port)]
    engine = EngineProcess([*command, "--until-stdin-closes"])
    try:
        _wait_until_healthy(engine, engine_port, Progress(f"loading {MODEL_NAME} on the CPU", sys.stdout))
        engine.when_it_dies(lambda: os.kill(os.getpid(), signal.SIGTERM))
        config = Config.model_validate(demo_config(host, port, f"http://127.0.0.1:{engine_port}"))
        serve(config, on_ready=lambda: print(invitation(host, port), flush=True))
    finally:
        if engine.died:
            raise CannotStart(engine.last_words())
        engine.stop()


class EngineProcess:
    """The engine as a child process that ends, at the latest, when this one does."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._stopping = False
        self._stderr: deque[str] = deque(maxlen=20)
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._stderr.extend, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def died(self) -> bool:
        """Whether it ended without being told to."""
        return not self._stopping and self._process.poll() is not None

    def when_it_dies(self, act: Callable[[], None]) -> None:
        """Call `act`, in a thread, once it ends without being told to."""

        def watch() -> None:
            self._process.wait()
            if not self._stopping:
                act()

        threading.Thread(target=watch, daemon=True).start()

    def last_words(self) -> str:
        """How it ended, with the last lines of its standard error."""
        code = self._process.wait()
        self._reader.join(timeout=1.0)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = "".join(f"\n  {line.rstrip()}" for line in self._stderr)
        return f"the embedded engine ended by itself ({how})" + (f"; its last lines:{lines}" if lines else "")

    def stop(self) -> None:
        """End it: ask by closing its standard input, then by signals."""
        self._stopping = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        for insist in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(_LEAVING)
                return
            except subprocess.TimeoutExpired:
                insist()
        self._process.wait()


class Progress:
    """One step shown with its elapsed time: redrawn on a terminal, two plain lines elsewhere."""

    def __init__(self, step: str, out: IO[str]) -> None:
        self._step = step
        self._out = out
        self._redraw = out.isatty()
        self._started = time.monotonic()
        self._frame = 0
        if not self._redraw:
            print(f"{step} ...", file=out, flush=True)

    def tick(self) -> None:
        if self._redraw:
            self._frame += 1
            frame = _FRAMES[self._frame % len(_FRAMES)]
            print(f"\r{frame} {self._step} ... {self._elapsed} ", end="", file=self._out, flush=True)

    def done(self) -> None:
        lead = "\r✓ " if self._redraw else ""
        print(f"{lead}{self._step}: ready after {self._elapsed}", file=self._out, flush=True)

    def failed(self) -> None:
        if self._redraw:
            print(file=self._out, flush=True)

    @property
    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started:.1f} s"


def _wait_until_healthy(engine: EngineProcess, port: int, progress: Progress) -> None:
    deadline = time.monotonic() + _LOADING
    try:
        while not _is_healthy(port):
            if engine.died:
                raise CannotStart(engine.last_words())
            if time.monotonic() > deadline:
                raise CannotStart(
                    f"the embedded engine did not answer within {_LOADING:.0f} s; is the machine very busy?"
                )
            progress.tick()
            time.sleep(_POLL)
    except BaseException:
        progress.failed()
        raise
    progress.done()


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_POLL)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except _NO_REPLY:
        return False
    finally:
        connection.close()


def _free_port(host: str, port: int) -> int:
    """The port itself if it is free, for 0 any that is. Raises `CannotStart`."""
    with listen(host, port) as listener:
        free: int = listener.getsockname()[1]
        return free


def invitation(host: str, port: int) -> str:
    """What to try, as it can be pasted into a shell."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    base_url = f"http://{shown}:{port}/v1"
    return f"""
{MODEL_NAME} is served at {base_url}

Try it with curl:

curl -N {base_url}/chat/completions -H 'content-type: application/json' \\
  -d '{{"model": "{MODEL_NAME}", "stream": true, "max_tokens": 200,
       "messages": [{{"role": "user", "content": "What is a proxy?"}}]}}'

or with the OpenAI SDK (pip install openai):

from openai import OpenAI

client = OpenAI(base_url="{base_url}", api_key="none")
stream = client.chat.completions.create(
    model="{MODEL_NAME}",
    messages=[{{"role": "user", "content": "What is a proxy?"}}],
    max_tokens=200,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)

Ctrl-C ends both.
"""


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
