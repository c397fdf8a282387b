"""Which sums a client has no part in, for what they would tell together with those that it was in."""

import itertools
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

from tests.client.doubles.secure_double import WARD, SecureDouble, peer_key
from umbel.aggregation.plans.assignment import assignment_id
from umbel.aggregation.plans.codec import Grid
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.plans.proximal import MuRule
from umbel.aggregation.plans.round import Task
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.aggregation.types import RunId
from umbel.client.errors import AttemptRefused, CoordinatorMisbehaved
from umbel.client.policy import earlier_sums
from umbel.client.policy.earlier_sums import EarlierSums, terms_sha256
from umbel.client.policy.policy import SitePolicy
from umbel.client.state.secure_store import SUMS_MAX, RememberedSum, SecureStore
from umbel.client.wire.offers import SecureInvitation, read_offer

OTHERS = tuple(f"peer-{number}" for number in range(9))
ALL = (*OTHERS, WARD)
ONE_MODEL, ANOTHER = "aa" * 32, "bb" * 32
_NUMBERS = itertools.count(1)


def asked(
    round_: int,
    clients: Collection[str] = ALL,
    model: str = ONE_MODEL,
    *,
    is_private: bool = False,
    attempt_id: str = "",
) -> SecureInvitation:
    """A round to which these clients are invited. `attempt_id`: by default another one each time."""
    module = nn.Linear(30, 10)
    double = SecureDouble(module, rounds=100, peers=tuple(sorted(set(clients) - {WARD})))
    double.keys[WARD] = public_key_bytes(peer_key(WARD), "a key")
    double.round = round_
    if is_private:
        noise = NoisePlan.of(1e9, 10**9, 320, least=3, colluders=1)
        double.plan = replace(double.plan, metrics=(), evaluation=(), weight_unit=1, noise=noise)
        double.codec = replace(double.codec, clip_norm=1.0)
    offer = double.offered()
    assert offer.secure is not None
    secure = replace(offer.secure, attempt_id=attempt_id or f"{next(_NUMBERS):032x}")
    offer = replace(offer, model=replace(offer.model, sha256=model), secure=secure)
    return read_offer(offer, WARD, double.layout)


def under(one: SecureInvitation, **changes: object) -> SecureInvitation:
    """The same round, but for this. Of the codec, the grid, the training or the plan: a mapping."""
    offer = one.assignment
    parts: dict[str, Any] = {"codec": offer.codec, "grid": offer.grid, "training": offer.training}
    parts["plan"] = one.offer.plan
    for name, change in changes.items():
        parts[name] = replace(parts[name], **change) if isinstance(change, dict) else change
    secure = replace(one.offer, plan=parts.pop("plan"))
    layout = one.composition.layout
    return read_offer(replace(offer, secure=secure, **parts), WARD, layout)


class Site:
    """What a client would do, and remember; a new one for each step, as after a restart, but for the last word."""

    def __init__(
        self,
        directory: Path,
        policy: SitePolicy | None = None,
        run: str = "demo",
        members: Collection[str] | None = None,
    ) -> None:
        self.memory = EarlierSums(RunId(run), policy or SitePolicy(), SecureStore(directory))
        self.members = members

    def is_in(
        self, one: SecureInvitation, clients: Collection[str], *, signs: bool = True, reveals: bool = True
    ) -> None:
        self.memory.check_invitation(one, self.members)
        self.memory.check_attempt(one)
        self.memory.sending(one)
        self.memory.check_sum(one, clients, self.members)
        if signs:
            self.memory.signing(one, clients)
        if reveals:
            self.memory.revealing(one, self.members)


NEAR = {
    "one less": ALL[1:],
    "two less": ALL[2:],
    "three less, of ten of whom three may collude": ALL[3:],
    "five less": ALL[5:],
    "one for another": (*ALL[1:], "peer-x"),
    "one more": (*ALL, "peer-x"),
}


@pytest.mark.parametrize("clients", NEAR.values(), ids=NEAR.keys())
def test_another_sum_over_the_model_of_nearly_the_same_clients_is_refused(
    tmp_path: Path, clients: Collection[str]
) -> None:
    Site(tmp_path).is_in(asked(1), ALL)
    with pytest.raises(AttemptRefused, match="over the same model"):
        Site(tmp_path).is_in(asked(2, clients), clients)
    Site(tmp_path).is_in(asked(3, clients, ANOTHER), clients)


FAR = {"the same clients": ALL, "six less": ALL[6:], "others": ("peer-x", "peer-y", WARD)}


