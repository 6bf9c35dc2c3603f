"""How a chat choice writes its reasoning and its calls, streamed and whole."""

import pytest

from proxy.derender.answer import Collected
from proxy.derender.chat import ChatForm
from proxy.derender.choice import Delta, ToolCallDelta
from proxy.protocol.generate import Outcome


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("reasoning", {"reasoning"}),
        ("reasoning_content", {"reasoning_content"}),
        ("both", {"reasoning", "reasoning_content"}),
    ],
)
def test_reasoning_stands_under_the_names_that_are_configured(field: str, names: set[str]) -> None:
    form = ChatForm(reasoning_field=field)
    delta = Delta("", (), reasoning="low tide")
    assert form.piece(0, delta)["delta"] == dict.fromkeys(names, "low tide")
    collected = Collected()
    collected.add(delta)
    message = form.whole(0, collected, Outcome())["message"]
    assert {key: message[key] for key in message if key.startswith("reasoning")} == dict.fromkeys(names, "low tide")


def test_a_call_says_its_name_once_and_content_is_null_beside_it() -> None:
    form, collected = ChatForm(), Collected()
    first = Delta("", (), tool_calls=[ToolCallDelta(0, "", "call_1", "now")])
    more = Delta("", (), tool_calls=[ToolCallDelta(0, "{}")])
    assert form.piece(0, first)["delta"]["tool_calls"] == [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "now", "arguments": ""}}
    ]
    assert form.piece(0, more)["delta"]["tool_calls"] == [{"index": 0, "function": {"arguments": "{}"}}]
    for delta in (first, more):
        collected.add(delta)
    message = form.whole(0, collected, Outcome())["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    ]
