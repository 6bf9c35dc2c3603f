"""A GGUF's tokenizer: what is read, that it encodes as llama.cpp does, and that a hostile file is refused in words."""

import json
import struct
from collections.abc import Callable
from itertools import product
from mmap import ACCESS_READ, mmap
from random import Random
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from proxy.embedded import model_path
from proxy.render.gguf import GgufError, GgufModel, read_gguf

U32, I32, BOOL, STRING, ARRAY, U64 = 4, 5, 7, 8, 9, 10
PACKED = {U32: "<I", I32: "<i", BOOL: "<?", U64: "<Q"}


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, item: Any) -> bytes:
    return string(item) if kind == STRING else struct.pack(PACKED[kind], item)


def array(kind: int, items: list[Any]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(value(kind, item) for item in items)


def gguf(entries: dict[str, tuple[int, Any]], version: int = 3, magic: bytes = b"GGUF") -> bytes:
    """A file of metadata; an array is `(ARRAY, bytes)`."""
    body = b"".join(
        string(key) + struct.pack("<I", kind) + (item if kind == ARRAY else value(kind, item))
        for key, (kind, item) in entries.items()
    )
    return magic + struct.pack("<IQQ", version, 0, len(entries)) + body


TOKENS = ["<|end|>", "<|start|>", "<think>", "a", "b", "c", "ab", "Ġ", "Ġab", "1", "2", "12"]
TYPES = [3, 3, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1]
MERGES = ["a b", "Ġ ab", "1 2"]

TINY: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "general.languages": (ARRAY, array(STRING, ["en", "de"])),
    "general.sizes": (ARRAY, array(U64, [1, 2, 3])),
    "llama.context_length": (U32, 2048),
    "tokenizer.ggml.model": (STRING, "gpt2"),
    "tokenizer.ggml.pre": (STRING, "smollm"),
    "tokenizer.ggml.tokens": (ARRAY, array(STRING, TOKENS)),
    "tokenizer.ggml.token_type": (ARRAY, array(I32, TYPES)),
    "tokenizer.ggml.merges": (ARRAY, array(STRING, MERGES)),
    "tokenizer.ggml.bos_token_id": (U32, 1),
    "tokenizer.ggml.eos_token_id": (U32, 0),
    "tokenizer.chat_template": (STRING, "{{ messages }}"),
}


def tiny(**changes: tuple[int, Any] | None) -> bytes:
    """The tiny file with some keys changed, or dropped with None; `__` stands for the dot."""
    entries = {**TINY, **{key.replace("__", "."): change for key, change in changes.items()}}
    return gguf({key: item for key, item in entries.items() if item is not None})


def read(data: bytes) -> GgufModel:
    return read_gguf(memoryview(data))


def test_the_text_side_of_a_model_is_read() -> None:
    model = read(tiny(tokenizer__ggml__eot_token_id=(U32, 2)))

    assert (model.bos_token, model.bos_token_id) == ("<|start|>", 1)
    assert (model.eos_token, model.eos_token_id) == ("<|end|>", 0)
    assert model.eot_token_id == 2
    assert model.chat_template == "{{ messages }}"
    assert model.context_length == 2048
    assert model.vocab_size == len(TOKENS)
    assert not model.add_bos


def test_what_a_file_does_not_say_is_none() -> None:
    dropped = ("tokenizer__ggml__bos_token_id", "tokenizer__ggml__eos_token_id", "tokenizer__chat_template")
    model = read(tiny(**dict.fromkeys(dropped), llama__context_length=None))

    assert (model.bos_token, model.bos_token_id, model.eos_token, model.eos_token_id) == (None, None, None, None)
    assert (model.eot_token_id, model.chat_template, model.context_length) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ab", [6]),
        ("c ab", [5, 8]),
        ("12", [9, 10]),  # digits stay apart, though a merge exists
        ("<|start|>ab<|end|>", [1, 6, 0]),
        ("a<think>b", [3, 2, 4]),
    ],
)
def test_the_tokenizer_merges_splits_digits_and_knows_the_added_tokens(text: str, ids: list[int]) -> None:
    assert Tokenizer.from_str(read(tiny()).tokenizer_json).encode(text).ids == ids


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = Tokenizer.from_str(read(tiny()).tokenizer_json)

    assert tokenizer.decode([1, 6, 2, 0]) == "ab<think>"
    assert tokenizer.decode([1, 6, 2, 0], skip_special_tokens=False) == "<|start|>ab<think><|end|>"


