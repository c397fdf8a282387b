"""What the README and docs/ say is there: code blocks, links, commands, options, endpoints and problem kinds."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import TypeAdapter
from typer.core import TyperGroup

import umbel.__main__ as command_line
from umbel.aggregation.runfile import Override, RunFile

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


def test_the_run_file_page_names_every_key_and_its_default() -> None:
    page = (ROOT / "docs" / "runs.md").read_text()
    rows = re.findall(r"^\| `([a-z_.]+)` \|(.*?)\|", page, re.MULTILINE)
    keys = {key: default for key, default in _run_file_keys(RunFile) if key != "override"}
    keys |= {f"override.{field.name}": "" for field in fields(Override)}  # an array of tables
    assert {key: default.strip() for key, default in rows} == keys


def test_the_run_files_of_the_documentation_are_accepted() -> None:
    examples = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(), re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        TypeAdapter(RunFile).validate_python(tomllib.loads(example))


def _run_file_keys(section: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a run file as the page writes it, with its default as the page writes that."""
    for field in fields(section):
        kinds = [kind for kind in (field.type, *get_args(field.type)) if isinstance(kind, type) and is_dataclass(kind)]
        if kinds:  # a section, or one that may be left out
            yield from _run_file_keys(kinds[0], f"{field.name}.")
        elif f"{prefix}{field.name}" == "training.local_epochs":
            yield "training.local_epochs", "1"  # where neither epochs nor steps are set
        else:
            yield f"{prefix}{field.name}", _written(field.default)


def _written(default: object) -> str:
    if default is MISSING or default is None:
        return ""
    if default == ():
        return "`[]`"
    if isinstance(default, bool | str):
        return f'`"{default}"`' if isinstance(default, str) else str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_the_operating_page_names_every_setting_with_its_default_and_flag() -> None:
    import inspect

    from umbel.server.commands import serve
    from umbel.server.settings import Settings

    page = (ROOT / "docs" / "operating.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \| (?:`(--[a-z-]+)`)? ?\|", page, re.MULTILINE)
    rows = {name: (default.split(" (")[0], flag) for name, default, flag in table}
    assert rows.keys() == Settings.model_fields.keys()
    flags = inspect.signature(serve).parameters.keys()
    for name, setting in Settings.model_fields.items():
        told = "none" if setting.default is None else str(setting.default)
        assert rows[name] == (told, f"--{name}" if name in flags else ""), name
