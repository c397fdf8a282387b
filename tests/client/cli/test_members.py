"""`umbel members` and `umbel fingerprint`, end to end over real files: officers make, sign and check; sites take."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner, Result

from tests.federations.consortium import first_list, public_key, signed
from umbel.aggregation.trust.members import FILE_BYTES_MAX, check_successor, members_bytes, read_members
from umbel.client.cli.members import members_app
from umbel.client.cli.site import show_fingerprint
from umbel.client.state.state_dir import locked
from umbel.client.state.store import Store

SERVER = "https://fl.example.org"


def members(*arguments: str, types: str = "") -> Result:
    return CliRunner().invoke(members_app, list(arguments), input=types)


def told(*arguments: str) -> Any:
    """What a verb prints for programs."""
    result = members(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fingerprint(*arguments: str) -> Result:
    verb = typer.Typer()
    verb.command()(show_fingerprint)
    return CliRunner().invoke(verb, list(arguments))


def own_key(state: str) -> dict[str, str]:
    result = fingerprint("--state", state, "--server", SERVER, "--json")
    assert result.exit_code == 0, result.output
    (key,) = json.loads(result.stdout)
    return dict(key)


def test_a_key_is_made_for_the_coordinator_of_the_environment_too(tmp_path: Path) -> None:
    verb = typer.Typer()
    verb.command()(show_fingerprint)
    there = CliRunner(env={"UMBEL_SERVER": SERVER}).invoke(verb, ["--state", str(tmp_path), "--json"])
    assert json.loads(there.stdout) == [own_key(str(tmp_path))]
    nowhere = CliRunner(env={"UMBEL_SERVER": None}).invoke(verb, ["--state", str(tmp_path / "other")])
    require_refused(nowhere, "there is no client key")
    assert "UMBEL_SERVER" in nowhere.stderr


def test_beside_a_client_that_runs_a_key_can_be_shown_and_not_made(tmp_path: Path) -> None:
    known, state = own_key(str(tmp_path)), str(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with locked(tmp_path):
        assert own_key(state) == known
        refused = fingerprint("--state", state, "--server", "https://other.example.org")
        require_refused(refused, f"another client process uses {state}; end it and run this command again")
        assert "--state" not in refused.stderr, "another directory would be another client"
    assert sorted(tmp_path.rglob("*")) == before


def require_refused(result: Result, sentence: str) -> None:
    assert result.exit_code == 1
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two officers' keys and the first epoch, unsigned: three sites, a quorum of two."""
    monkeypatch.chdir(tmp_path)
    assert members("new", "--name", "pilot", "--quorum", "2", "--out", "1.json").exit_code == 0
    for officer in ("anna", "bert"):
        made = told("officer-key", "--out", f"{officer}.pem")
        assert members("add-officer", "1.json", officer, made["public_key"]).exit_code == 0
    for site in ("north", "south", "west"):
        assert members("add", "1.json", site, own_key(site)["public_key"]).exit_code == 0
    return tmp_path


@pytest.fixture
def signed_desk(desk: Path) -> Path:
    """The same when both have signed."""
    for officer in ("anna", "bert"):
        assert members("sign", "1.json", "--key", f"{officer}.pem").exit_code == 0
    return desk


def test_a_list_without_members_is_not_signed(desk: Path) -> None:
    for site in ("north", "south", "west"):
        assert members("remove", "1.json", site).exit_code == 0
    before = Path("1.json").read_bytes()
    require_refused(members("sign", "1.json", "--key", "anna.pem"), "add them first (umbel members add)")
    assert Path("1.json").read_bytes() == before


def test_two_officers_make_a_list_and_the_sites_take_it(desk: Path) -> None:
    require_refused(members("verify", "1.json"), "signed by 0 of its own officers, but 2 must")
    assert told("sign", "1.json", "--key", "anna.pem")["signed_by"] == ["anna"]
    require_refused(members("verify", "1.json"), "signed by 1 of its own officers (anna), but 2 must")
    assert told("sign", "1.json", "--key", "bert.pem")["signed_by"] == ["anna", "bert"]
    verified = told("verify", "1.json")
    assert verified["signed_by"] == ["anna", "bert"]
    shown = told("show", "1.json")
    assert {one["name"]: one["fingerprint"] for one in shown["members"]} == {
        site: own_key(site)["fingerprint"] for site in ("north", "south", "west")
    }
    assert verified["sha256"] == shown["sha256"] == "".join(shown["fingerprint"].split()).lower()
    assert members("trust", "1.json", "--state", "north", "--sha256", shown["fingerprint"]).exit_code == 0
    assert members("trust", "1.json", "--state", "north").exit_code == 0, "it is known now"


