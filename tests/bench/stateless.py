#!/usr/bin/env python3
"""What the stateless streaming road costs: one answer, one token per call, with parsers configured.

    python -m tests.bench.stateless                      # answers of 1,000 and of 4,000 tokens
    python -m tests.bench.stateless --tokens 1000 --prompt 2000

Prints the total time, the bytes both ways, and the latency of single calls, and exits with 1 where the calls of the
last tenth of an answer are slower than those of the first by more than half: the cost must not grow with the answer.
No engine is needed, for none is asked.
"""

import argparse
import http.client
import itertools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tokenizers import byte_level, model_folder

TEXT = "The harbour lamp turns twice a minute, and the keeper counts each turn aloud. "
TOOL = {
    "type": "function",
    "function": {
        "name": "log_entry",
        "description": "Write a line into the harbour log.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
SHOWN = (10, 500, 1000, 4000)
MOST_GROWTH = 1.5


class Server:
    """A proxy with the parsers hermes and qwen3, and a connection to it that stays open."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        model = {"served_model_name": "m", "model": str(model_folder(folder)), "pool": "none", "max_model_len": 32768}
        model |= {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_auto_tool_choice": True}
        config = {
            "server": {"host": "127.0.0.1", "port": port, "log_level": "warning"},
            "models": [model],
            "pools": {"none": {"engines": [{"url": "http://127.0.0.1:9"}]}},
        }
        (folder / "proxy.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-m", "proxy", "serve", "--config", str(folder / "proxy.yaml")]
        self._process = subprocess.Popen(command)
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def __enter__(self) -> "Server":
        for _ in range(300):
            if self._process.poll() is not None:
                sys.exit("the proxy ended at start")
            try:
                self._connection.request("GET", "/health")
                self._connection.getresponse().read()
                return self
            except OSError:
                self._connection.close()
                time.sleep(0.1)
        sys.exit("the proxy did not become healthy")

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait(10)

    def post(self, body: bytes) -> bytes:
        self._connection.request("POST", "/v1/chat/completions/derender", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        data = response.read()
        if response.status != 200:
            sys.exit(f"HTTP {response.status}: {data.decode()}")
        return data


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_level().encode(text, add_special_tokens=False).ids
    return ids


def answer_ids(tokens: int) -> list[int]:
    """A thought, then text, of so many tokens."""
    thought = ids_of(f"<think>{TEXT}</think>")
    return [*thought, *itertools.islice(itertools.cycle(ids_of(TEXT)), tokens - len(thought))]


def measure(server: Server, tokens: int, prompt: int) -> tuple[list[float], int, int, int]:
    """Seconds per call, bytes sent and received, and the largest state in bytes."""
    prompt_ids = list(itertools.islice(itertools.cycle(ids_of(TEXT)), prompt))
    request = {"messages": [{"role": "user", "content": "Log it."}], "tools": [TOOL], "stream": True}
    common = {"model": "m", "stream": True, "chat_request": request, "prompt_tokens": prompt}
    state: Any = None
    seconds, sent, received, largest, text = [], 0, 0, 0, ""
    ids = answer_ids(tokens)
    for number, token_id in enumerate(ids, 1):
        choice = {"index": 0, "token_ids": [token_id], "finish_reason": "length" if number == len(ids) else None}
        body = {**common, "generate_chunk": {"request_id": "r", "choices": [choice]}, "stream_state": state}
        if state is None:
            body["prompt_token_ids"] = prompt_ids
        data = json.dumps(body).encode()
        began = time.perf_counter()
        answer = server.post(data)
        seconds.append(time.perf_counter() - began)
        sent += len(data)
        received += len(answer)
        made = json.loads(answer)
        state = made["stream_state"]
        largest = max(largest, len(json.dumps(state)))
        text += made["chunk"]["choices"][0]["delta"].get("content") or ""
    if TEXT not in text or "<think>" in text:
        sys.exit(f"the answer was not read as it should be: {text:.200}")
    return seconds, sent, received, largest


def report(tokens: int, seconds: Sequence[float], sent: int, received: int, largest: int) -> bool:
    """Prints a line, and returns whether the cost stayed what it was."""
    tenth = len(seconds) // 10
    first, last = statistics.median(seconds[1 : tenth + 1]), statistics.median(seconds[-tenth:])
    calls = ", ".join(
        f"call {n} {statistics.median(seconds[n - 5 : n]) * 1e3:.2f} ms" for n in SHOWN if n <= len(seconds)
    )
    print(
        f"{tokens} tokens: {sum(seconds):.2f} s; {sent / 1e6:.2f} MB sent, {received / 1e6:.2f} MB received; {calls}; "
        f"largest state {largest} bytes; last tenth / first tenth {last / first:.2f}"
    )
    return last <= first * MOST_GROWTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, action="append", help="length of an answer; default 1000 and 4000")
    parser.add_argument("--prompt", type=int, default=2000, help="length of the prompt in tokens")
    options = parser.parse_args()
    steady = True
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        measure(server, 100, options.prompt)
        for tokens in options.tokens or [1000, 4000]:
            steady &= report(tokens, *measure(server, tokens, options.prompt))
    sys.exit(0 if steady else 1)


if __name__ == "__main__":
    main()
