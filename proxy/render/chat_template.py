"""From messages to the prompt text, exactly as `transformers` 5's `apply_chat_template(tokenize=False)` writes it.

A model's templates are compiled once, when it is loaded; a fault in them is a `ValueError` then. Whatever goes wrong
while one renders, be it the template's own refusal or a fault of its program on these messages, is the request's 400.
A template that the request brings is refused unless the operator trusts such, and then runs under a budget
(`bounded_template.py`). The messages come from `messages.normalise`, and are never changed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from types import MappingProxyType

from jinja2 import TemplateSyntaxError, nodes

from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import JsonObject
from proxy.render.bounded_template import LONGEST_SOURCE, BoundedEnvironment, Budget, BudgetExceeded, render_bounded
from proxy.render.messages import Json
from proxy.render.template_environment import ChatEnvironment, RaisedByTemplate
from proxy.render.template_facts import ContentFormat, content_format, knows_developer

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_REQUEST_TEMPLATES_KEPT = 16
_LONGEST_MESSAGE = 1000

# Stands at the end of the text to continue while the template runs; the space shows whether the template trimmed it.
_CONTINUE_HERE = "[[continue-final-message-here]] "


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template and what its source tells. `run` takes the template's variables."""

    source: str
    content_format: ContentFormat
    knows_developer: bool
    run: Callable[[dict[str, Json]], str]


class ChatTemplates:
    """The templates of one model.

    `special_tokens` (bos_token, eos_token, ...) are variables that templates see; None values are left out, as
    `transformers` does. `request_template_size` counts characters and steps, `request_template_seconds` wall time; both
    bound one rendering of a template that a request brought. `now` is the date that templates print, `clock` measures.
    Raises ValueError for a template that is not valid Jinja.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, Json],
        *,
        trusted: bool = False,
        request_template_seconds: float = 1.0,
        request_template_size: int = 4_000_000,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        environment = ChatEnvironment(now)
        self._templates = {
            name: _compile(environment, f"chat template {name!r}", source) for name, source in templates.items()
        }
        self._special_tokens = {name: _text_of(token) for name, token in special_tokens.items() if token is not None}
        self._trusted = trusted
        self._budget = partial(Budget, request_template_size, request_template_seconds, clock)
        self._bounded = BoundedEnvironment(now)
        self._compile_request = lru_cache(_REQUEST_TEMPLATES_KEPT)(self._compile_request_template)

    def select(self, template: str | None, tools: list[JsonObject] | None) -> ChatTemplate:
        """The template of that name or text; without one `tool_use` if there are tools, then `default`."""
        if template is not None:
            return self._templates.get(template) or self._compile_request(template)
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise BadRequest(
                f"The model has no default chat template. Name one of its templates in `chat_template`: {names}.",
                param="chat_template",
            )
        raise BadRequest(
            "The model has no chat template, so it cannot take messages. Use /v1/completions, "
            "or have the operator set `chat_template` in the model's configuration.",
            param="chat_template",
        )

    def render(
        self,
        messages: list[JsonObject],
        *,
        tools: list[JsonObject] | None = None,
        documents: list[JsonObject] | None = None,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        kwargs: Mapping[str, Json] = MappingProxyType({}),
    ) -> str:
        """`continue_final_message` may name the field to continue, as `transformers` allows; True is `content`.

        `kwargs` are further variables of the template; they may override special tokens.
        """
        chosen = self.select(template, tools)
        if not messages:
            raise BadRequest("`messages` is empty; a chat needs at least one message.", param="messages")
        if reserved := sorted(RESERVED_VARIABLES & kwargs.keys()):
            raise BadRequest(
                f"`chat_template_kwargs` may not set {', '.join(map(repr, reserved))}; use the request's own field.",
                param="chat_template_kwargs",
            )
        _check_objects("documents", documents)
        _check_objects("tools", tools)
        chat = [_as_templates_expect(message) for message in messages]
        continued = ""
        if continue_final_message:
            field = continue_final_message if isinstance(continue_final_message, str) else "content"
            if add_generation_prompt:
                raise _cannot_continue("`add_generation_prompt` begins a new message; set it to false")
            chat[-1], continued = _mark_end(chat[-1], field, chosen.source)
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": chat,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = _run(chosen, variables)
        return _cut_at_mark(text, continued) if continue_final_message else text

    def _compile_request_template(self, source: str) -> ChatTemplate:
        if not self._trusted:
            known = ", ".join(sorted(self._templates)) or "none"
            raise BadRequest(
                "A chat template in a request is not accepted here. Leave `chat_template` out or name one of the "
                f"model's own ({known}), or have the operator set `trust_request_chat_template`.",
                param="chat_template",
            )
        if len(source) > LONGEST_SOURCE:
            raise BadRequest(
                f"`chat_template` has {len(source)} characters; at most {LONGEST_SOURCE} are allowed.",
                param="chat_template",
            )
        try:
            return _compile(self._bounded, "the chat template of the request", source, self._run_bounded)
        except ValueError as error:
            raise BadRequest(str(error), param="chat_template") from error

    def _run_bounded(self, tree: nodes.Template) -> Callable[[dict[str, Json]], str]:
        compiled = self._bounded.compile_bounded(tree)
        return lambda variables: render_bounded(compiled, self._budget(), variables)


Compile = Callable[[nodes.Template], Callable[[dict[str, Json]], str]]


def _compile(environment: ChatEnvironment, name: str, source: str, compile_tree: Compile | None = None) -> ChatTemplate:
    try:
        tree = environment.parse(source)
        facts = content_format(tree), knows_developer(tree)
        run = compile_tree(tree) if compile_tree else environment.from_string(tree).render
    except TemplateSyntaxError as error:
        raise ValueError(f"{name}, line {error.lineno}: {error.message}") from error
    except SyntaxError as error:  # what Jinja accepts and Python does not, such as `break` outside of a loop
        raise ValueError(f"{name}: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"{name} is nested too deeply") from error
    return ChatTemplate(source, *facts, run)


def _run(template: ChatTemplate, variables: dict[str, Json]) -> str:
    try:
        return template.run(variables)
    except BudgetExceeded as error:
        raise BadRequest(f"The chat template of the request was stopped: {error}.", param="chat_template") from error
    except RaisedByTemplate as error:
        raise BadRequest(_shortened(f"The chat template refused the messages: {error}"), param="messages") from error
    except Exception as error:  # a template is a program: it can fail in any way that Python can
        what = f"The chat template failed on these messages{_place(error)}: {type(error).__name__}: {error}"
        raise BadRequest(_shortened(what), param="messages") from error


def _shortened(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "..."


def _place(error: Exception) -> str:
    """The template's line, which Jinja writes into the traceback."""
    line, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == "<template>":
            line = step.tb_lineno
        step = step.tb_next
    return f" (line {line})" if line else ""


