"""What a tag allows, the parser reads. A test of its own writes random texts that a tag allows, as xgrammar would."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from proxy.derender.choice import ChoiceContext, ChoiceStream
from proxy.derender.codecs.base import MarkupLimits
from proxy.derender.output_format import OutputFormat, ToolUse
from proxy.derender.vocabulary import Vocabulary
from proxy.formats.kinds import Calls, HeaderCalls, JsonCalls, PythonicCalls, Reasoning, TaggedCalls, markers
from proxy.formats.reasoning import REASONING
from proxy.formats.tools import TOOLS
from proxy.render.structural_tags import Function, Surroundings, structural_tag
from tests.tokenizers import byte_level

Json = dict[str, Any]

ROOM = {"type": "object", "properties": {"room": {"type": "string"}, "level": {"type": "integer"}}}
NOTHING = {"type": "object", "properties": {}}
LAMP, NOW = Function("set_lamp", ROOM), Function("now", NOTHING)
ARGUMENTS: list[tuple[Function, Json]] = [
    (LAMP, {"room": "attic", "level": 4}),
    (LAMP, {"room": "the <b>\n hall"}),
    (NOW, {}),
]
TOOLS_OF_THE_REQUEST = [{"type": "function", "function": {"name": f.name, "parameters": f.schema}} for f in (LAMP, NOW)]
PROSE = ["Let me see. ", "a < b, so"]


def xml(begin: str, end: str, kind: Callable[[Any], str] = lambda _: "") -> Callable[[Json], str]:
    def write(arguments: Json) -> str:
        return "\n".join(
            begin.replace("KEY", key).replace("KIND", kind(value)) + str(value) + end
            for key, value in arguments.items()
        )

    return write


def is_string(value: Any) -> str:
    return "true" if isinstance(value, str) else "false"


def json_type(value: Any) -> str:
    return "string" if isinstance(value, str) else "number"


def gemma(arguments: Json) -> str:
    return (
        "{" + ",".join(f'{k}:<|"|>{v}<|"|>' if isinstance(v, str) else f"{k}:{v}" for k, v in arguments.items()) + "}"
    )


STYLES: Mapping[str, Callable[[Json], str]] = {
    "json": json.dumps,
    "qwen_xml": xml("<parameter=KEY>\n", "\n</parameter>"),
    "minimax_xml": xml('<parameter name="KEY">', "</parameter>"),
    "glm_xml": xml("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>"),
    "deepseek_xml": xml('<｜DSML｜parameter name="KEY" string="KIND">', "</｜DSML｜parameter>", is_string),
    "deepseek_v4_1_xml": xml('<｜DSML｜ parameter name="KEY" string="KIND">', "</｜DSML｜ parameter>", is_string),
    "kimi_k3_xml": xml('<|open|>argument key="KEY" type="KIND"<|sep|>', "<|close|>argument<|sep|>", json_type),
    "gemma": gemma,
}
PATTERNS: Mapping[str, Sequence[str]] = {
    r"[ \n]{0,2}": ["", "\n", " ", "\n\n"],
    r"[0-9]{1,4}": ["0", "12"],
    r"( ?<\|constrain\|>| )json": [" <|constrain|>json", "<|constrain|>json", " json"],
}


class Writer:
    """Writes a text that a tag allows, and remembers the calls in it and the text that is meant as content."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.calls: list[tuple[str, Json]] = []
        self.content = ""

    def write(self, form: Json) -> str:
        write: Callable[[Json], str] = getattr(self, f"_{form['type']}")
        return write(form)

    def _structural_tag(self, form: Json) -> str:
        return self.write(form["format"])

    def _const_string(self, form: Json) -> str:
        value: str = form["value"]
        return value

    def _regex(self, form: Json) -> str:
        return self.random.choice(PATTERNS[form["pattern"]])

    def _any_text(self, form: Json) -> str:
        return self.random.choice(PROSE)

    def _json_schema(self, form: Json) -> str:
        function, arguments = self.random.choice([a for a in ARGUMENTS if a[0].schema == form["json_schema"]])
        self.calls.append((function.name, arguments))
        return STYLES[form.get("style", "json")](arguments)

    def _sequence(self, form: Json) -> str:
        return "".join(map(self.write, form["elements"]))

    def _or(self, form: Json) -> str:
        return self.write(self.random.choice(form["elements"]))

    def _tag(self, form: Json) -> str:
        return f"{form['begin']}{self.write(form['content'])}{form['end']}"

    def _optional(self, form: Json) -> str:
        return self.random.choice(["", self.write(form["content"])])

    def _plus(self, form: Json) -> str:
        return "".join(self.write(form["content"]) for _ in range(self.random.choice([1, 1, 2, 3])))

    def _star(self, form: Json) -> str:
        return "".join(self.write(form["content"]) for _ in range(self.random.choice([0, 1, 2])))

    def _tags_with_separator(self, form: Json) -> str:
        assert form["at_least_one"]
        count = 1 if form["stop_after_first"] else self.random.choice([1, 2, 3])
        return form["separator"].join(self.write(self.random.choice(form["tags"])) for _ in range(count))

    def _triggered_tags(self, form: Json) -> str:
        for tag in form["tags"]:
            assert sum(tag["begin"].startswith(trigger) for trigger in form["triggers"]) == 1
        text = ""
        for _ in range(1 if form["stop_after_first"] else 2):
            self.content += PROSE[0]
            text += PROSE[0] + self.write(self.random.choice(form["tags"]))
        return text


