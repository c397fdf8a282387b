"""What the README and docs/ say is there: code blocks, links, commands, options, endpoints and problem kinds."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

import umbel.__main__ as command_line

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def cli() -> TyperGroup:
    if not command_line.app.registered_commands:
        command_line.mount()
    group = typer.main.get_command(command_line.app)
    assert isinstance(group, TyperGroup)
    return group


def shell_lines(page: Path) -> Iterator[str]:
    """Lines of the page's shell blocks and its inline code, where they call umbel."""
    text = page.read_text()
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        yield from (line for line in block.splitlines() if "umbel " in line)
    yield from (code for code in re.findall(r"`([^`\n]+)`", text) if code.startswith("umbel "))


def test_the_readme_shows_the_example_as_it_is() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block == (ROOT / "examples" / "my_hospital.py").read_text()


def test_a_hospitals_own_client_is_about_twenty_lines() -> None:
    lines = (ROOT / "examples" / "my_hospital.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_that_is_named_exists(page: Path, cli: TyperGroup) -> None:
    for line in shell_lines(page):
        words = re.split(r"\s+", line.split("#")[0].split("umbel ", 1)[1].strip())
        command: Any = cli  # typer does not export the base of its commands
        while isinstance(command, TyperGroup) and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
            name = words.pop(0)
            assert name in command.commands, f"{page.name}: umbel has no command {name!r} in {line!r}"
            command = command.commands[name]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
        for option in (word for word in words if re.fullmatch(r"--[a-z-]+", word)):
            assert option in known, f"{page.name}: {line!r} uses {option}, which {command.name} does not have"


def test_the_wire_page_lists_exactly_the_problems_that_exist() -> None:
    from umbel.server.problems import KINDS

    section = (ROOT / "docs" / "wire.md").read_text().split("## Problems")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z][a-z, -]+) \| (\d{3}) \|", section, re.MULTILINE)
    documented = {kind: int(status) for kinds, status in rows for kind in kinds.split(", ")}
    assert documented == {kind: known.status for kind, known in KINDS.items()}


def test_the_wire_page_names_endpoints_that_the_coordinator_has(tmp_path: Path) -> None:
    from umbel.server.app import create_app
    from umbel.server.settings import load_settings

    app = create_app(load_settings(None, {"data": tmp_path}))
    served = {re.sub(r"\{[^}]+\}", "{}", path) for path in [*app.openapi()["paths"], app.openapi_url or ""]}
    for path in re.findall(r"`(?:[A-Z]+ )?(/v1/[^?`]+)", (ROOT / "docs" / "wire.md").read_text()):
        assert re.sub(r"\{[^}]+\}", "{}", path) in served, path
