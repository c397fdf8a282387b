"""The compose files, put together as Compose does it: who reaches whom, and what leaves a container's memory."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.repository import ROOT
from umbel.server.http.limits import FILES_WANTED
from umbel.server.settings import Settings

_REPLACED = ("command", "entrypoint")
FILES = {
    "alone": ("docker-compose.yml",),
    "replicas": ("docker-compose.yml", "deploy/replicas.yml"),
}


def compose(*files: str) -> dict[str, Any]:
    """These files as one, each over the one before it, with what Compose adds where nothing is said."""
    whole: dict[str, Any] = {}
    for file in files:
        whole = merged(whole, yaml.safe_load((ROOT / file).read_text()))
    return whole


def merged(under: Any, over: Any) -> Any:
    """Mappings key by key, lists one behind the other; but a command is the later one."""
    if isinstance(under, dict) and isinstance(over, dict):
        both = {key: over[key] if key in _REPLACED else merged(under[key], over[key]) for key in under if key in over}
        return {**under, **over, **both}
    if isinstance(under, list) and isinstance(over, list):
        return [*under, *(one for one in over if one not in under)]
    return over


def services(setup: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = compose(*FILES[setup])["services"]
    return found


def networks_of(service: Mapping[str, Any]) -> set[str]:
    """The networks that a container is in: `default` where the file names none."""
    return set(service.get("networks", ["default"]))


def environment_of(service: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = service.get("environment", {})
    return found


def is_umbels_own(service: Mapping[str, Any]) -> bool:
    return "build" in service


@pytest.mark.parametrize("setup", FILES)
def test_coordinators_may_open_as_many_files_as_they_want(setup: str) -> None:
    serving = [one for one in services(setup).values() if "serve" in one.get("command", ())]
    assert len(serving) == {"alone": 1, "replicas": 2}[setup]
    for one in serving:
        assert one["ulimits"]["nofile"] >= FILES_WANTED
        assert one["stop_grace_period"] == "20s"


@pytest.mark.parametrize("setup", FILES)
def test_no_memory_of_umbels_containers_goes_into_a_core_file_or_to_the_swap(setup: str) -> None:
    for name, service in services(setup).items():
        if is_umbels_own(service):
            assert service["ulimits"]["core"] == 0, name
            # Compose's own words: the limit of memory and swap together; alone, without mem_limit, it says nothing.
            assert service["mem_limit"] == service["memswap_limit"], name


@pytest.mark.parametrize("setup", FILES)
def test_umbels_containers_have_no_right_that_they_do_not_need(setup: str) -> None:
    for name, service in services(setup).items():
        if is_umbels_own(service):
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["read_only"] is True, name


def test_the_database_shares_a_network_with_the_coordinators_alone() -> None:
    whole = compose(*FILES["replicas"])
    reached = networks_of(whole["services"]["database"])
    beside = {name for name, one in whole["services"].items() if networks_of(one) & reached}
    assert beside == {"database", "coordinator", "coordinator-2"}
    assert all(whole["networks"][network]["internal"] for network in reached)
    assert "ports" not in whole["services"]["database"]


def test_the_sites_still_reach_the_coordinators() -> None:
    found = services("replicas")
    for name in ("operator", "site-1", "site-2", "site-3", "site-4", "balancer"):
        assert networks_of(found[name]) & networks_of(found["coordinator"]), name


def test_the_database_asks_for_a_password_that_the_operator_has_made_and_only_coordinators_get() -> None:
    found = services("replicas")
    database = environment_of(found["database"])
    assert "POSTGRES_HOST_AUTH_METHOD" not in database  # without it the image asks every host for the password
    variable = re.fullmatch(r"\$\{(\w+):\?.+}", database["POSTGRES_PASSWORD"])
    assert variable is not None, "a default would be everyone's password"
    told = {name for name, one in found.items() if variable[1] in str(environment_of(one))}
    assert told == {"database", "coordinator", "coordinator-2"}
    for name in ("coordinator", "coordinator-2"):
        assert f":{database['POSTGRES_PASSWORD']}@database/" in environment_of(found[name])["UMBEL_DATABASE_URL"]


def test_the_replicas_are_given_settings_that_there_are() -> None:
    for name in ("coordinator", "coordinator-2"):
        for variable in environment_of(services("replicas")[name]):
            assert variable.removeprefix("UMBEL_").lower() in Settings.model_fields


@pytest.mark.parametrize("setup", FILES)
def test_every_image_is_of_one_exact_version(setup: str) -> None:
    for name, service in services(setup).items():
        if not is_umbels_own(service):
            assert re.search(r":\d+\.\d+", service["image"]), name