def test_a_member_is_removed_in_the_next_epoch(signed_desk: Path) -> None:
    before = Path("1.json").read_bytes()
    assert told("remove", "1.json", "south", "--out", "2.json")["epoch"] == 2
    assert Path("1.json").read_bytes() == before
    assert told("add", "2.json", "east", public_key("east"))["epoch"] == 2, "a draft is changed where it is"
    require_refused(members("verify", "2.json", "--previous", "1.json"), "signed by 0 of epoch 1's officers")
    for officer in ("anna", "bert"):
        assert members("sign", "2.json", "--key", f"{officer}.pem", "--previous", "1.json").exit_code == 0
    assert told("show", "2.json", "--previous", "1.json")["changes"] == ["member added: east", "member removed: south"]
    assert told("verify", "2.json", "--previous", "1.json")["follows"] == 1
    require_refused(
        members("verify", "1.json", "--previous", "2.json"),
        "the known list is epoch 2 of 'pilot', so the next must be epoch 3, not 1",
    )
    trusted = members("trust", "1.json", "2.json", "--state", "north", "--yes")
    assert trusted.exit_code == 0
    assert trusted.stderr == 'a policy that names an older epoch must name this file now: members = "2.json"\n'
    require_refused(members("trust", "1.json", "--state", "north", "--yes"), "does not go back to epoch 1")


def test_an_officer_hands_over_to_another(signed_desk: Path) -> None:
    new = told("officer-key", "--out", "cleo.pem")["public_key"]
    assert members("remove-officer", "1.json", "bert", "--out", "2.json").exit_code == 0
    require_refused(
        members("sign", "2.json", "--key", "anna.pem"), "fewer officers (1) than must sign it (2): add officers first"
    )
    assert members("add-officer", "2.json", "cleo", new).exit_code == 0
    require_refused(members("sign", "2.json", "--key", "bert.pem"), "name that epoch's list with --previous")
    for officer in ("anna", "bert", "cleo"):
        assert members("sign", "2.json", "--key", f"{officer}.pem", "--previous", "1.json").exit_code == 0
    old, second = (read_members(Path(name).read_bytes()) for name in ("1.json", "2.json"))
    assert check_successor(old.list, second) == ("anna", "bert")
    assert told("show", "2.json")["signed_by"] == ["anna", "cleo"]


def test_the_quorum_is_changed_with_the_officers(signed_desk: Path) -> None:
    arguments = ("add-officer", "1.json", "cleo", public_key("cleo"), "--quorum", "3", "--out", "2.json")
    assert told(*arguments)["quorum"] == 3
    assert told("show", "2.json", "--previous", "1.json")["changes"] == [
        "officer added: cleo",
        "quorum: 3 instead of 2",
    ]
    assert told("remove-officer", "2.json", "cleo", "--quorum", "2")["quorum"] == 2


def test_what_people_see_is_a_table_with_fingerprints(signed_desk: Path) -> None:
    shown, key = members("show", "1.json"), own_key("north")
    assert "pilot, epoch 1: signed by 2 of 2 required officers (anna, bert)" in shown.stdout
    assert f"north  {key['fingerprint']}" in shown.stdout
    assert shown.stderr == ""
    assert key["fingerprint"] in fingerprint("--state", "north").stdout
    assert "trusted from now on: pilot, epoch 1" in members("trust", "1.json", "--state", "north", "--yes").stdout


def test_a_careful_officer_is_warned(desk: Path) -> None:
    for site in ("north", "south"):
        members("remove", "1.json", site)
    assert (
        "careful: secure aggregation needs at least 3 members to hide their updates" in members("show", "1.json").stderr
    )


def test_a_person_is_asked_before_the_first_list_is_trusted(signed_desk: Path) -> None:
    said = told("show", "1.json")["fingerprint"]
    asked = members("trust", "1.json", "--state", "north", types="n\n")
    assert asked.exit_code == 1
    assert said in asked.stderr
    assert list(Path("north/members").iterdir()) == []
    assert members("trust", "1.json", "--state", "north", types="y\n").exit_code == 0
    wrong = members("trust", "1.json", "--state", "south", "--sha256", "0" * 64, "--yes")
    require_refused(wrong, "names another member list")


