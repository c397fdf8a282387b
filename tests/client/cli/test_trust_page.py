"""The pages on member lists and site policies: the example runs, the policy is accepted, no key is missing."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import umbel.__main__ as command_line
from tests.repository import ROOT
from umbel.aggregation.trust.members import read_members
from umbel.aggregation.trust.public_keys import fingerprint, grouped, public_key_bytes
from umbel.client.cli.new_run import careful_of_absence
from umbel.client.operator.run_files import read_run_file
from umbel.client.policy.members_store import MembersStore
from umbel.client.policy.policy import SitePolicy, read_policy

DOCS = ROOT / "docs"
PAGE = (DOCS / "how-to" / "run-a-consortium.md").read_text()
POLICY = (DOCS / "how-to" / "write-a-site-policy.md").read_text()
KEYS = (DOCS / "reference" / "site-policy.md").read_text()


def toml(page: str) -> str:
    """The first TOML example of a page."""
    return str(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])


def commands() -> Iterator[list[str]]:
    """What the page's shell blocks say after `umbel`, line by line."""
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        for line in block.splitlines():
            umbel, *words = shlex.split(line, comments=True)
            assert umbel == "umbel"
            yield words


def umbel(*words: str) -> Result:
    command_line.mount()
    result = CliRunner().invoke(command_line.app, list(words), input="y\n")
    assert result.exit_code == 0, f"umbel {' '.join(words)}: {result.output}"
    return result


def test_the_worked_example_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys that are made as the page says, for its own are somebody else's."""
    monkeypatch.chdir(tmp_path)
    keys = dict[str, str]()
    for words in commands():
        match words:
            case ["members", "officer-key", "--out", file]:
                keys[file.removesuffix(".pem")] = json.loads(umbel(*words, "--json").stdout)["public_key"]
            case ["members", "add" | "add-officer", file, name, _]:
                if name not in keys:
                    umbel("fingerprint", "--state", name, "--server", "https://fl.example.org")
                    (own,) = json.loads(umbel("fingerprint", "--state", name, "--json").stdout)
                    keys[name] = own["public_key"]
                umbel(*words[:-1], keys[name])
            case _:
                umbel(*words)
    second = read_members(Path("pilot-2.json").read_bytes())
    assert MembersStore(Path("north")).pinned("pilot") == second
    assert sorted(second.list.members) == ["east", "north", "west"]


def test_the_fingerprints_of_the_page_are_those_of_its_keys() -> None:
    named = {words[3]: words[4] for words in commands() if words[1] in ("add", "add-officer")}
    said = dict(re.findall(r"^ (?:member|officer) +([a-z]+) +((?:[0-9A-F]{4} ?){8})$", PAGE, re.MULTILINE))
    assert sorted(said) == ["anna", "bert", "east", "north", "west"]
    for name, groups in said.items():
        assert fingerprint(public_key_bytes(named[name])) == groups


def test_a_run_file_with_the_lines_of_the_page_asks_all_sites_each_time_and_names_the_first_list(
    tmp_path: Path,
) -> None:
    lines = toml(PAGE)
    (tmp_path / "ward.toml").write_text('name = "ward"\n' + lines.replace("[rounds]", "[rounds]\ncount = 9"))
    _, run_file = read_run_file(tmp_path / "ward.toml")
    assert run_file.members_sha256
    assert (
        grouped(run_file.members_sha256) in PAGE.partition("## Change the list")[0].partition("umbel members verify")[2]
    )
    assert run_file.round_plan(1, 1).n_wanted == run_file.round_plan(1, 1).minimum == 3
    assert careful_of_absence(run_file) == ""


def test_the_policy_of_the_page_is_accepted(tmp_path: Path) -> None:
    example = toml(POLICY)
    (tmp_path / "policy.toml").write_text(example)
    policy = read_policy(tmp_path / "policy.toml")
    assert policy.members == tmp_path / "pilot-2.json"
    assert policy.members_sha256 in PAGE, "it is the hash of the page's second list"
    assert tomllib.loads(example).keys() <= {field.name for field in fields(SitePolicy)}


def test_the_table_of_the_policy_names_every_key_and_its_default() -> None:
    rows = dict(re.findall(r"^\| `([a-z_0-9]+)` \|(.*?)\|", KEYS, re.MULTILINE))
    assert {key: default.strip() for key, default in rows.items()} == {
        field.name: _written(field.name, field.default) for field in fields(SitePolicy)
    }


def _written(name: str, default: object) -> str:
    assert default is not MISSING
    if name == "threshold_share":
        return "two thirds"
    if name == "secure_aggregation":
        return '`"required"` with `members`, else `"allowed"`'
    if name in ("cohort_change", "terms_change"):
        return '`"refuse"` with `members`, else `"warn"`'
    if name == "other_runs":
        return '`"refuse"` with `allowed_runs`, else `"ask"`'
    if default is None:
        return ""
    if default == ():
        return "`[]`"
    return f'`"{default}"`' if isinstance(default, str) else str(default).lower()
