"""The stages one by one, for clients that run the others themselves. What a stage does is what the pipeline does with
its own requests: the same context, the same `ChoiceStream`, the same forms.

Every rule that needs a model is checked here before anything is decoded.
"""

from collections.abc import Sequence
from dataclasses import replace

import orjson

from proxy.derender.answer import Collected, Form, Head, usage_of, whole_body
from proxy.derender.carried import Carried, step
from proxy.derender.chat import ChatForm
from proxy.derender.choice import ChoiceContext, ChoiceStream
from proxy.derender.stop import StopRule
from proxy.models import ServedModel
from proxy.pipeline import chat_form, choice_context, logprob_writer
from proxy.protocol.derender import ChatDerenderStep, ChatDerenderWhole, DerenderStep, GeneratedChoice, GenerateResponse
from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import Outcome
from proxy.protocol.openai import ChatRequest, GenerationRequest

NO_REQUEST = GenerationRequest.model_validate({})
"""What holds where a client does not send the request that it derenders the answer of."""


def derender_chat(model: ServedModel, body: ChatDerenderWhole, head: Head) -> bytes:
    """The response of `/v1/chat/completions` that an engine's whole answer makes."""
    request, response = body.chat_request, body.generate_response
    _check_request(model, request, "chat_request")
    prompt = response.prompt_token_ids if body.prompt_token_ids is None else body.prompt_token_ids
    context = choice_context(model, request or NO_REQUEST, prompt or ())
    outcome = Outcome(None, response.prompt_logprobs, response.kv_transfer_params)
    choices, tokens = [], 0
    for choice in response.choices:
        collected, used = _collected(context, choice)
        choices.append((choice.index, collected, outcome))
        tokens += used
    form = _chat_form(model, request, prompt or (), response.choices, response)
    return whole_body(head, form, choices, usage_of(body.prompt_tokens or 0, tokens), [outcome])


def derender_chat_step(model: ServedModel, body: ChatDerenderStep, head: Head) -> bytes:
    """`{"chunk": ..., "stream_state": ...}` of one event; `head.created` is used in the first call only."""
    request, chunk = body.chat_request, body.generate_chunk
    _check_request(model, request, "chat_request")
    if body.stream_state is None and body.prompt is None and _needs_request(model):
        raise BadRequest(
            "prompt_token_ids is missing; the first call needs it, for it decides how an answer begins",
            param="prompt_token_ids",
        )
    form = _chat_form(model, request, body.prompt or (), chunk.choices)
    return _step(model, request or NO_REQUEST, body, head, form)


def _needs_request(model: ServedModel) -> bool:
    """Whether the model's output has markup, so that it takes the request to read it."""
    return False


def _check_request(model: ServedModel, request: GenerationRequest | None, param: str) -> None:
    if request is not None:
        request.check()
    elif _needs_request(model):
        raise BadRequest(f"{param} is missing; the model's output cannot be parsed without it", param=param)


def _collected(context: ChoiceContext, choice: GeneratedChoice) -> tuple[Collected, int]:
    """All that a choice says, and how many tokens of it were used."""
    stream, collected = ChoiceStream(_stopping(context, choice)), Collected()
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


def _chat_form(
    model: ServedModel,
    request: ChatRequest | None,
    prompt: Sequence[int],
    choices: Sequence[GeneratedChoice],
    response: GenerateResponse | None = None,
) -> ChatForm:
    """Log probabilities are shown where they came; all of them where the request does not say how many."""
    form = ChatForm() if request is None else chat_form(model, request, prompt)
    every = logprob_writer(model, request or NO_REQUEST, model.limits.max_logprobs)
    came = any(choice.logprobs is not None for choice in choices)
    prompt_came = response is not None and response.prompt_logprobs is not None
    return replace(
        form,
        logprobs=(form.logprobs or every) if came else None,
        prompt_logprobs=(form.prompt_logprobs or every) if prompt_came else None,
    )


def _step(model: ServedModel, request: GenerationRequest, body: DerenderStep, head: Head, form: Form) -> bytes:
    chunk = body.generate_chunk
    choice = next(iter(chunk.choices), None)
    context = choice_context(model, request, body.prompt or ())
    if choice is not None:
        context = _stopping(context, choice)
    if body.stream_state is None:
        carried = Carried(ChoiceStream(context), head.created, len(body.prompt or ()) or body.prompt_tokens or 0)
    else:
        try:
            carried = Carried.load(context, body.stream_state)
        except ValueError as error:
            raise BadRequest(
                f"stream_state is not as this server made it: {error}; send it back as it came", param="stream_state"
            ) from None
    event = None if choice is None else choice.event(choice.index)
    made = step(carried, replace(head, created=carried.created), form, event)
    if chunk.usage is not None:
        prompt = chunk.usage.get("prompt_tokens") if body.prompt_tokens is None else body.prompt_tokens
        made["usage"] = usage_of(prompt or 0, chunk.usage.get("completion_tokens") or 0)
    return orjson.dumps({"chunk": made, "stream_state": carried.dump()})
