"""What a model folder, a Hub repository or a GGUF file says about its model: the only place that reads such files.

Everything is read into memory once, and nothing is interpreted further than a name, an id or a number; weights are
never opened. Where two files say the same thing, the order is that of transformers 5, and of vLLM for the context
length, so that a limit here is the engine's limit. A file that is there but broken is an error with its name and line,
never a silent default.
"""

import json
import math
import mmap
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import huggingface_hub

from proxy import CannotStart
from proxy.protocol.generate import JsonObject
from proxy.render.gguf import read_gguf

_SMALL_FILES = (
    "tokenizer.json",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "params.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)

# vLLM's list: families name the context length differently, and the smallest number is the limit.
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)

# transformers writes 10**30 as `model_max_length` when it does not know.
_SANE_LENGTH = 10**9


TokenizerMode: TypeAlias = Literal["auto", "hf", "mistral"]


class ModelFilesError(CannotStart):
    """A model whose files are missing, unreachable or broken. The message says which, and what to do."""


@dataclass(frozen=True)
class ModelFiles:
    """What render and derender need of a model.

    `name` is what was asked for, for messages. The tokenizer is either the text of a `tokenizer.json` or the path of a
    `tekken.json`, which mistral-common reads itself; the other is None. `chat_templates` is by name, `default` and
    perhaps others such as `tool_use`; empty for a base model. `special_tokens` are the strings that a template may use,
    by name (`bos_token`), and the list `additional_special_tokens`. `eos_token_ids` is the union of what all files but
    a `tekken.json` call an end of sequence. `vocab_size` is that of the weights, which may be larger than the
    tokenizer's.
    """

    name: str
    tokenizer_json: str | None
    tekken: Path | None
    chat_templates: dict[str, str]
    special_tokens: dict[str, Any]
    generation_config: JsonObject
    eos_token_ids: frozenset[int]
    max_model_len: int | None
    vocab_size: int | None


@dataclass(frozen=True)
class _Text:
    """What belongs to a tokenizer, and moves with it when a model borrows another's."""

    tokenizer_json: str | None
    tekken: Path | None
    chat_templates: dict[str, str]
    special_tokens: dict[str, Any]
    eos_token_ids: frozenset[int]
    max_model_len: int | None


@dataclass(frozen=True)
class _Weights:
    """What belongs to the weights."""

    generation_config: JsonObject
    eos_token_ids: frozenset[int]
    max_model_len: int | None
    vocab_size: int | None


def load_model_files(
    model: str,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    tokenizer: str | None = None,
    tokenizer_mode: TokenizerMode = "auto",
) -> ModelFiles:
    """The files of `model`: a directory, a Hub id (at `revision`), a `.gguf` file, or `embedded`.

    `tokenizer` is another such source, for the tokenizer, its special tokens and its templates; `chat_template` is the
    path or the text of a template that replaces all others; `tokenizer_mode` says which tokenizer of several it is.
    Raises ModelFilesError.
    """
    given = {} if chat_template is None else {"default": _given_template(chat_template)}
    place = _locate(model, revision)
    own, weights = _read(place)
    text = own
    if tokenizer is not None:
        place = _locate(tokenizer, None)
        text, _ = _read(place)
    templates = given or text.chat_templates or own.chat_templates
    if _takes_tekken(tokenizer_mode, text, templates):
        if text.tekken is None:
            raise ModelFilesError(f"{tokenizer or model}: has no tekken.json, which tokenizer_mode mistral needs")
        if given:
            raise ModelFilesError(
                "chat_template: has no meaning for a tekken.json, whose chats mistral-common renders; leave it out, "
                "or take a tokenizer.json with `tokenizer` or `tokenizer_mode: hf`"
            )
        text, templates = replace(text, tokenizer_json=None), {}
    elif text.tokenizer_json is None:
        raise ModelFilesError(_no_tokenizer(tokenizer or model, place))
    else:
        text = replace(text, tekken=None)
    lengths = [length for length in (weights.max_model_len, text.max_model_len) if length is not None]
    return ModelFiles(
        name=model,
        tokenizer_json=text.tokenizer_json,
        tekken=text.tekken,
        chat_templates=templates,
        special_tokens=text.special_tokens,
        generation_config=weights.generation_config,
        eos_token_ids=weights.eos_token_ids | text.eos_token_ids,
        max_model_len=min(lengths, default=None),
        vocab_size=weights.vocab_size,
    )


def _takes_tekken(mode: TokenizerMode, text: _Text, templates: dict[str, str]) -> bool:
    """Of both files `auto` takes the one that can render chats, which tokenizer.json can with a template only."""
    if mode != "auto" or text.tekken is None:
        return mode == "mistral"
    return text.tokenizer_json is None or (not templates and find_spec("mistral_common") is not None)


