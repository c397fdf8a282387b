"""The command line of sites and operators: what is wrong is said in one sentence, and it exits non-zero."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

import umbel.__main__ as command_line
import umbel.client
from tests.client.doubles.double import TOKEN, Double
from tests.client.doubles.double_server import served
from umbel.aggregation.model.artifact import decode_model
from umbel.client.cli.clients import token_app
from umbel.client.cli.models import model_app
from umbel.client.cli.runs import run_app
from umbel.client.cli.site import join
from umbel.client.errors import AppError
from umbel.client.user_code import load_app

NO_CONTEXT: Any = None  # listing verbs needs none
WARD = """
import torch
from umbel.client import Client, TrainResult

class Ward(Client):
    def __init__(self, samples=3):
        self.model, self.sample_count = torch.nn.Linear(2, 1), samples
    def train(self, model, plan):
        return TrainResult(3, 1, 1)

class NoModel(Ward):
    def __init__(self):
        self.sample_count = 3

ready = Ward()
number = 7
def make(): return Ward()
def empty(): return Ward(0)
def wrong(): return 7
def needs(argument): return Ward()
def broken(): raise KeyError("inside")
def type_error(): return len(7)
def late(): import no_such_library
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "ward_app.py").write_text(WARD)
    (tmp_path / "missing_import.py").write_text("import no_such_library\n")
    yield tmp_path
    for name in ("ward_app", "missing_import"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["Ward", "ready", "make"])
def test_an_app_is_a_client_or_something_that_makes_one(site: Path, name: str) -> None:
    assert load_app(f"ward_app:{name}").sample_count == 3


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("ward_app", "module:attribute"),
        ("ward_app:", "module:attribute"),
        ("nowhere:client", "run this in the folder that holds nowhere.py"),
        ("examples.nowhere:client", "run this in the folder that holds examples/nowhere.py"),
        ("ward_app.py:client", "go to the folder that holds ward_app.py, and write ward_app:client"),
        ("../site/ward_app.py:client", "go to the folder that holds ward_app.py, and write ward_app:client"),
        (".ward_app:client", "write ward_app:client"),
        ("ward_app:absent", "has no 'absent'"),
        ("ward_app:number", "is a int"),
        ("ward_app:wrong", "must return an umbel.client.Client"),
        ("ward_app:needs", "cannot be called without arguments"),
        ("ward_app:NoModel", "has no `model`"),
        ("ward_app:empty", "sample_count 0"),
        ("missing_import:x", "missing_import imports 'no_such_library', which is not installed"),
        ("ward_app:late", "ward_app imports 'no_such_library', which is not installed"),
    ],
)
def test_an_unusable_app_is_named_with_what_to_do(site: Path, spec: str, sentence: str) -> None:
    with pytest.raises(AppError, match=sentence):
        load_app(spec)


