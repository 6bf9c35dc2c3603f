"""How `/v1/chat/completions` writes its choices, streamed and whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.derender.answer import Collected
from proxy.derender.choice import Delta, ToolCallDelta
from proxy.derender.logprobs import LogprobWriter
from proxy.protocol.generate import JsonObject, Outcome


@dataclass(frozen=True, slots=True)
class ChatForm:
    """`echo` is the text of the message that the answer continues, repeated before it where the request asked for it.

    `prompt_token_ids` is given where the request set `return_token_ids`."""

    role: str = "assistant"
    echo: str = ""
    logprobs: LogprobWriter | None = None
    prompt_token_ids: Sequence[int] | None = None
    prompt_logprobs: LogprobWriter | None = None
    reasoning_field: str = "reasoning"

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self, index: int) -> list[JsonObject]:
        choices = [_choice(index, {"role": self.role, "content": ""})]
        if self.echo:
            choices.append(_choice(index, {"content": self.echo}))
        return choices

    def piece(self, index: int, delta: Delta) -> JsonObject:
        fields: JsonObject = {}
        if delta.reasoning:
            fields |= self._reasoning(delta.reasoning)
        if delta.content or not (delta.reasoning or delta.tool_calls):
            fields["content"] = delta.content
        if delta.tool_calls:
            fields["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        choice = _choice(index, fields)
        if self.logprobs is not None and delta.logprobs is not None:
            choice["logprobs"] = self.logprobs.chat(delta.logprobs)
        if self.prompt_token_ids is not None:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _reasoning(self, text: str | None) -> JsonObject:
        names = ("reasoning", "reasoning_content") if self.reasoning_field == "both" else (self.reasoning_field,)
        return dict.fromkeys(names, text)

    def closing(self, index: int, delta: Delta) -> JsonObject:
        return _choice(index, {}, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)

    def whole(self, index: int, collected: Collected, outcome: Outcome) -> JsonObject:
        content = self.echo + "".join(collected.content)
        message: JsonObject = {
            "role": self.role,
            "content": content if content or not collected.tool_calls else None,
            "refusal": None,
            **self._reasoning("".join(collected.reasoning) or None),
        }
        if collected.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": "".join(c.arguments)}}
                for c in collected.tool_calls
            ]
        choice: JsonObject = {
            "index": index,
            "message": message,
            "logprobs": self.logprobs.chat(collected.logprobs) if self.logprobs is not None else None,
            "finish_reason": collected.finish_reason,
            "stop_reason": collected.stop_reason,
        }
        if self.prompt_token_ids is not None:
            choice["token_ids"] = collected.token_ids
        return choice

    def top(self, outcomes: Sequence[Outcome] | None) -> JsonObject:
        fields: JsonObject = {}
        if self.prompt_token_ids is not None:
            fields["prompt_token_ids"] = list(self.prompt_token_ids)
        if outcomes is not None:
            (outcome,) = outcomes
            if self.prompt_logprobs is not None:
                fields["prompt_logprobs"] = self.prompt_logprobs.prompt(outcome.prompt_logprobs or [])
            if outcome.kv_transfer_params is not None:
                fields["kv_transfer_params"] = outcome.kv_transfer_params
        return fields


def _choice(index: int, delta: JsonObject, **finish: Any) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **finish}


def _call_delta(call: ToolCallDelta) -> JsonObject:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
