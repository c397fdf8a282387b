"""What the README and docs/ say is there: code blocks, links, commands, options, endpoints, problem kinds and tests."""

import json
import math
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from click import UsageError
from pydantic import TypeAdapter
from rich.text import Text
from typer.core import TyperGroup

import umbel.__main__ as command_line
from tests.repository import ROOT
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.messages import (
    AssignmentCounts,
    AssignmentStatus,
    CheckedIn,
    Enrolled,
    OpenRun,
    OpenRuns,
    Problem,
    ReportAnswer,
)
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.plans.assignment import Assignment, ModelChange, ModelRef, SecureOffer
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.aggregation.plans.masks import NoisePlan, SecurePlan
from umbel.aggregation.plans.round import CoverageFloor
from umbel.aggregation.plans.schedule import RateSchedule
from umbel.aggregation.plans.training import TrainingPlan, TrainingSection
from umbel.aggregation.privacy.section import PrivacySection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import (
    CanarySection,
    DownlinkSection,
    EvaluationSection,
    Override,
    RetentionSection,
    RoundsSection,
)
from umbel.aggregation.run.stopping import StopRule
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.messages import Inbox, Roster, share_keys_bytes
from umbel.aggregation.secagg.parameters import parameters_for, survivors_min
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.server.sums.share import HAND_IN_S, KEPT_MAX
from umbel.sim.data.load import DataSection
from umbel.sim.data.partition.section import PartitionSection
from umbel.sim.engines.clients.section import ClientsSection
from umbel.sim.engines.flower.section import FlowerSection
from umbel.sim.experiment.file import EngineSection, experiment_of
from umbel.sim.federation.measures import MeasureSection
from umbel.sim.federation.site_policies import SitesSection
from umbel.sim.fleet.section import FleetSection
from umbel.sim.models import ModelSection

NO_CONTEXT: Any = None  # finding a command needs none
_SECTIONS: dict[str, type[Any]] = {
    "": RunFile,
    "rounds": RoundsSection,
    "training": TrainingSection,
    "training.schedule": RateSchedule,
    "aggregation": AggregationSection,
    "aggregation.schedule": RateSchedule,
    "codec": CodecSection,
    "secure_aggregation": SecureAggregationSection,
    "privacy": PrivacySection,
    "downlink": DownlinkSection,
    "coverage": CoverageFloor,
    "evaluation": EvaluationSection,
    "canary": CanarySection,
    "stop": StopRule,
    "retention": RetentionSection,
    "override": Override,
}
_WORLD: dict[str, type[Any]] = {
    "data": DataSection,
    "partition": PartitionSection,
    "model": ModelSection,
    "clients": ClientsSection,
    "fleet": FleetSection,
    "engine": EngineSection,
    "measure": MeasureSection,
    "sites": SitesSection,
    "flower": FlowerSection,
}
_CODEC_OF = {
    "error": "auto",
    "bits": "eden",
    "levels": "qsgd",
    "clip_sigmas": "ternary",
    "share": "topk",
    "momentum": "topk",
    "warm_up_rounds": "topk",
    "every": "mask",
    "rank": "lowrank",
}
_OPTIMIZER_OF = {
    "momentum": "momentum",
    "beta1": "adam",
    "beta2": "adam",
    "tau": "adam",
    "v0": "adam",
    "bias_correction_from": "adam",
    "trust": "lars",
}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def cli() -> TyperGroup:
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
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if "://" not in target:
            other = page.parent / target if target else page
            assert other.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


def test_every_page_that_code_names_exists() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and not name.startswith("docs/")]
    for file in files:
        if file.is_file() and not file.is_symlink() and file.suffix not in (".png", ".svg", ".bin"):
            for page in re.findall(r"(?<![\w/])(docs/[\w/-]+\.md)", file.read_text(errors="replace")):
                assert (ROOT / page).exists(), f"{file.relative_to(ROOT)} names {page}"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_that_is_named_exists(page: Path, cli: TyperGroup) -> None:
    for line in shell_lines(page):
        words = re.split(r"\s+", line.split("#")[0].split("umbel ", 1)[1].strip())
        command: Any = cli  # typer does not export the base of its commands
        while isinstance(command, TyperGroup) and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
            name = words.pop(0)
            command = command.get_command(NO_CONTEXT, name)
            assert command is not None, f"{page.name}: umbel has no command {name!r} in {line!r}"
        known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
        for option in (word for word in words if re.fullmatch(r"--[a-z-]+", word)):
            assert option in known, f"{page.name}: {line!r} uses {option}, which {command.name} does not have"


