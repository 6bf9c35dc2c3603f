"""render -> generate -> derender for one request: the only place that runs all three stages.

A request is rendered to one `Job` per prompt; the jobs run side by side on the model's pool, and every engine event
goes straight into the one `Answer` of the request, whose bytes go straight to the client. No queue and no task stands
in between, except the tasks of several prompts.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from proxy.derender.answer import Answer, Form, Head, Prompts, StreamedAnswer, WholeAnswer
from proxy.derender.chat import ChatForm
from proxy.derender.choice import ChoiceContext, ChoiceStream
from proxy.derender.completion import CompletionForm
from proxy.derender.logprobs import LogprobWriter
from proxy.derender.output_format import ToolUse
from proxy.derender.stop import StopRule
from proxy.generate.engines.base import Flow
from proxy.models import ServedModel
from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import GenerateRequest, JsonObject, Outcome, TokenDelta
from proxy.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest, NamedToolChoice
from proxy.record import READ_BY, Record
from proxy.render.messages import normalise
from proxy.render.renderer import RenderedChat
from proxy.render.sampling import check_prompt_length, check_text_length, check_token_ids, sampling_params, truncated
from proxy.render.structural_tags import Surroundings
from proxy.render.structured_outputs import constrains_calls, structured_outputs

Rendered = TypeVar("Rendered")

INLINE_CHARACTERS = 8192
"""A longer text is rendered in a thread, which takes the event loop's time off it but costs a switch."""

LARGEST_TEXT = 8 << 20
"""Characters that are tokenized at all: they take a thread three seconds and nearly a gigabyte."""

GIANT = 1 << 20
RENDERING, GIANTS = ThreadPoolExecutor(2, "render"), ThreadPoolExecutor(1, "render-giants")
"""Few threads, whose memory adds up, and one of its own for texts so long that others should not wait behind them."""

LONGEST_TURN_START = 16
"""Tokens behind the last special one of a prompt that can be the template's; more may be what a user wrote."""

PROMPTS_AT_ONCE = 128
"""How many prompts of one request are generated side by side; each holds a connection to an engine."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, rendered. `text` is the prompt as text, where a response may repeat it. `prompt_only` drops what is
    generated: the engine is asked for a token only because it cannot be asked for none. `record` is kept at the end."""

    request: GenerateRequest
    context: ChoiceContext
    text: str = ""
    prompt_only: bool = False
    record: Record | None = None


class Writer(Protocol):
    """Where an answer's bytes go. `write` never waits; when it says that too much is unsent, `ready` waits for it."""

    def write(self, data: bytes) -> bool: ...
    async def ready(self) -> None: ...


async def encode(model: ServedModel, text: str, size: int, *, special: bool, limited: bool) -> list[int]:
    """The token ids of a text that is not a chat, of a request that has `size` characters. `special`: with what the
    tokenizer puts around a text; `limited`: the text is a prompt, and refused where it cannot fit."""

    def run() -> list[int]:
        _check_length(model, len(text), limited=limited)
        return model.tokenizer.prompt.encode(text, add_special_tokens=special)

    return await off_loop(size, run)


async def decode(model: ServedModel, token_ids: list[int]) -> str:
    return await off_loop(len(token_ids), partial(model.tokenizer.prompt.decode, token_ids, skip_special_tokens=False))


async def render_messages(model: ServedModel, request: ChatRequest, size: int) -> RenderedChat:
    """`size`: the request, in bytes."""
    check_length = partial(_check_length, model, limited=request.truncate_prompt_tokens is None)
    # A template that a request brought has a second to run, in which nobody else should wait.
    size_or_more = size if request.chat_template is None else math.inf
    return await off_loop(size_or_more, partial(model.chats.render, request, check_length))


async def off_loop(size: float, run: Callable[[], Rendered]) -> Rendered:
    """Runs what blocks for a time that grows with `size`, in a thread where that may be long."""
    if size <= INLINE_CHARACTERS:
        return run()
    return await asyncio.get_running_loop().run_in_executor(RENDERING if size <= GIANT else GIANTS, run)