@cache
def tokenizer(markers: tuple[str, ...]) -> Tokenizer:
    made = Tokenizer.from_str(byte_level().to_str())
    made.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return made


def parsed(
    calls: Sequence[Calls], text: str, use: ToolUse, reasoning: Reasoning | None = None, tokens: bool = False
) -> tuple[list[tuple[str, Json]], str]:
    """The calls and the content that the parser finds. `tokens`: the vocabulary has the markers as tokens."""
    declared = [*calls, *([reasoning] if reasoning else [])]
    added = (
        {t for d in declared for t in markers(d) if len(t) > 3 and t[0] in "<[" and "{" not in t} if tokens else set()
    )
    vocabulary = Vocabulary.of_tokenizer(made := tokenizer(tuple(sorted(added))))
    plan = OutputFormat(reasoning, calls, vocabulary, MarkupLimits()).plan(use, (), {})
    stream = ChoiceStream(ChoiceContext(vocabulary, (), markup=plan))
    delta = stream.feed(made.encode(text, add_special_tokens=False).ids, finish_reason="stop")
    found: dict[int, list[str]] = {}
    for call in delta.tool_calls:
        found.setdefault(call.index, [call.name or "", ""])[1] += call.arguments
    return [(name, json.loads(arguments)) for name, arguments in found.values()], delta.content


def use(**fields: Any) -> ToolUse:
    return ToolUse(TOOLS_OF_THE_REQUEST, True, **fields)


def tag_of(calls: Sequence[Calls], **fields: Any) -> Json | None:
    return structural_tag(calls, (LAMP, NOW), **{"forced": True, "single": False, **fields})


BY_TOKEN = {"openai", "mistral"}
"""Families whose markers are tokens of every model's vocabulary, and not read otherwise."""
TAGGED = [name for name, calls in TOOLS.items() if tag_of(calls) is not None]


def test_every_family_has_a_tag_whose_syntax_a_grammar_can_be_made_of() -> None:
    without = {name for name, calls in TOOLS.items() if not all(c.forced_json for c in calls)} - set(TAGGED)
    assert without == {"minicpm5"}
    assert not {name for name in TAGGED if all(c.forced_json for c in TOOLS[name])}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [(name, tokens) for name in TAGGED for tokens in (False, True) if tokens or name not in BY_TOKEN],
)
def test_what_a_tag_demands_is_read_as_those_calls(name: str, tokens: bool) -> None:
    tag = tag_of(TOOLS[name])
    assert tag is not None
    for seed in range(40):
        writer = Writer(seed)
        text = writer.write(tag)
        calls, content = parsed(TOOLS[name], text, use(required=True), tokens=tokens)
        assert calls == writer.calls, text
        assert name == "openai" or content.strip() == "", text
        assert calls


@pytest.mark.parametrize("name", TAGGED)
def test_one_call_is_demanded_where_one_is_wanted(name: str) -> None:
    tag = structural_tag(TOOLS[name], [LAMP], forced=True, single=True)
    assert tag is not None
    for seed in range(20):
        writer = Writer(seed)
        text = writer.write(tag)
        calls, _ = parsed(TOOLS[name], text, use(only="set_lamp"), tokens=True)
        assert calls == writer.calls, text
        assert [called for called, _ in calls] == ["set_lamp"]


@pytest.mark.parametrize("name", [name for name in TAGGED if name != "openai" and "json" not in name])
def test_calls_that_are_free_to_come_stand_between_any_text(name: str) -> None:
    tag = tag_of(TOOLS[name], forced=False)
    assert tag is not None
    for seed in range(20):
        writer = Writer(seed)
        text = writer.write(tag)
        calls, content = parsed(TOOLS[name], text, use())
        assert calls == writer.calls, text
        assert content.startswith(PROSE[0].strip()), text


