"""How model families write tool calls, by vLLM's parser name: one declaration, or several where a family does both."""

from proxy.formats.kinds import (
    Calls,
    ElementCalls,
    HeaderCalls,
    JsonCalls,
    PythonicCalls,
    QuotedMapCalls,
    TaggedCalls,
)
from proxy.formats.reasoning import HARMONY

HERMES = JsonCalls(open=("<tool_call>",), close=("</tool_call>",), by_text=True)

QWEN3_XML = TaggedCalls(
    section=("<tool_call>",),
    section_end=("</tool_call>",),
    call="<function={name}>",
    call_end="</function>",
    parameter="<parameter={key}>",
    parameter_end="</parameter>",
    trim=True,
    hidden=True,
)

DEEPSEEK_V3 = HeaderCalls(
    section=("<｜tool▁calls▁begin｜>",),
    section_end=("<｜tool▁calls▁end｜>",),
    call="<｜tool▁call▁begin｜>",
    header=("function<｜tool▁sep｜>{name}",),
    fence="```json",
    call_end="<｜tool▁call▁end｜>",
)

DEEPSEEK_V31 = HeaderCalls(
    section=("<｜tool▁calls▁begin｜>",),
    section_end=("<｜tool▁calls▁end｜>",),
    call="<｜tool▁call▁begin｜>",
    header=("{name}<｜tool▁sep｜>",),
    call_end="<｜tool▁call▁end｜>",
)

GLM = TaggedCalls(
    call="<tool_call>{name}",
    call_end="</tool_call>",
    parameter="<arg_key>{key}</arg_key>",
    value="<arg_value>",
    parameter_end="</arg_value>",
    hidden=True,
)


def _dsml(space: str, *sections: str) -> TaggedCalls:
    """DeepSeek's markup language, whose tags differ by what comes after the bar."""
    return TaggedCalls(
        section=tuple(f"<｜DSML｜{space}{section}>" for section in sections),
        section_end=tuple(f"</｜DSML｜{space}{section}>" for section in sections),
        call=f'<｜DSML｜{space}invoke name="{{name}}">',
        call_end=f"</｜DSML｜{space}invoke>",
        parameter=f'<｜DSML｜{space}parameter name="{{key}}" string="{{string}}">',
        parameter_end=f"</｜DSML｜{space}parameter>",
        types="wire",
        unwraps=("arguments", "input"),
        hidden=True,
    )


def _hunyuan(separator: str) -> TaggedCalls:
    return TaggedCalls(
        section=("<tool_calls>",),
        section_end=("</tool_calls>",),
        call=f"<tool_call>{{name}}{separator}",
        call_end="</tool_call>",
        parameter="<arg_key>{key}</arg_key>",
        value="<arg_value>",
        parameter_end="</arg_value>",
    )


PYTHONIC = PythonicCalls()
LLAMA_JSON = (
    JsonCalls(open=("<|python_tag|>",), separator=";", arguments=("parameters", "arguments")),
    JsonCalls(open=("\n{",), separator=";", arguments=("parameters", "arguments")),
    JsonCalls(separator=";", arguments=("parameters", "arguments")),
)