def test_an_officers_key_is_private_and_never_overwritten(desk: Path) -> None:
    before = Path("anna.pem").read_bytes()
    assert Path("anna.pem").stat().st_mode & 0o777 == 0o600
    require_refused(members("officer-key", "--out", "anna.pem"), "anna.pem exists already")
    assert Path("anna.pem").read_bytes() == before
    Path("anna.pem").chmod(0o640)
    require_refused(
        members("sign", "1.json", "--key", "anna.pem"),
        "other users can read the key anna.pem; run `chmod 600 anna.pem`",
    )


def test_a_passphrase_opens_a_key(desk: Path) -> None:
    made = members(
        "officer-key", "--out", "cleo.pem", "--passphrase", "--json", types="four or five words\nfour or five words\n"
    )
    assert b"ENCRYPTED" in Path("cleo.pem").read_bytes()
    assert members("add-officer", "1.json", "cleo", json.loads(made.stdout)["public_key"]).exit_code == 0
    wrong = members("sign", "1.json", "--key", "cleo.pem", types="short\n")
    assert wrong.exit_code == 1
    assert "the passphrase is wrong" in wrong.stderr
    assert members("sign", "1.json", "--key", "cleo.pem", types="four or five words\n").exit_code == 0
    assert told("show", "1.json")["signed_by"] == ["cleo"]
    assert "four or five words" not in made.output + wrong.output


def test_a_short_passphrase_is_refused(desk: Path) -> None:
    short = members("officer-key", "--out", "cleo.pem", "--passphrase", types="four words\nfour words\n")
    assert short.exit_code == 1
    assert "needs 16 characters or more" in short.stderr
    assert not Path("cleo.pem").exists()


def _x25519() -> bytes:
    return X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(lambda: b"", "cannot be opened"), (lambda: b"\xff" * 99, "cannot be opened"), (_x25519, "is not an Ed25519 key")],
    ids=["empty", "no PEM", "another kind"],
)
def test_what_is_no_officers_key_is_named(desk: Path, content: Callable[[], bytes], sentence: str) -> None:
    Path("other.pem").write_bytes(content())
    Path("other.pem").chmod(0o600)
    require_refused(members("sign", "1.json", "--key", "other.pem"), sentence)


def test_a_strangers_key_signs_nothing(desk: Path) -> None:
    told("officer-key", "--out", "mallory.pem")
    before = Path("1.json").read_bytes()
    require_refused(members("sign", "1.json", "--key", "mallory.pem"), "not the key of an officer")
    assert Path("1.json").read_bytes() == before


