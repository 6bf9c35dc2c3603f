"""The configuration file: what may stand in it, and how its text becomes a checked, frozen `Config`.

Every key is documented here, once: the docstring below a field is what `python -m proxy.config` prints as
`config/reference.md`. A file is right as a whole or refused as a whole: one `ConfigError` lists every problem with the
line of its key. What could hold a secret (an `api_key`, a URL, anything that came out of the environment) is not
repeated there. `load_config` is pure; only `read_config` and `EngineConfig.read_api_key` touch files, and relative
paths are relative to the working directory. How YAML is read, and `${NAME}` with it, is in `yaml_document.py`.
"""

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_origin, get_type_hints
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from proxy import CannotStart
from proxy.formats.kinds import KINDS, Calls, Reasoning, check
from proxy.formats.reasoning import REASONING
from proxy.formats.table import AUTO
from proxy.formats.tools import TOOLS
from proxy.yaml_document import Document, KeyPath, dotted


class ConfigError(CannotStart):
    """A configuration that cannot be used. The message has a line per problem: `file:line: dotted.path: problem`."""


def _engine_url(url: str) -> str:
    """Without its trailing slash. Messages leave the URL out, since it may hold a password."""
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port != 0
    except ValueError:
        raise ValueError("is not a URL; write it like http://10.0.0.11:8200") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid or re.search(r"\s", url):
        raise ValueError("should be an http or https URL with a host; write it like http://10.0.0.11:8200")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold credentials; give them as api_key or api_key_file")
    if parts.query or parts.fragment:
        raise ValueError("must not hold a query or a fragment; a base path such as http://10.0.0.11/engine is fine")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _header_safe(secret: str) -> str:
    if not re.fullmatch(r"[!-~]+", secret):
        raise ValueError("should be one or more visible ASCII characters, as it travels in an HTTP header")
    return secret


