"""`/openapi.json`: every route is in it, and nothing that it allows makes the server fail."""

import asyncio
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.api.talk import CHAT, Json, Talk, talk, talk_to
from tests.engines.scripted import says
from tests.stages.talk import DERENDER, GENERATE


async def document_of(t: Talk) -> Json:
    async with t.client.get("/openapi.json") as response:
        assert response.status == 200
        document: Json = await response.json()
        return document


async def test_every_route_is_described_with_the_body_that_it_takes(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        document = await document_of(t)
        routes = {(route.method, route.resource.canonical) for route in t.client.app.router.routes()}  # type: ignore[union-attr]
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(method, path) for method, path in routes if method != "HEAD"}
    assert all(("requestBody" in op) == (m == "post") for ops in document["paths"].values() for m, op in ops.items())


@pytest.mark.parametrize(
    ("path", "bodies"),
    [(CHAT, {"ChatRequest"}), (GENERATE, {"GenerateBody"}), (DERENDER, {"ChatDerenderWhole", "ChatDerenderStep"})],
)
async def test_a_body_is_described_by_the_model_that_validates_it(tmp_path: Path, path: str, bodies: set[str]) -> None:
    async with talk(tmp_path) as t:
        document = await document_of(t)
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {one["$ref"].rpartition("/")[2] for one in schema.get("anyOf", [schema])} == bodies
    assert bodies <= document["components"]["schemas"].keys()


async def test_nothing_that_the_description_allows_makes_the_server_fail(tmp_path: Path) -> None:
    def ask_everything(document: Json, url: str) -> list[str]:
        failures = []
        for result in schemathesis.openapi.from_dict(document).get_all_operations():
            operation = result.ok()

            @settings(
                max_examples=25,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                derandomize=True,
            )
            @given(operation.as_strategy())
            def ask(case: schemathesis.Case) -> None:
                response = case.call(base_url=url)
                if response.status_code == 500:
                    failures.append(f"{case.method} {case.path}: {case.body!r:.1000}: {response.text}")

            ask()
        return failures

    async with talk_to(tmp_path, says([[5]])) as t:
        assert await asyncio.to_thread(ask_everything, await document_of(t), str(t.client.make_url("/"))) == []