def _given_template(template: str) -> str:
    if re.search(r"[{}\n]", template):
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise ModelFilesError(
            f"chat_template: no file {template}; give the path of a .jinja file or the template itself"
        )
    return _read_text(path)


def _locate(model: str, revision: str | None) -> Path:
    """A folder, or a GGUF file."""
    if model == "embedded":
        from proxy.embedded import EmbeddedMissing, model_path  # a program beside the proxy, needed by its demo only

        try:
            return model_path()
        except EmbeddedMissing as error:
            raise ModelFilesError(f"{model}: {error}") from None
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    is_gguf = path.suffix.lower() == ".gguf"
    if path.is_file():
        if is_gguf:
            return path
        raise ModelFilesError(f"{model}: is a file, but not a .gguf file; give the directory that holds tokenizer.json")
    if is_gguf or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        kind = "file" if is_gguf else "directory"
        raise ModelFilesError(f"{model}: there is no such {kind}, and it is not a Hub id like Qwen/Qwen3-8B either")
    return _from_hub(model, revision)


def _from_hub(model: str, revision: str | None) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=list(_SMALL_FILES)))
    except Exception as error:  # the library's own errors, its HTTP client's and the system's, which share no base
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        command = f"hf download {model}" + (f" --revision {revision}" if revision else "")
        raise ModelFilesError(
            f"{model}: there is no such directory, and the Hub did not give it: {reason}. "
            f"Download it where there is a network (`{command}`), or give a directory"
        ) from error


def _no_tokenizer(model: str, folder: Path) -> str:
    found = sorted(entry.name for entry in folder.iterdir())
    if "tekken.json" in found:
        advice = "leave `tokenizer_mode` out to take tekken.json"
    elif "tokenizer.model" in found:
        advice = (
            "convert tokenizer.model with transformers, AutoTokenizer.from_pretrained(...).save_pretrained(...), "
            "or name another source with `tokenizer`"
        )
    elif any(name.endswith(".gguf") for name in found):
        advice = "give the path of the .gguf file itself, or name another source with `tokenizer`"
    else:
        advice = "name a source that has one with `tokenizer`"
    listed = ", ".join(found[:20]) + (", ..." if len(found) > 20 else "")
    return f"{model}: has no tokenizer.json, which is needed (found {listed or 'nothing'}); {advice}"


def _read(place: Path) -> tuple[_Text, _Weights]:
    return _read_folder(place) if place.is_dir() else _read_gguf_file(place)


def _read_gguf_file(path: Path) -> tuple[_Text, _Weights]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            gguf = read_gguf(data)
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: {error}") from error
    named = {"bos_token": gguf.bos_token, "eos_token": gguf.eos_token}
    text = _Text(
        tokenizer_json=gguf.tokenizer_json,
        tekken=None,
        chat_templates={"default": gguf.chat_template} if gguf.chat_template else {},
        special_tokens={name: token for name, token in named.items() if token is not None},
        eos_token_ids=frozenset(end for end in (gguf.eos_token_id, gguf.eot_token_id) if end is not None),
        max_model_len=None,
    )
    return text, _Weights({}, frozenset(), gguf.context_length, gguf.vocab_size)


def _read_folder(folder: Path) -> tuple[_Text, _Weights]:
    return _folder_text(folder), _folder_weights(folder)


def _folder_weights(folder: Path) -> _Weights:
    generation = _json_object(folder / "generation_config.json")
    config = _json_object(folder / "config.json")
    params = _mistral_params(_json_object(folder / "params.json"))
    inner = config.get("text_config")
    text_config: JsonObject = inner if isinstance(inner, dict) else {}
    sources = [
        (folder / "generation_config.json", generation),
        (folder / "config.json", config),
        (folder / "config.json", text_config),
    ]
    return _Weights(
        generation_config=generation,
        eos_token_ids=frozenset(
            token_id for path, values in sources for token_id in _ids(path, values, "eos_token_id")
        ),
        max_model_len=_context_length(text_config) or _context_length(config) or _context_length(params),
        vocab_size=_vocab_size(text_config) or _vocab_size(config) or _vocab_size(params),
    )


def _mistral_params(params: JsonObject) -> JsonObject:
    """Mistral's own params.json with the names and the default that vLLM gives it; empty where there is none."""
    if not params:
        return {}
    yarn = params.get("yarn")
    rope = {"rope_parameters": {**yarn, "rope_type": "yarn"}} if isinstance(yarn, dict) else {}
    return {"max_position_embeddings": 128_000, **params, **rope}


def _ids(path: Path, values: JsonObject, key: str) -> list[int]:
    value = values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelFilesError(f"{path}: {key} should be a token id or a list of them")
    return [token_id for token_id in ids if token_id >= 0]  # some files say -1 for none


