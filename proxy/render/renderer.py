"""From a chat to token ids: what every way of it promises, and the usual way, by a chat template.

A model's kind of tokenizer decides the way, once, when it is loaded; whoever holds the model sees only the two
protocols. Both may be called from any thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import JsonObject
from proxy.protocol.openai import ChatRequest
from proxy.render.chat_template import ChatTemplates
from proxy.render.escaping import Escaped, SpecialTextEscaper
from proxy.render.messages import normalise
from proxy.render.tokenizer import PromptTokenizer


class TextTokenizer(Protocol):
    """Text that is not a chat. `add_special_tokens`: with what the tokenizer puts around a text, such as a BOS.
    `encode` raises `BadRequest` for a text that it cannot take."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Each token as the vocabulary writes it; empty for an id that it does not have."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`content_parts` are the images and the like, which only the engine can read."""

    token_ids: list[int]
    content_parts: list[JsonObject]


class ChatRenderer(Protocol):
    """`description` says for `check` how this model's chats are rendered."""

    @property
    def description(self) -> str: ...

    def render(self, request: ChatRequest, check_length: Callable[[int], None]) -> RenderedChat:
        """`check_length` is given the characters that are to be tokenized before they are, and may raise.

        Raises BadRequest for whatever cannot be asked of this model.
        """


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What a model's files and its operator say of its chats."""

    templates: Mapping[str, str]
    special_tokens: Mapping[str, Any]
    default_chat_template_kwargs: Mapping[str, Any]
    trust_request_chat_template: bool
    split_special_tokens: bool


class TemplateRenderer:
    """Renders by the model's chat templates. Raises ValueError for a template that is not valid Jinja."""

    def __init__(self, tokenizer: PromptTokenizer, escaper: SpecialTextEscaper, settings: ChatSettings) -> None:
        self._tokenizer, self._escaper = tokenizer, escaper
        self._templates = ChatTemplates(
            settings.templates, settings.special_tokens, trusted=settings.trust_request_chat_template
        )
        self._default_variables = settings.default_chat_template_kwargs
        self._split_special_tokens = settings.split_special_tokens
        self.description = "chat template" if settings.templates else "no chat template, completions only"

    def render(self, request: ChatRequest, check_length: Callable[[int], None]) -> RenderedChat:
        text, mark, content_parts = self._prompt_text(request)
        check_length(len(text))
        special = bool(request.add_special_tokens)
        if mark is None:
            token_ids = self._tokenizer.encode(text, add_special_tokens=special)
        else:
            token_ids = self._tokenizer.encode_marked(text, mark, add_special_tokens=special)
        return RenderedChat(token_ids, content_parts)

    def _prompt_text(self, request: ChatRequest) -> tuple[str, str | None, list[JsonObject]]:
        """The conversation as the template writes it, the mark in what users wrote, and the parts that are no text."""
        template = self._templates.select(request.chat_template, request.tools)
        normal = normalise(
            request.messages, content_format=template.content_format, knows_developer=template.knows_developer
        )
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
        given = Escaped(normal.messages, request.tools, request.documents, None, variables)
        if self._split_special_tokens:
            try:
                given = self._escaper.escape(normal.messages, request.tools, request.documents, variables)
            except RecursionError:
                raise BadRequest("the arguments of a tool call are nested too deeply", param="messages") from None
        text = self._templates.render(
            given.messages,
            tools=given.tools,
            documents=given.documents,
            template=request.chat_template,
            add_generation_prompt=request.generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            kwargs={**self._default_variables, **(given.variables or {})},
        )
        return text, given.mark, [dict(part) for part in normal.content_parts]
