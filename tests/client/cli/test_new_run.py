"""`umbel run create --members` and `umbel join --policy`: what is wrong with a list is said before anything is sent."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer import Exit
from typer.testing import CliRunner, Result

from tests.client.cli.test_commands import WARD
from tests.federations.consortium import first_list, signed, without
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.run.records import RunView
from umbel.aggregation.trust.members import members_bytes
from umbel.aggregation.trust.public_keys import grouped
from umbel.client.cli.new_run import careful_of_absence, careful_of_overrides, create_run
from umbel.client.cli.runs import run_app
from umbel.client.cli.site import join
from umbel.client.operator.operator import Operator
from umbel.client.operator.run_files import read_run_file
from umbel.client.policy.members_store import MembersStore

NOBODY = "http://127.0.0.1:9"
FIRST = signed(first_list(), "anna", "bert")
SECOND = signed(without(FIRST.list, "south"), "anna", "bert")
RUN = """
name = "ward"
rounds = { count = 1, target = 4, minimum = 3, over_selection = 1.0 }
codec = { name = "integer" }
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("listed_app.py").write_text(WARD)
    Path("init.safetensors").write_bytes(encode_model({"w": torch.zeros(3)}))
    for number, members in enumerate((FIRST, SECOND), 1):
        Path(f"pilot-{number}.json").write_bytes(members_bytes(members))
    return tmp_path


def create(section: str, *more: str) -> Result:
    Path("run.toml").write_text(RUN.replace("count = 1", "count = 9") + section)
    words = ["create", "run.toml", "--model", "init.safetensors", "--server", NOBODY, *more]
    return CliRunner(env={"UMBEL_ADMIN_KEY": "secret"}).invoke(run_app, words)


def require_refused(result: Result, *sentences: str) -> None:
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    for sentence in sentences:
        assert sentence in result.stderr


SECTIONS = {
    "another list": f'[secure_aggregation]\nmembers_sha256 = "{FIRST.list.sha256}"\n',
    "none": "[secure_aggregation]\n",
    "a plain run": "",
}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS.keys())
def test_a_list_that_the_run_file_does_not_name_is_refused_with_the_line_for_it(site: Path, section: str) -> None:
    line = f'write members_sha256 = "{SECOND.list.sha256}" into'
    require_refused(create(section, "--members", "pilot-2.json"), "umbel: pilot-2.json: ", line)


def test_what_is_no_list_is_named(site: Path) -> None:
    needed = "; name the whole member list, a file that `umbel members new` made"
    require_refused(create(SECTIONS["none"], "--members", "run.toml"), "run.toml: this is not a member list", needed)
    require_refused(create(SECTIONS["none"], "--members", "absent.json"), "absent.json: No such file")


def test_the_list_that_is_named_in_groups_passes(site: Path) -> None:
    section = f'[secure_aggregation]\nmembers_sha256 = "{grouped(FIRST.list.sha256)}"\n'
    require_refused(create(section, "--members", "pilot-1.json"), "no answer from the coordinator")