REFUSED = {
    "a list that is there": (("new", "--name", "x", "--quorum", "1", "--out", "1.json"), "1.json exists already"),
    "a name that is none": (("new", "--name", "No Slug", "--quorum", "1", "--out", "x.json"), "must be 1 to 63"),
    "a file that is not there": (("show", "absent.json"), "absent.json: No such file"),
    "a key that is none": (("add", "1.json", "east", "north's key"), "the key of 'east' must be base64"),
    "a name that is taken": (("add", "1.json", "north", public_key("x")), "'north' is on the list already"),
    "a name that is not there": (("remove", "1.json", "east"), "'east' is not among the members"),
    "an officer that is none": (("remove-officer", "1.json", "north"), "'north' is not among the officers"),
    "a signed list in place": (("remove", "1.json", "north"), "name a file for the next epoch with --out"),
    "a next epoch over a file": (("remove", "1.json", "north", "--out", "anna.pem"), "anna.pem exists already"),
    "four groups of a hash": (
        ("trust", "1.json", "--state", "s", "--sha256", "7F3A 91C2 07F5 BE6F"),
        "--sha256 needs the whole hash, 64 hex digits (sixteen groups of four), not 16 characters. Copy",
    ),
    "a hash with a letter that is no hex digit": (
        ("trust", "1.json", "--state", "s", "--sha256", "O" + "7" * 63),
        "not 64 characters (these are not hex digits: 'O')",
    ),
    "a list that follows another": (
        ("show", "1.json", "--previous", "1.json"),
        "the known list is epoch 1 of 'pilot', so the next must be epoch 2",
    ),
    "a signature under a list that follows another": (
        ("sign", "1.json", "--key", "anna.pem", "--previous", "1.json"),
        "the known list is epoch 1 of 'pilot', so the next must be epoch 2",
    ),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_is_one_sentence(signed_desk: Path, arguments: tuple[str, ...], sentence: str) -> None:
    files = {path: path.read_bytes() for path in signed_desk.iterdir() if path.is_file()}
    require_refused(members(*arguments), sentence)
    assert {path: path.read_bytes() for path in signed_desk.iterdir() if path.is_file()} == files


def test_one_machine_is_one_member(signed_desk: Path) -> None:
    taken = own_key("north")["public_key"]
    require_refused(
        members("add", "1.json", "sybil", taken, "--out", "2.json"), "'north' and 'sybil' have the same key"
    )


def test_what_one_officer_has_signed_is_not_changed(desk: Path) -> None:
    members("sign", "1.json", "--key", "anna.pem")
    change = members("remove", "1.json", "north", "--out", "2.json")
    require_refused(change, "A list with some signatures cannot be changed")
    assert not Path("2.json").exists()


def test_a_list_that_was_edited_by_hand_is_refused_by_every_verb(signed_desk: Path) -> None:
    found = json.loads(Path("1.json").read_text())
    found["list"]["members"]["north"] = public_key("mallory")
    Path("1.json").write_text(json.dumps(found))
    for arguments in (
        ("show", "1.json"),
        ("verify", "1.json"),
        ("sign", "1.json", "--key", "anna.pem"),
        ("trust", "1.json", "--state", "s", "--yes"),
        ("remove", "1.json", "south", "--out", "2.json"),
    ):
        require_refused(members(*arguments), "the list was changed after signing")
    assert not Path("2.json").exists()


def test_another_file_than_a_list_is_refused_with_what_is_needed(desk: Path) -> None:
    Path("run.toml").write_text('name = "ward"\n')
    require_refused(members("show", "run.toml"), "; name the whole member list, a file that `umbel members new` made")
    Path("cut.json").write_bytes(Path("1.json").read_bytes()[:200])
    require_refused(members("show", "cut.json"), "; name the whole member list, a file that `umbel members new` made")


def test_a_list_of_another_format_is_not_taken_for_another_file(desk: Path) -> None:
    Path("2.json").write_text(Path("1.json").read_text().replace('"format": 1', '"format": 2'))
    refused = members("show", "2.json")
    require_refused(refused, "install the version of umbel that made it")
    assert "umbel members new" not in refused.stderr


def test_a_huge_file_is_refused(desk: Path) -> None:
    Path("huge.json").write_bytes(b" " * (FILE_BYTES_MAX + 1))
    require_refused(members("show", "huge.json"), "huge.json: this is not a member list: it has more than")


def test_a_client_that_runs_is_not_changed_under_its_feet(signed_desk: Path) -> None:
    with locked(Path("north")):
        running = members("trust", "1.json", "--state", "north", "--yes")
        require_refused(running, "another client process uses north")
        require_refused(running, "; stop that client, run this command again, and then start the client again")
        assert "--state" not in running.stderr, "another directory would be another client"
        assert fingerprint("--state", "north").exit_code == 0, "its key may be read all the same"


def test_a_clients_fingerprint_is_that_of_its_key(desk: Path) -> None:
    key = own_key("north")
    assert own_key("north") == key, "made once"
    assert key["client"] == "", "not enrolled yet"
    Store(Path("north"), SERVER).remember_enrolment("north")
    (enrolled,) = json.loads(fingerprint("--state", "north", "--json").stdout)
    assert (enrolled["client"], enrolled["server"]) == ("north", SERVER)
    assert enrolled["public_key"] == key["public_key"] == Store(Path("north"), SERVER).identity("north").public_key
    assert f"north at {SERVER}" in fingerprint("--state", "north").stdout


def test_without_a_key_or_with_a_damaged_enrolment_it_says_so(desk: Path) -> None:
    require_refused(fingerprint("--state", "nobody"), "there is no client key in nobody yet")
    assert not Path("nobody").exists(), "asking makes nothing"
    (directory,) = Path("north").glob("fl-example-org-*")
    (directory / "enrolment.json").write_text("{")
    require_refused(fingerprint("--state", "north"), "enrolment.json is damaged")
    shutil.rmtree(directory)
    require_refused(fingerprint("--state", "north"), "there is no client key")


def test_help_does_not_wait_for_torch() -> None:
    check = "import sys, umbel.client.cli.members; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_members_key_is_no_officers_key(desk: Path) -> None:
    """A client's key lies on a machine that is online; who breaks into it must not become an officer."""
    taken = own_key("north")["public_key"]
    require_refused(members("add-officer", "1.json", "mole", taken), "'north' and 'mole' have the same key")


def test_a_list_that_another_program_wrote_is_read(desk: Path) -> None:
    whole = signed(first_list(), "anna", "bert")
    Path("other.json").write_bytes(members_bytes(whole))
    assert told("verify", "other.json")["sha256"] == whole.list.sha256