@pytest.mark.parametrize("clients", FAR.values(), ids=FAR.keys())
def test_of_the_same_or_of_many_others_it_is_not(tmp_path: Path, clients: Collection[str]) -> None:
    Site(tmp_path).is_in(asked(1), ALL)
    Site(tmp_path).is_in(asked(2, clients), clients)


@pytest.mark.parametrize(("first", "second"), [(("peer-x", "peer-y"), ()), ((), ("peer-x", "peer-y"))])
def test_how_many_may_collude_goes_by_the_greater_of_the_two_cohorts(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    """Of twelve that is four, and three are to be left; of ten six would do."""
    Site(tmp_path).is_in(asked(1, (*ALL, *first)), ALL)
    with pytest.raises(AttemptRefused, match="over the same model"):
        Site(tmp_path).is_in(asked(2, (*ALL, *second)), ALL[6:])
    Site(tmp_path).is_in(asked(3, (*ALL, *second)), ALL[7:])


def test_every_sum_that_was_revealed_counts_not_the_last_alone(tmp_path: Path) -> None:
    Site(tmp_path).is_in(asked(1), ALL)
    for round_ in range(2, 6):
        Site(tmp_path).is_in(asked(round_, model=f"{round_:064x}"), ALL)
    with pytest.raises(AttemptRefused, match="differ only by peer-0, so"):
        Site(tmp_path).is_in(asked(6, ALL[1:]), ALL[1:])


def test_an_invitation_is_refused_unless_the_same_clients_may_come(tmp_path: Path) -> None:
    """Without peer-0 there can be no such sum; with one client more, that one may yet stay away, as it did before."""
    Site(tmp_path).is_in(asked(1, (*ALL, "peer-x")), ALL)
    Site(tmp_path).memory.check_invitation(asked(2, (*ALL, "peer-x")))
    Site(tmp_path).is_in(asked(2, (*ALL, "peer-x")), ALL)
    with pytest.raises(AttemptRefused, match="differ only by peer-0, so"):
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
    with pytest.raises(AttemptRefused, match="over the same model"):
        Site(tmp_path).is_in(asked(3, ALL[2:], is_private=True), ALL[2:])


def test_there_is_one_warning_an_attempt_and_it_names_the_nearest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    site.is_in(asked(1, model="01" * 32), ALL)
    site.is_in(asked(2, ALL[3:], "02" * 32), ALL[3:])
    assert not caplog.messages
    site.is_in(asked(3, ALL[2:], "03" * 32), ALL[2:])
    (message,) = caplog.messages
    assert message.startswith("round 3: the clients of this sum and of round 2 differ only by peer-2, so"), (
        "and two of round 1"
    )
    assert (
        "nearly reveal what peer-2 sent. In the same way, a round without this site would reveal this site's update."
        in message
    )
    assert 'set cohort_change = "refuse" in this site\'s policy' in message
    assert "set target and minimum to the number of sites, and over_selection = 1.0" in message


def test_of_the_same_clients_nothing_is_said_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One client was away in the first round. Of the rounds with all of them, and the next without it, one is told."""
    site = Site(tmp_path)
    for round_, clients in enumerate((ALL[1:], ALL, ALL, ALL[1:], ALL), start=1):
        site.is_in(asked(round_, clients, f"{round_:064x}"), clients)
    (message,) = caplog.messages
    assert message.startswith("round 2: the clients of this sum and of round 1 differ only by peer-0, so")
    site.is_in(asked(6, ALL[:1] + ALL[2:], "06" * 32), ALL[:1] + ALL[2:])
    assert caplog.messages[1:] == [
        message.replace("round 2", "round 6").replace("round 1", "round 2").replace("-0", "-1")
    ]


def test_warnings_that_were_given_are_not_remembered_without_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator invents another name each time. One that was forgotten is warned of again."""
    monkeypatch.setattr(earlier_sums, "_WARNED_MAX", 2)
    site = Site(tmp_path)
    site.is_in(asked(1), ALL)
    for names in (*[(*ALL, f"peer-{n}x") for n in range(4)], (*ALL, "peer-0x")):
        site.memory.check_invitation(asked(2, names, ANOTHER))
    said = [message.partition(" differ only by ")[2][:7] for message in caplog.messages]
    assert said == ["peer-0x", "peer-1x", "peer-2x", "peer-3x", "peer-0x"]
    caplog.clear()
    for rate in (0.1, 0.2, 0.3, 0.4, 0.1):
        site.memory.check_invitation(under(asked(2, model=ANOTHER), training={"learning_rate": rate}))
    assert len(caplog.messages) == 5


def test_who_stays_away_when_it_is_invited_is_told_of_when_the_sum_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though there was a warning at this invitation already: it was of another client."""
    site = Site(tmp_path)
    site.is_in(asked(1, ALL[1:], "01" * 32), ALL[1:])
    site.is_in(asked(2, ALL, "02" * 32), (ALL[0], *ALL[2:]))
    assert ["differ only by peer-0, so" in message for message in caplog.messages] == [True, False]
    assert "differ only by peer-0, peer-1, so" in caplog.messages[1]


def test_sums_that_nobody_was_told_of_are_warned_of_even_where_the_policy_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, SitePolicy(cohort_change="refuse"))
    site.memory.sending(asked(1, ALL, ANOTHER))
    site.memory.check_invitation(asked(2, ALL[1:]))
    assert ["differ only by peer-0, so" in message for message in caplog.messages] == [True]
    assert "in this site's policy" not in caplog.text, "it refuses already what can be refused"
    site.is_in(asked(3), ALL)
    with pytest.raises(AttemptRefused, match=r"does not allow this round: .* differ only by peer-0, so"):
        site.memory.check_invitation(asked(4, ALL[1:], "04" * 32))


def test_a_coordinator_that_stays_at_one_round_is_warned_of_in_each_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    site.is_in(asked(7, ALL, "01" * 32), ALL)
    site.is_in(asked(7, ALL[1:], "02" * 32), ALL[1:])
    assert len(caplog.messages) == 1
    site.is_in(asked(7, ALL, "03" * 32), ALL)
    site.is_in(asked(7, ALL[:1] + ALL[2:], "04" * 32), ALL[:1] + ALL[2:])
    assert [f"an earlier attempt at round 7 differ only by peer-{n}, so" in caplog.messages[n] for n in (0, 1)] == [
        True
    ] * 2
    assert len(caplog.messages) == 2, "of the third there was nothing new to say"


@pytest.mark.slow
def test_a_rollback_by_hundreds_of_rounds_finds_every_sum_remembered(tmp_path: Path) -> None:
    """After round 250 the coordinator goes back to the model of round 61, and asks all but one."""
    models = {round_: f"{round_:064x}" for round_ in range(1, 251)}
    for round_, model in models.items():
        SecureStore(tmp_path).remember(RunId("demo"), revealed_sum(round_, model))
    site = Site(tmp_path)
    for round_ in (1, 61, 150, 250):
        with pytest.raises(AttemptRefused, match=f"in round {round_} of run 'demo'. .* differ only by peer-0, so"):
            site.memory.check_invitation(asked(251, ALL[1:], models[round_]))
        with pytest.raises(AttemptRefused, match="over the same model"):
            Site(tmp_path, run="other").memory.check_sum(asked(1, ALL, models[round_]), ALL[1:])
        site.memory.check_invitation(asked(251, ALL, models[round_]))
    with pytest.raises(AttemptRefused, match="has already sent an update under it"):
        site.memory.check_attempt(asked(251, attempt_id=f"{61:032x}"))
    with pytest.raises(AttemptRefused, match="already revealed shares for round 61 of run 'demo'"):
        Site(tmp_path, SitePolicy(retrain_after_release=False), "other").memory.check_invitation(
            asked(1, ALL, models[61])
        )


def revealed_sum(round_: int, model: str) -> RememberedSum:
    return RememberedSum(f"key {round_}", f"{round_:032x}", round_, model, ALL, ALL, is_revealed=True)


def test_a_sum_that_was_signed_and_never_opened_binds_no_other_cohort_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else an attempt that failed when one client fell silent would keep that client out of the run."""
    policy = SitePolicy(cohort_change="refuse")
    Site(tmp_path, policy).is_in(asked(1), ALL[1:], reveals=False)
    Site(tmp_path, policy).is_in(asked(1), ALL)
    assert ["differ only by peer-0, so" in message for message in caplog.messages] == [True], "but it is told of"
    with pytest.raises(AttemptRefused, match="does not allow this round"):
        Site(tmp_path, policy).is_in(asked(2, model=ANOTHER), ALL[1:])


@pytest.mark.parametrize(
    ("cohort_change", "is_taken"),
    [(None, True), ("warn", True), ("refuse", False)],
    ids=["by itself", "warn", "refuse"],
)
def test_where_noise_covers_what_two_sums_differ_by_only_the_policys_own_word_refuses_it(
    tmp_path: Path, cohort_change: Literal["warn", "refuse"] | None, is_taken: bool
) -> None:
    policy = SitePolicy(members=Path("pilot.json"), epsilon=100.0, cohort_change=cohort_change)
    Site(tmp_path, policy).is_in(asked(1, is_private=True), ALL)
    with nullcontext() if is_taken else pytest.raises(AttemptRefused, match="differ only by peer-0, so"):
        Site(tmp_path, policy).is_in(asked(2, ALL[1:], ANOTHER, is_private=True), ALL[1:])
    uncounted = SitePolicy(members=Path("pilot.json"))
    with pytest.raises(AttemptRefused, match="does not allow this round"):
        Site(tmp_path, uncounted).is_in(asked(3, ALL[2:], "cc" * 32, is_private=True), ALL[2:])


# --- attempts of one name ---


@pytest.mark.parametrize("cohort_change", ["warn", "refuse"])
@pytest.mark.parametrize("run", ["demo", "other"])
@pytest.mark.parametrize("model", [ONE_MODEL, ANOTHER])
@pytest.mark.parametrize("reveals", [True, False])
def test_an_attempt_that_is_called_as_one_before_it_is_refused(
    tmp_path: Path, cohort_change: Literal["warn", "refuse"], run: str, model: str, reveals: bool
) -> None:
    policy = SitePolicy(cohort_change=cohort_change)
    Site(tmp_path, policy).is_in(asked(1, attempt_id="11" * 16), ALL, signs=reveals, reveals=reveals)
    before = SecureStore(tmp_path).sums_of_all_runs()
    with pytest.raises(AttemptRefused, match="has already sent an update under it"):
        Site(tmp_path, policy, run).is_in(asked(2, ALL, model, attempt_id="11" * 16), ALL)
    assert SecureStore(tmp_path).sums_of_all_runs() == before


def test_an_entry_is_changed_by_the_process_that_made_it_alone(tmp_path: Path) -> None:
    """Even if two attempts of one name were let in."""
    one, again = (asked(round_, attempt_id="11" * 16) for round_ in (1, 2))
    Site(tmp_path).is_in(one, ALL)
    (before,) = SecureStore(tmp_path).sums(RunId("demo"))
    later = Site(tmp_path)
    with pytest.raises(LookupError):
        later.memory.signing(again, ALL[1:])
    later.memory.sending(again)
    later.memory.signing(again, ALL[1:])
    with pytest.raises(LookupError):
        later.memory.revealing(asked(3))
    kept = SecureStore(tmp_path).sums(RunId("demo"))
    assert kept[0] == before
    assert [(found.clients, found.is_revealed) for found in kept] == [(ALL, True), (ALL[1:], False)]


# --- other runs ---


def test_another_run_from_the_same_model_is_under_the_same_rule(tmp_path: Path) -> None:
    Site(tmp_path).is_in(asked(5), ALL)
    with pytest.raises(AttemptRefused, match=r"over the same model, .* differ only by peer-0, so"):
        Site(tmp_path, run="other").memory.check_invitation(asked(1, ALL[1:]))
    with pytest.raises(AttemptRefused, match=r"over the same model, .* differ only by peer-0, so"):
        Site(tmp_path, run="other").is_in(asked(1), ALL[1:])
    named = r"the same model, in round 5 of run 'demo'\. .* pass another --seed"
    with pytest.raises(AttemptRefused, match=named):
        Site(tmp_path, run="other").memory.check_invitation(asked(1, ALL[1:]))
    with pytest.raises(AttemptRefused, match=named):
        Site(tmp_path, run="other").is_in(asked(1), ALL[1:])
    with pytest.raises(AttemptRefused, match=named):
        Site(tmp_path).memory.check_invitation(asked(6, ALL[1:]))
    Site(tmp_path, run="other").is_in(asked(1), ALL)


@pytest.mark.parametrize(("clients", "is_refused"), [(ALL[1:], True), (ALL, False)])
def test_of_two_runs_at_work_at_once_the_second_reveals_nothing_that_could_be_subtracted(
    tmp_path: Path, clients: Collection[str], is_refused: bool
) -> None:
    """Both sums are signed before shares of either are revealed, so neither has seen the other when it signed."""
    first, second = Site(tmp_path), Site(tmp_path, run="other")
    one, other = asked(1), asked(1)
    first.is_in(one, ALL, reveals=False)
    second.is_in(other, clients, reveals=False)
    first.memory.revealing(one)
    if is_refused:
        with pytest.raises(AttemptRefused, match="reveals no shares of this sum: this site already revealed shares"):
            second.memory.revealing(other)
    else:
        second.memory.revealing(other)
    revealed = SecureStore(tmp_path).revealed(RunId("other"))
    assert len(revealed) == (0 if is_refused else 1)


def test_of_two_runs_at_work_at_once_only_one_has_an_update_for_a_model_where_the_policy_allows_no_second(
    tmp_path: Path,
) -> None:
    policy = SitePolicy(retrain_after_release=False)
    first, second = Site(tmp_path, policy), Site(tmp_path, policy, run="other")
    one, other = asked(1), asked(1)
    first.is_in(one, ALL, reveals=False)
    second.is_in(other, ALL, reveals=False)
    first.memory.revealing(one)
    with pytest.raises(AttemptRefused, match="allows no second update"):
        second.memory.revealing(other)


def test_of_another_model_each_run_stands_for_itself(tmp_path: Path) -> None:
    policy = SitePolicy(cohort_change="refuse")
    Site(tmp_path, policy).is_in(asked(1), ALL)
    Site(tmp_path, policy, "other").is_in(asked(1, ALL[1:], ANOTHER), ALL[1:])
    with pytest.raises(AttemptRefused, match="differ only by peer-0, so"):
        Site(tmp_path, policy).is_in(asked(2, ALL[1:], ANOTHER), ALL[1:])


def test_no_second_update_for_a_model_is_so_in_every_run(tmp_path: Path) -> None:
    policy = SitePolicy(retrain_after_release=False)
    Site(tmp_path, policy).is_in(asked(5), ALL)
    with pytest.raises(AttemptRefused, match="already revealed shares for round 5 of run 'demo'"):
        Site(tmp_path, policy, "other").memory.check_invitation(asked(1))
    Site(tmp_path, policy, "other").memory.check_invitation(asked(1, model=ANOTHER))


# --- who was taken off the member list ---


def test_who_is_on_the_list_no_more_does_not_count(tmp_path: Path) -> None:
    Site(tmp_path, members=ALL).is_in(asked(1), ALL)
    with pytest.raises(AttemptRefused, match="differ only by peer-0, so"):
        Site(tmp_path, run="second").memory.check_invitation(asked(1, ALL[1:]), ALL)
    Site(tmp_path, run="second", members=ALL[1:]).is_in(asked(1, ALL[1:]), ALL[1:])


def test_beside_who_was_taken_off_the_others_count_as_before(tmp_path: Path) -> None:
    Site(tmp_path, members=ALL).is_in(asked(1), ALL)
    without = Site(tmp_path, run="second", members=ALL[1:])
    with pytest.raises(AttemptRefused, match="differ only by peer-1, so"):
        without.memory.check_invitation(asked(1, ALL[2:]), ALL[1:])
    with pytest.raises(AttemptRefused, match="differ only by peer-1, so"):
        without.is_in(asked(1, ALL[1:]), ALL[2:])


def test_who_has_come_on_the_list_counts_too(tmp_path: Path) -> None:
    """One for another: what differs would be the newcomer's, for the other may be the coordinator's."""
    Site(tmp_path, members=ALL).is_in(asked(1), ALL)
    others = (*ALL[1:], "peer-x")
    with pytest.raises(AttemptRefused, match="differ only by peer-x, so"):
        Site(tmp_path, run="second", members=others).is_in(asked(1, others), others)
    Site(tmp_path, run="second", members=others).is_in(asked(2, others), ALL[1:])


def test_nor_does_it_count_from_model_to_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = SitePolicy(cohort_change="refuse")
    Site(tmp_path, policy, members=ALL).is_in(asked(1), ALL)
    Site(tmp_path, policy, members=ALL).is_in(asked(2, model="02" * 32), ALL, signs=False, reveals=False)
    with pytest.raises(AttemptRefused, match="differ only by peer-0, so"):
        Site(tmp_path, policy).memory.check_invitation(asked(3, ALL[1:], ANOTHER), ALL)
    Site(tmp_path, policy, members=ALL[1:]).is_in(asked(4, ALL[1:], ANOTHER), ALL[1:])
    assert not caplog.messages


# --- other terms: bounds that the coordinator moves from one sum to the next ---

COARSER = Grid.finest(max_abs=asked(1).assignment.grid.max_abs, total_weight_max=1 << 38)
FROZEN_TERMS = "5679509f5c745b0c6c33bb20fcaf9acc9fd6e7af50086b23c3fc195d76d72bb8"
TERMS: dict[str, dict[str, object]] = {
    "more samples count": {"sample_count_max": 1001},
    "a clip norm": {"codec": {"clip_norm": 2.0}},
    "other values are cut": {"grid": {"max_abs": 4.0, "step": asked(1).assignment.grid.step / 2}},
    "more epochs": {"training": {"local_epochs": 2}},
    "steps": {"training": {"local_epochs": None, "local_steps": 10}},
    "a proximal term": {"training": {"proximal_mu": 0.1}},
    "larger batches": {"training": {"batch_size": 1 << 20}},
    "another learning rate": {"training": {"learning_rate": 0.02}},
    "a lower floor": {"plan": {"minimum_work": 0.5}},
    "another weight unit": {"plan": {"weight_unit": 1 << 30}},
}
NO_TERMS: dict[str, dict[str, object]] = {
    "nothing": {},
    "the step and the rotation": {"codec": {"inverse_step": 300.0, "key": 9}},
    "the bits": {"plan": {"bits": 31}},
    "the grid of exact values": {"grid": {"step": COARSER.step, "total_weight_max": COARSER.total_weight_max}},
    "measuring": {"training": {"evaluate": True}},
    "measuring after the training": {"training": {"evaluate_after": True, "inexactness": True}},
}


@pytest.mark.parametrize("model", [ONE_MODEL, ANOTHER], ids=["the same model", "another"])
@pytest.mark.parametrize("changes", TERMS.values(), ids=TERMS.keys())
def test_a_sum_of_the_run_under_other_terms_is_refused_or_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object], model: str
) -> None:
    Site(tmp_path).is_in(asked(1), ALL)
    other = under(asked(2, model=model), **changes)
    with pytest.raises(AttemptRefused, match="terms_change"):
        Site(tmp_path, SitePolicy(terms_change="refuse")).memory.check_invitation(other)
    assert "under other terms" not in caplog.text
    Site(tmp_path).is_in(other, ALL)
    assert caplog.text.count("under other terms") == 1, "once"