def test_a_client_whose_policy_names_the_old_list_says_which_file_of_which_policy(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MembersStore(site / "state")
    store.take(FIRST, is_confirmed=True)
    store.take(SECOND)
    Path("site.toml").write_text('members = "pilot-1.json"\n')
    with pytest.raises(Exit):
        join(NOBODY, "ward", "listed_app:Ward", token="token", state=site / "state", policy=Path("site.toml"))
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(
        "umbel: site.toml: pilot-1.json is epoch 1 of the member list 'pilot', but this site trusts epoch 2 ("
    )
    assert said.endswith('name the file of the newer epoch in the policy, members = "FILE"')


def test_a_policy_whose_list_is_not_there_is_named_with_the_key_and_the_file(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("site.toml").write_text('members = "pilot-9.json"\n')
    with pytest.raises(Exit):
        join(NOBODY, "ward", "listed_app:Ward", token="token", state=site / "state", policy=Path("site.toml"))
    assert capsys.readouterr().err.splitlines()[-1] == (
        "umbel: site.toml: the policy's key members names the file pilot-9.json, which cannot be read: No such file or "
        'directory. Name the file that holds the member list, members = "FILE"'
    )


NAMED = SECTIONS["another list"]
NOISE = "[privacy]\nepsilon = 8.0\nclip_norm = 1.0\n"


@pytest.mark.parametrize(
    ("numbers", "section", "is_told"),
    [
        ("target = 4, minimum = 3, over_selection = 1.0", NAMED, True),
        ("target = 4, minimum = 4, over_selection = 1.2", NAMED, True),
        ("target = 4, minimum = 4, over_selection = 1.0", NAMED, False),
        ("target = 4, minimum = 3, over_selection = 1.0", SECTIONS["none"], False),
        ("target = 4, minimum = 3, over_selection = 1.0", "", False),
        ("target = 4, minimum = 3, over_selection = 1.0", NAMED + NOISE, False),
    ],
    ids=["a minimum below", "more asked", "all each time", "no list", "a plain run", "noise"],
)
def test_an_operator_is_told_that_sites_with_a_list_want_the_same_sites_each_time(
    site: Path, numbers: str, section: str, is_told: bool
) -> None:
    Path("run.toml").write_text(RUN.replace("target = 4, minimum = 3, over_selection = 1.0", numbers) + section)
    said = careful_of_absence(read_run_file(Path("run.toml"))[1])
    assert ("set target and minimum to the number of sites" in said) == is_told
    assert bool(said) == is_told


def override_of(first_round: int, line: str) -> str:
    return f"[[override]]\nfirst_round = {first_round}\n{line}\n"


@pytest.mark.parametrize(
    ("section", "is_told"),
    [
        (NAMED + override_of(3, "learning_rate = 0.001"), True),
        (NAMED + override_of(5, "local_epochs = 2") + override_of(3, "batch_size = 8"), True),
        (NAMED + override_of(3, "window_s = 100.0"), False),
        (NAMED + override_of(3, "evaluate = true"), False),
        (NAMED, False),
        (SECTIONS["none"] + override_of(3, "learning_rate = 0.001"), False),
        (NAMED + NOISE + override_of(3, "learning_rate = 0.001"), False),
    ],
    ids=["a rate", "two", "a window", "measuring", "no override", "no list", "noise"],
)
def test_an_operator_is_told_that_sites_with_a_list_refuse_another_training_in_mid_run(
    site: Path, section: str, is_told: bool
) -> None:
    Path("run.toml").write_text(RUN.replace("count = 1", "count = 9") + section)
    said = careful_of_overrides(read_run_file(Path("run.toml"))[1])
    assert ("the training changes in round 3 ([[override]])" in said) == is_told
    assert bool(said) == is_told


class Taking(Operator):
    """An operator whose coordinator takes whatever it is sent."""

    def __init__(self) -> None:
        self.lists = list[str | None]()

    def upload_model(self, model: bytes | Path) -> str:
        assert isinstance(model, Path)
        return hashlib.sha256(model.read_bytes()).hexdigest()

    def create_run(
        self,
        name: str,
        run_file: str,
        model_sha256: str,
        members: str | None = None,
        *,
        same_first_model: bool = False,
    ) -> RunView:
        self.lists.append(members)
        return RunView(name, RunStatus.RUNNING, "", 0, 9, 0.0, ModelRef(1, model_sha256, 1, model_sha256))


@pytest.mark.parametrize(
    ("section", "members", "careful_of"),
    [
        (NAMED, None, ["without --members FILE", "are enough (minimum)"]),
        (NAMED + override_of(3, "learning_rate = 0.001"), "pilot-1.json", ["are enough (minimum)", "[[override]]"]),
        (NAMED + NOISE, None, ["without --members FILE"]),
        (NAMED + NOISE, "pilot-1.json", []),
        (
            '[engine]\nname = "sequential"\n[clients]\napp = "wards:make_ward"\n',
            None,
            ["not use [engine], [clients]: only"],
        ),
        ("", None, []),
    ],
)
def test_what_is_to_be_careful_of_is_said_apart_from_the_result_once_the_run_is_there(
    site: Path, section: str, members: str | None, careful_of: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text(RUN.replace("count = 1", "count = 9") + section)
    operator = Taking()
    create_run(operator, Path("run.toml"), Path("init.safetensors"), Path(members) if members else None, as_json=False)
    assert operator.lists == [members_bytes(FIRST).decode() if members else None]
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["ward: running, 0 of 9 rounds."]
    said = shown.err.splitlines()
    assert len(said) == len(careful_of)
    for line, words in zip(said, careful_of, strict=True):
        assert line.startswith("careful: ")
        assert words in line


@pytest.mark.parametrize(
    ("section", "is_noted"),
    [
        ("[secure_aggregation]\n", True),
        ("[secure_aggregation]\nenabled = false\n", False),
        (NAMED + NOISE, False),
        ("", False),
    ],
)
def test_a_secure_run_without_a_list_is_noted(
    site: Path, section: str, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text(RUN + section)
    members = Path("pilot-1.json") if section == NAMED + NOISE else None
    create_run(Taking(), Path("run.toml"), Path("init.safetensors"), members, as_json=False)
    said = capsys.readouterr().err
    assert said.startswith("note: this run is bound to no member list") if is_noted else said == ""
    assert said.count("\n") == is_noted


@pytest.mark.parametrize(
    ("officers", "words"),
    [
        ((), "is signed by 0 of its own officers, but 2 must sign it"),
        (("anna",), "is signed by 1 of its own officers (anna), but 2 must sign it"),
        (("anna", "bert"), None),
    ],
)
def test_a_list_that_too_few_officers_have_signed_is_taken_with_a_word(
    site: Path, officers: tuple[str, ...], words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("pilot-1.json").write_bytes(members_bytes(signed(first_list(), *officers)))
    Path("run.toml").write_text(RUN + NAMED + NOISE)
    create_run(Taking(), Path("run.toml"), Path("init.safetensors"), Path("pilot-1.json"), as_json=False)
    said = capsys.readouterr().err
    if words is None:
        assert said == ""
    else:
        assert said.startswith(f"careful: pilot-1.json: epoch 1 of 'pilot' {words}: ")
        assert said.endswith("Sites refuse this list until enough officers have signed it\n")
        assert said.count("\n") == 1


def test_a_list_with_a_signature_that_does_not_fit_is_refused_before_anything_is_sent(site: Path) -> None:
    forged = replace(FIRST, signatures=SECOND.signatures)
    Path("pilot-1.json").write_bytes(members_bytes(forged))
    require_refused(create(NAMED, "--members", "pilot-1.json"), "pilot-1.json: the signature of officer 'anna'")


def test_what_is_no_model_is_named_before_anything_is_sent(site: Path) -> None:
    Path("init.safetensors").write_bytes(b"weights")
    require_refused(create(""), "init.safetensors is not a safetensors model, or is incomplete (")
