"""The shape of the project, as far as imports show it: stages do not know each other, and the pure ones do no I/O."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "proxy"

MAY_IMPORT = {
    "protocol": set(),
    "formats": set(),
    "render": {"protocol", "formats"},
    "derender": {"protocol", "formats"},
    "generate": {"protocol"},
    "embedded": {"protocol", "render"},
    "config": {"formats", "yaml_document"},
    "yaml_document": set(),
    "model_files": {"render", "embedded", "protocol"},
    "record": {"protocol"},
    "recorder": {"record"},
    "replay": {"record", "pipeline", "models", "derender", "protocol"},
    "models": {"model_files", "record", "render", "generate", "derender", "protocol"},
    "pipeline": {"models", "record", "render", "generate", "derender", "protocol"},
    "stages": {"pipeline", "models", "render", "generate", "derender", "protocol"},
    "api": {"stages", "pipeline", "models", "render", "derender", "protocol"},
    "app": {
        "api",
        "replay",
        "record",
        "recorder",
        "models",
        "model_files",
        "config",
        "formats",
        "render",
        "generate",
        "derender",
    },
    "demo": {"app", "config", "embedded"},
    "cli": {"app", "replay", "config", "demo", "embedded"},
    "__main__": {"cli"},
    "__init__": set(),
}
"""Part of the project -> the other parts that it may import. Everybody may import `proxy` itself."""

PURE = {
    "formats": {"asyncio", "aiohttp", "socket", "os", "io", "pathlib", "subprocess", "threading", "logging", "time"},
    "render": {"asyncio", "aiohttp", "socket", "os", "io", "pathlib", "subprocess", "threading", "logging"},
    "derender": {"asyncio", "aiohttp", "socket", "os", "io", "pathlib", "subprocess", "threading", "logging", "time"},
    "protocol": {"asyncio", "aiohttp", "socket", "os", "io", "pathlib", "subprocess", "threading", "logging", "time"},
}
"""Part -> what it may not import, because it does no I/O (and, in derender, knows no clock)."""


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """The absolute names of all modules that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = sorted(ROOT.rglob("*.py"))


def test_every_part_of_the_project_is_in_the_table() -> None:
    assert {part_of(path) for path in FILES} == MAY_IMPORT.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_part_may(path: Path) -> None:
    part = part_of(path)
    others = {name.split(".")[1] for name in imports(path) if name.startswith("proxy.")} - {part}
    known = {other for other in others if other in MAY_IMPORT}
    assert known <= MAY_IMPORT[part]


@pytest.mark.parametrize("path", [p for p in FILES if part_of(p) in PURE], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_pure_part_imports_nothing_that_does_io(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & PURE[part_of(path)]


def test_the_table_has_no_cycle() -> None:
    def reachable(part: str) -> set[str]:
        return MAY_IMPORT[part].union(*(reachable(other) for other in MAY_IMPORT[part]))

    assert not [part for part in MAY_IMPORT if part in reachable(part)]
