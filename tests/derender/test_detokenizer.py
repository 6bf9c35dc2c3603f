"""The library's `decode` of the whole sequence is the law; here are any ids, one at a time, with the state written and
read anywhere in between.
"""

import functools
import json
import re
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from proxy.derender.detokenizer import Decoder, WindowDecoder, decoder_for
from proxy.derender.vocabulary import Vocabulary
from tests import tokenizers

BROKEN = "\ufffd"

EXAMPLES = settings(deadline=None, max_examples=40)
"""Per tokenizer."""


def with_decoder(tokenizer: Tokenizer, decoder: Any) -> Tokenizer:
    """A copy with another decoder: one of the library's, or the JSON of one."""
    spec = json.loads(tokenizer.to_str())
    spec["decoder"] = decoder if decoder is None or isinstance(decoder, dict) else json.loads(decoder.__getstate__())
    return Tokenizer.from_str(json.dumps(spec))


def unigram_with_a_double() -> Tokenizer:
    """The vocabulary of a Unigram model is a list, in which a text may stand twice."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0), ("▁a", -3.0), ("c▁", -4.0)], 0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def byte_level_with_odd_added_tokens() -> Tokenizer:
    """Added tokens are read as bytes as well, unless a character of theirs is not in the alphabet."""
    tokenizer = Tokenizer.from_str(tokenizers.byte_level().to_str())
    tokenizer.add_tokens([AddedToken(text) for text in ("<|a b|>", "été", "ð", "ŁĬ", "灯", "Ġ")])
    return tokenizer


def bpe_with_suffixes() -> Tokenizer:
    """A mark at the end of a word becomes a space, but for the last token."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.train_from_iterator(tokenizers.TEXTS, trainers.BpeTrainer(end_of_word_suffix="</w>", show_progress=False))
    return tokenizer


FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]

