"""Small tokenizers that the tests train for themselves, one for each kind of decoder, and a model folder around one."""

import base64
import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "The harbour lamp turns twice a minute, and the keeper counts each turn aloud.",
    "Seven gulls sat on the pier; three flew off when the tide came in.",
    "def turn(lamp, times=2):\n    return [lamp.step() for _ in range(times)]\n",
    "Wer die Flut zählt, braucht Geduld. Où est la marée? Ça monte à midi.",
    "灯台は一分に二回まわる。潮が満ちると鷗が飛ぶ。",
    "Прилив начинается в полдень, смотритель зажигает огонь.",
    "🌊🌊 waves, 🕯️ candle, 👩‍🚀 keeper, ½ mile, 37 °C — “quoted” …",
]

BOS, EOS, TURN, END_TURN, THINK, THOUGHT = "<s>", "</s>", "<|turn|>", "<|end|>", "<think>", "</think>"
SPECIAL = [BOS, EOS, TURN, END_TURN]
"""The special tokens of every tokenizer here; `<think>` and `</think>` are added tokens that are not special."""


def _with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (THINK, THOUGHT)])
    return tokenizer


@functools.cache
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every byte is a token, characters may be spread over several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    return _with_added_tokens(tokenizer)


def _byte_fallback(strip: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *bytes_], limit_alphabet=60)
    tokenizer.train_from_iterator(TEXTS, trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    # The trainer made the byte tokens special; a model's own are ordinary vocabulary.
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    return _with_added_tokens(Tokenizer.from_str(json.dumps(spec)))


@functools.cache
def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: word boundary marks, bytes for what the alphabet lacks, a leading space taken off."""
    return _byte_fallback(strip=True)


@functools.cache
def byte_fallback_unstripped() -> Tokenizer:
    """As Gemma: the same, and the text keeps its leading space."""
    return _byte_fallback(strip=False)


@functools.cache
def metaspace() -> Tokenizer:
    """As T5: the `Metaspace` decoder, which takes the mark off the first token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"]))
    return _with_added_tokens(tokenizer)


@functools.cache
def word_piece() -> Tokenizer:
    """As BERT: a decoder that no table can stand for."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"]))
    return _with_added_tokens(tokenizer)


TEKKEN_WORDS = ["the", " tide", " lamp", "turn", "[INST]", "[TOOL_CALLS]", "</s>", "灯台"]
"""What a small `tekken.json` has tokens for besides the bytes: each, and all that it begins with, as merging needs."""

TEKKEN_SPECIAL = [
    *["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"],
    *["[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"],
    *[
        "[SUFFIX]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[TOOL_CONTENT]",
        "[ARGS]",
        "[CALL_ID]",
        "[THINK]",
        "[/THINK]",
    ],
    *["[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"],
]
"""By id. Versions up to 7 know the first 20 by themselves, the rest of the ids are fillers."""


def tekken_json(version: str = "v3") -> str:
    """A `tekken.json` with 30 special tokens, the 256 bytes from id 30 on, and a few words: of `v3`, `v13` or `v15`."""
    tokens = [bytes([byte]) for byte in range(256)]
    for word in map(str.encode, TEKKEN_WORDS):
        tokens += [start for end in range(2, len(word) + 1) if (start := word[:end]) not in tokens]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": r"\[/?[A-Z_]+\]|</s>|\s?\w+|\s?[^\s\w]|\s+(?!\S)|\s+",
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + 30,
        "default_num_special_tokens": 30,
        "version": version,
    }
    spec: dict[str, object] = {"config": config, "vocab": vocab}
    if version != "v3":
        spec["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(TEKKEN_SPECIAL)
        ]
    if version == "v15":
        effort = {"type": "enum", "accepts_none": True, "default": "none", "values": ["none", "high"]}
        spec["model_settings_builder"] = {"reasoning_effort": effort}
    return json.dumps(spec)


def tekken_folder(folder: Path, version: str = "v3", **files: object) -> Path:
    """Writes a model folder that has a `tekken.json` only; `files` as with `model_folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(tekken_json(version), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|turn|>tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def model_folder(folder: Path, tokenizer: Tokenizer | None = None, **files: object) -> Path:
    """Writes a model folder; `files` are further JSON files by name, without `.json`, such as `generation_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text((tokenizer or byte_level()).to_str(), encoding="utf-8")
    config = {"bos_token": BOS, "eos_token": END_TURN, "chat_template": CHAT_TEMPLATE}
    for name, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
