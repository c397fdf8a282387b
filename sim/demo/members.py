"""The demo's consortium: officers list the keys that the clinics made, sign the list, and each clinic pins it.

It is docs/how-to/run-a-consortium.md in small, by the code behind `umbel members`; what a telephone call is there, a
pipe from the clinic's process is here. Nothing of it comes by way of the coordinator, which is given the list with the
run that is bound to it, and so draws nobody else.
"""

from collections.abc import Mapping
from pathlib import Path

from umbel.aggregation.trust.members import MemberList, SignedMembers
from umbel.aggregation.trust.public_keys import grouped, public_key_text
from umbel.client.operator.members_editing import new_file, sign_file, write_members_file
from umbel.client.private_keys import make_officer_key
from umbel.sim.demo.client import POLICY_FILE
from umbel.sim.demo.plan import MINIMUM

LIST = "demo"
LIST_FILE = f"{LIST}-1.json"
OFFICERS = ("anna", "bert")


def agree(folder: Path, keys: Mapping[str, str]) -> SignedMembers:
    """The first list of these clients (names to public keys), signed by all officers, whose keys are made in `folder`.

    Raises `ValueError` for what is no key, or one that two clients have; `OSError`.
    """
    folder.mkdir()
    officers = {name: _officer_key(folder / f"{name}.pem") for name in OFFICERS}
    path = folder / LIST_FILE
    signed = new_file(path, MemberList(LIST, 1, keys, officers, quorum=len(OFFICERS)))
    for name in OFFICERS:
        signed = sign_file(path, folder / f"{name}.pem", _no_passphrase)
    return signed


def pin(signed: SignedMembers, directory: Path, minimum_work: float | None = None) -> None:
    """Write the list into a clinic's directory, and a policy that trusts it and takes part in secure rounds alone.

    `minimum_work`: the share of its steps with which a clinic sends its update; None for all of them.
    """
    write_members_file(directory / LIST_FILE, signed)
    policy = f"""\
secure_aggregation = "required"
members = "{LIST_FILE}"
members_sha256 = "{grouped(signed.list.sha256)}"
minimum_cohort = {MINIMUM}
cohort_change = "warn"   # a clinic is killed and comes back: the sums without it, and with it, show about what it sent
"""
    if minimum_work is not None:
        policy += f"minimum_work = {minimum_work:g}\n"
    (directory / POLICY_FILE).write_text(policy)


def members_line(n_keys: int, sha256: str) -> str:
    """What was agreed, in words, with the list's hash as people compare it."""
    return (
        f"{n_keys} keys on a list that {len(OFFICERS)} officers signed; every clinic has pinned it: {grouped(sha256)}"
    )


def _officer_key(path: Path) -> str:
    return public_key_text(make_officer_key(path, "").public_key().public_bytes_raw())


def _no_passphrase() -> str:
    return ""  # none was set