TABLED = {
    "byte_level": tokenizers.byte_level,
    "byte_fallback": tokenizers.byte_fallback,
    "byte_fallback_unstripped": tokenizers.byte_fallback_unstripped,
    "metaspace": tokenizers.metaspace,
    "byte_level in a sequence": lambda: with_decoder(
        tokenizers.byte_level(), decoders.Sequence([decoders.ByteLevel()])
    ),
    "byte_level, odd added tokens": byte_level_with_odd_added_tokens,
    "byte_fallback, two spaces off": lambda: with_decoder(
        tokenizers.byte_fallback(), decoders.Sequence([*FALLBACK, decoders.Strip(" ", 2, 0)])
    ),
    "byte_fallback, not fused": lambda: with_decoder(
        tokenizers.byte_fallback(), decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")])
    ),
    "byte_fallback, then metaspace": lambda: with_decoder(
        tokenizers.byte_fallback(), decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "metaspace, then byte_fallback": lambda: with_decoder(
        tokenizers.byte_fallback(), decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
    ),
    "metaspace, first": lambda: with_decoder(
        tokenizers.metaspace(), decoders.Metaspace(prepend_scheme="first", split=False)
    ),
    "metaspace, never": lambda: with_decoder(tokenizers.metaspace(), decoders.Metaspace(prepend_scheme="never")),
    "metaspace as older files write it": lambda: with_decoder(
        tokenizers.metaspace(), {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    ),
    "metaspace after replacements": lambda: with_decoder(
        tokenizers.metaspace(),
        decoders.Sequence([decoders.Replace("th", "▁h"), decoders.Metaspace(), decoders.Replace("e", "ë")]),
    ),
    "nothing but the texts": lambda: with_decoder(tokenizers.metaspace(), {"type": "Sequence", "decoders": []}),
    "unigram": unigram_with_a_double,
}

WINDOWED = {
    "word_piece": tokenizers.word_piece,
    "word_piece, not cleaned": lambda: with_decoder(tokenizers.word_piece(), decoders.WordPiece(cleanup=False)),
    "words": lambda: with_decoder(tokenizers.word_piece(), None),
    "bpe with suffixes": bpe_with_suffixes,
    "byte_level, stripped": lambda: with_decoder(
        tokenizers.byte_level(), decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    ),
    "ctc": lambda: with_decoder(tokenizers.metaspace(), decoders.CTC(pad_token="<unk>", word_delimiter_token="▁")),
}


@functools.cache
def vocabulary(kind: str) -> Vocabulary:
    return Vocabulary.of_tokenizer((TABLED | WINDOWED)[kind]())


def ids_of(vocabulary: Vocabulary) -> st.SearchStrategy[list[int]]:
    """Any ids: of every sort of token, of real text, of bytes that make characters or do not, and of no token."""
    tokenizer, top = vocabulary.tokenizer, vocabulary.size
    in_bytes = [i for i in range(top) if len(vocabulary.bytes_of(i)) == 1]
    marked = sorted(set(vocabulary.tokenizer.get_added_tokens_decoder()) | {0, top - 1})
    one = st.one_of(
        st.integers(0, top - 1),
        st.sampled_from(marked),
        st.sampled_from(in_bytes or marked),
        st.sampled_from([top, top + 1, 2**31, 2**32 - 1]),
    )
    text = st.one_of(st.sampled_from(tokenizers.TEXTS), st.text(max_size=8), st.text("灯🌊 é▁\t", max_size=4))
    encoded = text.map(lambda t: tokenizer.encode(t, add_special_tokens=False).ids)
    return st.lists(st.one_of(one.map(lambda i: [i]), encoded), max_size=6).map(
        lambda parts: list(chain.from_iterable(parts))
    )


def prompts_of(vocabulary: Vocabulary) -> st.SearchStrategy[list[int]]:
    special = st.lists(st.sampled_from(sorted(vocabulary.special_ids) or [vocabulary.size]), max_size=8)
    return st.one_of(st.just([]), special, st.tuples(ids_of(vocabulary), special).map(lambda both: both[0] + both[1]))


def reloaded(decoder: Decoder, vocabulary: Vocabulary, skip: bool) -> Decoder:
    """A fresh decoder, of no prompt, with the state of the old."""
    fresh = decoder_for(vocabulary, (), skip_special_tokens=skip, spaces_between_special_tokens=True)
    fresh.load(json.loads(json.dumps(decoder.dump())))
    return fresh


def pieces(
    vocabulary: Vocabulary, prompt: Sequence[int], ids: Sequence[int], skip: bool, reloads: Collection[int] = ()
) -> list[str]:
    """The text that each id gave, and last what the end gave; the state is reloaded before the ids at `reloads`."""
    decoder = decoder_for(vocabulary, prompt, skip_special_tokens=skip, spaces_between_special_tokens=True)
    shown = []
    for at, token_id in enumerate(ids):
        if at in reloads:
            decoder = reloaded(decoder, vocabulary, skip)
        shown.append(decoder.feed(token_id))
    return [*shown, decoder.flush()]


def with_each_broken_byte(data: bytes) -> str:
    return re.sub("[\udc80-\udcff]", BROKEN, data.decode("utf-8", "surrogateescape"))


def decoded(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> str:
    """What the library decodes, but for runs of fallback bytes that are not valid as a whole: of those the broken
    bytes alone become U+FFFD."""
    if "ByteFallback" not in tokenizer.decoder.__getstate__().decode():
        return tokenizer.decode(list(ids), skip_special_tokens=skip)
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(i) for i in ids if not (skip and i in added and added[i].special)]
    written: list[str] = []
    run = b""
    for token in [*(token for token in tokens if token is not None), ""]:
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            run += bytes.fromhex(token[3:5])
            continue
        if run:
            written.append(with_each_broken_byte(run))
        written.append(token)
        run = b""
    return tokenizer.decoder.decode(written[:-1])


@pytest.mark.parametrize("kind", TABLED)
@EXAMPLES
@given(data=st.data(), skip=st.booleans())
def test_any_ids_after_any_prompt_give_the_text_of_the_whole_decode(kind: str, data: st.DataObject, skip: bool) -> None:
    v = vocabulary(kind)
    prompt = data.draw(prompts_of(v))
    prompt_text = decoded(v.tokenizer, prompt, skip)
    if prompt_text.endswith(BROKEN):  # an unfinished character stays the prompt's
        prompt, prompt_text = [], ""
    ids = data.draw(ids_of(v))
    reloads = data.draw(st.sets(st.integers(0, len(ids))))
    text = "".join(pieces(v, prompt, ids, skip, reloads))
    assert prompt_text + text == decoded(v.tokenizer, [*prompt, *ids], skip)


@pytest.mark.parametrize("kind", TABLED)
@EXAMPLES
@given(data=st.data(), skip=st.booleans())
def test_what_is_shown_lags_the_text_by_an_unfinished_character_at_most(
    kind: str, data: st.DataObject, skip: bool
) -> None:
    v = vocabulary(kind)
    ids = data.draw(ids_of(v))
    whole = decoded(v.tokenizer, ids, skip)
    shown = ""
    for count, piece in enumerate(pieces(v, (), ids, skip)[:-1], 1):
        shown += piece
        assert whole.startswith(shown)
        assert decoded(v.tokenizer, ids[:count], skip) in [shown + BROKEN * unfinished for unfinished in range(4)]


@pytest.mark.parametrize(
    ("run", "library", "ours"),
    [
        ("E4 B8 AD", "中", "中"),
        ("41", "A", "A"),
        ("41 E4 B8 AD 42", "A中B", "A中B"),
        ("41 FF", "\ufffd\ufffd", "A\ufffd"),
        ("E4 B8 AD E4", "\ufffd" * 4, "中\ufffd"),
        ("E4 B8", "\ufffd" * 2, "\ufffd" * 2),
        ("F0 9F 8C 41", "\ufffd" * 4, "\ufffd" * 3 + "A"),
        ("80 80", "\ufffd" * 2, "\ufffd" * 2),
        ("C3 C3 A9", "\ufffd" * 3, "\ufffdé"),
        ("ED A0 80", "\ufffd" * 3, "\ufffd" * 3),
    ],
)
def test_of_a_run_of_fallback_bytes_only_the_broken_ones_are_replaced(run: str, library: str, ours: str) -> None:
    v = vocabulary("byte_fallback")
    ids = [v.tokenizer.token_to_id(f"<0x{byte}>") for byte in run.split()]
    assert v.tokenizer.decode(ids) == library
    assert "".join(pieces(v, (), ids, skip=True)) == ours


def test_a_boundary_mark_that_is_spelled_in_bytes_stays_one() -> None:
    v = vocabulary("byte_fallback, then metaspace")
    ids = [v.tokenizer.token_to_id(token) for token in ("a", *(f"<0x{byte:02X}>" for byte in "▁".encode()))]
    assert v.tokenizer.decode(ids) == "a "
    assert "".join(pieces(v, (), ids, skip=True)) == "a▁"


@EXAMPLES
@given(st.lists(st.integers(0, 255), max_size=12))
def test_a_valid_run_of_fallback_bytes_is_what_the_library_says(run: list[int]) -> None:
    v = vocabulary("byte_fallback")
    try:
        bytes(run).decode()
    except UnicodeDecodeError:
        run = [*bytes(run).decode("latin-1").encode()]
    ids = [v.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in run]
    assert "".join(pieces(v, (), ids, skip=True)) == v.tokenizer.decode(ids)


def test_a_skipped_token_inside_a_character_does_not_break_it() -> None:
    v = vocabulary("byte_level")
    first, *rest = v.tokenizer.encode("🕰").ids
    ids = [first, v.tokenizer.token_to_id(tokenizers.TURN), v.size + 5, *rest]
    assert rest
    assert "".join(pieces(v, (), ids, skip=True)) == "🕰"


@pytest.mark.parametrize(
    ("kind", "prompt", "output", "text"),
    [
        ("byte_fallback", [], ["▁", "▁", "a"], " a"),
        ("byte_fallback", ["<s>", "<|turn|>"], ["▁", "a"], "a"),
        ("byte_fallback", ["<think>"], ["▁", "a"], " a"),
        ("byte_fallback", ["▁"], ["▁", "a"], " a"),
        ("byte_fallback", ["a"], ["▁", "a"], " a"),
        ("byte_fallback", ["<0xE4>"], ["▁", "a"], " a"),
        ("byte_fallback", [], ["<0xE4>", "▁", "a"], "\ufffd a"),
        ("byte_fallback, two spaces off", [], ["▁", "▁", "▁", "a"], " a"),
        ("byte_fallback, two spaces off", [], ["▁", "a", "▁"], "a "),
        ("byte_fallback, two spaces off", ["▁"], ["▁", "▁", "a"], " a"),
        ("byte_fallback_unstripped", [], ["▁", "a"], " a"),
        ("metaspace", [], ["▁", "▁", "a"], " a"),
        ("metaspace", ["<s>"], ["▁", "a"], "a"),
        ("metaspace", ["▁"], ["▁", "a"], " a"),
        ("metaspace, never", [], ["▁", "a"], " a"),
        ("word_piece", ["t", *["<s>"] * 9], ["t"], " t"),
    ],
)
def test_the_prompt_decides_whether_the_output_begins_the_text(
    kind: str, prompt: list[str], output: list[str], text: str
) -> None:
    v = vocabulary(kind)
    prompt_ids, ids = ([v.tokenizer.token_to_id(token) for token in tokens] for tokens in (prompt, output))
    assert "".join(pieces(v, prompt_ids, ids, skip=True)) == text
    assert "".join(pieces(v, prompt_ids, ids, skip=True, reloads=range(len(ids)))) == text


def test_an_unfinished_character_of_the_prompt_is_not_finished_in_the_output() -> None:
    v = vocabulary("byte_level")
    first, *rest = v.tokenizer.encode("🕰").ids
    assert "".join(pieces(v, [first], rest, skip=True)) == v.tokenizer.decode(rest) == BROKEN * len(rest)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([*tokenizers.TEXTS, "👩‍🚀🕯️🌊", "\n\n", " "]), max_size=40).map("".join))