def _header_safe_secret(secret: SecretStr) -> SecretStr:
    _header_safe(secret.get_secret_value())
    return secret


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _default_served_name(model: str) -> str:
    """A Hub id names itself; of a path, the last part does, a GGUF file without its ending."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) and not model.endswith(".gguf"):
        return model
    return model.rstrip("/").rpartition("/")[2].removesuffix(".gguf") or model


def _declaration(value: object) -> Reasoning | Calls:
    """A format's declaration, as a dataclass of `proxy.formats.kinds`."""
    if not isinstance(value, dict):
        raise ValueError("should be a mapping with a kind and its fields")
    options = dict(value)
    name = options.pop("kind", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        missing = "kind is missing" if name is None else f"kind {name!r} is not known"
        raise ValueError(f"{missing}{_nearest(str(name), KINDS)}")
    hints = get_type_hints(kind)
    for key in options:
        if key not in hints:
            raise ValueError(f"{key} is not a field of {name}{_nearest(key, hints)}")
        if get_origin(hints[key]) is tuple and isinstance(options[key], str):
            options[key] = [options[key]]
    try:
        declaration = TypeAdapter(kind).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    check(declaration)
    return declaration


def _new_name(name: str) -> str:
    if name == AUTO or name in TOOLS or name in REASONING:
        raise ValueError(f"{name} is one of the project's own formats; choose another name")
    return name


Declaration = Annotated[Any, PlainValidator(_declaration)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty_keys(cls, value: object) -> object:
        """A key without a value is a key left out, so that an optional key can be `${NAME:-}`."""
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None or key not in cls.model_fields}


class ServerConfig(_Section):
    """Where clients connect, and what a connection may cost."""

    host: Name = "127.0.0.1"
    """The address to listen on: `0.0.0.0` for every interface. `serve --host` overrides it."""

    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on; 0 takes a free one. `serve --port` overrides it."""

    keep_alive_interval: float = Field(default=15, ge=0, allow_inf_nan=False)
    """Seconds of silence in a stream after which an SSE comment is sent, so that nothing on the way closes it; 0 for
    never."""

    shutdown_timeout: float = Field(default=30, ge=0, allow_inf_nan=False)
    """Seconds that running requests have to finish once the server is told to stop."""

    max_body_size: int = Field(default=64 * 2**20, gt=0)
    """Bytes of a request body; a larger one is answered with 413."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages that are logged."""

    record_dir: Name | None = None
    """A directory that keeps the token streams of the last chats, as files that `derender-proxy replay` reads: for
    looking at how an output was parsed. They hold what models wrote, and the tools of the requests."""

    record_last: int = Field(default=100, ge=1, le=100_000)
    """How many chats `record_dir` keeps."""

    record_prompts: bool = False
    """Whether the records hold the prompts too."""


class ModelConfig(_Section):
    """One model as clients see it: the files that render and derender need, its defaults, its pool of engines."""

    model: Name
    """A directory, a Hub id, a `.gguf` file, or `embedded` for the embedded engine's own model. Only tokenizer, chat
    template and small JSON files are read from it, never weights."""

    served_model_name: Annotated[list[Name], BeforeValidator(_as_list), Field(min_length=1)] = Field(
        default_factory=lambda validated: [_default_served_name(validated["model"])]
    )
    """The name that clients ask for, or a list of names: the first is the one in answers, the others are aliases.
    Without it, the Hub id or the last part of the path."""

    pool: Name
    """The pool whose engines serve this model. It may be left out when there is exactly one pool."""

    tokenizer: Name | None = None
    """A directory, Hub id or `.gguf` file to take the tokenizer and the chat template from, instead of `model`."""

    tokenizer_mode: Literal["auto", "hf", "mistral"] = "auto"
    """Which file the tokenizer is: `hf` takes `tokenizer.json`, `mistral` takes `tekken.json` and renders chats with
    mistral-common (the extra `mistral`), without a chat template. `auto` takes the one that is there; of both
    `tekken.json`, where there is no chat template and mistral-common is installed."""

    revision: Name | None = None
    """Branch, tag or commit of `model` on the Hub; `tokenizer` always comes from its default branch."""

    max_model_len: int | None = Field(default=None, gt=0)
    """The context length in tokens, prompt and answer together. Without it, what the model's files say."""

    chat_template: Name | None = None
    """The path of a `.jinja` file, or the template itself, instead of the model's own."""

    default_chat_template_kwargs: dict[str, JsonValue] = {}
    """Variables for the chat template, such as `enable_thinking: false`. A request's `chat_template_kwargs` come on
    top."""

    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template of its own."""

    split_special_tokens: bool = True
    """Whether text in system, user and tool messages that looks like a special token is encoded as plain text.
    False lets every client write control tokens."""

    tool_call_parser: Name | None = None
    """How the model writes tool calls, by vLLM's parser name (`proxy/formats/README.md` lists them), or by a name of
    `formats`. `auto` finds it in the chat template and the vocabulary, and refuses where it cannot tell."""

    reasoning_parser: Name | None = None
    """How the model writes its reasoning, in the same way."""

    reasoning_field: Literal["reasoning", "reasoning_content", "both"] = "reasoning"
    """What responses call the reasoning: vLLM's name of today, the name that DeepSeek's API and older clients know,
    or both."""

    enable_auto_tool_choice: bool = False
    """Whether the model may decide by itself to call a tool; without it, requests with tools have to demand a call
    (`tool_choice` required, or a function's name) or forbid it (none)."""

    max_tool_call_depth: int = Field(128, ge=1, le=10_000)
    """How deep the arguments of a call may nest. The text of a call that nests deeper becomes content from there on."""

    max_tool_call_held: int = Field(1 << 20, ge=1)
    """How many characters of one argument may be held until its end is known, where it cannot be streamed. The text of
    a longer one becomes content from there on."""

    generation_config: Literal["auto", "vllm"] = "auto"
    """Where default sampling parameters come from: `auto` takes the model's `generation_config.json`, `vllm` leaves
    the engine's defaults."""

    override_generation_config: dict[str, JsonValue] = {}
    """Default sampling parameters, such as `temperature: 0.6`, over those of `generation_config`. A request's come on
    top."""

    max_logprobs: int = Field(default=20, ge=0)
    """The most `top_logprobs` (`logprobs` in completions) and `prompt_logprobs` that a request may ask for."""

    return_tokens_as_token_ids: bool = False
    """Whether tokens in logprobs are written as `token_id:123` where a request does not say."""

    @property
    def name(self) -> str:
        """The canonical served name."""
        return self.served_model_name[0]


class EngineConfig(_Section):
    """One engine. Its URL alone, as a string, is enough where the other keys keep their defaults."""

    url: Annotated[str, AfterValidator(_engine_url)]
    """The engine's `http` or `https` address, with a base path if it has one: `http://10.0.0.11:8200`."""

    protocol: Literal["vllm"] = "vllm"
    """What the engine speaks: `vllm` is `/inference/v1/generate`."""

    api_key: Annotated[SecretStr, AfterValidator(_header_safe_secret)] | None = None
    """Sent to the engine as bearer token. Take it from the environment, `${ENGINE_API_KEY}`, or use `api_key_file`."""

    api_key_file: Name | None = None
    """A file that holds the key, such as a mounted secret; white space around the key is dropped."""

    @model_validator(mode="before")
    @classmethod
    def _bare_url(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("has both api_key and api_key_file; keep one")
        return self

    def read_api_key(self) -> SecretStr | None:
        """The key from either place. Raises ConfigError when the file cannot be read or holds no key."""
        if self.api_key_file is None:
            return self.api_key
        try:
            return SecretStr(_header_safe(Path(self.api_key_file).expanduser().read_text("utf-8").strip()))
        except UnicodeDecodeError:
            raise ConfigError(f"{self.api_key_file}: api_key_file of {self.url} is not UTF-8 text") from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(f"{self.api_key_file}: api_key_file of {self.url} cannot be read: {reason}") from error
        except ValueError as error:
            raise ConfigError(f"{self.api_key_file}: the key for {self.url} {error}") from None


class PoolConfig(_Section):
    """Engines that serve the same model, how one is chosen, and how long it may take."""

    engines: list[EngineConfig] = Field(min_length=1)
    """The engines, each a mapping or just its URL."""

    policy: Literal["round_robin", "least_requests"] = "least_requests"
    """Which engine is next: each in turn, or the one with the fewest requests in flight."""

    connect_timeout: Seconds = 5
    """Seconds to open a connection to an engine."""

    first_token_timeout: Seconds = 300
    """Seconds from the request to the first token, so queueing and prefill in the engine count. Answers that an engine
    can only give whole, such as those with `prompt_logprobs`, have `total_timeout` alone."""

    idle_timeout: Seconds = 60
    """Seconds without a token once the first has come."""

    total_timeout: Seconds = 3600
    """Seconds for the whole answer of one engine; a request that is passed on to another has them again."""

    @model_validator(mode="after")
    def _distinct_engines(self) -> Self:
        urls = [engine.url for engine in self.engines]
        for index, url in enumerate(urls):
            if (first := urls.index(url)) < index:
                raise ValueError(f"engines[{index}] has the same url as engines[{first}]; an engine is listed once")
        return self


class Config(_Section):
    """The whole file: a listener, models, and the engines that generate for them."""

    server: ServerConfig = ServerConfig()
    """Where clients connect, and what a connection may cost."""

    models: list[ModelConfig] = Field(min_length=1)
    """The models that clients may ask for."""

    pools: dict[Name, PoolConfig] = Field(min_length=1)
    """The engines, in pools that bear a name. Each pool serves one model or more; one that serves none is refused."""

    formats: dict[
        Annotated[str, AfterValidator(_new_name)], Annotated[list[Declaration], BeforeValidator(_as_list)]
    ] = {}
    """Formats of your own, by name, for `tool_call_parser` and `reasoning_parser`: a `kind` with its fields, or a list
    of such. `proxy/formats/README.md` has the kinds; `custom-format.yaml` is an example."""

    def only(self, name: str | None) -> "Config":
        """This configuration with one model, and its pool: the one of that name, or, without a name, the only one.
        Raises ConfigError."""
        found = [model for model in self.models if name is None or name in model.served_model_name]
        if len(found) != 1:
            names = ", ".join(model.name for model in self.models)
            asked = "name one of its models with --model" if name is None else f"there is no model {name!r}"
            raise ConfigError(f"{asked}; the file has {names}")
        (model,) = found
        return self.model_copy(update={"models": [model], "pools": {model.pool: self.pools[model.pool]}})

    @classmethod
    def of_model(cls, model: str) -> "Config":
        """A model's files, its formats found in them, and an engine that nobody asks."""
        parsers = {"tool_call_parser": AUTO, "reasoning_parser": AUTO, "enable_auto_tool_choice": True}
        return cls.model_validate(
            {
                "models": [{"model": model, "pool": "none", **parsers}],
                "pools": {"none": {"engines": [{"url": "http://127.0.0.1:1"}]}},
            }
        )

    def with_listen(self, host: str | None, port: int | None) -> "Config":
        """This configuration with the command line's host and port, where given. Raises ConfigError on a bad one."""
        given = {"host": host, "port": port}
        overrides = {key: value for key, value in given.items() if value is not None}
        try:
            server = ServerConfig.model_validate(self.server.model_dump() | overrides)
        except ValidationError as error:
            raise ConfigError(
                "\n".join(f"--{e['loc'][0]}: {_message(_path(e), e, str(e['input']))}" for e in error.errors())
            ) from None
        return self.model_copy(update={"server": server})


def read_config(path: Path) -> Config:
    """The configuration in a file, with this process's environment. Raises ConfigError."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or type(error).__name__}") from error
    return load_config(text, source=str(path), env=os.environ)


def load_config(text: str, *, source: str, env: Mapping[str, str]) -> Config:
    """The configuration in `text`; `source` names it in messages. Raises ConfigError with every problem, by line."""
    document = Document(env)
    data = document.read(text)
    config: Config | None = None
    if not document.unreadable:
        _give_the_only_pool(data)
        config, errors = _validate(document, data)
        for error in errors:
            path = _path(error)
            document.report(path, _message(path, error, _shown(document, path, error["input"])))
        for path, message in _cross_check(data):
            document.report(path, message)
    if config is None or document.problems:
        raise ConfigError("\n".join(str(problem.at(source)) for problem in sorted(document.problems)))
    return config


def _shown(document: Document, path: KeyPath, value: object) -> str:
    """A wrong value as a message may repeat it; empty for keys, and for URLs, which may hold one."""
    if {"api_key", "url"} & set(path) or (path and isinstance(path[-1], int) and "engines" in path):
        return ""
    return document.shown(path, value)


def _give_the_only_pool(data: JsonValue) -> None:
    match data:
        case {"models": list(models), "pools": dict(pools)} if len(pools) == 1:
            for model in models:
                if isinstance(model, dict) and model.get("pool") is None:
                    model["pool"] = next(iter(pools))


def _validate(document: Document, data: JsonValue) -> tuple[Config | None, list[ErrorDetails]]:
    """Tries twice: what the environment holds may look like a number where text is wanted, as many a key does."""
    errors: list[ErrorDetails] = []
    for _ in range(2):
        try:
            return Config.model_validate(data), []
        except ValidationError as error:
            # A default that could not be made is the echo of an error that is in the list already.
            errors = [e for e in error.errors(include_url=False) if e["type"] != "default_factory_not_called"]
        wants_text = {document.known(_path(e)) for e in errors if e["type"] == "string_type"}
        for path in wants_text & document.expanded.keys():
            parent = cast(Any, data)
            for part in path[:-1]:
                parent = parent[part]
            parent[path[-1]] = document.expanded[path]
    return None, errors


def _cross_check(data: JsonValue) -> Iterator[tuple[KeyPath, str]]:
    """What no section can see alone. It reads the plain data, so that it works beside errors elsewhere in the file."""
    sections = data if isinstance(data, dict) else {}
    models, pools = sections.get("models"), sections.get("pools")
    if not isinstance(models, list) or not isinstance(pools, dict):
        return
    used: set[JsonValue] = set()
    names: dict[str, str] = {}
    for index, model in enumerate(models):
        if not isinstance(model, dict):
            continue
        pool = model.get("pool")
        if isinstance(pool, str):
            used.add(pool)
            if pool not in pools:
                yield ("models", index, "pool"), f"names no pool of this file{_nearest(pool, pools)}"
        for path, name in _served_names(model):
            where = dotted(("models", index, *path))
            if name in names:
                yield ("models", index, *path), f"gives a name that {names[name]} has already; a name means one model"
            names.setdefault(name, where)
    if all(isinstance(model, dict) and isinstance(model.get("pool"), str) for model in models):
        # Engines that get no requests are capacity that somebody counts on: nearly always a name that was misspelt.
        for pool in pools.keys() - used:
            yield ("pools", pool), f"no model uses this pool; give a model `pool: {pool}`, or take the pool out"


def _served_names(model: dict[str, JsonValue]) -> Iterator[tuple[KeyPath, str]]:
    given = model.get("served_model_name")
    if isinstance(given, list):
        yield from ((("served_model_name", i), name) for i, name in enumerate(given) if isinstance(name, str))
    elif isinstance(given, str):
        yield ("served_model_name",), given
    elif given is None and isinstance(path := model.get("model"), str):
        yield ("model",), _default_served_name(path)


def _nearest(word: str, known: Collection[str]) -> str:
    matches = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {matches[0]}?" if matches else f"; expected one of {', '.join(known)}"


_SECTIONS: dict[str, type[_Section]] = {
    "server": ServerConfig,
    "models[]": ModelConfig,
    "pools.<name>": PoolConfig,
    "pools.<name>.engines[]": EngineConfig,
}


def _unknown_key(path: KeyPath) -> str:
    key = str(path[-1])
    homes = [f"it belongs in {title}" for title, section in _SECTIONS.items() if key in section.model_fields]
    return f"unknown key; {homes[0]}" if homes else f"unknown key{_nearest(key, _section(path[:-1]).model_fields)}"


def _section(path: KeyPath) -> type[_Section]:
    match path:
        case ("server",):
            return ServerConfig
        case ("models", int()):
            return ModelConfig
        case ("pools", str()):
            return PoolConfig
        case ("pools", str(), "engines", int()):
            return EngineConfig
        case _:
            return Config


_EXPECTATIONS = {
    "bool_type": "should be true or false",
    "dict_type": "should be a mapping",
    "float_type": "should be a number",
    "int_from_float": "should be a whole number",
    "int_type": "should be a whole number",
    "list_type": "should be a list",
    "model_type": "should be a mapping",
    "string_too_short": "should not be empty",
    "string_type": "should be text",
    "too_short": "should hold at least one entry",
}


def _path(error: ErrorDetails) -> KeyPath:
    return tuple(part for part in error["loc"] if part != "[key]")


def _message(path: KeyPath, error: ErrorDetails, shown: str) -> str:
    match error["type"]:
        case "extra_forbidden":
            return _unknown_key(path)
        case "missing":
            meaning = _section(path[:-1]).model_fields[str(path[-1])].description or ""
            return f"missing: {' '.join(meaning.split())}"
        case "value_error":
            return str(error["ctx"]["error"])
        case "string_too_short" | "too_short" as kind:
            return _EXPECTATIONS[kind]
        case kind:
            expected = _EXPECTATIONS.get(kind) or error["msg"].replace("Input should", "should", 1)
            return f"{expected}, got {shown}" if shown else expected


def reference() -> str:
    """Every key as a Markdown table: what `config/reference.md` holds."""
    lines = [
        "# Configuration reference",
        "",
        "Made by `python -m proxy.config > config/reference.md`, so change `proxy/config.py` and not this file.",
        "Keys that mean the same as a vLLM flag bear its name. Unknown and duplicate keys are refused.",
        "",
        "Any value may hold `${NAME}` or `${NAME:-default}` from the environment. The default also stands in for an",
        "empty variable; one that is empty or not set is an error where there is no default. `$$` is a dollar sign.",
        "A key without a value is a key left out. Relative paths are relative to the working directory.",
    ]
    sections: list[tuple[str, type[_Section]]] = [("The file", Config)]
    sections += [(f"`{title}`", section) for title, section in _SECTIONS.items()]
    for title, section in sections:
        schema = section.model_json_schema()
        lines += ["", f"## {title}", "", str(section.__doc__), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, field in section.model_fields.items():
            prop = schema["properties"][key]
            default = "required" if field.is_required() else _default(prop)
            meaning = " ".join((field.description or "").split())
            lines.append(f"| `{key}` | {_type(prop)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _default(prop: dict[str, Any]) -> str:
    match prop.get("default"):
        case None | dict():
            return ""
        case bool(value):
            return f"`{str(value).lower()}`"
        case value:
            return f"`{value}`"


def _type(prop: dict[str, Any]) -> str:
    match prop:
        case {"anyOf": [only, {"type": "null"}]}:
            return _type(only)
        case {"enum": values}:
            return ", ".join(f"`{value}`" for value in values)
        case {"const": value}:
            return f"`{value}`"
        case {"format": "password"}:
            return "text, secret"
        case {"type": "array", "items": {"type": "string"}}:
            return "text, or a list of texts"
        case {"type": "array"}:
            return "list"
        case {"type": "object"} | {"$ref": _}:
            return "mapping"
        case {"type": "boolean"}:
            return "true or false"
        case {"type": "integer" | "number" as kind}:
            bounds = (("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"))
            limits = [f", {words} {prop[bound]:g}" for bound, words in bounds if bound in prop]
            return ("whole number" if kind == "integer" else "number") + "".join(limits)
        case _:
            return "text"


if __name__ == "__main__":
    print(reference(), end="")