def every_command(command: Any, context: Any = NO_CONTEXT) -> Iterator[Any]:
    yield command
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            yield from every_command(command.get_command(context, name))


def test_help_shows_what_its_author_wrote(cli: TyperGroup) -> None:
    """Rich takes a word in square brackets for markup, and shows nothing in its place."""
    for command in every_command(cli):
        for told in (command.help, *(getattr(one, "help", None) for one in command.params)):
            assert not told or Text.from_markup(told).plain == told, f"umbel ... {command.name}: {told}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_shell_block_is_complete(
    page: Path, cli: TyperGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the page has exported so far: nobody who types it is told that an option is missing."""
    for name in ("UMBEL_SERVER", "UMBEL_ADMIN_KEY", "UMBEL_ADMIN_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
        for words in (shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()):
            if words[:1] == ["export"]:
                for name, _, value in (word.partition("=") for word in words[1:]):
                    monkeypatch.setenv(name, value)
            elif "umbel" in words:
                typed = takewhile(lambda word: word not in ("&", ">", "2>"), words[words.index("umbel") + 1 :])
                _require_complete(cli, list(typed))


def _require_complete(cli: TyperGroup, words: list[str]) -> None:
    command: Any = cli
    while isinstance(command, TyperGroup):
        command = command.get_command(NO_CONTEXT, words.pop(0))
    try:
        context = command.make_context(command.name, list(words))
    except UsageError as error:
        pytest.fail(f"umbel ... {command.name} {shlex.join(words)}: {error.format_message()}")
    if "admin_key_file" in context.params:
        assert context.params["admin_key_file"], f"umbel ... {command.name}: no admin key"


def test_the_wire_page_lists_exactly_the_problems_that_exist() -> None:
    from umbel.server.problems import KINDS

    section = (ROOT / "docs" / "reference" / "wire.md").read_text().split("## Problems")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z][a-z, -]+) \| (\d{3}) \|", section, re.MULTILINE)
    documented = {kind: int(status) for kinds, status in rows for kind in kinds.split(", ")}
    assert documented == {kind: known.status for kind, known in KINDS.items()}


def test_every_kind_of_problem_has_a_section_of_its_own_and_the_index_leads_to_it() -> None:
    from umbel.server.problems import KINDS

    folder = ROOT / "docs" / "reference" / "problems"
    sections = {
        kind: (page.name, int(status))
        for page in sorted(folder.glob("*.md"))
        for kind, status in re.findall(r"^## ([a-z-]+)\n\nStatus (\d{3})\.", page.read_text(), re.MULTILINE)
    }
    assert {kind: status for kind, (_, status) in sections.items()} == {kind: one.status for kind, one in KINDS.items()}
    index = (folder / "README.md").read_text()
    for kind, (page, _) in sections.items():
        assert f"[{kind}]({page}#{kind})" in index


def test_the_wire_page_names_endpoints_that_the_coordinator_has(tmp_path: Path) -> None:
    from umbel.server.serve.app import create_app
    from umbel.server.settings import load_settings

    app = create_app(load_settings(None, {"data": tmp_path}))
    served = {re.sub(r"\{[^}]+\}", "{}", path) for path in [*app.openapi()["paths"], app.openapi_url or ""]}
    for path in re.findall(r"`(?:[A-Z]+ )?(/v1/[^?`]+)", (ROOT / "docs" / "reference" / "wire.md").read_text()):
        assert re.sub(r"\{[^}]+\}", "{}", path) in served, path


def test_the_run_file_page_names_every_key_and_its_default() -> None:
    page = (ROOT / "docs" / "reference" / "run-file.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \|(.*?)\|", page, re.MULTILINE)
    keys = {key: default for key, default in _keys_of(RunFile) if key != "override"}
    keys |= {f"override.{field.name}": "" for field in fields(Override)}  # an array of tables
    assert {key: default.strip() for key, default in rows} == keys


def test_the_experiments_page_names_every_key_of_the_world_and_its_default() -> None:
    page = (ROOT / "docs" / "reference" / "experiment-file.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \|(.*?)\|", page, re.MULTILINE)
    keys = {"seeds": "`[0]`", "target_accuracy": "", "stop_at_target": "false", "best_over": "`[]`", "sweep": "`{}`"}
    for name, section in _WORLD.items():
        keys |= dict(_keys_of(section, f"{name}."))
    keys |= {"fleet.corrupt.share": "0", "fleet.malicious.share": "0"}  # what those sections are, left out
    assert {key: default.strip() for key, default in rows} == keys


@pytest.mark.slow
def test_the_run_files_of_the_documentation_are_accepted() -> None:
    pages = ("how-to/write-a-run-file.md", "explanation/compression.md", "explanation/masked-updates.md")
    text = "".join((ROOT / "docs" / page).read_text() for page in pages)
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 7
    for example in examples:
        TypeAdapter(RunFile).validate_python(tomllib.loads(example))


def test_the_experiments_of_the_documentation_are_accepted() -> None:
    pages = ("simulate-your-own-data-and-model.md", "tune-a-window-from-a-trace.md")
    text = "".join((ROOT / "docs" / "how-to" / page).read_text() for page in pages)
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert [len(experiment_of(tomllib.loads(example)).trials) for example in examples] == [1, 1, 12]
    (of_app,) = re.findall(r"```toml\n([^`]*\[flower\].*?)```", _page("how-to/move-from-flower.md"), re.DOTALL)
    assert len(experiment_of(tomllib.loads(of_app)).trials) == 6


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def _bounds() -> Iterator[tuple[str, str, str]]:
    """Each key in the table of bounds, its least and its greatest value."""
    page = (ROOT / "docs" / "reference" / "run-file.md").read_text()
    for least, most, keys in re.findall(r"^\| (-?[0-9^e.-]+) to ([0-9^e.-]+)[^|]*\| ([^|;]+)[|;]", page, re.MULTILINE):
        yield from ((key, least, most) for key in re.findall(r"`([a-z0-9_.]+)`", keys))


def _number(text: str, is_whole: bool) -> int | float:
    if power := re.fullmatch(r"2\^(-?\d+)(-1)?", text):
        exponent = int(power[1])
        return math.ldexp(1.0, exponent) if not is_whole else (1 << exponent) - (1 if power[2] else 0)
    return int(text) if is_whole else float(text)


_QFEDAVG = {"algorithm": "qfedavg", "q": 1.0, "loss_max": 5.0}
_TRAINING_OF: dict[str, dict[str, Any]] = {  # what a key of [training] needs beside it
    "total_samples": {"algorithm": "feddyn", "proximal_mu": 0.1},
    **{key: {"algorithm": "fedprox", "adaptive_mu": True} for key in ("mu_step", "mu_max")},
    **dict.fromkeys(("q", "loss_max", "lipschitz"), _QFEDAVG),
}


def _with(key: str, value: object) -> dict[str, Any]:
    """A run file in which this key's bounds are the only ones that can be broken."""
    base: dict[str, Any] = {
        "name": "r",
        "rounds": {"count": 1_000_000, "target": 1 << 20, "over_selection": 1.0, "window_s": 366 * 86_400.0},
        "aggregation": {"sample_count_max": 1},
        "stop": {"metric": "training.loss", "patience": 1, "minimum": 1},
    }
    section, _, name = key.rpartition(".")
    if name in ("q", "loss_max", "lipschitz"):
        base["rounds"]["minimum"] = 3
    needed: dict[str, dict[str, Any]] = {
        "evaluation": {"every": 1, "clients": 1},
        "override": {"first_round": 1},
        "downlink": {"name": "change"},
        "secure_aggregation": {"enabled": False},
        "aggregation": {
            "optimizer": _OPTIMIZER_OF.get(name, "sgd"),
            **({"bias_correction": True} if name == "bias_correction_from" else {}),
        },
        "training": _TRAINING_OF.get(name, {}),
        "codec": {"name": _CODEC_OF.get(name, "integer"), **({"error_feedback": True} if name == "momentum" else {})},
    }
    if not section:
        return {**base, name: value}
    if section.endswith(".schedule"):
        kind = {"every": "step", "factor": "step", "final": "cosine"}.get(name, "constant")
        needs = {"every": 1} if kind == "step" else {}
        owner = section.removesuffix(".schedule")
        return {**base, owner: {**base.get(owner, {}), "schedule": {"name": kind, **needs, name: value}}}
    changed = {**base.get(section, {}), **needed.get(section, {}), name: value}
    return {**base, section: [changed] if section == "override" else changed}


