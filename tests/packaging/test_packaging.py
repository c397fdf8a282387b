"""What gets installed: extras, pins, and the two commands of the README."""

import re
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repository import ROOT


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def closure(distribution: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """The names of everything that installing `distribution[extras]` brings on this platform."""
    if (distribution, extras) in seen:
        return
    seen.add((distribution, extras))
    for text in metadata.requires(distribution) or []:
        requirement = Requirement(text)
        wanted = [{"extra": extra} for extra in extras] or [{"extra": ""}]
        if requirement.marker is None or any(requirement.marker.evaluate(environment) for environment in wanted):
            name = canonicalize_name(requirement.name)
            yield name
            yield from closure(name, frozenset(requirement.extras), seen)


def test_every_package_that_the_two_commands_install_is_pinned_to_what_is_installed() -> None:
    pins = pinned()
    for name in sorted(set(closure("umbel", frozenset({"dev"}), set())) - {"umbel"}):
        if name.startswith(("nvidia-", "cuda-", "triton")):  # torch pins these itself, exactly
            continue
        assert name in pins, f"{name} is installed by make test but constraints.txt does not pin it"
        assert pins[name] == metadata.version(name).split("+")[0], name


def test_a_device_gets_no_server_and_no_simulator_library() -> None:
    base = set(closure("umbel", frozenset(), set()))
    assert base.isdisjoint({"fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "scikit-learn", "matplotlib"})
    assert "tensorboard" not in base


def test_the_readme_names_the_two_commands_that_the_makefile_has() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
