"""The configuration file: what is accepted, and the exact lines that a broken one is answered with."""

from pathlib import Path
from typing import Any

import pytest

from proxy.config import Config, ConfigError, ModelConfig, ServerConfig, load_config, read_config, reference
from proxy.formats.kinds import JsonCalls, PythonicCalls, Reasoning

EXAMPLES = Path(__file__).parents[1] / "config"

# What the examples take from the environment.
EXAMPLE_ENV = {"MODELS": "/models", "MODEL": "/models/Qwen3-8B", "BIG_ENGINE_KEY": "0123"}

SMALLEST = """\
models:
  - model: /models/tiny
pools:
  cpu:
    engines: [http://127.0.0.1:8200]
"""


def load(text: str, **env: str) -> Config:
    return load_config(text, source="c.yaml", env=env)


def problems(text: str, **env: str) -> list[str]:
    with pytest.raises(ConfigError) as failure:
        load(text, **env)
    return str(failure.value).splitlines()


def with_model(lines: str) -> str:
    """SMALLEST with more keys in its model, from line 3 on."""
    return SMALLEST.replace("/models/tiny\n", f"/models/tiny\n    {lines}\n")


def with_engine(engine: str) -> str:
    """SMALLEST with another engine, on line 5."""
    return SMALLEST.replace("http://127.0.0.1:8200", engine)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EXAMPLE_ENV.items():
        monkeypatch.setenv(name, value)
    assert read_config(path).models


def test_there_are_examples_to_load() -> None:
    assert {path.name for path in EXAMPLES.glob("*.yaml")} >= {
        "custom-format.yaml",
        "demo.yaml",
        "one-engine.yaml",
        "pool.yaml",
        "sidecar.yaml",
    }


def test_the_reference_is_what_the_code_says() -> None:
    assert (EXAMPLES / "reference.md").read_text("utf-8") == reference(), (
        "run python -m proxy.config > config/reference.md"
    )


def test_every_key_is_documented() -> None:
    assert [line for line in reference().splitlines() if line.endswith("|  |")] == []


def test_the_demo_serves_the_embedded_model_from_its_own_engine() -> None:
    config = read_config(EXAMPLES / "demo.yaml")
    assert [(model.name, model.model, model.pool) for model in config.models] == [
        ("smollm2-135m-instruct", "embedded", "demo")
    ]
    assert [engine.url for engine in config.pools["demo"].engines] == ["http://127.0.0.1:8200"]
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)


def test_a_second_pool_takes_over_the_settings_of_the_first() -> None:
    config = load_config((EXAMPLES / "pool.yaml").read_text("utf-8"), source="pool.yaml", env=EXAMPLE_ENV)
    small, big = config.pools["small"], config.pools["big"]
    assert (small.first_token_timeout, small.total_timeout, len(small.engines)) == (60, 900, 3)
    assert (big.first_token_timeout, big.total_timeout, len(big.engines)) == (300, 900, 2)
    assert config.models[0].served_model_name == ["qwen3-8b", "default", "gpt-4o-mini"]
    assert config.models[1].chat_template is None
    api_key = big.engines[0].api_key
    assert api_key is not None and api_key.get_secret_value() == "0123"


def test_a_sidecar_is_configured_by_its_environment_alone() -> None:
    text = (EXAMPLES / "sidecar.yaml").read_text("utf-8")
    env = {"MODEL": "Qwen/Qwen3-8B", "PORT": "9000", "MAX_MODEL_LEN": "4096", "ENABLE_AUTO_TOOL_CHOICE": "true"}
    config = load_config(text, source="sidecar.yaml", env=env)
    model = config.models[0]
    assert (model.name, model.max_model_len, model.enable_auto_tool_choice) == ("Qwen/Qwen3-8B", 4096, True)
    assert (config.server.host, config.server.port) == ("0.0.0.0", 9000)
    assert load_config(text, source="sidecar.yaml", env={"MODEL": "m"}).models[0].max_model_len is None


def test_what_the_smallest_file_leaves_out_has_its_default() -> None:
    config = load(SMALLEST)
    assert config.server == ServerConfig()
    assert config.models == [ModelConfig(model="/models/tiny", served_model_name=["tiny"], pool="cpu")]
    pool = config.pools["cpu"]
    assert (pool.policy, pool.engines[0].protocol, pool.engines[0].api_key) == ("least_requests", "vllm", None)


def test_json_is_accepted() -> None:
    text = '{"models": [{"model": "a/b"}], "pools": {"p": {"engines": [{"url": "http://h:1"}]}}, "server": {"port": 1}}'
    assert load(text).server.port == 1