def test_long_texts_with_emoji_come_back_whole(text: str) -> None:
    v = vocabulary("byte_level")
    assert "".join(pieces(v, (), v.tokenizer.encode(text).ids, skip=True)) == text


@pytest.mark.parametrize("kind", TABLED)
def test_the_state_of_a_table_decoder_is_a_few_bytes_after_any_text(kind: str) -> None:
    v = vocabulary(kind)
    decoder = decoder_for(v, (), skip_special_tokens=True, spaces_between_special_tokens=True)
    for token_id in [i for _ in range(10) for i in range(v.size)]:
        decoder.feed(token_id)
        assert len(json.dumps(decoder.dump())) < 30


@pytest.mark.parametrize("kind", ["word_piece", "word_piece, not cleaned", "words", "bpe with suffixes"])
@EXAMPLES
@given(data=st.data(), skip=st.booleans())
def test_a_window_gives_the_text_of_the_whole_decode_where_a_token_looks_at_its_neighbours_alone(
    kind: str, data: st.DataObject, skip: bool
) -> None:
    v = vocabulary(kind)
    prompt, ids = data.draw(prompts_of(v)), data.draw(ids_of(v))
    whole = v.tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    text = "".join(pieces(v, prompt, ids, skip, data.draw(st.sets(st.integers(0, len(ids))))))
    assert v.tokenizer.decode(prompt, skip_special_tokens=skip) + text == whole