def _with_privacy(key: str, value: object) -> dict[str, Any]:
    name = key.rpartition(".")[2]
    return {name: value} if name in ("epsilon", "noise_multiplier") else {"epsilon": 1.0, name: value}


@pytest.mark.parametrize(("key", "least", "most"), list(_bounds()))
def test_a_number_of_the_run_file_has_the_bounds_that_the_page_names(key: str, least: str, most: str) -> None:
    section, _, name = key.rpartition(".")
    files: TypeAdapter[Any] = TypeAdapter(RunFile)
    complete = _with
    if section == "privacy":  # no one run file has room for all of its values
        files, complete = TypeAdapter(PrivacySection), _with_privacy
    kinds = get_type_hints(_SECTIONS[section])
    is_whole = float not in (kinds[name], *get_args(kinds[name]))
    low, high = _number(least, is_whole), _number(most, is_whole)
    for value in (low, high):
        files.validate_python(complete(key, value))
    beyond = (low - 1, high + 1) if is_whole else (math.nextafter(low, -math.inf), math.nextafter(high, math.inf))
    for value in (*beyond, math.nan, math.inf, -math.inf, 10**400, *([5e-324] if low > 0 else [])):
        with pytest.raises(ValueError, match=name):
            files.validate_python(complete(key, value))