def test_the_command_line_overrides_where_to_listen() -> None:
    config = load("server: {port: 1, log_level: debug}\n" + SMALLEST)
    assert config.with_listen(None, None) == config
    assert config.with_listen("0.0.0.0", None).server == ServerConfig(host="0.0.0.0", port=1, log_level="debug")
    assert config.with_listen(None, 2).server.port == 2
    with pytest.raises(ConfigError, match=r"^--port: should be less than or equal to 65535, got 70000$"):
        config.with_listen(None, 70000)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/models/Qwen3-8B", "Qwen3-8B"),
        ("/models/Qwen3-8B/", "Qwen3-8B"),
        ("./tiny", "tiny"),
        ("models/tiny.Q4_1.gguf", "tiny.Q4_1"),
        ("gpt2", "gpt2"),
        ("embedded", "embedded"),
    ],
)
def test_a_model_is_served_under_its_own_name_by_default(model: str, name: str) -> None:
    assert load(SMALLEST.replace("/models/tiny", model)).models[0].name == name


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("HTTPS://h/base/", "https://h/base"),
        ("http://[::1]:8200", "http://[::1]:8200"),
    ],
)
def test_an_engine_url_loses_its_trailing_slash(url: str, normal: str) -> None:
    assert load(with_engine(f'"{url}"')).pools["cpu"].engines[0].url == normal


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("${X}", 8000),
        ('"${X}"', 8000),
        ("${X:-1}", 8000),
        ("${Y:-1}", 1),
        ("${EMPTY:-1}", 1),
        ("${Y:-}", None),
        ("${Y:-true}", True),
        ("${Y:-a:-b}", "a:-b"),
        ("${X}0", "80000"),
        ("a${X}-${Y:-b}", "a8000-b"),
        ("$${X}", "${X}"),
        ("$X costs $5", "$X costs $5"),
        ("'[1]'", "[1]"),
        ("${LIST}", "[1, 2]"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1e3", 1000.0),
        ("0x10", 16),
        ("010", 10),
        (".5", 0.5),
        ("1e999", "1e999"),
        ("!!str 8", "8"),
        ("'8'", "8"),
        ("~", None),
    ],
)
def test_a_scalar_is_read_as(scalar: str, value: Any) -> None:
    text = with_model(f"default_chat_template_kwargs:\n      x: {scalar}")
    read = load(text, X="8000", EMPTY="", LIST="[1, 2]").models[0].default_chat_template_kwargs["x"]
    assert (read, type(read)) == (value, type(value))


def test_a_number_from_the_environment_is_text_where_text_is_wanted() -> None:
    text = with_model("revision: ${REV}\n    served_model_name: ${NAME}")
    model = load(text, REV="1234567", NAME="8").models[0]
    assert (model.revision, model.served_model_name) == ("1234567", ["8"])


def test_keys_are_never_expanded() -> None:
    text = with_model("default_chat_template_kwargs: {'${X}': 1, 50256: 2}")
    assert load(text, X="y").models[0].default_chat_template_kwargs == {"${X}": 1, "50256": 2}


def test_an_earlier_merge_and_an_own_key_win() -> None:
    text = """\
models: [{model: a/b}]
pools:
  p:
    <<: [{idle_timeout: 1, total_timeout: 1, connect_timeout: 1}, {idle_timeout: 2, first_token_timeout: 2}]
    connect_timeout: 3
    engines: [http://h:1]
"""
    pool = load(text).pools["p"]
    assert (pool.idle_timeout, pool.total_timeout, pool.first_token_timeout, pool.connect_timeout) == (1, 1, 2, 3)


POOL_MEANING = "missing: The pool whose engines serve this model. It may be left out when there is exactly one pool."