@pytest.mark.parametrize("kind", WINDOWED)
@EXAMPLES
@given(data=st.data(), skip=st.booleans())
def test_a_window_gives_the_same_pieces_and_stays_small_however_often_it_is_reloaded(
    kind: str, data: st.DataObject, skip: bool
) -> None:
    v = vocabulary(kind)
    prompt, ids = data.draw(prompts_of(v)), data.draw(ids_of(v))
    assert pieces(v, prompt, ids, skip) == pieces(v, prompt, ids, skip, reloads=range(len(ids)))
    decoder = WindowDecoder(v, prompt, skip, True)
    for token_id in ids:
        decoder.feed(token_id)
        assert sum(map(len, decoder.dump()[:2])) <= 2 * WindowDecoder.MOST_HELD


def test_a_window_shows_bytes_that_never_become_a_character() -> None:
    v = vocabulary("byte_level, stripped")
    decoder = WindowDecoder(v, (), True, True)
    lead = next(token_id for token_id in range(v.size) if v.tokenizer.id_to_token(token_id) == "ä")
    shown = "".join(decoder.feed(lead) for _ in range(100))
    assert len(shown) >= 100 - WindowDecoder.MOST_HELD
    assert len(decoder.dump()[1]) < WindowDecoder.MOST_HELD
    assert shown + decoder.flush() == BROKEN * 100


