"""derender alone: an engine's answer, or one event of it, in; an OpenAI response, or one chunk of it, out.

Every rule that needs a model is checked here before anything is decoded. The functions block for as long as decoding
takes; where they run is the caller's to decide.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import orjson

from proxy.derender.answer import Collected, Form, Head, usage_of, whole_body
from proxy.derender.carried import Carried, step
from proxy.derender.chat import ChatForm
from proxy.derender.choice import ChoiceContext, ChoiceStream
from proxy.derender.completion import CompletionForm
from proxy.derender.logprobs import LogprobWriter
from proxy.derender.stop import StopRule
from proxy.models import ServedModel
from proxy.pipeline import chat_form, choice_context, logprob_writer
from proxy.protocol.derender import (
    ChatDerenderStep,
    ChatDerenderWhole,
    CompletionDerenderStep,
    CompletionDerenderWhole,
    DerenderStep,
    GenerateChunk,
    GeneratedChoice,
    GenerateResponse,
    VllmState,
)
from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import Outcome
from proxy.protocol.openai import MAX_CHOICES, ChatRequest, CompletionRequest, GenerationRequest

EitherForm = TypeVar("EitherForm", ChatForm, CompletionForm)

NO_REQUEST = GenerationRequest.model_validate({})
"""What holds where a client does not send the request that it derenders the answer of."""


def derender_chat(model: ServedModel, body: ChatDerenderWhole, head: Head) -> bytes:
    """The response of `/v1/chat/completions` that an engine's whole answer makes."""
    request, response = body.chat_request, body.generate_response
    _check_chat_request(model, request)
    prompt = response.prompt_token_ids if body.prompt_token_ids is None else body.prompt_token_ids
    _check_response(model, response, prompt, "generate_response")
    context = choice_context(model, request or NO_REQUEST, prompt or ())
    outcome = Outcome(None, response.prompt_logprobs, response.kv_transfer_params)
    choices, tokens = [], 0
    for choice in response.choices:
        collected, used = _collected(context, choice, f"{head.id}/{choice.index}")
        choices.append((choice.index, collected, outcome))
        tokens += used
    form = ChatForm() if request is None else chat_form(model, request, prompt or ())
    form = _with_writers(form, model, request, [response])
    return whole_body(head, form, choices, usage_of(body.prompt_tokens or 0, tokens), [outcome])


def derender_completion(model: ServedModel, body: CompletionDerenderWhole, head: Head) -> bytes:
    """The response of `/v1/completions` that the whole answers to its prompts make; choices are counted through."""
    request, responses = body.completion_request, body.generate_responses
    if request is not None:
        request.check()
    given = body.prompt_token_ids or [None] * len(responses)
    prompts = [r.prompt_token_ids if ids is None else ids for r, ids in zip(responses, given, strict=True)]
    for number, (response, prompt) in enumerate(zip(responses, prompts, strict=True)):
        _check_response(model, response, prompt, f"generate_responses[{number}]")
    choices: list[tuple[int, Collected, Outcome]] = []
    outcomes, of_choice, tokens = [], [], 0
    for response, prompt in zip(responses, prompts, strict=True):
        context = choice_context(model, request or NO_REQUEST, prompt or ())
        outcomes.append(outcome := Outcome(None, response.prompt_logprobs, response.kv_transfer_params))
        for choice in response.choices:
            collected, used = _collected(context, choice, f"{head.id}/{len(choices)}")
            choices.append((len(choices), collected, outcome))
            of_choice.append(prompt or [])
            tokens += used
    form = _completion_form(request, 1, of_choice)
    form = _with_writers(form, model, request, responses)
    return whole_body(head, form, choices, usage_of(sum(body.prompt_tokens or ()), tokens), outcomes)


def derender_chat_step(model: ServedModel, body: ChatDerenderStep, head: Head) -> bytes:
    """`{"chunk": ..., "stream_state": ...}` of one event; `head.created` is used in the first call only."""
    request = body.chat_request
    _check_chat_request(model, request)
    if body.prompt is None and not isinstance(body.stream_state, dict) and _needs_request(model):
        raise BadRequest(
            "prompt_token_ids is missing; the first call needs it, for it decides how an answer begins",
            param="prompt_token_ids",
        )
    form = ChatForm() if request is None else chat_form(model, request, body.prompt or ())
    form = _with_writers(form, model, request, [body.generate_chunk])
    return _step(model, request or NO_REQUEST, body, head, form)


def derender_completion_step(model: ServedModel, body: CompletionDerenderStep, head: Head) -> bytes:
    """As `derender_chat_step`."""
    request = body.completion_request
    if request is not None:
        request.check()
    form = _completion_form(request, MAX_CHOICES, [body.prompt or []])
    form = _with_writers(form, model, request, [body.generate_chunk])
    return _step(model, request or NO_REQUEST, body, head, form)


def _needs_request(model: ServedModel) -> bool:
    """Whether the model's output has markup, so that it takes the request to read it."""
    return model.output_format is not None


def _check_chat_request(model: ServedModel, request: ChatRequest | None) -> None:
    if request is not None:
        request.check()
    elif _needs_request(model):
        raise BadRequest(
            "chat_request is missing; the model's output cannot be parsed without it", param="chat_request"
        )


def _collected(context: ChoiceContext, choice: GeneratedChoice, name: str) -> tuple[Collected, int]:
    """All that a choice says, and how many tokens of it were used."""
    stream, collected = ChoiceStream(_stopping(context, choice), name), Collected()
    event = choice.event(choice.index)
    collected.add(stream.feed(event.token_ids, event.logprobs, event.finish_reason, event.stop_reason))
    return collected, stream.tokens