def test_a_round_without_weights_under_next_to_no_noise_is_of_other_terms_than_one_with_weights(tmp_path: Path) -> None:
    """The weights are in the one sum and not in the other. So a difference of the two would be of a few sites."""
    policy, alike = SitePolicy(terms_change="refuse"), {"plan": {"weight_unit": 1}, "codec": {"clip_norm": 1.0}}
    Site(tmp_path, policy).is_in(under(asked(1), **alike), ALL)
    Site(tmp_path, policy).is_in(under(asked(2), **alike), ALL)
    with pytest.raises(AttemptRefused, match="under other terms"):
        Site(tmp_path, policy).memory.check_invitation(asked(3, is_private=True))


@pytest.mark.parametrize("model", [ONE_MODEL, ANOTHER], ids=["the same model", "another"])
def test_another_run_may_try_other_terms_from_the_same_model(tmp_path: Path, model: str) -> None:
    """People do: the first rate was too high. `allowed_runs` says which runs there may be."""
    policy = SitePolicy(terms_change="refuse")
    Site(tmp_path, policy).is_in(asked(1), ALL)
    slower = under(asked(1, model=model), training={"learning_rate": 0.001})
    Site(tmp_path, policy, "second").is_in(replace(slower, context=asked(2).context), ALL)


def test_a_release_of_umbel_changes_no_terms_of_a_run_under_way() -> None:
    """Else each site with a member list would refuse what its running runs ask from then on."""
    assert terms_sha256(asked(1)) == FROZEN_TERMS