BROKEN: dict[str, tuple[str, list[str]]] = {
    "an unknown key is answered with the nearest one": (
        with_model("tool_call_praser: hermes"),
        ["c.yaml:3: models[0].tool_call_praser: unknown key; did you mean tool_call_parser?"],
    ),
    "a flag as vLLM's command line writes it": (
        with_model("reasoning-parser: qwen3"),
        ["c.yaml:3: models[0].reasoning-parser: unknown key; did you mean reasoning_parser?"],
    ),
    "a key of another section": (
        "port: 8000\n" + SMALLEST,
        ["c.yaml:1: port: unknown key; it belongs in server"],
    ),
    "a key like no other": (
        "server: {zzz: 1}\n" + SMALLEST,
        [
            "c.yaml:1: server.zzz: unknown key; expected one of host, port, keep_alive_interval, shutdown_timeout, "
            "max_body_size, log_level, "
            "record_dir, record_last, record_prompts"
        ],
    ),
    "an unknown key without a value": (
        with_model("revison:"),
        ["c.yaml:3: models[0].revison: unknown key; did you mean revision?"],
    ),
    "all problems at once, in the order of the lines": (
        """\
server:
  port: 70000
models:
  - modle: /models/tiny
    max_model_len: 0
    max_logprobs: many
    enable_auto_tool_choice: yes
pools:
  cpu:
    policy: random
    engines: []
    idle_timeout: 0
    policy: least_requests
""",
        [
            "c.yaml:2: server.port: should be less than or equal to 65535, got 70000",
            "c.yaml:4: models[0].model: missing: A directory, a Hub id, a `.gguf` file, or `embedded` for the embedded "
            "engine's own model. Only tokenizer, chat template and small JSON files are read from it, never weights.",
            "c.yaml:4: models[0].modle: unknown key; did you mean model?",
            "c.yaml:5: models[0].max_model_len: should be greater than 0, got 0",
            "c.yaml:6: models[0].max_logprobs: should be a whole number, got 'many'",
            "c.yaml:7: models[0].enable_auto_tool_choice: should be true or false, got 'yes'",
            "c.yaml:10: pools.cpu.policy: should be 'round_robin' or 'least_requests', got 'random'",
            "c.yaml:11: pools.cpu.engines: should hold at least one entry",
            "c.yaml:12: pools.cpu.idle_timeout: should be greater than 0, got 0",
            "c.yaml:13: pools.cpu.policy: the key is already on line 10",
        ],
    ),
    "sections of the wrong shape": (
        "server: 8000\nmodels: {model: a/b}\npools: [http://h:1]\n",
        [
            "c.yaml:1: server: should be a mapping, got 8000",
            "c.yaml:2: models: should be a list, got a mapping",
            "c.yaml:3: pools: should be a mapping, got a list",
        ],
    ),
    "sections that are missing": (
        "server:\n",
        [
            "c.yaml:1: models: missing: The models that clients may ask for.",
            "c.yaml:1: pools: missing: The engines, in pools that bear a name. Each pool serves one model or more; "
            "one that serves none is refused.",
        ],
    ),
    "an empty file": ("", ["c.yaml:1: should be a mapping with the keys server, models and pools"]),
    "a list": ("- a\n", ["c.yaml:1: should be a mapping with the keys server, models and pools"]),
    "a quoted number": (
        "server:\n  port: '8000'\n" + SMALLEST,
        ["c.yaml:2: server.port: should be a whole number, got '8000'"],
    ),
    "a number for a name": (
        with_model("served_model_name: [a, 8]"),
        ["c.yaml:3: models[0].served_model_name[1]: should be text, got 8"],
    ),
    "an empty name": (
        with_model("served_model_name: ['']"),
        ["c.yaml:3: models[0].served_model_name[0]: should not be empty"],
    ),
    "a pool that does not exist, and so one that nobody uses": (
        with_model("pool: cpus"),
        [
            "c.yaml:3: models[0].pool: names no pool of this file; did you mean cpu?",
            "c.yaml:5: pools.cpu: no model uses this pool; give a model `pool: cpu`, or take the pool out",
        ],
    ),
    "no pool named where there are two": (
        SMALLEST + "  gpu:\n    engines: [http://h:2]\n",
        [f"c.yaml:2: models[0].pool: {POOL_MEANING}"],
    ),
    "a name for two models": (
        SMALLEST.replace("pools:", "  - model: a/b\n    served_model_name: [b, tiny]\n  - model: b\npools:"),
        [
            "c.yaml:4: models[1].served_model_name[1]: gives a name that models[0].model has already; "
            "a name means one model",
            "c.yaml:5: models[2].model: gives a name that models[1].served_model_name[0] has already; "
            "a name means one model",
        ],
    ),
    "an engine listed twice": (
        with_engine("http://h:1, {url: http://h:1/}"),
        ["c.yaml:4: pools.cpu: engines[1] has the same url as engines[0]; an engine is listed once"],
    ),
    "both ways to give a key": (
        with_engine("{url: http://h:1, api_key: a, api_key_file: b}"),
        ["c.yaml:5: pools.cpu.engines[0]: has both api_key and api_key_file; keep one"],
    ),
    "a variable that is not set": (
        with_model("revision: ${REV}"),
        [
            "c.yaml:3: models[0].revision: the environment variable REV is not set; "
            "set it, or write ${REV:-} if it may be empty"
        ],
    ),
    "a variable that is empty": (
        with_model("revision: v${EMPTY}"),
        [
            "c.yaml:3: models[0].revision: the environment variable EMPTY is empty; "
            "set it, or write ${EMPTY:-} if it may be empty"
        ],
    ),
    "a variable of the wrong type is named, not shown": (
        "server: {port: '${WORD}'}\n" + SMALLEST,
        ["c.yaml:1: server.port: should be a whole number, got the value of ${WORD}"],
    ),
    "nested defaults": (
        with_model("revision: ${A:-${B}}"),
        [
            "c.yaml:3: models[0].revision: should hold ${NAME} or ${NAME:-default}, not nested; "
            "write $$ for a dollar sign"
        ],
    ),
    "a reference without its end": (
        with_model("revision: ${A"),
        [
            "c.yaml:3: models[0].revision: should hold ${NAME} or ${NAME:-default}, not nested; "
            "write $$ for a dollar sign"
        ],
    ),
    "a tab": ("models:\n\t- a\n", ["c.yaml:2: is not YAML: found character '\\t' that cannot start any token"]),
    "an unclosed list": (
        "models: [a\n",
        ["c.yaml:2: is not YAML: expected ',' or ']', but got '<stream end>'"],
    ),
    "a control character": ("models:\n  - model: a\x07\n", ["c.yaml:2: is not YAML: holds a control character"]),
    "two documents": (
        SMALLEST + "---\n" + SMALLEST,
        ["c.yaml:6: is not YAML: but found another document"],
    ),
    "a tag": (
        with_model("revision: !!python/name:os.system x"),
        ["c.yaml:3: models[0].revision: bears a YAML tag; tags are not used here, leave it out"],
    ),
    "an alias inside of itself": (
        with_model("default_chat_template_kwargs: &a {b: *a}"),
        ["c.yaml:3: models[0].default_chat_template_kwargs.b: is an alias for something that it is part of"],
    ),
    "a mapping that merges itself": (
        with_model("default_chat_template_kwargs: &a\n      <<: *a"),
        [
            "c.yaml:4: models[0].default_chat_template_kwargs.<<: should name one mapping from elsewhere, "
            "or a list of them"
        ],
    ),
    "a duplicate key deep inside": (
        with_model("default_chat_template_kwargs: {a: [{b: 1, b: 2}]}"),
        ["c.yaml:3: models[0].default_chat_template_kwargs.a[0].b: the key is already on line 3"],
    ),
    "a key that is a list": (
        with_model("default_chat_template_kwargs: {[a]: 1}"),
        ["c.yaml:3: models[0].default_chat_template_kwargs: a key should be plain text, not a list or a mapping"],
    ),
}