def test_add_bos_puts_the_bos_token_in_front() -> None:
    model = read(tiny(tokenizer__ggml__add_bos_token=(BOOL, True)))
    tokenizer = Tokenizer.from_str(model.tokenizer_json)

    assert model.add_bos
    assert tokenizer.encode("ab").ids == [1, 6]
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [6]


HUGE = 1 << 62

BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ends inside the magic number"),
    "another format": (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
    "an old version": (gguf(TINY, version=1), "version 1 cannot be read"),
    "big endian": (b"GGUF" + struct.pack(">I", 3) + bytes(40), "cannot be read"),
    "more keys than there are": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "ends inside a metadata key"),
    "an endless key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE), "at most 65535"),
    "an endless string": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("x") + struct.pack("<IQ", STRING, HUGE),
        "ends inside x",
    ),
    "an endless array": (gguf({"x": (ARRAY, struct.pack("<IQ", U64, HUGE))}), "ends inside x"),
    "an endless array of strings": (gguf({"x": (ARRAY, struct.pack("<IQ", STRING, HUGE))}), "at most"),
    "an endless token list": (
        tiny(tokenizer__ggml__tokens=(ARRAY, struct.pack("<IQ", STRING, HUGE))),
        "at most",
    ),
    "endless token types": (
        tiny(tokenizer__ggml__token_type=(ARRAY, struct.pack("<IQ", I32, HUGE))),
        "at most",
    ),
    "an array of arrays": (gguf({"x": (ARRAY, struct.pack("<IQ", ARRAY, 1))}), "unsupported element type 9"),
    "an unknown value type": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("x") + struct.pack("<I", 99),
        "unknown value type 99",
    ),
    "a key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (string("x") + struct.pack("<II", U32, 1)),
        "'x' stands twice",
    ),
    "text that is not UTF-8": (tiny().replace(b"{{ messages }}", b"\xff" * 14), "chat_template is not UTF-8"),
    "another tokenizer": (tiny(tokenizer__ggml__model=(STRING, "llama")), "only 'gpt2'"),
    "no tokenizer": (tiny(tokenizer__ggml__model=None), "tokenizer.ggml.model is missing"),
    "an untested pre-tokenizer": (tiny(tokenizer__ggml__pre=(STRING, "qwen2")), "'qwen2' has not been tested"),
    "no pre-tokenizer": (tiny(tokenizer__ggml__pre=None), "tokenizer.ggml.pre is missing"),
    "no tokens": (tiny(tokenizer__ggml__tokens=None), "tokenizer.ggml.tokens is missing"),
    "no merges": (tiny(tokenizer__ggml__merges=None), "tokenizer.ggml.merges is missing"),
    "no token types": (tiny(tokenizer__ggml__token_type=None), "has no entries"),
    "too few token types": (tiny(tokenizer__ggml__token_type=(ARRAY, array(I32, [1]))), "has 1 entries"),
    "tokens that are numbers": (tiny(tokenizer__ggml__tokens=(ARRAY, array(I32, [1]))), "expected type 8"),
    "a token twice": (tiny(tokenizer__ggml__tokens=(ARRAY, array(STRING, [*TOKENS[:-1], "a"]))), "token twice"),
    "a merge of strangers": (tiny(tokenizer__ggml__merges=(ARRAY, array(STRING, ["x y"]))), "'x y' is not of two"),
    "a merge of one": (tiny(tokenizer__ggml__merges=(ARRAY, array(STRING, ["ab"]))), "'ab' is not of two"),
    "eos outside the vocabulary": (tiny(tokenizer__ggml__eos_token_id=(U32, 12)), "outside the vocabulary of 12"),
    "bos of another type": (tiny(tokenizer__ggml__bos_token_id=(STRING, "1")), "is str, expected int"),
    "add_bos without bos": (
        tiny(tokenizer__ggml__add_bos_token=(BOOL, True), tokenizer__ggml__bos_token_id=None),
        "there is no tokenizer.ggml.bos_token_id",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(name: str) -> None:
    data, reason = BROKEN[name]
    with pytest.raises(GgufError, match=reason.replace("(", r"\(")):
        read(data)


def test_a_file_cut_anywhere_is_refused() -> None:
    whole = tiny()
    for length in range(len(whole)):
        with pytest.raises(GgufError):
            read(whole[:length])


@given(st.integers(0, len(tiny()) - 1), st.binary(min_size=1, max_size=8))
def test_a_file_with_any_bytes_changed_is_read_or_refused(position: int, change: bytes) -> None:
    data = bytearray(tiny())
    data[position : position + len(change)] = change
    try:
        model = read(bytes(data))
    except GgufError:
        return
    Tokenizer.from_str(model.tokenizer_json)


def test_a_refused_file_can_be_unmapped_while_its_error_is_handled(tmp_path: Any) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(tiny(tokenizer__ggml__pre=(STRING, "qwen2")))
    with (
        path.open("rb") as file,
        pytest.raises(GgufError, match="qwen2"),
        mmap(file.fileno(), 0, access=ACCESS_READ) as data,
    ):
        read_gguf(data)


@pytest.fixture(scope="module")
def embedded_model() -> GgufModel:
    with model_path().open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return read_gguf(data)


def test_the_embedded_model_has_its_template_and_end_of_turn(embedded_model: GgufModel) -> None:
    assert (embedded_model.bos_token, embedded_model.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert embedded_model.vocab_size == 49152
    assert embedded_model.context_length == 8192
    assert "<|im_start|>" in (embedded_model.chat_template or "")
    assert len(json.loads(embedded_model.tokenizer_json)["added_tokens"]) == 17


@pytest.fixture(scope="module")
def llama_cpp() -> Callable[[str], list[int]]:
    """llama.cpp's own tokenizer for the embedded model, special tokens parsed."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="the embedded engine's runtime is not installed")
    params = xllamacpp.CommonParams()
    params.model.path = str(model_path())
    params.n_ctx = 256
    params.warmup = params.ui = params.fit_params = False
    params.verbosity = -1
    server = xllamacpp.Server(params)

    def tokenize(text: str) -> list[int]:
        body = json.dumps({"content": text, "parse_special": True}).encode()
        request = Request(f"{server.listening_address}/tokenize", body, {"content-type": "application/json"})
        with build_opener(ProxyHandler({})).open(request) as response:
            ids: list[int] = json.load(response)["tokens"]
            return ids

    return tokenize


WORDS = """the don't I'LL we've proxy, x1y2 3.14 1234 ½ Ⅷ ² café naïve 日本語 한국어 русский العربية ﷺ 🙂 👩‍👩‍👧
<|im_start|> <|im_end|> <|endoftext|> <repo_name> <think> </think> { } [] // -- ¿qué? “q” https://a.b/c?d=e"""
BLANKS = [" ", "  ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u200b", "\u0301", "\x00"]
PIECES = [*WORDS.split(), *BLANKS]


def test_the_embedded_tokenizer_encodes_as_llama_cpp_does(
    embedded_model: GgufModel, llama_cpp: Callable[[str], list[int]]
) -> None:
    tokenizer = Tokenizer.from_str(embedded_model.tokenizer_json)
    random = Random(1)
    pairs = ["".join(pair) for pair in product(PIECES[::3], PIECES[::2])]
    texts = ["".join(random.choices(PIECES, k=random.randint(1, 30))) for _ in range(200)]

    different = [text for text in PIECES + pairs + texts if tokenizer.encode(text).ids != llama_cpp(text)]
    assert different == []
