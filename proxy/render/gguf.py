"""A GGUF file's metadata, read as a tokenizer.

No I/O and no trust: the caller maps the file and hands in the bytes, every length is checked against what is left of
them before it is used, and only the values that are needed are ever built. Tensors are never looked at. Whatever is
wrong with a file is a `GgufError`.

Encodings must equal llama.cpp's own, so a pre-tokenizer name is accepted only once that was tested.
Layout: the GGUF specification, versions 2 and 3, little endian.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Final, TypeAlias, TypeVar

Value: TypeAlias = int | float | bool | str | list[int] | list[str]
T = TypeVar("T", bool, int, str)

_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING: Final = 8
_ARRAY: Final = 9
_INT32: Final = 5

_U32: Final = _SCALARS[4]
_U64: Final = _SCALARS[10]

_LONGEST_KEY: Final = 65_535  # the specification's own limit
_MOST_STRINGS: Final = 1 << 21  # eight times the largest vocabulary in use

# Token types of `tokenizer.ggml.token_type`.
_CONTROL: Final = 3
_USER_DEFINED: Final = 4

_PRE_TOKENIZERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    },
}

_WANTED_ARRAYS: Final = {
    "tokenizer.ggml.tokens": _STRING,
    "tokenizer.ggml.merges": _STRING,
    "tokenizer.ggml.token_type": _INT32,
}


class GgufError(ValueError):
    """The bytes are not a GGUF file that can be used here; the message says why."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a GGUF file says about a model's text side.

    `tokenizer_json` is the text of a `tokenizer.json`; with `add_bos` its post-processor puts the bos token in front.
    `eot_token_id` is the end of a turn where it differs from the end of the text, `context_length` counts tokens.
    """

    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    eot_token_id: int | None
    add_bos: bool
    context_length: int | None
    vocab_size: int


def read_gguf(data: memoryview | mmap) -> GgufModel:
    """Read the metadata of a mapped GGUF file. Raises `GgufError`."""
    with memoryview(data).cast("B") as view:
        metadata = _read_metadata(view)
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise GgufError("tokenizer.ggml.tokens holds a token twice; every token must have one id")
    bos_token_id = _token_id(metadata, "bos", tokens)
    eos_token_id = _token_id(metadata, "eos", tokens)
    add_bos = _optional(metadata, "tokenizer.ggml.add_bos_token", bool) or False
    if add_bos and bos_token_id is None:
        raise GgufError("tokenizer.ggml.add_bos_token is set, but there is no tokenizer.ggml.bos_token_id")
    architecture = _optional(metadata, "general.architecture", str)
    return GgufModel(
        tokenizer_json=_tokenizer_json(metadata, tokens, vocabulary, bos_token_id if add_bos else None),
        chat_template=_optional(metadata, "tokenizer.chat_template", str),
        bos_token=None if bos_token_id is None else tokens[bos_token_id],
        eos_token=None if eos_token_id is None else tokens[eos_token_id],
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        eot_token_id=_token_id(metadata, "eot", tokens),
        add_bos=add_bos,
        context_length=_optional(metadata, f"{architecture}.context_length", int),
        vocab_size=len(tokens),
    )


class _Reader:
    """A position in the bytes. Nothing is read, and nothing allocated, beyond their end."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def skip(self, size: int, what: str) -> int:
        """Move on by `size` bytes and return where they began."""
        start = self._position
        if size > len(self._data) - start:
            raise GgufError(
                f"the file ends inside {what}: {size} bytes expected at offset {start}, {len(self._data) - start} left"
            )
        self._position = start + size
        return start

    def number(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack_from(self._data, self.skip(layout.size, what))[0]

    def string(self, what: str, longest: int | None = None) -> str:
        size: int = self.number(_U64, what)
        if longest is not None and size > longest:
            raise GgufError(f"{what} is {size} bytes long, at most {longest} are allowed")
        start = self.skip(size, what)
        try:
            return str(self._data[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise GgufError(f"{what} is not UTF-8 (at offset {start + error.start})") from None

    def skip_string(self, what: str) -> None:
        self.skip(self.number(_U64, what), what)


def _read_metadata(data: memoryview) -> dict[str, Value]:
    """All scalars and strings, and of the arrays those that make the tokenizer."""
    reader = _Reader(data)
    start = reader.skip(4, "the magic number")
    if (magic := bytes(data[start : start + 4])) != b"GGUF":
        raise GgufError(f"not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    version = reader.number(_U32, "the version")
    if version not in (2, 3):
        raise GgufError(f"GGUF version {version} cannot be read, expected 2 or 3 (little endian)")
    reader.number(_U64, "the number of tensors")
    count = reader.number(_U64, "the number of metadata keys")
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = reader.string("a metadata key", _LONGEST_KEY)
        if key in metadata:
            raise GgufError(f"the metadata key {key!r} stands twice")
        kind = reader.number(_U32, f"the type of {key}")
        if kind == _ARRAY:
            values = _read_array(reader, key)
            if values is not None:
                metadata[key] = values
        elif kind == _STRING:
            metadata[key] = reader.string(key)
        elif kind in _SCALARS:
            metadata[key] = reader.number(_SCALARS[kind], key)
        else:
            raise GgufError(f"{key} has the unknown value type {kind}")
    return metadata


def _read_array(reader: _Reader, key: str) -> list[int] | list[str] | None:
    """The array's values if the tokenizer needs them, else None."""
    kind = reader.number(_U32, f"the element type of {key}")
    count = reader.number(_U64, f"the length of {key}")
    wanted = _WANTED_ARRAYS.get(key)
    if wanted is not None and kind != wanted:
        raise GgufError(f"{key} is an array of type {kind}, expected type {wanted}")
    if kind == _STRING:
        if count > _MOST_STRINGS:
            raise GgufError(f"{key} has {count} strings, at most {_MOST_STRINGS} are allowed")
        if wanted is not None:
            return [reader.string(key) for _ in range(count)]
        for _ in range(count):
            reader.skip_string(key)
        return None
    if kind not in _SCALARS:
        raise GgufError(f"{key} is an array of the unsupported element type {kind}")
    layout = _SCALARS[kind]
    if wanted is None:
        reader.skip(layout.size * count, key)
        return None
    if count > _MOST_STRINGS:
        raise GgufError(f"{key} has {count} numbers, at most {_MOST_STRINGS} are allowed")
    return [reader.number(layout, key) for _ in range(count)]


def _tokenizer_json(
    metadata: Mapping[str, Value], tokens: Sequence[str], vocabulary: Mapping[str, int], bos_token_id: int | None
) -> str:
    model = _required(metadata, "tokenizer.ggml.model", str)
    if model != "gpt2":
        raise GgufError(
            f"tokenizer.ggml.model is {model!r}, only 'gpt2' (byte-level BPE) can be read; "
            "use the model's directory or Hub id with its tokenizer.json instead"
        )
    pre = _required(metadata, "tokenizer.ggml.pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise GgufError(
            f"the pre-tokenizer {pre!r} has not been tested; tested: {', '.join(_PRE_TOKENIZERS)}. "
            "Use the model's directory or Hub id with its tokenizer.json instead"
        )
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(metadata, tokens),
            "normalizer": None,
            "pre_tokenizer": _PRE_TOKENIZERS[pre],
            "post_processor": None if bos_token_id is None else _bos_in_front(tokens[bos_token_id], bos_token_id),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": _merges(metadata, vocabulary),
            },
        },
        ensure_ascii=False,
    )


def _merges(metadata: Mapping[str, Value], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise GgufError(f"the merge {merge[:80]!r} is not of two tokens that make a third")
        merges.append((left, right))
    return merges


def _added_tokens(metadata: Mapping[str, Value], tokens: Sequence[str]) -> list[dict[str, Any]]:
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        found = len(types) if isinstance(types, list) else "no"
        raise GgufError(f"tokenizer.ggml.token_type has {found} entries, expected one for each of {len(tokens)} tokens")
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_type == _CONTROL,
        }
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type in (_CONTROL, _USER_DEFINED) and token
    ]


def _bos_in_front(token: str, token_id: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _token_id(metadata: Mapping[str, Value], name: str, tokens: Sequence[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = _optional(metadata, key, int)
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise GgufError(f"{key} is {token_id}, outside the vocabulary of {len(tokens)} tokens")
    return token_id


def _strings(metadata: Mapping[str, Value], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list):
        raise GgufError(f"{key} is missing: this file holds no byte-level BPE tokenizer")
    return [value for value in values if isinstance(value, str)]


def _required(metadata: Mapping[str, Value], key: str, kind: type[T]) -> T:
    value = _optional(metadata, key, kind)
    if value is None:
        raise GgufError(f"{key} is missing")
    return value


def _optional(metadata: Mapping[str, Value], key: str, kind: type[T]) -> T | None:
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not kind:
        raise GgufError(f"{key} is {type(value).__name__}, expected {kind.__name__}")
    return value