def test_a_grid_that_rounds_more_than_it_must_is_refused() -> None:
    step = asked(1).assignment.grid.step
    with pytest.raises(CoordinatorMisbehaved, match="its grid's step is larger"):
        under(asked(1), grid={"step": 2 * step})
    assert under(asked(1), grid={"step": step}).assignment.grid == asked(1).assignment.grid


@pytest.mark.parametrize("changes", NO_TERMS.values(), ids=NO_TERMS.keys())
def test_what_follows_from_the_round_before_is_free(tmp_path: Path, changes: dict[str, object]) -> None:
    policy = SitePolicy(terms_change="refuse")
    Site(tmp_path, policy).is_in(asked(1), ALL)
    Site(tmp_path, policy).is_in(under(asked(2), **changes), ALL)
    Site(tmp_path, policy).is_in(under(asked(3, model=ANOTHER), **changes), ALL)


def adaptive(one: SecureInvitation, mu: float, rule: MuRule) -> SecureInvitation:
    return under(one, training={"algorithm": "fedprox", "proximal_mu": mu, "mu_rule": rule})


def test_a_mu_that_adapts_is_one_term_for_all_rounds_and_its_rule_is_another(tmp_path: Path) -> None:
    policy, rule = SitePolicy(terms_change="refuse"), MuRule(0.5, 0.1)
    Site(tmp_path, policy).is_in(adaptive(asked(1), 0.5, rule), ALL)
    Site(tmp_path, policy).is_in(adaptive(asked(6), 0.7, rule), ALL)
    others = (
        adaptive(asked(7), 0.7, MuRule(0.5, 0.2)),
        adaptive(asked(7), 0.7, MuRule(0.6, 0.1)),
        under(asked(7), training={"algorithm": "fedprox", "proximal_mu": 0.5}),
    )
    for other in others:
        with pytest.raises(AttemptRefused, match="terms_change"):
            Site(tmp_path, policy).memory.check_invitation(other)