@pytest.mark.parametrize(
    ("skip", "spaces", "text"),
    [
        (False, True, "lamp <think> </think> turn"),
        (False, False, "lamp <think></think> turn"),
        (True, False, "lamp <think> </think> turn"),
    ],
)
def test_only_between_added_tokens_are_spaces_left_out(skip: bool, spaces: bool, text: str) -> None:
    v = vocabulary("word_piece")
    ids = v.tokenizer.encode("lamp<think></think>turn").ids
    decoder = decoder_for(v, (), skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    assert "".join([decoder.feed(i) for i in ids]) + decoder.flush() == text


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
REGEX = {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "}
FUSE = {"type": "Fuse"}
BYTES = {"type": "ByteFallback"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def strip(content: str, start: int, stop: int) -> dict[str, Any]:
    return {"type": "Strip", "content": content, "start": start, "stop": stop}


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        REGEX,
        [REGEX, BYTES, FUSE],
        [REPLACE, strip(" ", 1, 0), FUSE],
        [REPLACE, FUSE, strip(" ", 0, 1)],
        [REPLACE, FUSE, strip(" ", 1, 1)],
        [REPLACE, FUSE, strip("▁", 1, 0)],
        [FUSE, REPLACE],
        [FUSE, METASPACE],
        [FUSE, BYTES],
        [REPLACE, FUSE, strip(" ", 1, 0), REPLACE],
        [BYTE_LEVEL, FUSE],
        [BYTE_LEVEL, strip(" ", 1, 0)],
        [METASPACE, BYTE_LEVEL],
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [REPLACE]}]},
    ],
)
def test_a_decoder_that_looks_beyond_a_token_has_no_table(decoder: Any) -> None:
    spec = {"type": "Sequence", "decoders": decoder} if isinstance(decoder, list) else decoder
    assert Vocabulary.of_tokenizer(with_decoder(tokenizers.metaspace(), spec)).table is None


@pytest.mark.parametrize(
    ("kind", "token", "text", "bytes_"),
    [
        ("byte_level", "Ġ", " ", b" "),
        ("byte_level", "ð", BROKEN, b"\xf0"),
        ("byte_level", "<|turn|>", "<|turn|>", b"<|turn|>"),
        ("byte_level, odd added tokens", "<|a b|>", "<|a b|>", b"<|a b|>"),
        ("byte_level, odd added tokens", "灯", "灯", "灯".encode()),
        ("byte_fallback", "<0xE4>", BROKEN, b"\xe4"),
        ("byte_fallback", "<0x41>", "A", b"A"),
        ("byte_fallback", "▁", " ", b" "),
        ("metaspace", "▁", " ", b" "),
        ("metaspace", "<unk>", "<unk>", b"<unk>"),
        ("word_piece", "t", "t", b"t"),
        ("word_piece", "<think>", "<think>", b"<think>"),
    ],
)
def test_a_token_alone_has_a_text_and_its_exact_bytes(kind: str, token: str, text: str, bytes_: bytes) -> None:
    v = vocabulary(kind)
    token_id = v.tokenizer.token_to_id(token)
    assert (v.text_of(token_id), v.bytes_of(token_id)) == (text, bytes_)


@pytest.mark.parametrize("kind", [*TABLED, *WINDOWED])
def test_an_id_outside_the_vocabulary_is_no_text(kind: str) -> None:
    v = vocabulary(kind)
    for token_id in (v.size, v.size + 1, 2**31, 2**40):
        assert (v.text_of(token_id), v.bytes_of(token_id)) == ("", b"")
        assert pieces(v, (), [token_id], skip=False) == ["", ""]


def test_added_tokens_are_known_by_id() -> None:
    v = vocabulary("byte_level")
    think, turn = v.tokenizer.token_to_id("<think>"), v.tokenizer.token_to_id("<|turn|>")
    assert (v.added_texts[think], v.added_texts[turn]) == ("<think>", "<|turn|>")
    assert v.added_texts.keys() == v.tokenizer.get_added_tokens_decoder().keys()
    assert turn in v.special_ids
    assert think not in v.special_ids
    assert sorted(v.special_texts) == sorted(tokenizers.SPECIAL)


def test_a_table_of_bytes_is_a_vocabulary_too() -> None:
    first, *rest = [bytes([byte]) for byte in "🕰".encode()]
    v = Vocabulary.of_table([b"", b"", b" lamp", first, *rest, b"\xb0 turn"], {0: "<s>", 1: "[TOOL_CALLS]"})
    assert (v.size, v.longest, v.special_ids) == (8, 12, frozenset({0, 1}))
    assert (v.added_texts, sorted(v.special_texts)) == ({0: "<s>", 1: "[TOOL_CALLS]"}, ["<s>", "[TOOL_CALLS]"])
    assert (v.text_of(1), v.bytes_of(1), v.bytes_of(3), v.text_of(8)) == ("[TOOL_CALLS]", b"[TOOL_CALLS]", first, "")
    assert pieces(v, (), [0, 2, 3, 4, 5, 7, 1, 9], skip=False) == [
        "<s>",
        " lamp",
        "",
        "",
        "",
        "🕰 turn",
        "[TOOL_CALLS]",
        "",
        "",
    ]
    assert pieces(v, (), [0, 2, 3, 1, 4, 5], skip=True) == ["", " lamp", "", "", "", "", BROKEN]
