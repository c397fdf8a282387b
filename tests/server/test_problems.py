"""The table of problems is the one that docs/reference/wire.md promises; what is unexpected tells nothing."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.federations.server_device import house, problem
from tests.repository import ROOT
from umbel.server.problems import KINDS
from umbel.server.store.outage import DatabaseAway

WIRE = ROOT / "docs" / "reference" / "wire.md"


def test_the_contract_and_the_code_name_the_same_problems() -> None:
    section = WIRE.read_text().split("## Problems")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z, -]+) \| (\d{3}) \|", section, re.MULTILINE)
    promised = {kind: int(status) for kinds, status in rows for kind in kinds.split(", ")}
    assert promised == {kind: known.status for kind, known in KINDS.items()}


def test_an_unexpected_error_is_logged_and_tells_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:

            async def fail() -> None:
                raise RuntimeError("secret details")

            it.app.add_api_route("/v1/fail", fail)
            answer = await it.http.get("/v1/fail")
            assert problem(answer) == "internal-error"
            assert "secret" not in answer.text

    asyncio.run(scenario())
    assert "secret details" in caplog.text


def test_a_request_that_the_database_fails_is_told_to_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:

            async def fail() -> None:
                raise DatabaseAway("Connection refused")

            it.app.add_api_route("/v1/fail", fail)
            answer = await it.http.get("/v1/fail")
            assert (answer.status_code, problem(answer)) == (503, "database-unavailable")
            assert int(answer.headers["Retry-After"]) > 0

    asyncio.run(scenario())


def test_openapi_documents_bodies_and_problems(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            api = (await it.http.get("/v1/openapi.json")).json()
            check_in = api["paths"]["/v1/check-ins"]["post"]
            assert "layout_digest" in check_in["requestBody"]["content"]["application/json"]["schema"]["properties"]
            assert "application/problem+json" in check_in["responses"]["401"]["content"]
            assert (await it.http.get("/v1/health")).json() == {"status": "ok"}

    asyncio.run(scenario())
