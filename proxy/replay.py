"""Reads a token stream again and shows how each token is read: how a parser fault is looked at, and reported.

It is the pipeline's own context and the same `ChoiceStream`; here is only what comes in and how it is shown.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import orjson

from proxy import CannotStart, pipeline
from proxy.derender.answer import Collected
from proxy.derender.choice import ChoiceContext, ChoiceStream, Delta
from proxy.derender.output_format import ToolUse
from proxy.models import ServedModel
from proxy.protocol.errors import ApiError
from proxy.protocol.generate import JsonObject, TokenDelta
from proxy.record import Record, read_request, token_ids

WIDTHS = (8, 22, 10)
"""Of the columns id, text and state of the table, in characters; the last column has the rest of the line."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says of the request; a record says it itself. `prompt` is text or a JSON list of ids."""

    tools: str | None = None
    tool_choice: str | None = None
    prompt: str | None = None
    finish_reason: str = "stop"


def replay(model: ServedModel, text: str, options: Options, *, as_json: bool) -> Iterator[str]:
    """The lines to print, for an output given as text, as a JSON list of token ids, or as a record. Raises
    `CannotStart`."""
    try:
        record = _record(model, text, options)
        context = _context(model, record)
    except (ValueError, ApiError) as error:
        raise CannotStart(f"this cannot be replayed: {error}") from error
    vocabulary = model.tokenizer.vocabulary
    for event in record.events:
        if unknown := [token_id for token_id in event.token_ids if token_id >= vocabulary.size]:
            raise CannotStart(f"token id {unknown[0]} is beyond the vocabulary of {vocabulary.size}")
    for index in sorted({event.index for event in record.events}):
        events = [event for event in record.events if event.index == index]
        if not as_json:
            yield from _heading(index)
        yield from _choice(model, context, f"{record.id}/{index}", events, as_json=as_json)


def _record(model: ServedModel, text: str, options: Options) -> Record:
    try:
        body = json.loads(text)
    except ValueError:  # it is what a model wrote
        body = None
    if isinstance(body, dict) and "record" in body:
        return Record.load(body)
    is_ids = isinstance(body, list) and bool(body) and all(type(item) is int for item in body)
    ids = token_ids(body) if is_ids else model.tokenizer.prompt.encode(text, add_special_tokens=False)
    words: JsonObject = {}
    if options.tools is not None:
        words["tools"] = json.loads(options.tools)
    if options.tool_choice is not None:
        named = {"type": "function", "function": {"name": options.tool_choice}}
        words["tool_choice"] = options.tool_choice if options.tool_choice in ("none", "auto", "required") else named
    prompt: list[int] = []
    if options.prompt is not None:
        prompt = _ids_of(model, options.prompt)
    event = TokenDelta(0, ids, None, options.finish_reason, None)
    return Record("replay", model.name, words, prompt, None, [event])


def _ids_of(model: ServedModel, text: str) -> list[int]:
    try:
        return token_ids(json.loads(text))
    except ValueError:
        return model.tokenizer.prompt.encode(text, add_special_tokens=False)


def _context(model: ServedModel, record: Record) -> ChoiceContext:
    """Of an output that came alone, calls are read also where no tools were given: they are what one asks for."""
    request = read_request(record.request)
    request.check()
    context = pipeline.choice_context(replace(model, enable_auto_tool_choice=True), request, record.prompt_token_ids)
    if context.markup is None or model.output_format is None:
        return context
    if record.inside is not None:
        return replace(context, markup=replace(context.markup, inside=record.inside))
    if request.tools:
        return context
    variables = pipeline.template_variables(model, request)
    return replace(context, markup=model.output_format.plan(ToolUse(asked=True), record.prompt_token_ids, variables))


def _choice(
    model: ServedModel, context: ChoiceContext, name: str, events: Sequence[TokenDelta], *, as_json: bool
) -> Iterator[str]:
    stream, collected = ChoiceStream(context, name), Collected()
    for event in events:
        for number, token_id in enumerate(event.token_ids):
            is_last = number == len(event.token_ids) - 1
            finish = (event.finish_reason, event.stop_reason) if is_last else (None, None)
            delta = stream.feed([token_id], None, *finish)
            collected.add(delta)
            yield _line(model, token_id, stream.place, delta, as_json=as_json)
        if not event.token_ids:
            delta = stream.feed([], None, event.finish_reason, event.stop_reason)
            collected.add(delta)
            yield _line(model, None, stream.place, delta, as_json=as_json)
    yield from _message(collected, as_json=as_json)
    if _as_it_came(context, name, events) != _said(collected):
        yield "in the engine's own pieces the same tokens read differently: a fault of the proxy, please report it"


def _as_it_came(context: ChoiceContext, name: str, events: Sequence[TokenDelta]) -> JsonObject:
    stream, collected = ChoiceStream(context, name), Collected()
    for event in events:
        collected.add(stream.feed(event.token_ids, None, event.finish_reason, event.stop_reason))
    return _said(collected)


def _said(collected: Collected) -> JsonObject:
    return {
        "reasoning": "".join(collected.reasoning) or None,
        "content": "".join(collected.content) or None,
        "tool_calls": [
            {"id": call.id, "name": call.name, "arguments": "".join(call.arguments)} for call in collected.tool_calls
        ],
        "finish_reason": collected.finish_reason,
    }


def _heading(index: int) -> Iterator[str]:
    if index:
        yield ""
    yield f"choice {index}"
    yield _row("id", "text", "state", "delta")


def _row(*cells: str) -> str:
    return " ".join([cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False)] + [cells[-1]]).rstrip()


def _line(model: ServedModel, token_id: int | None, state: str, delta: Delta, *, as_json: bool) -> str:
    text = "" if token_id is None else model.tokenizer.vocabulary.text_of(token_id)
    shown: JsonObject = {}
    if delta.reasoning:
        shown["reasoning"] = delta.reasoning
    if delta.content:
        shown["content"] = delta.content
    if delta.tool_calls:
        shown["tool_calls"] = [
            {"index": call.index, **({"name": call.name} if call.name else {}), "arguments": call.arguments}
            for call in delta.tool_calls
        ]
    if delta.finish_reason is not None:
        shown["finish_reason"] = delta.finish_reason
    if as_json:
        return orjson.dumps({"id": token_id, "text": text, "state": state, "delta": shown}).decode()
    pieces = "  ".join(f"{key} {json.dumps(value, ensure_ascii=False)}" for key, value in shown.items())
    return _row("" if token_id is None else str(token_id), json.dumps(text, ensure_ascii=False), state, pieces)


def _message(collected: Collected, *, as_json: bool) -> Iterator[str]:
    said = _said(collected)
    if as_json:
        yield orjson.dumps({"message": said}).decode()
        return
    yield ""
    for key, value in said.items():
        if key != "tool_calls":
            yield f"{key}: {json.dumps(value, ensure_ascii=False)}"
    for call in said["tool_calls"]:
        yield f"tool call {call['id']}: {call['name']} {call['arguments']}"
