"""What docker-compose.yml does, without Docker: its own scripts, in its own order, as real processes; and the units."""

import configparser
import inspect
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.repository import ROOT
from tests.servers.waits import LIMIT_S, wait_for_file
from umbel.client.cli.agent import agent
from umbel.client.cli.output import FINAL_STATUS
from umbel.client.cli.site import join
from umbel.server.http.limits import FILES_WANTED
from umbel.server.serve.commands import serve
from umbel.server.serve.process import GRACE_S


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
        yield wait_for_file(data / "endpoint", process).read_text().strip()
    finally:
        process.terminate()
        assert process.wait(timeout=LIMIT_S) == 0


UNITS = ("umbel.service", "umbel-client.service", "umbel-agent.service")
COMMANDS: dict[str, Callable[..., object]] = {"serve": serve, "join": join, "agent": agent}


def service_of(unit: str) -> configparser.SectionProxy:
    """The [Service] section of a unit. Raises for a key that stands in it twice."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # the documented way to keep keys as they are
    assert parser.read(ROOT / "deploy" / unit)
    return parser["Service"]


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_starts_a_command_that_there_is_with_options_that_it_has(unit: str) -> None:
    service = service_of(unit)
    program, command, *options = service["ExecStart"].split()
    assert Path(program).name == "umbel"
    known = {name.replace("_", "-") for name in inspect.signature(COMMANDS[command]).parameters}
    assert {option.removeprefix("--") for option in options[::2]} <= known
    where = options[1 + options.index("--data" if command == "serve" else "--state")]
    assert where == f"/var/lib/{service['StateDirectory']}"


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_keeps_secrets_out_of_core_files_and_swap_and_its_state_to_itself(unit: str) -> None:
    service = service_of(unit)
    assert (service["LimitCORE"], service["MemorySwapMax"]) == ("0", "0")
    assert (service["StateDirectoryMode"], service["UMask"]) == ("0700", "0077")


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_takes_from_its_process_what_it_does_not_need(unit: str) -> None:
    service = service_of(unit)
    assert service["User"] != "root"
    assert service["CapabilityBoundingSet"] == ""
    assert service["ProtectSystem"] == "strict"
    assert service["SystemCallFilter"] == "@system-service"
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictNamespaces", "RestrictSUIDSGID"):
        assert service[key] == "yes", key


def test_the_coordinators_unit_has_as_many_files_and_as_much_time_as_it_wants() -> None:
    service = service_of("umbel.service")
    assert int(service["LimitNOFILE"]) >= FILES_WANTED
    assert int(service["TimeoutStopSec"]) > GRACE_S


def test_a_client_that_has_ended_with_an_error_waits_for_a_person() -> None:
    assert service_of("umbel-client.service")["Restart"] == "on-abnormal"


@pytest.mark.parametrize("unit", ["umbel-client.service", "umbel-agent.service"])
def test_a_client_that_the_coordinator_refuses_for_good_is_not_started_again(unit: str) -> None:
    assert service_of(unit)["RestartPreventExitStatus"] == str(FINAL_STATUS)


def test_an_agent_is_started_again_and_asked_to_leave_before_the_processes_of_its_runs() -> None:
    service = service_of("umbel-agent.service")
    assert (service["Restart"], service["KillMode"]) == ("on-failure", "mixed")


@pytest.mark.nightly
def test_four_hospitals_finish_the_example_run_through_the_compose_scripts(
    coordinator: str, environment: dict[str, str], tmp_path: Path
) -> None:
    sites = [tmp_path / "sites" / name for name in ("site-1", "site-2", "site-3", "site-4")]
    for site in sites:
        site.mkdir(parents=True)
    environment = {**environment, "UMBEL_SERVER": coordinator}
    for _ in range(2):  # a second `docker compose up` must change nothing
        subprocess.run(["sh", "deploy/first-run.sh"], cwd=ROOT, env=environment, check=True, timeout=LIMIT_S)
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
        assert [hospital.wait(timeout=LIMIT_S) for hospital in hospitals] == [0] * 4
    finally:
        for hospital in hospitals:
            hospital.kill()

    key = (Path(environment["COORDINATOR_DATA"]) / "admin.key").read_text().strip()
    headers = {"Authorization": f"Bearer {key}"}
    run = httpx.get(f"{coordinator}/v1/admin/runs/breast-cancer", headers=headers, timeout=60.0).json()
    planned = tomllib.loads((ROOT / "examples" / "breast_cancer.toml").read_text())["rounds"]["count"]
    assert (run["status"], run["rounds_done"]) == ("finished", planned)