def _stopping(context: ChoiceContext, choice: GeneratedChoice) -> ChoiceContext:
    """Where the engine says at which string it stopped, the text ends there, whatever the request said."""
    reason = choice.stop_reason
    if not isinstance(reason, str) or not reason:
        return context
    strings = context.stop.strings if context.stop is not None else ()
    return replace(context, stop=StopRule([*strings, reason], context.include_stop_str_in_output))


def _completion_form(request: CompletionRequest | None, n: int, prompts: Sequence[Sequence[int]]) -> CompletionForm:
    """`n` choices belong to each prompt. Nothing is echoed: what a client sends has no prompt's text."""
    return CompletionForm(
        n=n,
        prompts=[""] * len(prompts),
        prompt_token_ids=prompts,
        return_token_ids=bool(request and request.return_token_ids),
    )


def _with_writers(
    form: EitherForm,
    model: ServedModel,
    request: GenerationRequest | None,
    responses: Sequence[GenerateResponse] | Sequence[GenerateChunk],
) -> EitherForm:
    """Log probabilities are shown where they came; all of them where the request does not say how many."""

    def writer(came: bool, wanted: int | None) -> LogprobWriter | None:
        top = model.limits.max_logprobs if wanted is None else wanted
        return logprob_writer(model, request or NO_REQUEST, top) if came else None

    came = any(choice.logprobs is not None for response in responses for choice in response.choices)
    prompt_came = any(isinstance(r, GenerateResponse) and r.prompt_logprobs is not None for r in responses)
    return replace(
        form,
        logprobs=writer(came, None if request is None else request.wanted_logprobs),
        prompt_logprobs=writer(prompt_came, None if request is None else request.prompt_logprobs),
    )


def _step(model: ServedModel, request: GenerationRequest, body: DerenderStep, head: Head, form: Form) -> bytes:
    chunk, state = body.generate_chunk, body.stream_state
    choice = next(iter(chunk.choices), None)
    ids = choice.token_ids or () if choice is not None else ()
    if choice is not None:
        _check_choice(model, choice, 0, "generate_chunk.choices[0]")
    prompt = len(body.prompt or ()) or body.prompt_tokens or 0
    _check_room(model, prompt, "prompt_token_ids")
    if isinstance(state, VllmState):
        before = max(len(state.output_token_ids), len(state.prev_tokens))
        _check_room(model, prompt + before + len(ids), "stream_state")
    context = choice_context(model, request, body.prompt or ())
    if choice is not None:
        context = _stopping(context, choice)
    event = None if choice is None else choice.event(choice.index)
    name = f"{head.id}/{0 if choice is None else choice.index}"
    try:
        if state is None:
            carried = Carried(ChoiceStream(context, name), head.created, prompt)
        elif isinstance(state, VllmState):
            carried = Carried.of_vllm(context, state, head.created, name)
        else:
            carried = Carried.load(context, state, name)
    except ValueError as error:
        raise BadRequest(
            f"stream_state does not fit: {error}; send it back as it came, with the same request",
            param="stream_state",
        ) from None
    _check_room(model, carried.prompt + carried.stream.tokens + len(ids), "generate_chunk")
    if event is not None and carried.index not in (None, event.index):
        raise BadRequest(
            f"stream_state is of choice {carried.index}, but the chunk is of choice {event.index}; keep one per choice",
            param="stream_state",
        )
    made = step(carried, replace(head, created=carried.created), form, event)
    if chunk.usage is not None:
        counted = chunk.usage.get("prompt_tokens") if body.prompt_tokens is None else body.prompt_tokens
        made["usage"] = usage_of(counted or 0, chunk.usage.get("completion_tokens") or 0)
    if event is None and state is not None:  # nothing has moved, and text that vLLM held back is still to be shown
        carried_on = state if isinstance(state, dict) else state.model_dump()
    else:
        carried_on = carried.dump()
    return orjson.dumps({"chunk": made, "stream_state": carried_on})


def _check_response(model: ServedModel, response: GenerateResponse, prompt: Sequence[int] | None, place: str) -> None:
    length = len(prompt or ())
    _check_room(model, length, "prompt_token_ids")
    entries = response.prompt_logprobs or ()
    _check_room(model, len(entries), f"{place}.prompt_logprobs")
    most = model.limits.max_logprobs + 1  # with the token itself
    if any(len(entry or ()) > most for entry in entries):
        raise _too_many_logprobs(model, f"{place}.prompt_logprobs")
    for number, choice in enumerate(response.choices):
        _check_choice(model, choice, length, f"{place}.choices[{number}]")


def _check_choice(model: ServedModel, choice: GeneratedChoice, prompt: int, place: str) -> None:
    _check_room(model, prompt + len(choice.token_ids or ()), f"{place}.token_ids")
    most = model.limits.max_logprobs + 1
    if any(len(entry.get("top_logprobs") or ()) > most for entry in choice.entries or ()):
        raise _too_many_logprobs(model, f"{place}.logprobs")


def _check_room(model: ServedModel, tokens: int, param: str) -> None:
    limit = model.limits.max_model_len
    if limit is not None and tokens > limit:
        raise BadRequest(
            f"{param}: {tokens} tokens, prompt and answer together, are more than the model's context of {limit} "
            "(max_model_len)",
            param=param,
        )


def _too_many_logprobs(model: ServedModel, param: str) -> BadRequest:
    return BadRequest(
        f"{param} has more alternatives per token than {model.limits.max_logprobs} (max_logprobs)", param=param
    )
