"""render alone: what the proxy would send to an engine, as JSON that can be sent to one unchanged."""

from collections.abc import Sequence
from dataclasses import replace

from proxy.derender.logprobs import LogprobWriter
from proxy.models import ServedModel
from proxy.pipeline import Job, decode, render_chat, render_completion
from proxy.protocol.generate import JsonObject
from proxy.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest


async def rendered_chat(model: ServedModel, request: ChatRequest, request_id: str, size: int) -> JsonObject:
    """The generate request of a conversation. `size` is the request's, in bytes. Raises `ApiError`."""
    job = await render_chat(model, request, request_id, size)
    body = _wire(request, job)
    if request.return_token_offsets:
        body["token_offsets"] = _offsets(model, job.request.token_ids, await decode(model, job.request.token_ids))
    return body


async def rendered_completion(model: ServedModel, request: CompletionRequest, request_id: str) -> list[JsonObject]:
    """A generate request per prompt. Raises `ApiError`."""
    jobs = await render_completion(model, request, request_id)
    bodies = [_wire(request, job) for job in jobs]
    if request.return_token_offsets:
        for body, job, prompt in zip(bodies, jobs, request.prompts, strict=True):
            if isinstance(prompt, str):
                ids = job.request.token_ids
                cut = request.truncate_prompt_tokens is not None
                body["token_offsets"] = _offsets(model, ids, await decode(model, ids) if cut else prompt)
    return bodies


def _wire(request: GenerationRequest, job: Job) -> JsonObject:
    """The proxy streams from its engines as it likes; here the client's own wish stands, and its name for the model."""
    body = replace(job.request, stream=bool(request.stream)).wire()
    body.pop("stream_options", None)
    if request.stream_options is not None:
        body["stream_options"] = request.stream_options.model_dump(exclude_none=True)
    if request.model:
        body["model"] = request.model
    return body


def _offsets(model: ServedModel, token_ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """Where each token begins and ends in the prompt's text, in characters. A token that ends inside a character is
    empty, and so is what the tokenizer put before the text."""
    starts = LogprobWriter(model.tokenizer.vocabulary, 0, tokens_as_ids=False).starts(token_ids, text)
    return list(zip(starts, [*starts[1:], len(text)], strict=True))