def _text_of(token: Json) -> Json:
    """A special token is given as its text, or as the object that `tokenizer_config.json` may hold."""
    return token["content"] if isinstance(token, Mapping) and "content" in token else token


def _check_objects(field: str, values: list[JsonObject] | None) -> None:
    for index, value in enumerate(values or ()):
        if not isinstance(value, dict):
            raise BadRequest(
                f"`{field}[{index}]` must be an object, but is {type(value).__name__}.", param=f"{field}[{index}]"
            )


def _as_templates_expect(message: JsonObject) -> JsonObject:
    """Without the keys that are null, and with the reasoning under each of the names that templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[field] for field in _REASONING_FIELDS if field in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _cannot_continue(reason: str) -> BadRequest:
    return BadRequest(f"`continue_final_message` cannot be used here: {reason}.", param="continue_final_message")


def _mark_end(message: JsonObject, field: str, source: str) -> tuple[JsonObject, str]:
    """The message with a mark at the end of the text to continue, and that text."""
    if (value := message.get(field)) is None:
        raise _cannot_continue(f"the final message has no `{field}` to continue")
    copies = [field]
    if field in _REASONING_FIELDS:
        copies = [name for name in _REASONING_FIELDS if message.get(name) == value]
    if not any(name in source for name in copies):
        raise _cannot_continue(f"the chat template does not read `{field}`")
    if isinstance(value, str):
        return {**message, **dict.fromkeys(copies, value + _CONTINUE_HERE)}, value
    if isinstance(value, list):
        for index in range(len(value) - 1, -1, -1):
            part = value[index]
            if isinstance(part, dict) and isinstance(text := part.get("text"), str):
                marked = {**part, "text": text + _CONTINUE_HERE}
                return {**message, field: [*value[:index], marked, *value[index + 1 :]]}, text
    raise _cannot_continue(f"the final message's `{field}` has no text to continue")


def _cut_at_mark(rendered: str, continued: str) -> str:
    end = rendered.rfind(_CONTINUE_HERE.strip())
    if end < 0 or continued.strip() not in rendered:
        raise _cannot_continue("the chat template does not write the final message as it is")
    if rendered.startswith(_CONTINUE_HERE, end):
        return rendered[:end]
    return rendered[:end].rstrip()