def test_without_parallel_calls_the_first_one_is_the_last() -> None:
    for name in TAGGED:
        tag = tag_of(TOOLS[name], single=True)
        assert tag is not None
        for seed in range(20):
            writer = Writer(seed)
            writer.write(tag)
            assert len(writer.calls) == 1, name


HERMES_CALL = {
    "type": "tag",
    "begin": "<tool_call>",
    "content": {
        "type": "sequence",
        "elements": [
            {"type": "regex", "pattern": "[ \\n]{0,2}"},
            {
                "type": "tag",
                "begin": '{"name": "now", "arguments": ',
                "content": {"type": "json_schema", "json_schema": NOTHING},
                "end": "}",
            },
            {"type": "regex", "pattern": "[ \\n]{0,2}"},
        ],
    },
    "end": "</tool_call>",
}


def test_a_strict_call_is_triggered_by_its_marker() -> None:
    assert structural_tag(TOOLS["hermes"], [NOW], forced=False, single=False) == {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": [HERMES_CALL],
            "stop_after_first": False,
        },
    }


@pytest.mark.parametrize(
    ("name", "beginnings"),
    [
        ("apertus", {'<|tools_prefix|>[{"now": {}}]<|tools_suffix|>'}),
        ("deepseek_v3", {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"}),
        ("kimi_k2", {"<|tool_calls_section_begin|><|tool_call_begin|>functions.now:12<|tool_call_argument_begin|>{}"}),
        ("kimi_k3", {'<|open|>tools<|sep|><|open|>call tool="now" index="12"<|sep|><|close|>call<|sep|>'}),
        ("llama3_json", {'{"name": "now", "parameters": {}}'}),
        ("mistral", {'[TOOL_CALLS][{"name": "now", "arguments": {}}]', "[TOOL_CALLS]now[ARGS]{}"}),
        ("qwen3_xml", {"<tool_call><function=now></function></tool_call>"}),
        (
            "openai",
            {
                "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
                " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
            },
        ),
    ],
)
def test_a_call_is_written_as_its_family_does(name: str, beginnings: set[str]) -> None:
    tag = structural_tag(TOOLS[name], [NOW], forced=True, single=True)
    assert tag is not None
    written = {Writer(seed).write(tag) for seed in range(2000)}
    assert not {b for b in beginnings if not any(text.startswith(b) for text in written)}


@pytest.mark.parametrize(
    "calls",
    [
        JsonCalls(array=True),
        JsonCalls(open=("<call>",), close=("</call>",), forced_json=True),
        JsonCalls(open=("\n{",)),
        TaggedCalls(call="<f {name}>", parameter="<p {key}>", parameter_end="</p>"),
        PythonicCalls(forced_json=False),
    ],
    ids=["bare array", "as JSON", "half an object", "a style of its own", "pythonic"],
)
def test_what_a_grammar_cannot_be_told_has_no_tag(calls: Calls) -> None:
    assert tag_of([calls]) is None
    assert tag_of([calls], forced=False) is None


def test_of_several_syntaxes_those_with_a_tag_are_used() -> None:
    hermes = TOOLS["hermes"]
    assert tag_of([PythonicCalls(), *hermes]) == tag_of(hermes)


def test_a_header_without_an_id_is_preferred() -> None:
    calls = HeaderCalls(call="<c>", header=("{name}#{id}|", "{name}|"))
    tag = structural_tag([calls], [NOW], forced=True, single=True)
    assert tag is not None
    assert "<c>now|{}" in {Writer(seed).write(tag).strip() for seed in range(20)}


@pytest.mark.parametrize(
    ("tools", "thinks", "text"),
    [
        ("mistral", "mistral", "[THINK]Let me see. [/THINK]"),
        ("gemma4", "gemma4", "<|channel>thought\nLet me see. <channel|>"),
        ("kimi_k3", "kimi_k3", "<|open|>think<|sep|>Let me see. <|close|>think<|sep|><|open|>response<|sep|>"),
    ],
)
def test_a_model_that_opens_its_reasoning_itself_may_do_so_before_a_call(tools: str, thinks: str, text: str) -> None:
    reasoning = REASONING[thinks]
    assert isinstance(reasoning, Reasoning)
    tag = structural_tag(
        TOOLS[tools], [NOW], forced=True, single=True, around=Surroundings(reasoning, reasoning.dropped)
    )
    assert tag is not None
    written = [Writer(seed).write(tag) for seed in range(200)]
    assert any(w.startswith(text) for w in written)
    for w in written[:40]:
        calls, content = parsed(TOOLS[tools], w, use(only="now"), reasoning, tokens=True)
        assert (calls, content.strip()) == ([("now", {})], ""), w