def _check_length(model: ServedModel, characters: int, *, limited: bool) -> None:
    if characters > LARGEST_TEXT:
        raise BadRequest(f"the text has {characters} characters; at most {LARGEST_TEXT} are tokenized")
    if limited:
        check_text_length(characters, model.limits)


async def render_chat(model: ServedModel, request: ChatRequest, request_id: str, size: int) -> Job:
    """Raises `ApiError` for whatever cannot be asked of this model. `size` is the request's, in bytes."""
    request.check()
    chat = await render_messages(model, request, size)
    job = _job(model, request, chat.token_ids, request_id)
    job = replace(job, request=replace(job.request, content_parts=chat.content_parts))
    return replace(job, record=_record(model, request, job)) if model.recorder is not None else job


def _record(model: ServedModel, request: ChatRequest, job: Job) -> Record:
    """Of the prompt what the template wrote behind the last message, or all of it where that is wanted."""
    assert model.recorder is not None
    prompt, markup = list(job.request.token_ids), job.context.markup
    if not model.recorder.with_prompts:
        start = model.output_format.turn_start(prompt) if model.output_format and request.generation_prompt else None
        turn = [] if start is None else prompt[start:]
        prompt = turn if len(turn) <= LONGEST_TURN_START else []
    words = request.model_dump(include=READ_BY, exclude_none=True, by_alias=True)
    return Record(job.request.request_id, model.name, words, prompt, markup is not None and markup.inside)


async def render_completion(model: ServedModel, request: CompletionRequest, request_id: str) -> list[Job]:
    """One job per prompt. Raises `ApiError` for whatever cannot be asked of this model."""
    request.check()
    prompts = request.prompts
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    if request.echo and size * (request.n or 1) > LARGEST_TEXT:
        raise BadRequest(
            f"echo would repeat more than {LARGEST_TEXT} characters; leave it out or lower n", param="echo"
        )
    jobs = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            limited = request.truncate_prompt_tokens is None
            special = request.add_special_tokens is not False
            token_ids = await encode(model, prompt, size, special=special, limited=limited)
        else:
            token_ids = prompt
            check_token_ids(token_ids, model.limits.vocabulary_size, "prompt")
        job = _job(model, request, token_ids, f"{request_id}-{number}" if len(prompts) > 1 else request_id)
        if request.echo:
            kept = job.request.token_ids
            whole = isinstance(prompt, str) and len(kept) == len(token_ids)
            text = str(prompt) if whole else await decode(model, kept)
            job = replace(job, text=text, prompt_only=request.max_tokens == 0)
        jobs.append(job)
    return jobs


def _job(model: ServedModel, request: GenerationRequest, token_ids: list[int], request_id: str) -> Job:
    token_ids = truncated(token_ids, request.truncate_prompt_tokens, model.limits.max_model_len)
    check_prompt_length(len(token_ids), model.limits.max_model_len)
    constraint = _constraint(model, request, token_ids)
    params = sampling_params(
        request,
        prompt_length=len(token_ids),
        limits=model.limits,
        defaults=model.defaults,
        eos_token_ids=model.eos_token_ids,
        structured_outputs=constraint.structured_outputs,
    )
    generate = GenerateRequest(
        request_id=request_id,
        token_ids=token_ids,
        sampling_params=params,
        # An engine's events never carry these; what comes back whole reaches the sink all the same.
        stream="prompt_logprobs" not in params and (bool(request.stream) or request.kv_transfer_params is None),
        cache_salt=request.cache_salt,
        priority=request.priority or 0,
        kv_transfer_params=request.kv_transfer_params,
        vocabulary_size=model.limits.engine_vocabulary_size,
        reasoning_ended=constraint.reasoning_ended,
        reasoning_parser_kwargs=constraint.reasoning_parser_kwargs,
    )
    return Job(generate, choice_context(model, request, token_ids))


