"""`transformers` is the law: over templates that use each construct it supports, the text must be the same, and where
it raises, we give a 400.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from proxy.protocol.errors import BadRequest
from proxy.render.chat_template import ChatTemplates

Message = dict[str, Any]

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(["a small text to train on"], trainers.BpeTrainer(special_tokens=[*SPECIAL.values()]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def outcome(render: Callable[[], str]) -> str | None:
    """The text, or None where it is refused, in whatever way."""
    try:
        return render()
    except Exception:
        return None


def both(
    reference: PreTrainedTokenizerFast, source: str | dict[str, str], messages: list[Message], **options: Any
) -> tuple[str | None, str | None]:
    """(transformers' text, ours); None is an exception there and a BadRequest here."""
    options = {"add_generation_prompt": True, "kwargs": {}, **options}
    theirs = {"chat_template" if name == "template" else name: value for name, value in options.items()}
    theirs |= theirs.pop("kwargs")
    reference.chat_template = source
    expected = outcome(lambda: reference.apply_chat_template(messages, tokenize=False, **theirs))
    templates = ChatTemplates({"default": source} if isinstance(source, str) else source, reference.special_tokens_map)
    try:
        return expected, templates.render(messages, **options)
    except BadRequest as error:
        assert error.status == 400
        assert error.param
        return expected, None


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(name: str, **arguments: Any) -> Message:
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wie ist's? <b>\"schön\" & 'warm'</b>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

DOCUMENTS = [{"title": "One", "text": "first"}, {"title": "Two", "text": "second"}]

TURNS = [
    {"role": "system", "content": " Be brief.\n"},
    user("What is the weather in Zürich? 日本 🙂"),
    assistant(None, tool_calls=[call("weather", city='Zü"rich', days=3, exact=1.5, deep={"a": [1, None, True]})]),
    {"role": "tool", "tool_call_id": "id-weather", "name": "weather", "content": '{"t": 21}'},
    assistant("It is <21> & fine.  ", reasoning_content="I looked it up.\n"),
    user("Thanks & bye\n"),
]

CONSTRUCTS = {
    "loop variables": """
        {%- for m in messages -%}
        {{ loop.index }}/{{ loop.index0 }}/{{ loop.length }}/{{ loop.revindex }}/{{ loop.first }}{{ loop.last }}
        {{- loop.previtem.role if loop.previtem }} {{ loop.nextitem.role if loop.nextitem is defined else '-' }};
        {%- endfor %}""",
    "loop with a condition and else": """
        {%- for m in messages if m.role == 'user' %}[{{ m.content }}]{% else %}nobody{% endfor -%}
        {%- for m in messages if m.role == 'nobody' %}x{% else %}nobody{% endfor %}""",
    "loop over pairs": "{% for key, value in messages[0].items() %}{{ key }}={{ value }},{% endfor %}",
    "recursive loop": """
        {%- for k, v in tools[0].items() recursive -%}
        {{ k }}:{% if v is mapping %}({{ loop(v.items()) }}){% else %}{{ v }}{% endif %};
        {%- endfor %}""",
    "break and continue": """
        {%- for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}
        {%- if m.role == 'tool' %}{% break %}{% endif %},{% endfor %}""",
    "namespace": """
        {%- set ns = namespace(count=0, last=none, text='') %}
        {%- for m in messages %}{% set ns.count = ns.count + 1 %}{% set ns.last = m.role %}{% endfor %}
        {{- ns.count }}{{ ns.last }}{{ ns.text is string }}""",
    "a namespace with an attribute self": "{% set ns = namespace({'self': 2}, other=3) %}{{ ns.self }}{{ ns.other }}",
    "scopes": "{% set x = 1 %}{% for m in messages %}{% set x = 2 %}{% endfor %}{{ x }}",
    "macros": """
        {%- macro turn(role, text='none', mark='|') -%}{{ mark }}{{ role }}{{ mark }}{{ text }}{%- endmacro -%}
        {%- for m in messages %}{{ turn(m.role, m.content, mark='#') }}{{ turn(m.role) }}{% endfor %}""",
    "macro with varargs": """
        {%- macro f() %}{{ varargs|join('-') }}{{ kwargs|dictsort }}{% endmacro %}{{ f(1, 'b', c=3) }}""",
    "call blocks": """
        {%- macro wrap(tag) %}<{{ tag }}>{{ caller('in') }}</{{ tag }}>{% endmacro -%}
        {%- call(where) wrap('b') %}{{ where }} {{ messages[0].role }}{% endcall %}""",
    "filter blocks and set blocks": """
        {%- filter upper %}x{{ messages[1].content }}{% endfilter %}{% set t %}a{{ bos_token }}{% endset %}
        {{- t }}{{ t }}""",
    "with": "{% with a = 1, b = messages|length %}{{ a + b }}{% endwith %}",
    "trimming filters": "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}",
    "tojson": "{{ tools | tojson }}{{ tools[0] | tojson(indent=4) }}{{ messages[2].tool_calls | tojson }}",
    "tojson with options": """
        {{- tools | tojson(indent=2, sort_keys=True) }}{{ tools | tojson(separators=(',', ':')) }}
        {{- tools | tojson(ensure_ascii=True) }}{{ tools | tojson(indent=none) }}""",
    "map and select": """
        {{- messages | map(attribute='role') | join(',') }}
        {{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}
        {{- messages | rejectattr('tool_calls', 'defined') | list | length }}{{ [1, 2, 3] | select('odd') | list }}
        {{- [0, 1, ''] | reject | list }}{{ ['a', 'b'] | map('upper') | join }}""",
    "sorting": """
        {{- {'b': 1, 'a': 2} | dictsort }}{{ [3, 1, 2] | sort(reverse=true) }}{{ ['b', 'a', 'b'] | unique | list }}
        {{- messages | groupby('role') | map('first') | join(' ') }}{{ [1, 2] | reverse | list }}""",
    "default": "{{ nothing | default('d') }}{{ '' | default('e', true) }}{{ none | default('f') }}{{ nothing|d(1) }}",
    "items": "{% for k, v in tools[0].function | items %}{{ k }}:{{ v }};{% endfor %}",
    "text filters": """
        {{- 'aXbX' | replace('X', '-') }}{{ 'the end' | title }}{{ 'abc' | capitalize }}{{ 'a\nb' | indent(2) }}
        {{- 'AbC' | lower }}{{ 'ab' | upper | length }}{{ '<&>' | e }}{{ 'a b c' | wordcount }}{{ 'abc' | first }}
        {{- 'abc' | last }}{{ 'word word word' | truncate(9) }}{{ '%s=%d' | format('x', 3) }}{{ 'x' | center(5) }}""",
    "number filters": """
        {{- '3' | int + 1 }}{{ 'x' | int(7) }}{{ '2.5' | float }}{{ 2.567 | round(1) }}{{ 7 // 2 }}{{ 7 / 2 }}
        {{- 2 ** 5 }}
        {{- 7 % 4 }}{{ -3 | abs }}{{ 1e3 }}{{ [1, 2] | sum }}{{ [4, 9] | max }}{{ '%.2f' | format(1.0 / 3) }}""",
    "tests": """
        {{- nothing is defined }}{{ messages is defined }}{{ messages[0] is mapping }}{{ messages is iterable }}
        {{- messages is string }}{{ 'a' is string }}{{ none is none }}{{ 1 is number }}{{ true is boolean }}
        {{- messages is sequence }}{{ 3 is odd }}{{ 4 is divisibleby 2 }}{{ 'a' is in 'abc' }}{{ 1 is not none }}
        {{- nothing is undefined }}{{ 1 is eq 1 }}{{ 2 is integer }}{{ 2.0 is float }}{{ true is true }}""",
    "slices and indexes": """
        {{- messages[1:][0].role }}{{ messages[-1].role }}{{ messages[-2:] | length }}{{ messages[::-1][0].role }}
        {{- 'abcdef'[1:3] }}{{ 'abc'[-1] }}{{ messages[:1] | map(attribute='role') | list }}""",
    "string methods": """
        {{- 'a</think>b'.split('</think>')[-1] }}{{ '  x '.strip() }}|{{ ' x '.lstrip() }}|{{ ' x\n'.rstrip('\n') }}|
        {{- 'abc'.startswith('ab') }}{{ 'abc'.endswith(('x', 'c')) }}{{ '{}-{x}'.format(1, x=2) }}
        {{- 'a-b'.replace('-', '+') }}
        {{- 'Ab'.upper() }}{{ 'Ab'.lower() }}{{ ','.join(['a', 'b']) }}{{ 'abc'.find('c') }}{{ 'aba'.count('a') }}""",
    "operators": """
        {{- 'a' ~ 1 ~ none ~ 'b' }}{{ 'a' + 'b' }}{{ 'a' * 3 }}{{ [1] + [2] }}{{ 1 if false else 2 }}{{ 1 if false }}
        {{- not true or 1 < 2 <= 2 and 'user' in ['user'] }}{{ 'x' not in {'y': 1} }}{{ {'a': {'b': 3}}.a.b }}
        {{- (1, 2)[1] }}""",
    "whitespace control": """
  {% for m in messages %}
    {# a comment #}
    {{ m.role }}
      {%- if m.content %}  {{- ' ' }}{{ m.content -}}  {% endif +%}
  {%+ if true %} x {% endif %}

  {% endfor %}
end
""",
    "raw": "{% raw %}{{ not this }}{% endraw %}{{ '{{' }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ unk_token is defined }}",
    "generation": """
        {%- for m in messages %}
        {%- if m.role == 'assistant' %}{% generation %}{% set inner = 1 %}{{ m.content }}{{ eos_token }}
        {%- endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{{ inner is defined }}""",
    "null content": """
        {%- for m in messages %}{{ m.content }}{{ m.content is none }}{{ m['content'] is defined }}{% endfor %}""",
    "reasoning under each name": """
        {%- for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ 'reasoning' in m }}{% endfor %}""",
    "tools and documents": """
        {{- tools is none }}{{ documents is none }}{% for d in documents or [] %}{{ d.title }}{% endfor %}""",
    "the prompt flag": "{% if add_generation_prompt %}go{% endif %}{{ add_generation_prompt }}",
    "undefined prints nothing": "{{ nothing }}{{ messages[0].nothing }}{{ messages[0]['nothing'] }}",
    "strftime_now": "{{ strftime_now('%%d') }}{{ strftime_now('at 100%%') }}",
    "dict": "{{ dict(a=1, b='x') }}{{ dict([('k', 2)]).k }}{{ dict.fromkeys(['a'], 0) }}",
    "the class behind dict": "{{ dict.__class__ }}{{ dict.mro }}",
    "range and cycler": "{% set c = cycler('a', 'b') %}{% for i in range(3) %}{{ i }}{{ c.next() }}{% endfor %}",
    "reaching through a filter": "{{ messages | attr('__class__') }}",
    "key of a string": "{{ messages[1].content.text }}",
    "html stays": "{{ '<b>' }}{{ messages[4].content }}",
    "do is not there but set is": "{% set _ = 1 %}{{ _ }}",
    "printing objects": "{{ messages[2].tool_calls[0].function.arguments }}{{ [none, true, 1.0, 'ü'] }}{{ TOOLS }}",
}

REFUSED = {
    "a namespace with a private name": "{% set ns = namespace(_x=1) %}{{ ns._x }}",
    "setting a private name": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "tojson of an undefined": "{{ nothing | tojson }}",
    "an attribute of undefined": "{{ nothing.more }}",
    "calling what is not there": "{{ messages.nothing() }}",
    "raise_exception": "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}",
    "raise_exception later": "{{ raise_exception('never') if false }}{{ messages[99].role }}",
    "a range too long": "{% for i in range(10 ** 9) %}{% endfor %}",
    "mutating the messages": "{{ messages.append(1) }}",
    "mutating a message": "{% set _ = messages[0].update({'role': 'x'}) %}",
    "reaching for internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "zero division": "{{ 1 / 0 }}",
    "type error": "{{ 1 + 'a' }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "include": "{% include 'other' %}",
    "extends": "{% extends 'other' %}",
}


@pytest.mark.parametrize("template", CONSTRUCTS.values(), ids=CONSTRUCTS)
def test_a_construct_renders_as_transformers_renders_it(reference: PreTrainedTokenizerFast, template: str) -> None:
    expected, text = both(reference, template, TURNS, tools=TOOLS, documents=DOCUMENTS)
    assert text == expected
    assert text is not None


@pytest.mark.parametrize("template", CONSTRUCTS.values(), ids=CONSTRUCTS)
def test_a_construct_without_tools_renders_as_transformers_renders_it(
    reference: PreTrainedTokenizerFast, template: str
) -> None:
    expected, text = both(reference, template, TURNS)
    assert text == expected


@pytest.mark.parametrize("template", REFUSED.values(), ids=REFUSED)
def test_where_transformers_raises_the_request_is_at_fault(reference: PreTrainedTokenizerFast, template: str) -> None:
    assert both(reference, template, TURNS, tools=TOOLS, documents=DOCUMENTS) == (None, None)


CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Functions you may call:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if m.role == 'user' and ns.last == messages|length - 1 %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and thought %}{{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

HEADERS = """{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header|>system<|end_header|>\\n\\n' }}Today: {{ date_string }}
{{ system }}
{%- if tools is not none %}
You have these functions:
{% for t in tools %}{{ t | tojson(indent=4) }}

{% endfor %}
{%- endif %}<|eot|>
{%- for m in messages %}
    {%- if m.role in ('tool', 'ipython') %}
        {{- '<|start_header|>ipython<|end_header|>\\n\\n' }}
        {{- (m.content if m.content is string else m.content | tojson) + '<|eot|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('One call at a time, please') }}{% endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- '<|start_header|>assistant<|end_header|>\\n\\n{"name": "' ~ f.name ~ '", "parameters": ' }}
        {{- f.arguments | tojson }}}<|eot|>
    {%- else %}
        {{- '<|start_header|>' + m.role + '<|end_header|>\\n\\n' + m.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\\n\\n' }}{% endif %}"""

INST = """{%- if messages[0].role == 'system' %}
    {%- set system, turns = messages[0].content, messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for m in turns if not (m.role == 'tool' or m.tool_calls) %}
    {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('The roles user and assistant must take turns') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools and m == (turns | selectattr('role', 'equalto', 'user') | list | last) %}
            {{- '[AVAILABLE_TOOLS] ' ~ (tools | map(attribute='function') | list | tojson) ~ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' }}{% if loop.last and system is defined %}{{ system + '\\n\\n' }}{% endif %}
        {{- m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for c in m.tool_calls %}
            {{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id[-9:]} | tojson }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ m.content ~ ', "call_id": "' ~ m.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}
{%- endfor %}"""

CHANNELS = """
{%- macro type_of(schema) -%}
    {%- if schema.enum %}{{ schema.enum | map('tojson') | join(' | ') }}
    {%- elif schema.type == 'integer' %}number
    {%- elif schema.type == 'array' %}{{ type_of(schema['items']) }}[]
    {%- else %}{{ schema.type | default('any', true) }}{% endif -%}
{%- endmacro -%}
{%- macro signatures(tools) %}
{%- for t in tools %}
{{ '// ' + t.function.description | default('') + '\\n' if t.function.description else '' -}}
type {{ t.function.name }} = (_: {
{%- for name, schema in t.function.parameters.properties.items() %}
{{ name }}{{ '?' if name not in t.function.parameters.required | default([]) }}: {{ type_of(schema) }},
{%- endfor %}
}) => any;
{%- endfor %}
{%- endmacro -%}
<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>
{%- set instructions = messages[0].content if messages[0].role in ['system', 'developer'] else '' %}
{%- if instructions or tools %}<|start|>developer<|message|>{{ instructions }}{{ signatures(tools) if tools }}<|end|>
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
        {%- for c in m.tool_calls or [] %}
            {{- '<|start|>assistant to=functions.' ~ c.function.name ~ '<|channel|>commentary json<|message|>' }}
            {{- c.function.arguments | tojson }}<|call|>
        {%- endfor %}
        {%- if m.content %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% endif %}
    {%- elif m.role == 'tool' %}{{ '<|start|>tool<|message|>' + (m.content | tojson) + '<|end|>' }}
    {%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

BARS = """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system='') %}
{%- for m in messages if m['role'] == 'system' %}{% set ns.system = ns.system ~ m['content'] %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{% set ns.is_tool = false %}{{ '<｜User｜>' + m['content'] }}{% endif %}
    {%- if m['role'] == 'assistant' and m['tool_calls'] is defined %}
        {%- set ns.is_first = true %}
        {%- for c in m['tool_calls'] %}
            {{- '<｜Assistant｜><｜calls｜>' if ns.is_first else '\\n' }}
            {{- '<｜call｜>' + c['type'] + '<｜sep｜>' + c['function']['name'] }}
            {{- '\\n```json\\n' ~ (c['function']['arguments'] | tojson) ~ '\\n```<｜end｜>' }}
            {%- set ns.is_first = false %}
        {%- endfor %}{{ '<｜calls end｜>' + eos_token }}
    {%- elif m['role'] == 'assistant' and m['content'] is not none %}
        {%- set text = m['content'].split('</think>')[-1] %}
        {{- (text if ns.is_tool else '<｜Assistant｜>' + text) + eos_token }}{% set ns.is_tool = false %}
    {%- endif %}
    {%- if m['role'] == 'tool' %}
        {%- set ns.is_tool = true %}{{ '<｜output｜>' + m['content'] + '<｜output end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

PARTS = """
{%- macro show(content) -%}
    {%- if content is string %}{{ content }}
    {%- else %}{% for part in content %}
        {%- if part is string %}{{ part }}{% elif part.type == 'image' or 'image_url' in part %}<image>
        {%- elif part.type == 'text' %}{{ part.text | trim }}
        {%- else %}{{ raise_exception('What is ' ~ part.type) }}{% endif %}
    {%- endfor %}{% endif %}
{%- endmacro -%}
{%- for m in messages %}{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) }}
{{ show(m.content or '') }}</turn>
{% endfor %}{% if add_generation_prompt %}<turn>model
{% endif %}"""

FAMILIES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "channels": CHANNELS, "bars": BARS, "parts": PARTS}

CONVERSATIONS: dict[str, list[Message]] = {
    "one question": [user("Hi")],
    "whole": TURNS,
    "system only": [{"role": "system", "content": "S"}],
    "thoughts in the text": [
        user("a"),
        assistant("<think>\nhm\n</think>\n\nb"),
        user("c"),
        assistant("<think>x</think>d"),
    ],
    "reasoning under vLLM's name": [user("a"), assistant("b", reasoning="because"), user("c")],
    "two calls, two results": [
        user("both?"),
        assistant("Looking.", tool_calls=[call("weather", city="Bern"), call("now")]),
        {"role": "tool", "tool_call_id": "id-weather", "content": "21"},
        {"role": "tool", "tool_call_id": "id-now", "content": "noon"},
    ],
    "roles out of turn": [assistant("x"), assistant("y"), user("z")],
    "two users": [user("x"), user("y")],
    "text parts": [user([{"type": "text", "text": " p "}, {"type": "image"}, {"type": "text", "text": "q"}])],
    "unknown part": [user([{"type": "smell"}])],
    "no content": [{"role": "user"}],
    "null keys": [user("x"), assistant("y", tool_calls=None, reasoning_content=None, name=None), user("z")],
    "developer": [{"role": "developer", "content": "D"}, user("u")],
    "ends with spaces": [user("a"), assistant("  b \n")],
    "empty": [],
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"tools": TOOLS},
    "no tools at all": {"tools": []},
    "kwargs": {"kwargs": {"enable_thinking": False, "reasoning_effort": "high", "date_string": "today"}},
    "kwargs over special tokens": {"kwargs": {"bos_token": "[bos]", "messages_": 1}},
    "continued": {"continue_final_message": True, "add_generation_prompt": False},
    "continued reasoning": {"continue_final_message": "reasoning_content", "add_generation_prompt": False},
    "continued with a prompt": {"continue_final_message": True, "add_generation_prompt": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("template", FAMILIES.values(), ids=FAMILIES)
def test_a_family_renders_as_transformers_renders_it(
    reference: PreTrainedTokenizerFast, template: str, messages: list[Message], options: dict[str, Any]
) -> None:
    expected, text = both(reference, template, messages, **options)
    assert text == expected


WRITES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
WRITES_PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}</>{% endfor %}"

CONTINUED: list[tuple[str, str, list[Message], bool | str]] = [
    ("kept as it is", WRITES, [user("a"), assistant("b")], True),
    ("kept with its spaces", WRITES, [user("a"), assistant(" b \n")], True),
    ("trimmed", WRITES.replace("m.content", "m.content | trim"), [user("a"), assistant(" b \n ")], True),
    ("the user's", WRITES, [user("a")], True),
    ("the text elsewhere too", WRITES, [user("b"), assistant("b"), user("b"), assistant("b")], True),
    ("empty", WRITES, [user("a"), assistant("")], True),
    ("the last text part", WRITES_PARTS, [user([{"type": "text", "text": t} for t in ("x", "y ")])], True),
    ("a text part before an image", WRITES_PARTS, [user([{"type": "text", "text": "x"}, {"type": "image"}])], True),
    ("no text part", WRITES_PARTS, [user([{"type": "image"}])], True),
    ("null", WRITES, [user("a"), assistant(None)], True),
    ("changed by the template", WRITES.replace("m.content", "m.content | upper"), [user("abc")], True),
    ("left out by the template", "{{ messages[0].content }}", [user("a"), assistant("b")], True),
    ("cut by the template", WRITES.replace("m.content", "m.content[:2]"), [user("abc")], True),
    ("thoughts cut off", WRITES.replace("m.content", "m.content.split('/')[-1]"), [assistant("a/b ")], True),
    ("a template without content", "{{ messages[0].role }}", [user("a")], True),
    ("reasoning", WRITES + "{{ messages[-1].thinking }}|", [user("a"), assistant("b", reasoning="c ")], "reasoning"),
    ("a field of its own", WRITES + "{{ messages[-1].draft }}|", [assistant("b", draft="c")], "draft"),
    ("a missing field", WRITES + "{{ messages[-1].draft }}|", [assistant("b")], "draft"),
]


@pytest.mark.parametrize(("template", "messages", "field"), [c[1:] for c in CONTINUED], ids=[c[0] for c in CONTINUED])
def test_a_final_message_is_continued_as_transformers_continues_it(
    reference: PreTrainedTokenizerFast, template: str, messages: list[Message], field: bool | str
) -> None:
    expected, text = both(reference, template, messages, continue_final_message=field, add_generation_prompt=False)
    assert text == expected


NAMED = {"default": "D", "tool_use": "T{{ tools|length }}", "rag": "R{% for d in documents %}{{ d.title }}{% endfor %}"}


@pytest.mark.parametrize(
    ("templates", "options"),
    [
        (NAMED, {}),
        (NAMED, {"tools": TOOLS}),
        (NAMED, {"tools": []}),
        (NAMED, {"template": "rag", "documents": DOCUMENTS}),
        (NAMED, {"template": "default", "tools": TOOLS}),
        ({"rag": "R"}, {}),
        ({"tool_use": "T"}, {"tools": TOOLS}),
        ({"tool_use": "T"}, {}),
        ({"default": "D"}, {"tools": TOOLS}),
    ],
)
def test_a_template_is_chosen_as_transformers_chooses_it(
    reference: PreTrainedTokenizerFast, templates: dict[str, str], options: dict[str, Any]
) -> None:
    expected, text = both(reference, templates, [user("x")], **options)
    assert text == expected


def refusal(templates: ChatTemplates, messages: list[Message] | None = None, **options: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        templates.render([user("x")] if messages is None else messages, **options)
    return caught.value


def test_the_templates_own_refusal_is_the_message() -> None:
    templates = ChatTemplates({"default": "{{ raise_exception('Roles must take turns') }}"}, {})
    error = refusal(templates)
    assert (error.status, error.param) == (400, "messages")
    assert error.message == "The chat template refused the messages: Roles must take turns"


def test_a_fault_of_the_template_names_its_line_and_kind() -> None:
    error = refusal(ChatTemplates({"default": "a\nb\n{{ 1 / 0 }}\n"}, {}))
    assert error.param == "messages"
    assert "(line 3): ZeroDivisionError" in error.message


def test_a_refusal_is_not_longer_than_a_client_can_read() -> None:
    assert len(refusal(ChatTemplates({"default": "{{ raise_exception('x' * 100000) }}"}, {})).message) < 1100


def test_a_model_without_a_template_says_which_key_gives_one() -> None:
    error = refusal(ChatTemplates({}, {}))
    assert error.param == "chat_template"
    assert "`chat_template` in the model's configuration" in error.message


def test_a_model_without_a_default_template_names_those_it_has() -> None:
    assert "rag, tool_use" in refusal(ChatTemplates({"tool_use": "T", "rag": "R"}, {})).message


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("fine\n{% if x %}\n{{ y }", "chat template 'rag', line 3"),
        ("{% endfor %}", "chat template 'rag', line 1"),
        ("{{ x | nosuchfilter }}", "nosuchfilter"),
        ("{% break %}", "chat template 'rag'"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "nested too deeply"),
    ],
)
def test_a_template_that_is_not_jinja_is_a_value_error_that_names_it(source: str, says: str) -> None:
    with pytest.raises(ValueError, match="chat template 'rag'") as caught:
        ChatTemplates({"rag": source}, {})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"],
)
def test_template_kwargs_may_not_stand_for_the_requests_own_fields(name: str) -> None:
    error = refusal(ChatTemplates({"default": "x"}, {}), kwargs={name: None, "fine": 1})
    assert error.param == "chat_template_kwargs"
    assert f"'{name}'" in error.message


