"""What docker-compose.yml does, without Docker: its own scripts, in its own order, as real processes."""

import configparser
import inspect
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from umbel.server.commands import serve
from umbel.server.door import FILES_WANTED
from umbel.server.process import GRACE_S

ROOT = Path(__file__).parent.parent
PROCESS_TIMEOUT_S = 120


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COORDINATOR_DATA": str(tmp_path / "coordinator"),
        "SITES_DIR": str(tmp_path / "sites"),
    }


@pytest.fixture
def coordinator(environment: dict[str, str]) -> Iterator[str]:
    data = Path(environment["COORDINATOR_DATA"])
    process = subprocess.Popen(["umbel", "serve", "--data", str(data), "--port", "0"], env=environment)
    try:
        yield wait_for_endpoint(data / "endpoint", process)
    finally:
        process.terminate()
        assert process.wait(timeout=20) == 0


def wait_for_endpoint(file: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists():
            url = file.read_text().strip()
            if httpx.get(f"{url}/v1/health").is_success:
                return url
        time.sleep(0.1)
    raise AssertionError("the coordinator did not start")


def test_the_unit_starts_what_there_is_with_as_many_files_as_it_wants() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # the documented way to keep keys as they are
    unit.read(ROOT / "deploy" / "umbel.service")
    service = unit["Service"]
    assert int(service["LimitNOFILE"]) >= FILES_WANTED
    assert int(service["TimeoutStopSec"]) > GRACE_S
    program, command, *options = service["ExecStart"].split()
    assert (Path(program).name, command) == ("umbel", "serve")
    known = {name.replace("_", "-") for name in inspect.signature(serve).parameters}
    assert {option.removeprefix("--") for option in options[::2]} <= known
    assert service["StateDirectory"] == Path(options[1 + options.index("--data")]).name


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/replicas.yml"])
def test_the_containers_may_open_as_many_files_as_they_want(file: str) -> None:
    text = (ROOT / file).read_text()
    limits = re.findall(r"ulimits: \{nofile: (\d+)\}", text)
    assert len(limits) == text.count("stop_grace_period") == 1
    assert int(limits[0]) >= FILES_WANTED


@pytest.mark.slow
def test_four_hospitals_finish_the_example_run_through_the_compose_scripts(
    coordinator: str, environment: dict[str, str], tmp_path: Path
) -> None:
    sites = [tmp_path / "sites" / name for name in ("site-1", "site-2", "site-3", "site-4")]
    for site in sites:
        site.mkdir(parents=True)
    environment = {**environment, "UMBEL_SERVER": coordinator}
    for _ in range(2):  # a second `docker compose up` must change nothing
        subprocess.run(["sh", "deploy/first-run.sh"], cwd=ROOT, env=environment, check=True, timeout=PROCESS_TIMEOUT_S)
    tokens = [(site / "token").read_text().strip() for site in sites]
    assert len(set(tokens)) == 4

    hospitals = [
        subprocess.Popen(
            ["sh", "deploy/join-site.sh", site.name],
            cwd=ROOT,
            env={**environment, "STATE": str(site), "HOSPITAL": str(int(site.name[-1]) - 1)},
        )
        for site in sites
    ]
    try:
        assert [hospital.wait(timeout=PROCESS_TIMEOUT_S) for hospital in hospitals] == [0] * 4
    finally:
        for hospital in hospitals:
            hospital.kill()

    key = (Path(environment["COORDINATOR_DATA"]) / "admin.key").read_text().strip()
    run = httpx.get(f"{coordinator}/v1/admin/runs/breast-cancer", headers={"Authorization": f"Bearer {key}"}).json()
    planned = tomllib.loads((ROOT / "examples" / "breast_cancer.toml").read_text())["rounds"]["count"]
    assert (run["status"], run["rounds_done"]) == ("finished", planned)
