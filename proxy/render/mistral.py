"""Chats and texts to token ids with `mistral-common`, for models that come with a `tekken.json` and no chat template.

The only file that imports that package, which is an extra: whoever imports this file deals with its absence. A prompt
is the one that vLLM makes with `--tokenizer-mode mistral`: the package decides which conversations are valid and how
they are written. It sets control tokens by their ids and encodes every text without them, so that no text, whoever
wrote it, can become one. Images and audio are refused, for the package would fetch and decode them.
"""

import hashlib
import re
from collections.abc import Callable, Iterable

from mistral_common.exceptions import InvalidToolException, InvalidToolSchemaException, MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest, ReasoningEffort
from mistral_common.protocol.instruct.tool_calls import Function, Tool
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from pydantic import ValidationError

from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import JsonObject
from proxy.protocol.openai import ChatRequest
from proxy.render.messages import TEXT_PARTS, Json, normalise
from proxy.render.renderer import ChatSettings, RenderedChat

_LONGEST_MESSAGE = 1000

_CALL_ID = re.compile("[a-zA-Z0-9]{9}")
"""What the package takes for the id of a tool call; older versions of the tokenizer write it into the prompt."""

_REFUSALS = (MistralCommonException, ValueError, AssertionError, NotImplementedError, RecursionError)
"""How the package says no: by errors of its own, by pydantic's and tiktoken's ValueErrors, and by bare assertions."""


class TekkenTokenizer:
    """The tokenizer of one `tekken.json`, which the package reads itself. Raises whatever it raises for a bad file.

    `tokens` are the bytes of every token by id, `special_texts` the texts of the special ones, which have no bytes.
    """

    def __init__(self, path: str) -> None:
        self._mistral: MistralTokenizer[Json, Json, Json, Json, Json] = MistralTokenizer.from_file(path)
        tekken = self._mistral.instruct_tokenizer.tokenizer
        assert isinstance(tekken, Tekkenizer)
        self._tekken = tekken
        ids = range(tekken.n_words)
        self.tokens = [tekken.id_to_byte_piece(i, SpecialTokenPolicy.IGNORE) for i in ids]
        self.special_texts = {i: tekken.id_to_piece(i) for i in ids if tekken.is_special(i)}
        self.eos_token_id = tekken.eos_id
        self.version: str = tekken.version.value
        self.takes_reasoning_effort: bool = tekken.version.supports_model_settings

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A text never holds control tokens; `add_special_tokens` puts the BOS in front."""
        try:
            return self._tekken.encode(text, bos=add_special_tokens, eos=False)
        except ValueError as error:  # what tiktoken's pattern makes of a very long run of white space
            raise BadRequest(f"the text cannot be tokenized: {error}") from error

    def encode_chat(self, chat: ChatCompletionRequest[Json]) -> list[int]:
        """Raises one of `_REFUSALS`."""
        tokens: list[int] = self._mistral.encode_chat_completion(chat).tokens
        return tokens

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        policy = SpecialTokenPolicy.IGNORE if skip_special_tokens else SpecialTokenPolicy.KEEP
        return self._tekken.decode(token_ids, policy)

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Each token as text, a broken character as U+FFFD; empty for an id that there is not."""
        return [self._tekken.id_to_piece(i) if i < self._tekken.n_words else "" for i in token_ids]


class MistralRenderer:
    """Raises ValueError for settings of chat templates, of which there are none here."""

    def __init__(self, tokenizer: TekkenTokenizer, settings: ChatSettings) -> None:
        meaningless = {
            "default_chat_template_kwargs": bool(settings.default_chat_template_kwargs),
            "trust_request_chat_template: true": settings.trust_request_chat_template,
            "split_special_tokens: false": not settings.split_special_tokens,
        }
        if given := ", ".join(name for name, is_set in meaningless.items() if is_set):
            raise ValueError(f"{given}: has no meaning with tokenizer_mode mistral, which uses no chat template")
        self._tokenizer = tokenizer
        self.description = f"chats by mistral-common (tokenizer {tokenizer.version})"

    def render(self, request: ChatRequest, check_length: Callable[[int], None]) -> RenderedChat:
        _refuse_template_fields(request)
        messages = _openai_messages(request.messages)
        _check_last(request)
        check_length(_characters([messages, request.tools]))
        effort = {"reasoning_effort": request.reasoning_effort} if self._tokenizer.takes_reasoning_effort else {}
        try:
            chat: ChatCompletionRequest[Json] = ChatCompletionRequest.from_openai(
                messages,
                request.tools or None,
                continue_final_message=bool(request.continue_final_message),
                **effort,
            )
            return RenderedChat(self._tokenizer.encode_chat(chat), [])
        except _REFUSALS as error:
            message = f"mistral-common refused the chat: {_reason(error)}"
            raise BadRequest(message, param="tools" if _is_of_tools(error) else "messages") from error


