"""The requests of the OpenAI API with vLLM's extra fields, validated once, when they come in.

Unknown fields are ignored, as vLLM and OpenAI clients expect; known ones are checked for type and range, and every
rule that needs nothing but the request itself stands here. A null is the same as a field left out. Of a list only the
first wrong element is reported, because a body may hold millions. A union says by the value's JSON type which branch is
meant; the tag of a branch holds a space, so that no reader of an error's place takes it for a field.
"""

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import JsonObject

INT64 = 2**63
MAX_N = 128
MAX_PROMPTS = 1024
MAX_CHOICES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
LONGEST_ID = 20  # characters of a token id as a string

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
"""What travels in an HTTP header as it is."""

Item = TypeVar("Item")
List = Annotated[list[Item], Field(fail_fast=True)]
TokenIds = List[Annotated[int, Field(ge=0, strict=True)]]


def _json_type(value: object) -> str:
    match value:
        case str():
            return "a string"
        case dict() | BaseModel():  # a model where it is written again
            return "an object"
        case list():
            return "a list"
    return "a scalar"


class Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Fields):
    """`continuous_usage_stats` alone asks for usage as well."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def usage(self) -> bool:
        return bool(self.continuous_usage_stats) if self.include_usage is None else self.include_usage


class FunctionDefinition(Fields):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolDefinition(Fields):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition


def _checked_tool(tool: JsonObject) -> JsonObject:
    """The tool as it was sent: templates print it, key order and all."""
    ToolDefinition.model_validate(tool)
    return tool


Tool = Annotated[JsonObject, AfterValidator(_checked_tool)]


class NamedFunction(Fields):
    name: str


class NamedToolChoice(Fields):
    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a string")] | Annotated[NamedToolChoice, Tag("an object")],
    Discriminator(
        _json_type,
        custom_error_type="tool_choice",
        custom_error_message="should be none, auto, required, or an object that names a function",
    ),
]


class JsonSchemaFormat(Fields):
    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    name: str = "response"
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """`structural_tag` carries fields of its own, which the engine understands."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("type json_schema needs json_schema.schema, a JSON schema object")
        return self


JsonSchema = Annotated[
    Annotated[str, Tag("a string")] | Annotated[JsonObject, Tag("an object")],
    Discriminator(
        _json_type,
        custom_error_type="json_schema",
        custom_error_message="should be a JSON schema, as an object or as a string",
    ),
]


class StructuredOutputs(Fields):
    """vLLM's constraint on the output: exactly one of the six, with options that are passed on."""

    model_config = ConfigDict(extra="allow")

    json_: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None

    @model_validator(mode="after")
    def _is_one_constraint(self) -> Self:
        kinds = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
        if sum(getattr(self, kind) is not None for kind in kinds) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar, json_object and structural_tag")
        return self


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _checked_biases(biases: Any) -> Any:
    for key, bias in biases.items() if isinstance(biases, dict) else ():
        if len(key) > LONGEST_ID:
            raise ValueError(f'a key has {len(key)} characters; keys are token ids such as "50256"')
        if type(bias) not in (int, float):
            raise ValueError(f"the bias of {key!r} should be a number")
    return biases


def _checked_request_id(request_id: str) -> str:
    if not REQUEST_ID.fullmatch(request_id):
        raise ValueError("should be 1 to 256 visible ASCII characters")
    return request_id


RequestIdField = Annotated[str, AfterValidator(_checked_request_id)]


class GenerationRequest(Fields):
    """What both routes share. Ranges are vLLM's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_checked_biases)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: List[str] | None = None
    thinking_token_budget: int | None = Field(None, ge=0)

    stop: Annotated[
        List[Annotated[str, Field(max_length=MAX_STOP_LENGTH)]] | None,
        Field(max_length=MAX_STOP_STRINGS),
        BeforeValidator(_as_list),
    ] = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)

    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_token_offsets: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    add_special_tokens: bool | None = None
    echo: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    priority: int | None = Field(None, ge=-INT64, lt=INT64)
    request_id: RequestIdField | None = None
    cache_salt: str | None = Field(None, min_length=1)
    kv_transfer_params: JsonObject | None = None
    vllm_xargs: JsonObject | None = None

    use_beam_search: bool | None = None

    @property
    def output_limit(self) -> int | None:
        """The most tokens to generate, None for as many as fit."""
        raise NotImplementedError

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives per token, 0 for the sampled token alone, None for no log probabilities."""
        raise NotImplementedError

    def check(self) -> None:
        """The rules between fields; raises `BadRequest`."""
        if self.use_beam_search:
            raise BadRequest("beam search is not supported; leave use_beam_search out", param="use_beam_search")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream: true", param="stream_options")
        if self.truncate_prompt_tokens == 0:
            raise BadRequest(
                "truncate_prompt_tokens 0 leaves no prompt; give at least 1", param="truncate_prompt_tokens"
            )
        if any(not string for string in self.stop or ()):
            raise BadRequest("stop strings must not be empty", param="stop")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs come only with stream: false", param="prompt_logprobs")
        limit = self.output_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise BadRequest(
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({limit})", param="min_tokens"
            )


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`. The messages themselves are checked where they are normalised."""

    messages: List[JsonObject] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    tools: List[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None

    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: List[JsonObject] | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other; set one of them",
                param="continue_final_message",
            )
        names = [tool["function"]["name"] for tool in self.tools or ()]
        if self.tool_choice == "required" and not names:
            raise BadRequest("tool_choice required needs tools", param="tool_choice")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise BadRequest(
                f"tool_choice names the function {self.tool_choice.function.name!r}, which is not in tools"
                + (f" ({', '.join(names)})" if names else ", for there are none"),
                param="tool_choice",
            )

    @property
    def generation_prompt(self) -> bool:
        """Whether the template adds the header of the answer: vLLM's default, turned off by a continuation."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def _kind_of_prompt(value: Any) -> str:
    kind = _json_type(value)
    if kind != "a list":
        return kind
    first = _json_type(value[0]) if value else "a string"
    return {"a string": "strings in a list", "a list": "lists in a list"}.get(first, "ids in a list")


Prompt = Annotated[
    Annotated[str, Tag("a string")]
    | Annotated[TokenIds, Tag("ids in a list")]
    | Annotated[List[str], Tag("strings in a list")]
    | Annotated[List[TokenIds], Tag("lists in a list")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="should be a string, a list of token ids, or a list of either",
    ),
]


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = None
    suffix: str | None = None

    @property
    def output_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # the OpenAI API's default, for this route alone

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise BadRequest("suffix (fill in the middle) is not supported; write it into the prompt", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadRequest("best_of is not supported; ask for n choices instead", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens 0 makes sense only with echo: true", param="max_tokens")
        if self.echo and self.stream and self.logprobs is not None:
            raise BadRequest("echo with logprobs comes only with stream: false", param="logprobs")
        if not 0 < len(self.prompts) <= MAX_PROMPTS:
            raise BadRequest(
                f"prompt must be 1 to {MAX_PROMPTS} prompts, but is a list of {len(self.prompts)}", param="prompt"
            )
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise BadRequest(f"prompts times n may make {MAX_CHOICES} choices at most; split the request", param="n")

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt, as text or token ids."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if one else list(prompt)


class TokenizeRequest(Fields):
    """`POST /tokenize`, of a text or of a chat as it would be rendered."""

    model: str | None = None
    prompt: str | None = None
    messages: List[JsonObject] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: List[Tool] | None = None
    documents: List[JsonObject] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: TokenIds
