"""What a client of the single stages does by hand: render, generate, derender, with the states that it carries."""

from typing import Any

from tests.api.talk import CHAT, COMPLETIONS, Json, Talk

RENDER, DERENDER = f"{CHAT}/render", f"{CHAT}/derender"
RENDER_COMPLETION, DERENDER_COMPLETION = f"{COMPLETIONS}/render", f"{COMPLETIONS}/derender"
GENERATE = "/inference/v1/generate"


def said(*token_ids: int, finish: str | None = None, **more: Any) -> Json:
    """What an engine says of a choice."""
    return {"index": 0, "token_ids": list(token_ids), "finish_reason": finish, **more}


def whole(*choices: Json, **more: Any) -> Json:
    return {"request_id": "generate-tokens-1", "choices": list(choices), **more}


def step(*choices: Json, state: Any = None, usage: Any = None, **more: Any) -> Json:
    """The body of one call of the streaming road."""
    chunk = {"request_id": "generate-tokens-1", "choices": list(choices), "usage": usage}
    return {"stream": True, "generate_chunk": chunk, "stream_state": state, **more}


async def derendered(t: Talk, path: str, events: list[Json], first: Json, **common: Any) -> list[Json]:
    """The chunks that the events of a generate stream make, one call each, with a state per choice. What only the first
    call of each choice needs is in `first`."""
    states: dict[int, Any] = {}
    chunks = []
    for event in events:
        index = event["choices"][0]["index"] if event["choices"] else 0
        body = {"stream": True, "generate_chunk": event, "stream_state": states.get(index), **common}
        answer = await t.ask(path, body if index in states else {**body, **first})
        assert answer.keys() == {"chunk", "stream_state"}
        states[index] = answer["stream_state"]
        chunks.append(answer["chunk"])
    return chunks