def test_every_number_of_the_run_file_has_bounds_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "run-file.md").read_text()
    bounds = page[page.index("| from, to |") :]
    numbers = [
        f"{section}.{field.name}".strip(".")
        for section, kind in _SECTIONS.items()
        for field in fields(kind)
        if {int, float} & {get_type_hints(kind)[field.name], *get_args(get_type_hints(kind)[field.name])}
    ]
    for key in numbers:
        assert f"`{key}`" in bounds or f"`{key.rpartition('.')[2]}`" in bounds, key


def _keys_of(section: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a section as a page writes it, with its default as the page writes that."""
    for field in fields(section):
        if field.default_factory == dict[str, Any]:
            yield f"{prefix}{field.name}", "`{}`"  # a table of one's own
            continue
        kinds = [kind for kind in (field.type, *get_args(field.type)) if isinstance(kind, type) and is_dataclass(kind)]
        if kinds:  # a section, or one that may be left out
            yield from _keys_of(kinds[0], f"{prefix}{field.name}.")
        elif f"{prefix}{field.name}" == "training.local_epochs":
            yield "training.local_epochs", "1"  # where neither epochs nor steps are set
        else:
            yield f"{prefix}{field.name}", _written(field.default)


def _written(default: object) -> str:
    if default is MISSING or default is None:
        return ""
    if default == ():
        return "`[]`"
    if isinstance(default, tuple):
        return f"`{json.dumps(default)}`"
    if isinstance(default, bool | str):
        return f'`"{default}"`' if isinstance(default, str) else str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_the_settings_page_names_every_setting_with_its_default_and_flag() -> None:
    import inspect

    from umbel.server.serve.commands import serve
    from umbel.server.settings import Settings

    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \| (?:`(--[a-z-]+)`)? ?\|", page, re.MULTILINE)
    rows = {name: (default.split(" (")[0], flag) for name, default, flag in table}
    assert rows.keys() == Settings.model_fields.keys()
    flags = inspect.signature(serve).parameters.keys()
    for name, setting in Settings.model_fields.items():
        told = "none" if setting.default is None else str(setting.default)
        assert rows[name] == (told, f"--{name}" if name in flags else ""), name


def test_the_context_of_the_protocol_page_has_the_digest_that_stands_there() -> None:
    page = (ROOT / "docs" / "reference" / "secure-aggregation.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)\n```", page, re.DOTALL)
    (digest,) = re.findall(r"has the digest `([0-9a-f]{64})`", page)
    facts = json.loads(text)
    facts["cohort"] = tuple((name, key) for name, key in facts["cohort"])
    assert Context(**facts).digest.hex() == digest


def test_the_protocol_page_has_the_sizes_and_parameters_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "secure-aggregation.md").read_text()
    assert f"{share_keys_bytes(0)} + {share_keys_bytes(1) - share_keys_bytes(0)} |N(u)| bytes" in page
    assert f"within {HAND_IN_S:g} s of a pause, or as soon as {KEPT_MAX} wait for it" in page
    sizes = (301, 500, 1000, 10_000)
    rows = [(f"{n:,}" for n in sizes), (f"{one.k} / {one.t}" for one in map(parameters_for, sizes))]
    for head, cells in zip(("n", "k / t"), rows, strict=True):
        assert f"| {head} | {' | '.join(cells)} |" in page


def test_the_security_page_names_what_a_cohort_stands() -> None:
    """c: a third, who may work for a coordinator that lies: 2t > n + c."""
    page = (ROOT / "docs" / "explanation" / "security.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+)", page, re.MULTILINE)
    assert len(rows) == 5
    for n, t, dropouts, corrupt, honest in (map(int, row) for row in rows):
        assert t == parameters_for(n).t
        assert dropouts == n - survivors_min(n)
        assert 2 * t > n + corrupt
        assert corrupt == n // 3
        assert honest == t - corrupt


_SAID_BY_THE_COORDINATOR: dict[str, type[Any]] = {
    "open_runs": OpenRuns,
    "open_run": OpenRun,
    "checked_in": CheckedIn,
    "assignment": Assignment,
    "assignment.model": ModelRef,
    "assignment.changes": ModelChange,
    "assignment.training": TrainingPlan,
    "assignment.codec": CodecPlan,
    "assignment.grid": Grid,
    "secure": SecureOffer,
    "secure.plan": SecurePlan,
    "secure.plan.noise": NoisePlan,
    "roster": Roster,
    "inbox": Inbox,
    "report": ReportAnswer,
    "status": AssignmentStatus,
    "counts": AssignmentCounts,
    "problem": Problem,
    "enrolled": Enrolled,
}


def test_the_page_of_claims_says_of_every_field_of_every_message_what_binds_it() -> None:
    text = (ROOT / "docs" / "reference" / "coordinator-claims.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    assert {name for row in rows for name in _fields_in(row)} == {
        f"{prefix}.{field.name}"
        for prefix, message in _SAID_BY_THE_COORDINATOR.items()
        for field in fields(message)
        if f"{prefix}.{field.name}" not in _SAID_BY_THE_COORDINATOR and field.name != "secure"
    }


def _fields_in(cell: str) -> list[str]:
    """`a.b`, `c` stands for a.b and a.c; `a.b.*`: `c` for a.b.c."""
    first, *others = re.findall(r"`([\w.*]+)`", cell)
    prefix, _, name = first.rpartition(".")
    return [f"{prefix}.{one}" for one in ([] if name == "*" else [name]) + others]


def test_the_page_of_attacks_names_tests_that_there_are() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "reference" / "attacks.md").read_text())
    assert len(named) > 30
    for file, test in named:
        path = ROOT / file if "/" in file else next((ROOT / "tests/aggregation/secagg").rglob(file))
        assert f"def {test}(" in path.read_text(), f"{file} has no {test}"
