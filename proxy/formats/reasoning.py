"""How model families write their reasoning. One declaration each, by vLLM's parser name."""

from proxy.formats.kinds import Channels, Reasoning

THINKING = ("enable_thinking", "thinking")
EFFORT = ("reasoning_effort", *THINKING)

THINK = Reasoning(open=("<think>",), close=("</think>",), ended_by_calls=False)
"""DeepSeek R1 and everything that thinks like it, whatever the request says; only the closing tag ends it."""

HARMONY = Channels(
    start="<|start|>",
    channel="<|channel|>",
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    reasoning=("analysis",),
    recipient="to=",
    prefix="functions.",
    dropped=("<|constrain|>",),
)
"""gpt-oss: reasoning and calls in one, so the same declaration stands for both parsers."""

REASONING: dict[str, Reasoning | Channels] = {
    "deepseek_r1": THINK,
    "deepseek_v3": Reasoning(open=("<think>",), close=("</think>",), starts="outside", switches=THINKING, once=True),
    "deepseek_v4": Reasoning(open=("<think>",), close=("</think>",), switches=EFFORT),
    "deepseek_v41": Reasoning(open=("<think>",), close=("</think>",), switches=EFFORT),
    "ernie45": Reasoning(
        open=("<think>",), close=("</think>",), switches=THINKING, dropped=("<response>", "</response>")
    ),
    "gemma4": Reasoning(
        open=("<|channel>thought\n", "<|channel>"),
        close=("<channel|>",),
        starts="outside",
        switches=("enable_thinking",),
        trim="end",
    ),
    "glm45": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING, trim="end"),
    "glm47": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING, trim="end"),
    "granite": Reasoning(
        open=("Here is my thought process:", "Here's my thought process:"),
        close=("Here is my response:", "Here's my response:"),
        starts="outside",
        trim="both",
    ),
    "granite_thinking_parser": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING, trim="end"),
    "holo2": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING),
    "hunyuan_a13b": Reasoning(
        open=("<think>",),
        close=("</think>",),
        starts="outside",
        switches=THINKING,
        trim="both",
        dropped=("<answer>\n", "\n</answer>", "<answer>", "</answer>"),
    ),
    "hy_v3": Reasoning(open=("<think>",), close=("</think>",), starts="outside", switches=EFFORT),
    "hy_v4": Reasoning(open=("<think>",), close=("</think>",), switches=EFFORT),
    "inkling": Reasoning(
        open=("<|content_thinking|>",),
        close=("<|end_message|>",),
        starts="outside",
        dropped=("<|content_text|>",),
    ),
    "k2_horizon": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING),
    "kimi_k2": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING, trim="end"),
    "kimi_k3": Reasoning(
        open=("<|open|>think<|sep|>",),
        close=("<|close|>think<|sep|>",),
        starts="outside",
        switches=THINKING,
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "ling3": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING),
    "mimo": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING),
    "minimax_m2": Reasoning(open=("<think>",), close=("</think>",), trim="end"),
    "minimax_m3": Reasoning(
        open=("<mm:think>",), close=("</mm:think>",), starts="outside", switches=THINKING, trim="end"
    ),
    "mistral": Reasoning(open=("[THINK]",), close=("[/THINK]",), starts="outside"),
    "nemotron_v3": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING, trim="end"),
    "olmo3": Reasoning(open=("<think>",), close=("</think>",)),
    "openai_gptoss": HARMONY,
    "poolside_v1": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING),
    "qwen3": Reasoning(open=("<think>",), close=("</think>",), switches=THINKING, ends=("<tool_call>",)),
    "seed_oss": Reasoning(open=("<seed:think>",), close=("</seed:think>",), switches=THINKING),
    "solar_open2": Reasoning(open=("<think>",), close=("</think>",), switches=EFFORT),
    "step3": Reasoning(close=("</think>",), switches=THINKING),
    "step3p5": Reasoning(open=("<think>",), close=("</think>",), trim="end"),
}