def _refuse_template_fields(request: ChatRequest) -> None:
    for field in ("chat_template", "chat_template_kwargs", "documents"):
        if getattr(request, field):
            raise BadRequest(
                f"`{field}` is for chat templates, and this model has none: mistral-common writes its prompts. "
                "Leave it out.",
                param=field,
            )
    efforts = [effort.value for effort in ReasoningEffort]
    if request.reasoning_effort is not None and request.reasoning_effort not in efforts:
        raise BadRequest(f"`reasoning_effort` must be one of {', '.join(efforts)}.", param="reasoning_effort")


def _check_last(request: ChatRequest) -> None:
    is_assistant = request.messages[-1].get("role") == "assistant"
    if request.continue_final_message and not is_assistant:
        raise BadRequest(
            "`continue_final_message` continues an assistant message, but the last one is not the assistant's.",
            param="continue_final_message",
        )
    if is_assistant and not request.continue_final_message:
        raise BadRequest(
            "The last message is the assistant's: set `continue_final_message` to have it continued, "
            "or end with a user or tool message.",
            param="messages",
        )


def _openai_messages(messages: list[JsonObject]) -> list[JsonObject]:
    """The messages in the one spelling of OpenAI's that the package reads, with ids of tool calls that it takes."""
    normalise(messages, content_format="parts", knows_developer=True)  # for its errors, which name the place
    short = _CallIds()
    return [_openai_message(message, f"messages[{index}]", short) for index, message in enumerate(messages)]


def _openai_message(message: JsonObject, place: str, short: "_CallIds") -> JsonObject:
    role, content = message["role"], message.get("content")
    if isinstance(content, list):
        content = [_openai_part(part, f"{place}.content[{index}]") for index, part in enumerate(content)]
    match role:
        case "system" | "developer" | "user":
            return {"role": role, "content": content or ""}
        case "tool":
            call_id = short.of(message.get("tool_call_id"), f"{place}.tool_call_id")
            return {"role": role, "content": content or "", "tool_call_id": call_id, "name": message.get("name")}
        case "assistant":
            result: JsonObject = {"role": role, "content": content}
            result |= {name: message[name] for name in ("reasoning", "reasoning_content") if message.get(name)}
            if calls := message.get("tool_calls"):
                result["tool_calls"] = [
                    _openai_call(call, f"{place}.tool_calls[{index}]", short) for index, call in enumerate(calls)
                ]
            return result
        case _:
            raise BadRequest(
                f"`{place}.role` is {role!r}; this model knows system, developer, user, assistant and tool.",
                param=f"{place}.role",
            )


def _openai_part(part: Json, place: str) -> JsonObject:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part["type"]
    if kind not in TEXT_PARTS:
        raise BadRequest(f"`{place}` is of type {kind!r}, but chats of this model take text only here.", param=place)
    return part if kind == "thinking" else {"type": "text", "text": part[TEXT_PARTS[kind]]}


def _openai_call(call: JsonObject, place: str, short: "_CallIds") -> JsonObject:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = arguments.strip()
    call_id = short.of(call.get("id"), f"{place}.id")
    return {"id": call_id, "function": {"name": function["name"], "arguments": arguments}}


class _CallIds:
    """The ids of one conversation's tool calls, cut to the nine letters or digits that the package takes.

    As vLLM does it, the last nine characters; where those are no such id, or another call's, a hash. An id is the same
    in the call and in its result, and stays the same when the conversation goes on.
    """

    def __init__(self) -> None:
        self._short: dict[str, str] = {}
        self._taken: set[str] = set()

    def of(self, call_id: Json, place: str) -> str:
        if not isinstance(call_id, str):
            raise BadRequest(f"`{place}` must be the id of a tool call, a string.", param=place)
        if call_id not in self._short:
            short = call_id[-9:]
            if not _CALL_ID.fullmatch(short) or short in self._taken:
                short = hashlib.sha256(call_id.encode()).hexdigest()[:9]
            self._short[call_id] = short
            self._taken.add(short)
        return self._short[call_id]


def _characters(value: Json) -> int:
    """Of all the strings inside: about what is going to be tokenized."""
    if isinstance(value, str):
        return len(value)
    inside: Iterable[Json] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list):
        inside = value
    return sum(map(_characters, inside))


def _is_of_tools(error: Exception) -> bool:
    if isinstance(error, ValidationError):
        return error.title in (Tool.__name__, Function.__name__)
    return isinstance(error, InvalidToolException | InvalidToolSchemaException)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        text = f"{place}: {first['msg']}" if place else first["msg"]
    elif isinstance(error, RecursionError):
        text = "it is nested too deeply"
    else:
        text = getattr(error, "message", "") or str(error) or type(error).__name__
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "..."