@pytest.mark.parametrize(("text", "expected"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_answered_with(text: str, expected: list[str]) -> None:
    assert problems(text, EMPTY="", WORD="secret") == expected


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://h", "should be an http or https URL with a host; write it like http://10.0.0.11:8200"),
        ("10.0.0.11:8200", "should be an http or https URL with a host; write it like http://10.0.0.11:8200"),
        ("http://", "should be an http or https URL with a host; write it like http://10.0.0.11:8200"),
        ("http://h h", "should be an http or https URL with a host; write it like http://10.0.0.11:8200"),
        ("http://h:0", "should be an http or https URL with a host; write it like http://10.0.0.11:8200"),
        ("http://h:99999", "is not a URL; write it like http://10.0.0.11:8200"),
        ("http://[::1", "is not a URL; write it like http://10.0.0.11:8200"),
        ("http://u:p@h", "must not hold credentials; give them as api_key or api_key_file"),
        ("http://@h", "must not hold credentials; give them as api_key or api_key_file"),
        ("http://h?a=b", "must not hold a query or a fragment; a base path such as http://10.0.0.11/engine is fine"),
    ],
)
def test_an_engine_url_is_refused(url: str, problem: str) -> None:
    assert problems(with_engine(f'"{url}"')) == [f"c.yaml:5: pools.cpu.engines[0].url: {problem}"]