class _Constraint(NamedTuple):
    """What an engine is told of the form of an output, and of the reasoning that may come before it."""

    structured_outputs: JsonObject | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: JsonObject | None = None


def _constraint(model: ServedModel, request: GenerationRequest, prompt_token_ids: Sequence[int]) -> _Constraint:
    output = model.output_format
    if output is None or not isinstance(request, ChatRequest):
        return _Constraint(structured_outputs(request))
    variables = template_variables(model, request)
    ended = output.reasoning_ended(prompt_token_ids, variables)
    reasoning = output.reasoning
    around = Surroundings()
    if reasoning is not None:
        may_think = ended and reasoning.starts == "outside" and not reasoning.once
        around = Surroundings(reasoning if may_think else None, reasoning.dropped)
    constraint = structured_outputs(request, output.calls, around)
    if constraint is None or (reasoning is None and output.channels is None):
        return _Constraint(constraint)
    if output.channels is not None:  # a tag for channels begins with the reasoning, any other constraint behind it
        ended = constrains_calls(request)
    return _Constraint(constraint, ended, {"chat_template_kwargs": variables})


def choice_context(model: ServedModel, request: GenerationRequest, prompt_token_ids: Sequence[int]) -> ChoiceContext:
    """How the choices of a request are derendered; the one place that decides it."""
    stop_ids = frozenset(request.stop_token_ids or ())
    include_stop = bool(request.include_stop_str_in_output)
    return ChoiceContext(
        vocabulary=model.tokenizer.vocabulary,
        prompt_token_ids=prompt_token_ids,
        end_token_ids=stop_ids if request.ignore_eos else stop_ids | model.eos_token_ids,
        stop_token_ids=stop_ids,
        stop=StopRule(request.stop, include_stop) if request.stop else None,
        include_stop_str_in_output=include_stop,
        min_tokens=request.min_tokens or 0,
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        **_markup(model, request, prompt_token_ids),
    )