@pytest.mark.parametrize(
    ("spec", "error"),
    [("ward_app:broken", KeyError), ("ward_app:type_error", TypeError)],
)
def test_errors_in_the_users_own_code_keep_their_traceback(site: Path, spec: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        load_app(spec)


def test_the_first_model_is_written_as_the_code_initialises_it(site: Path) -> None:
    result = CliRunner().invoke(model_app, ["init", "--app", "ward_app:make", "--out", "init.safetensors", "--json"])
    facts = json.loads(result.stdout)
    layout, _ = decode_model((site / "init.safetensors").read_bytes())
    assert (facts["n_values"], facts["layout_digest"]) == (3, layout.digest)


def test_the_first_model_has_what_travels_and_the_hash_of_the_base_is_printed(site: Path) -> None:
    (site / "adapted.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))\n"
    )
    (site / "run.toml").write_text('name = "r"\nrounds = { count = 1, target = 1 }\n[tensors]\nbase = ["0.*"]\n')
    arguments = ["init", "--app", "adapted:make", "--out", "init.safetensors", "--run-file", "run.toml"]
    said = CliRunner().invoke(model_app, arguments)
    assert said.exit_code == 0, said.output
    layout, _ = decode_model((site / "init.safetensors").read_bytes())
    assert [spec.name for spec in layout.tensors] == ["1.bias", "1.weight"]
    first, line = said.stdout.splitlines()
    assert first.endswith("6 values, " + str((site / "init.safetensors").stat().st_size) + " bytes (2 base tensors)")
    (site / "run.toml").write_text(
        line.removeprefix("for the top of the run file: ") + "\n" + (site / "run.toml").read_text()
    )
    assert CliRunner().invoke(model_app, arguments).exit_code == 0
    other = CliRunner().invoke(model_app, [*arguments, "--seed", "1"])
    assert (other.exit_code, other.stderr.count("\n")) == (1, 1)
    assert "the base tensors of this client's model hash to" in other.stderr


def run(*arguments: str, key: str = "secret") -> Result:
    return CliRunner(env={"UMBEL_ADMIN_KEY": key, "UMBEL_SERVER": ""}).invoke(run_app, list(arguments))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\n", "key.txt is empty: name the file that holds the coordinator's admin key"),
        (b"two\nlines\n", "key.txt holds no admin key: a key is one line of printable ASCII"),
        (b"\xff\xfe", "key.txt holds no admin key"),
    ],
)
def test_a_file_that_is_no_admin_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key.txt").write_bytes(content)
    refused = run("list", "--server", "http://127.0.0.1:9", "--admin-key-file", "key.txt")
    assert refused.exit_code == 1
    assert sentence in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (lambda: run("list", "--server", "http://127.0.0.1:9"), "no answer from the coordinator at 127.0.0.1:9"),
        (lambda: run("list", "--server", "127.0.0.1:9"), "must look like https://host"),
        (lambda: run("list", "--server", "http://u:p@127.0.0.1"), "user name"),
        (lambda: run("list", "--server", "http://127.0.0.1:9", key=""), "no admin key"),
        (
            lambda: run("audit", "demo", "--server", "http://127.0.0.1:9", key=""),
            "export UMBEL_ADMIN_KEY_FILE=umbel-data/admin.key",
        ),
        (
            lambda: run("list", "--server", "http://127.0.0.1:9", "--admin-key-file", "absent.key"),
            "there is no file absent.key: the admin key is in the file admin.key",
        ),
        (lambda: run("show", "No Slug", "--server", "http://127.0.0.1:9"), "name must be"),
        (lambda: run("create", "absent.toml", "--model", "x", "--server", "http://127.0.0.1:9"), "absent.toml"),
        (
            lambda: run("create", "bad.toml", "--model", "bad.toml", "--server", "http://127.0.0.1:9"),
            "'rounds' is missing",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(site: Path, result: "object", sentence: str) -> None:
    (site / "bad.toml").write_text('name = "x"\n')
    assert callable(result)
    outcome = result()
    assert isinstance(outcome, Result)
    assert outcome.exit_code == 1
    assert sentence in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert "secret" not in outcome.output


def test_a_token_for_a_name_that_is_none_names_the_flag() -> None:
    flags = ["create", "--name", "A b", "--server", "http://127.0.0.1:9"]
    outcome = CliRunner(env={"UMBEL_ADMIN_KEY": "secret"}).invoke(token_app, flags)
    assert outcome.exit_code == 1
    assert "--name must be 1 to 63 of a-z" in outcome.stderr


@pytest.mark.parametrize(
    ("label", "sentence"), [("tier", "must look like name=value"), ("tier=Not A Slug", "a label's value must be")]
)
def test_a_label_that_cannot_be_stored_is_named(site: Path, label: str, sentence: str) -> None:
    verb = typer.Typer()
    verb.command()(join)
    where = ["--server", "http://127.0.0.1:9", "--state", str(site / "state")]
    who = ["--app", "ward_app:make", "--run", "demo", "--token", "t", "--name", "ward-7", "--label", label]
    outcome = CliRunner().invoke(verb, [*where, *who])
    assert outcome.exit_code == 1
    assert sentence in outcome.stderr


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("minimum_cohort = 2", "policy.toml: minimum_cohort must lie between 3"),
        ('allowed_runs = ["other"]', "this site's policy does not allow run 'demo'"),
        ('members = "none.json"', "none.json, which cannot be read: No such file"),
    ],
    ids=["unusable", "another run", "no list"],
)
def test_a_policy_is_read_before_anybody_is_asked(site: Path, text: str, sentence: str) -> None:
    (site / "policy.toml").write_text(text)
    verb = typer.Typer()
    verb.command()(join)
    where = ["--server", "http://127.0.0.1:9", "--state", str(site / "state"), "--policy", str(site / "policy.toml")]
    outcome = CliRunner().invoke(verb, [*where, "--app", "ward_app:make", "--run", "demo", "--token", "t"])
    assert outcome.exit_code == 1
    assert sentence in outcome.stderr