def _vocab_size(config: JsonObject) -> int | None:
    size = config.get("vocab_size")
    return size if type(size) is int and size > 0 else None


def _context_length(config: JsonObject) -> int | None:
    """The smallest length that a config names, stretched as its rotary embedding is; None if it names none.

    As vLLM does it: YaRN counts from the length before it, linear and dynamic scaling from the length that is named.
    The named length of Gemma 3 is the scaled one already, as it is with every other kind of scaling.
    """
    lengths = [value for key in _LENGTH_KEYS if isinstance(value := config.get(key), int) and value > 0]
    if not lengths:
        return None
    named = min(lengths)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or not isinstance(factor := rope.get("factor"), int | float):
        return named
    if not 0 < factor < math.inf:
        raise ValueError(f"the factor of its rope scaling is {factor}")
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "yarn":
        return int((rope.get("original_max_position_embeddings") or named) * factor)
    if kind in ("linear", "dynamic") and not str(config.get("model_type")).startswith("gemma3"):
        return int(named * factor)
    return named


def _folder_text(folder: Path) -> _Text:
    config = _json_object(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config, _json_object(folder / "special_tokens_map.json"))
    path, tekken = folder / "tokenizer.json", folder / "tekken.json"
    tokenizer_json = _read_text(path) if path.is_file() else None
    tokenizer = {} if tokenizer_json is None else _parsed_object(path, tokenizer_json)
    eos = _token_id(tokenizer, special_tokens.get("eos_token"))
    length = config.get("model_max_length")
    return _Text(
        tokenizer_json=tokenizer_json,
        tekken=tekken if tekken.is_file() else None,
        chat_templates=_chat_templates(folder, config),
        special_tokens=special_tokens,
        eos_token_ids=frozenset() if eos is None else frozenset({eos}),
        max_model_len=int(length) if isinstance(length, int | float) and 0 < length < _SANE_LENGTH else None,
    )


def _token_id(tokenizer: JsonObject, token: str | None) -> int | None:
    """Looked up in the file, as building the tokenizer takes seconds where it is large."""
    for added in tokenizer.get("added_tokens") or ():
        match added:
            case {"content": str(content), "id": int(token_id)} if content == token:
                return token_id
    match tokenizer.get("model"):
        case {"vocab": dict(vocabulary)}:
            found = vocabulary.get(token)
            return found if isinstance(found, int) else None
        case {"vocab": list(pieces)}:  # Unigram: pairs of piece and score, by id
            return next((token_id for token_id, piece in enumerate(pieces) if token in piece[:1]), None)
        case _:
            return None


def _special_tokens(config: JsonObject, legacy: JsonObject) -> dict[str, Any]:
    """A tokenizer_config.json with an `added_tokens_decoder` is newer than the special_tokens_map.json beside it."""
    merged = legacy | config if "added_tokens_decoder" in config else config | legacy
    named = {name: merged[name] for name in merged if name.endswith("_token")}
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named |= extra
        extra = merged.get("additional_special_tokens") or []
    tokens: dict[str, Any] = {
        name: content for name, token in named.items() if (content := _token_content(token)) is not None
    }
    listed = [content for token in extra if (content := _token_content(token)) is not None]
    return tokens | {"additional_special_tokens": listed} if listed else tokens


def _token_content(token: object) -> str | None:
    """A token is its text, or an object that holds it. Switches such as `add_bos_token` are neither."""
    match token:
        case str():
            return token
        case {"content": str(content)}:
            return content
        case _:
            return None


def _chat_templates(folder: Path, tokenizer_config: JsonObject) -> dict[str, str]:
    """Of the places where templates may stand, the first that has any counts, alone."""
    default = folder / "chat_template.jinja"
    templates = {"default": _read_text(default)} if default.is_file() else {}
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = _read_text(path)
    processor = folder / "chat_template.json"
    return (
        templates
        or _named_templates(processor, _json_object(processor).get("chat_template"))
        or _named_templates(folder / "tokenizer_config.json", tokenizer_config.get("chat_template"))
    )


def _named_templates(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    templates: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [None]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                problem = "chat_template should be text, or a list of objects with name and template"
                raise ModelFilesError(f"{path}: {problem}")
    return templates


def _json_object(path: Path) -> JsonObject:
    """Empty where there is no such file."""
    return _parsed_object(path, _read_text(path)) if path.is_file() else {}


def _parsed_object(path: Path, text: str) -> JsonObject:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelFilesError(f"{path}:{error.lineno}:{error.colno}: is not JSON: {error.msg}") from None
    except RecursionError:
        raise ModelFilesError(f"{path}: is nested too deeply") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: should be a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFilesError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read: {error.strerror or type(error).__name__}") from error