def _markup(model: ServedModel, request: GenerationRequest, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
    """Of a chat with a model that has parsers: how its output is read."""
    if model.output_format is None or not isinstance(request, ChatRequest):
        return {}
    use = tool_use(model, request)
    return {
        "markup": model.output_format.plan(use, prompt_token_ids, template_variables(model, request)),
        "include_reasoning": request.include_reasoning is not False,
        "forced_function": use.only is not None,
    }


def template_variables(model: ServedModel, request: ChatRequest) -> dict[str, Any]:
    """What the chat template knows of thinking, the request's word before the operator's."""
    variables = {**model.default_chat_template_kwargs, **(request.chat_template_kwargs or {})}
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    return variables


def tool_use(model: ServedModel, request: ChatRequest) -> ToolUse:
    """Raises BadRequest where the request leaves the choice to a model that may not choose."""
    choice, tools = request.tool_choice, request.tools or ()
    only = choice.function.name if isinstance(choice, NamedToolChoice) else None
    asked = bool(tools) and choice != "none"
    reads_calls = model.output_format is not None and bool(model.output_format.calls)
    if asked and choice in (None, "auto") and reads_calls and not model.enable_auto_tool_choice:
        raise BadRequest(
            f"model {model.name} may not choose tools by itself; send tool_choice required, a function or none, or "
            "let the operator set enable_auto_tool_choice: true",
            param="tool_choice",
        )
    return ToolUse(tools, asked, choice == "required", only, request.parallel_tool_calls is not False)


def chat_answer(model: ServedModel, request: ChatRequest, job: Job, head: Head) -> Answer:
    return _answer(request, [job], head, chat_form(model, request, job.request.token_ids))


def chat_form(model: ServedModel, request: ChatRequest, prompt_token_ids: Sequence[int]) -> ChatForm:
    last = request.messages[-1]
    role = "assistant" if request.generation_prompt else str(last["role"])
    return ChatForm(
        role=role,
        echo=_text_of(last) if request.echo and last["role"] == role else "",
        logprobs=logprob_writer(model, request, request.wanted_logprobs),
        prompt_token_ids=prompt_token_ids if request.return_token_ids else None,
        prompt_logprobs=logprob_writer(model, request, request.prompt_logprobs),
        reasoning_field=model.reasoning_field,
    )


def _text_of(message: JsonObject) -> str:
    """What a response repeats of a message."""
    content = normalise([message], content_format="parts", knows_developer=True).messages[0]["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if part.get("text"))


def completion_answer(model: ServedModel, request: CompletionRequest, jobs: Sequence[Job], head: Head) -> Answer:
    form = CompletionForm(
        n=request.n or 1,
        prompts=[job.text for job in jobs],
        prompt_token_ids=[job.request.token_ids for job in jobs],
        echo=bool(request.echo),
        return_token_ids=bool(request.return_token_ids),
        logprobs=logprob_writer(model, request, request.wanted_logprobs),
        prompt_logprobs=logprob_writer(model, request, request.prompt_logprobs),
    )
    return _answer(request, jobs, head, form)


def logprob_writer(model: ServedModel, request: GenerationRequest, top: int | None) -> LogprobWriter | None:
    if top is None:
        return None
    as_ids = request.return_tokens_as_token_ids
    return LogprobWriter(
        model.tokenizer.vocabulary, top, model.return_tokens_as_token_ids if as_ids is None else as_ids
    )


def _answer(request: GenerationRequest, jobs: Sequence[Job], head: Head, form: Form) -> Answer:
    n = request.n or 1
    contexts = [job.context for job in jobs for _ in range(n)]
    streams = [ChoiceStream(context, f"{head.id}/{index}") for index, context in enumerate(contexts)]
    prompts = Prompts([len(job.request.token_ids) for job in jobs], n)
    if not request.stream:
        return WholeAnswer(head, form, streams, prompts)
    options = request.stream_options
    include_usage = bool(options and options.usage)
    return StreamedAnswer(
        head,
        form,
        streams,
        prompts,
        include_usage=include_usage,
        continuous_usage_stats=include_usage and bool(options and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
    )


async def run(model: ServedModel, jobs: Sequence[Job], answer: Answer, writer: Writer) -> bytes:
    """Generates all jobs into `answer`. The bytes that end it are returned, not written. Raises `ApiError`."""
    if len(jobs) == 1:
        outcomes = [await _run_one(model, jobs[0], 0, answer, writer)]
    else:
        turn = asyncio.Semaphore(PROMPTS_AT_ONCE)

        async def in_turn(number: int, job: Job) -> Outcome:
            async with turn:
                return await _run_one(model, job, number * job.request.n, answer, writer)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(in_turn(number, job)) for number, job in enumerate(jobs)]
        except ExceptionGroup as failures:  # the first of them cancelled the others
            raise failures.exceptions[0] from None
        outcomes = [task.result() for task in tasks]
    return answer.end(outcomes)


async def _run_one(model: ServedModel, job: Job, first_choice: int, answer: Answer, writer: Writer) -> Outcome:
    flow = Flow()
    generating = set(range(job.request.n))  # the choices that the engine has not finished

    def sink(events: list[TokenDelta]) -> None:
        if job.prompt_only:
            events = [TokenDelta(e.index, [], None, "length") for e in events if e.finish_reason is not None]
        data = b"".join([answer.feed(first_choice + event.index, event) for event in events])
        if data and writer.write(data):
            flow.pause(writer.ready)
        if job.context.stop is None:
            return
        generating.difference_update(event.index for event in events if event.finish_reason is not None)
        if generating and all(answer.ended(first_choice + index) for index in generating):
            flow.stop()

    record = job.record
    if record is None or model.recorder is None:
        return await model.pool.generate(job.request, sink, flow)

    def recording(events: list[TokenDelta]) -> None:
        record.add(events)
        sink(events)

    try:
        return await model.pool.generate(job.request, recording, flow)
    finally:
        model.recorder.keep(record)