def test_other_terms_are_allowed_where_as_many_clients_differ_as_a_sum_has(tmp_path: Path) -> None:
    policy, changes = SitePolicy(terms_change="refuse"), TERMS["more samples count"]
    Site(tmp_path, policy).is_in(asked(1), ALL)
    with pytest.raises(AttemptRefused, match="under other terms"):
        Site(tmp_path, policy).is_in(under(asked(3, ALL[5:], ANOTHER), **changes), ALL[5:])
    Site(tmp_path, policy).is_in(under(asked(2, ALL[6:]), **changes), ALL[6:])


def test_where_many_may_come_and_few_do_the_sum_is_looked_at(tmp_path: Path) -> None:
    """The invitation is of many others; those who come are the clients of before."""
    policy, others = SitePolicy(terms_change="refuse"), tuple(f"peer-x{number}" for number in range(12))
    Site(tmp_path, policy).is_in(asked(1), ALL)
    for model in (ONE_MODEL, ANOTHER):
        site, second = Site(tmp_path, policy), under(asked(2, (*ALL, *others), model), **TERMS["a clip norm"])
        site.memory.check_invitation(second)
        with pytest.raises(AttemptRefused, match="under other terms"):
            site.memory.check_sum(second, ALL)


def test_of_several_sums_each_is_looked_at_whatever_the_first_was(tmp_path: Path) -> None:
    """That the oldest has had the same terms says nothing of the newer one."""
    other, policy = TERMS["more samples count"], SitePolicy(terms_change="refuse")
    Site(tmp_path).is_in(under(asked(1), **other), ALL)
    Site(tmp_path).is_in(asked(2), ALL)
    with pytest.raises(AttemptRefused, match="as round 2, but under other terms"):
        Site(tmp_path, policy).memory.check_invitation(under(asked(3), **other))


