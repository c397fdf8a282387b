"""Which sums a client has no part in, for what they would tell together with those that it was in."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from tests.client.secure_double import WARD, SecureDouble, peer_key
from umbel.aggregation.privacy.noise_plan import NoisePlan
from umbel.aggregation.public_keys import public_key_bytes
from umbel.aggregation.types import RunId
from umbel.client.errors import AttemptRefused
from umbel.client.policy import SitePolicy
from umbel.client.secure_offer import Asked, read_offer
from umbel.client.secure_store import SecureStore
from umbel.client.sum_memory import SumMemory

OTHERS = tuple(f"peer-{number}" for number in range(9))
ALL = (*OTHERS, WARD)
ONE_MODEL, ANOTHER = "aa" * 32, "bb" * 32


def asked(round_: int, clients: Collection[str] = ALL, model: str = ONE_MODEL, *, is_private: bool = False) -> Asked:
    """A round to which these clients are invited."""
    module = nn.Linear(30, 10)
    double = SecureDouble(module, rounds=100, peers=tuple(sorted(set(clients) - {WARD})))
    double.keys[WARD] = public_key_bytes(peer_key(WARD), "a key")
    double.round = round_
    if is_private:
        noise = NoisePlan.of(4.0, 10**9, 320, least=3, colluders=0)
        double.plan = replace(double.plan, metrics=(), evaluation=(), weight_unit=1, noise=noise)
    offer = double.offered()
    offer = replace(offer, model=replace(offer.model, sha256=model))
    return read_offer(offer, WARD, double.layout)


class Site:
    """What a client would do, and remember; a new one for each step, as after a restart, but for the last word."""

    def __init__(self, directory: Path, policy: SitePolicy | None = None) -> None:
        self.memory = SumMemory(RunId("demo"), policy or SitePolicy(), SecureStore(directory))

    def is_in(self, one: Asked, clients: Collection[str], *, signs: bool = True, reveals: bool = True) -> None:
        self.memory.check_invitation(one)
        self.memory.sending(one)
        self.memory.check_sum(one, clients)
        if signs:
            self.memory.signing(one, clients)
        if reveals:
            self.memory.revealing(one)


NEAR = {
    "one less": ALL[1:],
    "two less": ALL[2:],
    "one for another": (*ALL[1:], "peer-x"),
    "one more": (*ALL, "peer-x"),
}


@pytest.mark.parametrize("clients", NEAR.values(), ids=NEAR.keys())
def test_another_sum_over_the_model_of_nearly_the_same_clients_is_refused(
    tmp_path: Path, clients: Collection[str]
) -> None:
    Site(tmp_path).is_in(asked(1), ALL)
    with pytest.raises(AttemptRefused, match="over this very model"):
        Site(tmp_path).is_in(asked(2, clients), clients)
    Site(tmp_path).is_in(asked(3, clients, ANOTHER), clients)


FAR = {"the same clients": ALL, "three less": ALL[3:], "others": ("peer-x", "peer-y", WARD)}


@pytest.mark.parametrize("clients", FAR.values(), ids=FAR.keys())
def test_of_the_same_or_of_many_others_it_is_not(tmp_path: Path, clients: Collection[str]) -> None:
    Site(tmp_path).is_in(asked(1), ALL)
    Site(tmp_path).is_in(asked(2, clients), clients)


def test_every_sum_that_was_revealed_counts_not_the_last_alone(tmp_path: Path) -> None:
    Site(tmp_path).is_in(asked(1), ALL)
    for round_ in range(2, 6):
        Site(tmp_path).is_in(asked(round_, model=f"{round_:064x}"), ALL)
    with pytest.raises(AttemptRefused, match="differ by peer-0 alone"):
        Site(tmp_path).is_in(asked(6, ALL[1:]), ALL[1:])


def test_an_invitation_is_refused_unless_the_same_clients_may_come(tmp_path: Path) -> None:
    """Without peer-0 there can be no such sum; with one client more, that one may yet stay away, as it did before."""
    Site(tmp_path).is_in(asked(1, (*ALL, "peer-x")), ALL)
    Site(tmp_path).memory.check_invitation(asked(2, (*ALL, "peer-x")))
    Site(tmp_path).is_in(asked(2, (*ALL, "peer-x")), ALL)
    with pytest.raises(AttemptRefused, match="differ by peer-0 alone"):
        Site(tmp_path).memory.check_invitation(asked(3, ALL[1:]))


def test_a_sum_of_which_nothing_was_revealed_binds_nobody(tmp_path: Path) -> None:
    """Too few signed, or too few reported: those who are left go on without those who fell silent."""
    Site(tmp_path).is_in(asked(1), ALL, reveals=False)
    Site(tmp_path).is_in(asked(2, ALL[:-1]), ALL[1:], signs=False, reveals=False)
    Site(tmp_path).is_in(asked(3, ALL[1:]), ALL[1:])


def test_nor_does_one_that_the_client_has_refused(tmp_path: Path) -> None:
    """Else nobody could ever go on: no sum is like the one and the other."""
    Site(tmp_path).is_in(asked(1), ALL)
    with pytest.raises(AttemptRefused):
        Site(tmp_path).is_in(asked(2), ALL[1:])
    Site(tmp_path).is_in(asked(3), ALL)


@pytest.mark.parametrize(("round_", "model"), [(1, ANOTHER), (2, ANOTHER), (3, ONE_MODEL)])
def test_a_policy_may_allow_no_second_update_for_a_round_or_a_model(tmp_path: Path, round_: int, model: str) -> None:
    policy = SitePolicy(retrain_after_release=False)
    Site(tmp_path, policy).is_in(asked(1, model="cc" * 32), ALL, reveals=False)
    Site(tmp_path, policy).is_in(asked(2), ALL)
    with pytest.raises(AttemptRefused, match="already revealed shares for round 2"):
        Site(tmp_path, policy).memory.check_invitation(asked(round_, model=model))
    Site(tmp_path, policy).memory.check_invitation(asked(3, model=ANOTHER))
    Site(tmp_path).memory.check_invitation(asked(round_, model=model))


def test_a_private_round_that_is_charged_may_be_of_any_clients(tmp_path: Path) -> None:
    policy = SitePolicy(epsilon=100.0, retrain_after_release=False)
    Site(tmp_path, policy).is_in(asked(1, is_private=True), ALL)
    Site(tmp_path, policy).is_in(asked(2, ALL[1:], is_private=True), ALL[1:])
    with pytest.raises(AttemptRefused, match="over this very model"):
        Site(tmp_path).is_in(asked(3, ALL[2:], is_private=True), ALL[2:])


def test_there_is_one_warning_a_round_and_it_names_the_nearest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    site.is_in(asked(1, model="01" * 32), ALL)
    site.is_in(asked(2, ALL[3:], "02" * 32), ALL[3:])
    assert not caplog.messages
    site.is_in(asked(3, ALL[2:], "03" * 32), ALL[2:])
    (message,) = caplog.messages
    assert message.startswith("round 3: the clients of two rounds differ by peer-2 alone"), "and two of round 1"


def test_sums_that_nobody_was_told_of_are_warned_of_even_where_the_policy_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, SitePolicy(cohort_change="refuse"))
    site.memory.sending(asked(1, ALL, ANOTHER))
    site.memory.check_invitation(asked(2, ALL[1:]))
    assert ["differ by peer-0 alone" in message for message in caplog.messages] == [True]
    site.is_in(asked(3), ALL)
    with pytest.raises(AttemptRefused, match=r"does not allow it: .* differ by peer-0 alone"):
        site.memory.check_invitation(asked(4, ALL[1:], "04" * 32))