@pytest.mark.parametrize(
    "text",
    [
        with_engine("{url: http://h, api_key: [hunter2]}"),
        with_engine("{url: http://h, api_key: 'hunter2 '}"),
        with_engine("{url: http://h, api_kee: hunter2}"),
        with_engine("{url: 'http://hunter2@h'}"),
        with_engine("{url: 'htp://u:hunter2@h'}"),
        with_engine("[hunter2]"),
        with_engine("{url: http://h, api_key: *hunter2}"),
        with_engine("{url: http://h, api_key: !hunter2 x}"),
        with_engine("{url: http://h, api_key: &hunter2 a, api_key_file: &hunter2 b}"),
        with_engine("{url: http://h, api_key: 'pre${hunter2'}"),
        with_engine("{url: http://h, api_key: 'hunter2"),
        with_engine("{url: http://h, policy: '${SECRET}'}"),
        with_model("api_key: hunter2"),
        with_model("pool: ${SECRET}"),
        with_model("generation_config: ${SECRET}"),
        with_model("served_model_name: [a${SECRET}, a${SECRET}]"),
    ],
)
def test_a_secret_never_appears_in_a_message(text: str) -> None:
    assert "hunter2" not in "\n".join(problems(text, SECRET="hunter2"))


def test_a_secret_never_appears_in_the_printed_configuration() -> None:
    config = load(with_engine("{url: http://h, api_key: hunter2}"))
    assert "hunter2" not in f"{config!r} {config} {config.model_dump_json()}"


def test_an_api_key_comes_from_a_file_without_white_space(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hunter2\n")
    engine = load(with_engine(f"{{url: http://h, api_key_file: {tmp_path / 'key'}}}")).pools["cpu"].engines[0]
    key = engine.read_api_key()
    assert key is not None and key.get_secret_value() == "hunter2"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "api_key_file of http://h cannot be read: No such file or directory"),
        (b"\n", "the key for http://h should be one or more visible ASCII characters, as it travels in an HTTP header"),
        (
            b"a\nb",
            "the key for http://h should be one or more visible ASCII characters, as it travels in an HTTP header",
        ),
        (b"\xff", "api_key_file of http://h is not UTF-8 text"),
    ],
)
def test_an_api_key_file_is_refused(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    engine = load(with_engine(f"{{url: http://h, api_key_file: {path}}}")).pools["cpu"].engines[0]
    with pytest.raises(ConfigError) as failure:
        engine.read_api_key()
    assert str(failure.value) == f"{path}: {problem}"


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    missing, binary = tmp_path / "missing.yaml", tmp_path / "binary.yaml"
    binary.write_bytes(b"a\xff")
    with pytest.raises(ConfigError, match=f"^{missing}: cannot be read: No such file or directory$"):
        read_config(missing)
    with pytest.raises(ConfigError, match=rf"^{binary}: is not UTF-8 text \(byte 1\)$"):
        read_config(binary)


def with_format(*lines: str) -> str:
    """SMALLEST with a format, its lines from line 8 on."""
    return SMALLEST + "formats:\n  house:\n" + "".join(f"    {line}\n" for line in lines)


def test_a_format_is_declared_as_its_kind_with_its_fields() -> None:
    config = load(with_format("kind: json_calls", "open: <call>", 'close: ["</call>", "</calls>"]', "array: true"))
    assert config.formats == {"house": [JsonCalls(open=("<call>",), close=("</call>", "</calls>"), array=True)]}


def test_a_format_may_be_several_declarations() -> None:
    config = load(with_format("- {kind: pythonic_calls}", "- {kind: reasoning, close: </t>}"))
    assert config.formats == {"house": [PythonicCalls(), Reasoning(close=("</t>",))]}


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["kind: jsoncalls"], "formats.house[0]: kind 'jsoncalls' is not known; did you mean json_calls?"),
        (["open: <c>"], "formats.house[0]: kind is missing; expected one of reasoning, json_calls"),
        (
            ["kind: json_calls", "opens: <c>"],
            "formats.house[0]: opens is not a field of json_calls; did you mean open?",
        ),
        (["kind: json_calls", "array: perhaps"], "formats.house[0]: array: input should be a valid boolean"),
        (["kind: reasoning", "close: </t>", "starts: within"], "starts: input should be 'inside' or 'outside'"),
        (["kind: reasoning"], "formats.house[0]: close: field required"),
        (["kind: header_calls", "call: <c>", "header: <sep>"], "header needs the hole {name} or {id}"),
        (["just text"], "formats.house[0]: should be a mapping with a kind and its fields"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused_with_its_field(lines: list[str], problem: str) -> None:
    (line,) = problems(with_format(*lines))
    assert problem in line
    assert line.startswith(("c.yaml:7:", "c.yaml:8:"))


def test_a_format_of_the_project_cannot_be_declared_anew() -> None:
    (line,) = problems(SMALLEST + "formats:\n  hermes: {kind: pythonic_calls}\n")
    assert "hermes is one of the project's own formats; choose another name" in line