@pytest.mark.parametrize("field", ["tools", "documents"])
def test_tools_and_documents_must_be_objects(field: str) -> None:
    assert refusal(ChatTemplates({"default": "x"}, {}), **{field: [{}, "x"]}).param == f"{field}[1]"


def test_rendering_changes_nothing_that_it_is_given() -> None:
    messages = [user("a"), assistant([{"type": "text", "text": "b"}], reasoning="c", tool_calls=None)]
    before = repr(messages)
    ChatTemplates({"default": WRITES_PARTS}, {}).render(
        messages, continue_final_message=True, add_generation_prompt=False
    )
    assert repr(messages) == before


def test_the_date_comes_from_the_clock_that_was_given() -> None:
    templates = ChatTemplates({"default": "{{ strftime_now('%d %b %Y') }}"}, {}, now=lambda: datetime(2025, 2, 3))
    assert templates.render([user("x")]) == "03 Feb 2025"


def test_special_tokens_that_are_null_are_undefined_and_objects_are_their_text() -> None:
    special = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "pad_token": None,
        "additional_special_tokens": ["<a>"],
    }
    templates = ChatTemplates(
        {"default": "{{ bos_token }}{{ pad_token is defined }}{{ additional_special_tokens[0] }}"}, special
    )
    assert templates.render([user("x")]) == "<s>False<a>"


@pytest.mark.parametrize("template", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("name", [name for name, messages in CONVERSATIONS.items() if messages])
def test_a_trusted_template_in_a_request_renders_as_the_models_own_would(template: str, name: str) -> None:
    def render(templates: ChatTemplates, given: str | None) -> str | None:
        kwargs = {"bos_token": "^"}
        return outcome(lambda: templates.render(CONVERSATIONS[name], tools=TOOLS, template=given, kwargs=kwargs))

    own = ChatTemplates({"default": template}, SPECIAL)
    brought = ChatTemplates({}, SPECIAL, trusted=True)
    assert render(brought, template) == render(own, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_family_that_shows_images_takes_parts(family: str) -> None:
    chosen = ChatTemplates({"default": FAMILIES[family]}, {}).select(None, None)
    assert chosen.content_format == ("parts" if family == "parts" else "string")


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_family_with_a_word_for_it_knows_the_developer(family: str) -> None:
    assert ChatTemplates({"default": FAMILIES[family]}, {}).select(None, None).knows_developer is (family == "channels")