def test_terms_are_remembered_for_good_and_those_of_a_sum_that_was_not_revealed_bind_nobody(tmp_path: Path) -> None:
    other = TERMS["more samples count"]
    Site(tmp_path).is_in(under(asked(1), **other), ALL, reveals=False)
    Site(tmp_path).is_in(asked(2), ALL)
    for round_ in range(3, SUMS_MAX + 4):
        SecureStore(tmp_path).remember(RunId("demo"), revealed_sum(round_, ANOTHER))
    assert 2 not in {one.round for one in SecureStore(tmp_path).sums(RunId("demo"))}
    policy = SitePolicy(terms_change="refuse")
    with pytest.raises(AttemptRefused, match="as round 2, but under other terms"):
        Site(tmp_path, policy).memory.check_invitation(under(asked(200), **other))
    Site(tmp_path, policy).memory.check_invitation(asked(200))


def test_sums_of_a_version_that_wrote_no_terms_stop_no_run(tmp_path: Path) -> None:
    SecureStore(tmp_path).remember(RunId("demo"), revealed_sum(1, ONE_MODEL))
    for model in (ONE_MODEL, ANOTHER):
        Site(tmp_path, SitePolicy(terms_change="refuse")).memory.check_invitation(asked(2, model=model))


@pytest.mark.parametrize("word", [None, "refuse"])
def test_noise_that_the_site_counts_covers_other_terms_unless_the_policy_says_refuse(
    tmp_path: Path, word: Literal["refuse"] | None
) -> None:
    policy = replace(SitePolicy(epsilon=1e5), terms_change=word)
    Site(tmp_path, policy).is_in(asked(1, is_private=True), ALL)
    other = under(asked(2, model=ANOTHER, is_private=True), training={"learning_rate": 0.02})
    with pytest.raises(AttemptRefused, match="under other terms") if word else nullcontext():
        Site(tmp_path, policy).memory.check_invitation(other)
    with pytest.raises(AttemptRefused, match="under other terms"):
        Site(tmp_path, SitePolicy(terms_change="refuse")).memory.check_invitation(other)