def test_a_client_that_joins_has_the_name_that_it_was_given(site: Path) -> None:
    verb, double = typer.Typer(), Double(torch.nn.Linear(2, 1))
    verb.command()(join)
    who = ["--app", "ward_app:make", "--run", "demo", "--token", TOKEN, "--name", "ward-7", "--state", "state"]
    with served(double.handle) as url:
        result = CliRunner().invoke(verb, ["--server", url, *who])
    assert result.exit_code == 0, result.output
    assert list(double.keys) == ["ward-7"]


def test_help_does_not_wait_for_torch() -> None:
    modules = ", ".join(f"umbel.client.cli.{name}" for name in ("runs", "clients", "models", "site"))
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert sorted(umbel.client.__all__) == umbel.client.__all__
    for name in umbel.client.__all__:
        assert getattr(umbel.client, name).__module__.startswith("umbel.client.")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(umbel.client, "nonsense")  # noqa: B009 - a name that mypy would rightly refuse


def test_the_same_seed_gives_the_same_first_model_and_a_bare_module_will_do(site: Path) -> None:
    (site / "bare.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(3, 2)\n")

    def init(seed: int) -> bytes:
        arguments = ["init", "--app", "bare:make", "--out", "init.safetensors", "--seed", str(seed)]
        assert CliRunner().invoke(model_app, arguments).exit_code == 0
        return (site / "init.safetensors").read_bytes()

    assert init(1) == init(1)
    assert init(1) != init(2)


def test_no_switch_of_a_command_is_on_unless_it_is_typed() -> None:
    """As `--json` and `--yes` are."""
    command_line.mount()
    waiting: list[tuple[str, Any]] = [("umbel", typer.main.get_command(command_line.app))]
    switches = dict[str, object]()
    while waiting:
        name, command = waiting.pop()
        if isinstance(command, TyperGroup):
            verbs = command.list_commands(NO_CONTEXT)
            waiting += [(f"{name} {verb}", command.get_command(NO_CONTEXT, verb)) for verb in verbs]
        switches |= {f"{name} {one.opts[0]}": one.default for one in command.params if getattr(one, "is_flag", False)}
    assert {"umbel run list --json", "umbel run stop --yes", "umbel bench codec --json"} <= switches.keys()
    assert [switch for switch, is_on in switches.items() if is_on] == []


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("run", "audit", "demo"), "export UMBEL_SERVER=http"),
        (("run", "replay", "demo", "--server", "http://127.0.0.1:9"), "umbel run replay demo --all"),
        (("run", "verify", "demo.jsonl"), "--key KEY"),
        (("audit", "demo"), "umbel run audit"),
        (("list",), "umbel run list or umbel client list"),
    ],
)
def test_a_command_that_lacks_something_says_what_to_type(words: tuple[str, ...], hint: str) -> None:
    command_line.mount()
    wide = {"UMBEL_SERVER": None, "UMBEL_ADMIN_KEY": "key", "COLUMNS": "400", "TERMINAL_WIDTH": "400"}
    outcome = CliRunner(env=wide).invoke(command_line.app, list(words))
    assert outcome.exit_code == 2
    assert hint in outcome.stderr