TOOLS: dict[str, tuple[Calls, ...]] = {
    "apertus": (JsonCalls(open=("<|tools_prefix|>",), close=("<|tools_suffix|>",), array=True, name=None),),
    "deepseek_v3": (DEEPSEEK_V3,),
    "deepseek_v31": (DEEPSEEK_V31,),
    "deepseek_v32": (_dsml("", "function_calls"),),
    "deepseek_v4": (_dsml("", "tool_calls", "toolcalls", "tool"),),
    "deepseek_v41": (_dsml(" ", "calls"),),
    "dots": (
        TaggedCalls(
            section=("<dots_function_call>",),
            section_end=("</dots_function_call>",),
            call='<invoke name="{name}">',
            call_end="</invoke>",
            parameter='<parameter name="{key}">',
            parameter_end="</parameter>",
        ),
    ),
    "ernie45": (JsonCalls(open=("<tool_call>",), close=("</tool_call>\n", "</tool_call>"), forced_json=True),),
    "functiongemma": (
        QuotedMapCalls(
            open=("<start_function_call>",), close=("<end_function_call>",), quote="<escape>", quoted="schema"
        ),
    ),
    "gemma4": (
        QuotedMapCalls(open=("<|tool_call>",), close=("<tool_call|>",), quote='<|"|>', forced_json=False, hidden=True),
    ),
    "glm45": (GLM,),
    "glm47": (GLM,),
    "granite": (JsonCalls(open=("<|tool_call|>", "<tool_call>"), array=True, forced_json=True, hidden=True),),
    "granite-20b-fc": (JsonCalls(open=("<function_call>",), forced_json=True),),
    "granite4": (HERMES,),
    "hermes": (HERMES,),
    "hunyuan_a13b": (JsonCalls(open=("<tool_calls>",), close=("</tool_calls>",), array=True, forced_json=True),),
    "hy_v3": (_hunyuan("<tool_sep>"),),
    "hy_v4": (_hunyuan(""),),
    "inkling": (
        JsonCalls(
            open=("<|content_invoke_tool_json|>",),
            close=("<|end_message|>",),
            arguments=("args", "arguments"),
            hidden=True,
        ),
    ),
    "internlm": (JsonCalls(open=("<|action_start|><|plugin|>",), close=("<|action_end|>",), forced_json=True),),
    "jamba": (JsonCalls(open=("<tool_calls>",), close=("</tool_calls>",), array=True, forced_json=True),),
    "kimi_k2": (
        HeaderCalls(
            section=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
            section_end=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
            call="<|tool_call_begin|>",
            header=("{id}<|tool_call_argument_begin|>",),
            call_end="<|tool_call_end|>",
            hidden=True,
        ),
    ),
    "kimi_k3": (
        TaggedCalls(
            section=("<|open|>tools<|sep|>",),
            section_end=("<|close|>tools<|sep|>",),
            call='<|open|>call tool="{name}" index="{index}"<|sep|>',
            call_end="<|close|>call<|sep|>",
            parameter='<|open|>argument key="{key}" type="{type}"<|sep|>',
            parameter_end="<|close|>argument<|sep|>",
            types="wire",
            hidden=True,
        ),
    ),
    "lfm2": (PythonicCalls(open=("<|tool_call_start|>",), close=("<|tool_call_end|>",)),),
    "ling3": (GLM,),
    "llama3_json": LLAMA_JSON,
    "llama4_json": LLAMA_JSON,
    "llama4_pythonic": (PythonicCalls(open=("<|python_start|>",), close=("<|python_end|>",)), PYTHONIC),
    "longcat": (JsonCalls(open=("<longcat_tool_call>",), close=("</longcat_tool_call>",), by_text=True),),
    "mimo": (QWEN3_XML,),
    "minicpm5": (
        TaggedCalls(
            call='<function name="{name}">',
            call_end="</function>",
            parameter='<param name="{key}">',
            parameter_end="</param>",
        ),
    ),
    "minimax_m2": (
        TaggedCalls(
            section=("<minimax:tool_call>",),
            section_end=("</minimax:tool_call>",),
            call='<invoke name="{name}">',
            call_end="</invoke>",
            parameter='<parameter name="{key}">',
            parameter_end="</parameter>",
            hidden=True,
        ),
    ),
    "minimax_m3": (
        ElementCalls(
            namespace="]<]minimax[>[",
            section=("]<]minimax[>[<tool_call>",),
            section_end=("]<]minimax[>[</tool_call>",),
            call=']<]minimax[>[<invoke name="{name}">',
            call_end="]<]minimax[>[</invoke>",
        ),
    ),
    "mistral": (
        JsonCalls(open=("[TOOL_CALLS]",), array=True, hidden=True),
        HeaderCalls(
            call="[TOOL_CALLS]",
            header=("{name}[CALL_ID]{id}[ARGS]", "{name}[ARGS]", "{name}"),
            ids="nine",
            hidden=True,
        ),
    ),
    "olmo3": (PythonicCalls(open=("<function_calls>",), close=("</function_calls>",), lines=True),),
    "openai": (HARMONY,),
    "phi4_mini_json": (JsonCalls(open=("functools",), array=True, forced_json=True),),
    "poolside_v1": (GLM,),
    "pythonic": (PYTHONIC,),
    "qwen3_coder": (QWEN3_XML,),
    "qwen3_json": (HERMES,),
    "qwen3_xml": (QWEN3_XML,),
    "seed_oss": (
        TaggedCalls(
            section=("<seed:tool_call>",),
            section_end=("</seed:tool_call>",),
            call="<function={name}>",
            call_end="</function>",
            parameter="<parameter={key}>",
            parameter_end="</parameter>",
            trim=True,
            forced_json=True,
            hidden=True,
        ),
    ),
    "step3": (
        TaggedCalls(
            section=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>function<｜tool_sep｜>"),
            section_end=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
            call='<steptml:invoke name="{name}">',
            call_end="</steptml:invoke>",
            parameter='<steptml:parameter name="{key}">',
            parameter_end="</steptml:parameter>",
            forced_json=True,
        ),
    ),
    "step3p5": (QWEN3_XML,),
    "step5": (QWEN3_XML,),
    "xlam": (JsonCalls(array=True, forced_json=True),),
}