def test_nor_is_it_refused_for_a_member_list_where_noise_covers_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A list makes "refuse" the default, but not of rounds that the site counts; nor is it warned of them."""
    listed = SitePolicy(members=Path("pilot.json"), secure_aggregation="required", epsilon=1e5)
    assert listed.refuses_terms_change
    other = under(asked(2, model=ANOTHER, is_private=True), training={"learning_rate": 0.02})
    for policy in (listed, SitePolicy(epsilon=1e5)):
        Site(tmp_path, policy).is_in(asked(1, is_private=True), ALL)
        Site(tmp_path, policy).memory.check_invitation(other)
    assert "under other terms" not in caplog.text


def measuring(one: SecureInvitation, *, evaluates: bool = False) -> SecureInvitation:
    """An evaluation instead of a training; or, with `evaluates`, a training that measures the model first."""
    offer = one.assignment
    task = Task.TRAINING if evaluates else Task.EVALUATION
    own = assignment_id(offer.run, offer.round, offer.attempt, WARD, task)
    changed = replace(offer, id=own, task=task, training=replace(offer.training, evaluate=evaluates))
    return read_offer(changed, WARD, SecureDouble(nn.Linear(30, 10)).layout)


def test_an_evaluation_is_no_second_update_and_binds_no_training_that_measures_nothing(tmp_path: Path) -> None:
    """Under a policy that sends one update of a round, and refuses sums that differ by few clients."""
    policy = SitePolicy(retrain_after_release=False, cohort_change="refuse")
    Site(tmp_path, policy).is_in(asked(1, model=ONE_MODEL), ALL)
    Site(tmp_path, policy).is_in(measuring(asked(1, model=ANOTHER)), ALL)
    Site(tmp_path, policy).is_in(asked(2, model=ANOTHER), ALL)


def test_a_second_evaluation_of_one_model_by_nearly_the_same_clients_is_refused(tmp_path: Path) -> None:
    Site(tmp_path).is_in(measuring(asked(1)), ALL)
    with pytest.raises(AttemptRefused, match="over the same model, in round 1"):
        Site(tmp_path).is_in(measuring(asked(2, ALL[1:])), ALL[1:])
    Site(tmp_path).is_in(measuring(asked(3)), ALL)


def test_a_training_that_measures_a_model_which_nearly_the_same_clients_have_measured_is_a_cohort_change(
    tmp_path: Path,
) -> None:
    """In the run of the evaluation, and in another one from its model."""
    Site(tmp_path).is_in(measuring(asked(1, model=ANOTHER)), ALL)
    refuses, fewer = SitePolicy(cohort_change="refuse"), ALL[1:]
    for run in ("demo", "later"):
        Site(tmp_path, refuses, run).memory.check_invitation(asked(2, fewer, ANOTHER))
        with pytest.raises(AttemptRefused, match="and of the evaluation of round 1"):
            Site(tmp_path, refuses, run).memory.check_invitation(measuring(asked(2, fewer, ANOTHER), evaluates=True))
        Site(tmp_path, SitePolicy(cohort_change="warn"), run).memory.check_invitation(
            measuring(asked(2, fewer, ANOTHER), evaluates=True)
        )


@pytest.mark.parametrize("fewer_measure", [True, False])
def test_of_an_evaluation_and_a_training_at_work_at_once_in_two_runs_the_second_reveals_nothing(
    tmp_path: Path, fewer_measure: bool
) -> None:
    """One measures the model at all clients, and the other at all but one: each is signed before either is revealed."""
    refuses, fewer = SitePolicy(cohort_change="refuse"), ALL[1:]
    first, second = Site(tmp_path, refuses), Site(tmp_path, refuses, run="later")
    trains = measuring(asked(2, ALL if fewer_measure else fewer, ANOTHER), evaluates=True)
    measures = measuring(asked(2, fewer if fewer_measure else ALL, ANOTHER))
    first.is_in(trains, trains.context.names, reveals=False)
    second.is_in(measures, measures.context.names, reveals=False)
    first.memory.revealing(trains)
    with pytest.raises(AttemptRefused, match="reveals no shares of this sum: "):
        second.memory.revealing(measures)
    assert not SecureStore(tmp_path).revealed(RunId("later"))


def test_an_evaluation_of_a_model_whose_training_is_not_among_the_newest_sums_is_compared_with_it(
    tmp_path: Path,
) -> None:
    """Between the two are a hundred sums with quite different clients, which a coordinator may ask for."""
    refuses = SitePolicy(cohort_change="refuse")
    Site(tmp_path, refuses).is_in(measuring(asked(2, model=ANOTHER), evaluates=True), ALL)
    far = (WARD, *(f"far-{number}" for number in range(9)))
    for round_ in range(3, SUMS_MAX + 4):
        between = replace(revealed_sum(round_, f"{round_:064x}"), cohort=far, clients=far)
        SecureStore(tmp_path).remember(RunId("demo"), between)
    site, fewer = Site(tmp_path, refuses), measuring(asked(2, ALL[1:], ANOTHER))
    assert ANOTHER not in {one.model_sha256 for one in SecureStore(tmp_path).sums(RunId("demo"))}
    with pytest.raises(AttemptRefused, match="round 2 of run 'demo'"):
        site.memory.check_invitation(fewer)
    with pytest.raises(AttemptRefused, match="round 2 of run 'demo'"):
        site.memory.check_sum(fewer, ALL[1:])
