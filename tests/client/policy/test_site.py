"""What a whole site lets itself be asked: its policy, the list that its officers have signed, and what it has done."""

import threading
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from torch import nn

from tests.aggregation.secagg.federation import identity
from tests.client.doubles.secure_double import WARD, SecureDouble, peer_key
from tests.client.policy.test_earlier_sums import ALL, ONE_MODEL, asked, under
from tests.federations.consortium import OFFICERS, first_list, signed, without
from umbel.aggregation.privacy.accounting import ORDERS, Ledger
from umbel.aggregation.privacy.section import release_of
from umbel.aggregation.secagg.messages import AdvertiseKeys, Roster
from umbel.aggregation.secagg.turns import MODEL_SHARE
from umbel.aggregation.trust.members import MemberList, members_bytes
from umbel.aggregation.types import RunId
from umbel.client.errors import Alarm, AttemptRefused, WorkRefused
from umbel.client.policy.decided import DecidedTerms
from umbel.client.policy.members_store import MembersStore
from umbel.client.policy.policy import SitePolicy
from umbel.client.policy.site import Site
from umbel.client.state.identity import Identity
from umbel.client.state.secure_store import SecureStore
from umbel.client.wire.offers import SecureInvitation, check_window, read_offer

LAYOUT = SecureDouble(nn.Linear(30, 10)).layout
FIRST = replace(first_list(), members={name: peer_key(name) for name in ALL})
SECOND = without(FIRST, ALL[0])


class House:
    """One site's disk. A new process for each attempt."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.list_path = directory / "pilot.json"
        self.policy = SitePolicy("required", self.list_path, FIRST.sha256)
        self.show(FIRST, *OFFICERS)

    def show(self, members: MemberList, *officers: str) -> None:
        """The file beside the policy is this list from now on, with these officers' signatures."""
        self.list_path.write_bytes(members_bytes(signed(members, *officers)))

    def site(self, run: str = "demo", *, has_policy: bool = True) -> Site:
        policy = self.policy if has_policy else None
        return Site(
            RunId(run), Identity(WARD, identity(WARD)), policy, self.directory, SecureStore(self.directory / "secure")
        )

    def take_part(
        self, offer: SecureInvitation, clients: Collection[str], run: str = "demo", *, has_policy: bool = True
    ) -> None:
        """To the last word: shares of a sum of these clients are revealed."""
        site = self.site(run, has_policy=has_policy)
        site.admit(offer, LAYOUT)
        site.earlier_sums.sending(offer)
        site.check_sum(offer, clients)
        site.earlier_sums.signing(offer, clients)
        site.revealing(offer)


def bound(offer: SecureInvitation, members: MemberList) -> SecureInvitation:
    """The same round, bound to this list."""
    assert offer.assignment.secure is not None
    secure = replace(offer.assignment.secure, members_sha256=members.sha256)
    return read_offer(replace(offer.assignment, secure=secure), WARD, LAYOUT)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


# --- what is left of the window ---


@pytest.mark.parametrize(("left_s", "is_taken"), [(15.0, True), (14.9, False)])
def test_a_round_is_taken_while_the_share_of_its_window_that_the_work_needs_is_left(
    left_s: float, is_taken: bool
) -> None:
    offer = asked(1)
    assert offer.offer.window_s == 60.0
    with nullcontext() if is_taken else pytest.raises(AttemptRefused, match=r"14\.9 s left .* needs at least 15 s"):
        check_window(offer, left_s, MODEL_SHARE, "the model arrived")


# --- attempts of one name ---


@pytest.mark.parametrize("cohort_change", ["warn", "refuse"])
def test_a_second_round_under_the_id_of_the_first_gets_no_word(
    house: House, cohort_change: Literal["warn", "refuse"]
) -> None:
    """Else the second sum, of all but one, would stand in the place of the first, and there would be nothing to see."""
    house.policy = replace(house.policy, cohort_change=cohort_change)
    first, second = (bound(asked(round_, attempt_id="11" * 16), FIRST) for round_ in (1, 2))
    house.take_part(first, ALL)
    with pytest.raises(AttemptRefused, match="has already sent an update under it"):
        house.take_part(second, ALL[1:])
    (one,) = SecureStore(house.directory / "secure").sums(RunId("demo"))
    assert (one.round, one.clients, one.is_revealed) == (1, ALL, True)


def test_the_attempt_that_was_begun_last_is_still_declined_as_a_restart(house: House) -> None:
    offer = bound(asked(1), FIRST)
    house.take_part(offer, ALL)
    with pytest.raises(AttemptRefused, match="already began this attempt"):
        house.site().admit(offer, LAYOUT)


def test_each_attempt_gets_secrets_of_its_own(house: House) -> None:
    """Of 32 bytes, and a seed: nothing that the coordinator says decides them."""
    admitted = [house.site().admit(bound(asked(1, attempt_id=id_ * 16), FIRST), LAYOUT) for id_ in ("11", "22")]
    assert {len(one.secret) for one in admitted} == {32}
    assert len({one.secret for one in admitted}) == len({one.seed for one in admitted}) == 2


# --- other terms ---


@pytest.mark.parametrize("model", [ONE_MODEL, "ab" * 32], ids=["the same model", "one that differs by a bit"])
def test_of_two_sums_of_the_same_clients_with_a_sites_count_between_their_bounds_it_gives_one(
    house: House, model: str
) -> None:
    """M = 120 and M = 310: the first, times 310 / 120, less the second, is of the sites with fewer than 310 samples."""
    offers = [under(bound(asked(1), FIRST), sample_count_max=120)]
    offers.append(under(bound(asked(2, model=model), FIRST), sample_count_max=310))
    house.take_part(offers[0], ALL)
    with pytest.raises(AttemptRefused, match="under other terms"):
        house.take_part(offers[1], ALL)


# --- who was taken off the member list ---


def test_once_officers_have_taken_a_member_off_a_new_run_goes_on_from_the_same_model(house: House) -> None:
    house.take_part(bound(asked(3), FIRST), ALL)
    house.show(SECOND, "anna", "bert")
    house.take_part(bound(asked(1, ALL[1:]), SECOND), ALL[1:], "second")
    assert len(SecureStore(house.directory / "secure").sums(RunId("second"))) == 1


UNTAKEN = {"nobody's": (), "too few officers'": ("anna",), "other officers'": ("x", "y")}


@pytest.mark.parametrize("names", UNTAKEN.values(), ids=UNTAKEN.keys())
def test_without_their_signatures_nobody_is_taken_off(house: House, names: Collection[str]) -> None:
    site = house.site("second")
    house.take_part(bound(asked(3), FIRST), ALL)
    house.show(SECOND, *names)
    with pytest.raises(AttemptRefused, match=r"over the same model, .* differ only by peer-0, so"):
        site.admit(bound(asked(1, ALL[1:]), FIRST), LAYOUT)
    with pytest.raises(WorkRefused, match="this round names another member list"):
        site.admit(bound(asked(1, ALL[1:]), SECOND), LAYOUT)


def test_two_lists_that_are_pinned_without_a_policy_are_no_way_out(house: House) -> None:
    """The coordinator could choose the one without the member whose update it wants."""
    house.take_part(asked(3), ALL, has_policy=False)
    other = replace(FIRST, name="other", members=SECOND.members)
    for members in (FIRST, other):
        MembersStore(house.directory).take(signed(members, *OFFICERS), is_confirmed=True)
    with pytest.raises(AttemptRefused, match="differ only by peer-0, so"):
        house.take_part(bound(asked(1, ALL[1:]), other), ALL[1:], has_policy=False)


def test_where_a_policy_names_a_list_another_one_that_is_pinned_does_not_count(house: House) -> None:
    other = replace(FIRST, name="other")
    MembersStore(house.directory).take(signed(other, *OFFICERS), is_confirmed=True)
    with pytest.raises(WorkRefused, match="this round names another member list"):
        house.site().admit(bound(asked(1), other), LAYOUT)


# --- who has come ---


@pytest.mark.parametrize(
    ("n_came", "sentence"),
    [
        (1, "only one client takes part, so the sum would reveal its update"),
        (4, "only 4 of 10 invited clients take part, and a secure round needs at least 5"),
        (5, ""),
    ],
)
def test_who_has_come_ends_this_attempt_at_most_for_others_may_come_next_time(
    house: House, n_came: int, sentence: str
) -> None:
    adverts = tuple(AdvertiseKeys(index, bytes(32), bytes(32), bytes(64)) for index in range(n_came))
    site, offer = house.site(), bound(asked(1), FIRST)
    site.admit(offer, LAYOUT)
    with pytest.raises(AttemptRefused, match=sentence) if sentence else nullcontext():
        site.check_roster(offer, Roster(bytes(32), adverts), LAYOUT)


@pytest.mark.parametrize("is_named", [False, True], ids=["without this client", "with another key for it"])
def test_a_cohort_in_which_somebody_would_speak_in_its_place_is_an_alarm(house: House, is_named: bool) -> None:
    offer = bound(asked(1), FIRST)
    others = {name: key for name, key in offer.context.cohort if name != WARD}
    cohort = others | {WARD: peer_key("a stranger")} if is_named else others
    told = replace(offer, context=replace(offer.context, cohort=tuple(sorted(cohort.items()))))
    with pytest.raises(Alarm, match="lists another key for this client, or none"):
        house.site().admit(told, LAYOUT)


# --- noise ---


@pytest.mark.parametrize(("colluders", "is_taken"), [(0, True), (1, True), (2, False)])
def test_noise_must_count_on_as_many_colluders_as_the_policy_says(house: House, colluders: int, is_taken: bool) -> None:
    """The round's noise counts on one."""
    house.policy = replace(house.policy, colluders=colluders)
    house.site().admit(bound(asked(1), FIRST), LAYOUT)
    private = bound(asked(2, model=ONE_MODEL, is_private=True), FIRST)
    if is_taken:
        house.site().admit(private, LAYOUT)
    else:
        with pytest.raises(WorkRefused, match="against 2 colluding clients, and this round's noise holds against 1"):
            house.site().admit(private, LAYOUT)


def test_noise_that_every_participant_could_take_a_share_of_off_is_refused_without_a_word_in_the_policy(
    house: House,
) -> None:
    """Each client of the sum knows its own noise."""
    private = bound(asked(1, is_private=True), FIRST)
    assert private.assignment.secure is not None
    secure = private.assignment.secure
    assert secure.plan.noise is not None
    on_none = replace(secure, plan=replace(secure.plan, noise=replace(secure.plan.noise, colluders=0)))
    offer = read_offer(replace(private.assignment, secure=on_none), WARD, LAYOUT)
    with pytest.raises(WorkRefused, match="against 1 colluding client, and this round's noise holds against 0"):
        house.site().admit(offer, LAYOUT)


# --- what it costs ---

RELEASE = release_of(asked(1, is_private=True).assignment.secure.plan.noise)  # type: ignore[union-attr,arg-type]  # it is private
OTHER = RunId("other")


def kept(house: House) -> SecureStore:
    return SecureStore(house.directory / "secure")


def test_a_private_round_is_charged_when_it_is_admitted(house: House) -> None:
    """Whatever becomes of it then may hang on the data, and so it costs."""
    house.site().admit(bound(asked(1, is_private=True), FIRST), LAYOUT)
    assert kept(house).spent(RunId("demo"), 1e-6) == Ledger(1e-6).after(RELEASE)


def test_one_that_the_policy_refuses_costs_nothing(house: House) -> None:
    house.policy = replace(house.policy, epsilon=1e-6)
    with pytest.raises(WorkRefused, match="would bring this site's privacy cost for the run to"):
        house.site().admit(bound(asked(1, is_private=True), FIRST), LAYOUT)
    assert kept(house).spent(RunId("demo"), 1e-6) == Ledger(1e-6)


def test_an_attempt_is_charged_once_though_it_is_offered_again_after_a_restart(house: House) -> None:
    first, second = (bound(asked(round_, is_private=True), FIRST) for round_ in (1, 2))
    house.site().admit(first, LAYOUT)
    for _ in range(3):
        with pytest.raises(AttemptRefused, match="already began this attempt"):
            house.site().admit(first, LAYOUT)
    assert kept(house).spent(RunId("demo"), 1e-6).n_rounds == 1
    house.site().admit(second, LAYOUT)
    assert kept(house).spent(RunId("demo"), 1e-6).n_rounds == 2


def test_a_kill_before_the_charge_is_written_leaves_an_attempt_that_is_not_begun_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = bound(asked(1, is_private=True), FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(SecureStore, "spend", killed)
        with pytest.raises(KeyboardInterrupt):
            house.site().admit(offer, LAYOUT)
    with pytest.raises(AttemptRefused, match="already began this attempt"):
        house.site().admit(offer, LAYOUT)
    assert kept(house).spent(RunId("demo"), 1e-6).n_rounds == 0, "nothing was trained in it"


def killed(*_args: object) -> None:
    raise KeyboardInterrupt


def test_who_has_come_is_held_against_the_budget_without_a_second_charge(house: House) -> None:
    """The budget is that of one round, to the last digit."""
    house.policy = replace(house.policy, epsilon=Ledger(1e-6).after(RELEASE).epsilon)
    site, offer = house.site(), bound(asked(1, is_private=True), FIRST)
    site.admit(offer, LAYOUT)
    adverts = tuple(AdvertiseKeys(index, bytes(32), bytes(32), bytes(64)) for index in range(10))
    site.check_roster(offer, Roster(bytes(32), adverts), LAYOUT)
    assert kept(house).spent(RunId("demo"), 1e-6).n_rounds == 1


@pytest.mark.parametrize("coordinator", ["here", "elsewhere"])
@pytest.mark.parametrize(("n_before", "is_taken"), [(1, True), (2, False)])
def test_a_budget_may_be_for_all_runs_of_all_coordinators(
    house: House, coordinator: str, n_before: int, is_taken: bool
) -> None:
    """It is that of two rounds; this is the first one of its run."""
    store = SecureStore(house.directory / coordinator / "secure")
    store.spend(OTHER, Ledger(1e-9).after(RELEASE, n_before))
    budget = Ledger(1e-6).after(RELEASE, 2).epsilon
    house.policy = replace(house.policy, epsilon=budget, epsilon_total=1.0001 * budget)
    offer = bound(asked(1, is_private=True), FIRST)
    if is_taken:
        house.site().admit(offer, LAYOUT)
        return
    with pytest.raises(WorkRefused, match=r"for all runs together to epsilon .*, and its budget \(epsilon_total\) is"):
        house.site().admit(offer, LAYOUT)


@pytest.mark.parametrize("budget", ["epsilon", "epsilon_total"])
def test_rounds_are_held_against_a_budget_at_one_order_whatever_another_would_say(house: House, budget: str) -> None:
    """A coordinator that chooses each round's noise by what it has seen would choose the order with it."""
    divergences = tuple(0.0 if order == 40 else 50.0 for order in ORDERS)
    kept(house).spend(RunId("demo"), Ledger(1e-6, 1, divergences))
    within = kept(house).spent(RunId("demo"), 1e-6).after(RELEASE).epsilon
    house.policy = replace(house.policy, **{budget: 1.01 * within})  # type: ignore[arg-type]  # a budget by name
    with pytest.raises(WorkRefused, match=budget):
        house.site().admit(bound(asked(2, is_private=True), FIRST), LAYOUT)


def test_a_site_that_can_remember_no_more_sums_takes_part_in_none(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not read through them first: each offer would have it read all of it."""
    monkeypatch.setattr("umbel.client.state.secure_store.SUMS_BYTES_MAX", 9)
    (house.directory / "secure" / "sums").mkdir(parents=True)
    (house.directory / "secure" / "sums" / "demo.json").write_bytes(b"unreadable")
    with pytest.raises(WorkRefused, match="more than the"):
        house.site().admit(bound(asked(1), FIRST), LAYOUT)
    assert kept(house).begun(RunId("demo")) is None


def test_a_run_that_goes_on_is_counted_once_in_the_budget_of_all(tmp_path: Path) -> None:
    """Its own ledger stands among the others' on the disk."""
    house = House(tmp_path)
    house.policy = replace(house.policy, epsilon_total=1.0001 * Ledger(1e-6).after(RELEASE, 2).epsilon)
    kept_here = SecureStore(tmp_path / "home" / "secure")
    for round_ in (1, 2):
        site = Site(RunId("demo"), Identity(WARD, identity(WARD)), house.policy, tmp_path, kept_here)
        site.admit(bound(asked(round_, is_private=True), FIRST), LAYOUT)
    third = bound(asked(3, is_private=True), FIRST)
    with pytest.raises(WorkRefused, match="epsilon_total"):
        Site(RunId("demo"), Identity(WARD, identity(WARD)), house.policy, tmp_path, kept_here).admit(third, LAYOUT)


def test_two_runs_at_work_at_once_do_not_spend_the_same_rest_of_a_budget(tmp_path: Path) -> None:
    """The second run decides while the first one does: it must see what the first one has spent."""
    house = House(tmp_path)
    house.policy = replace(house.policy, epsilon_total=1.0001 * Ledger(1e-6).after(RELEASE).epsilon)
    kept_here, refused = SecureStore(tmp_path / "home" / "secure"), list[WorkRefused]()

    def admit() -> None:
        site = Site(RunId("demo"), Identity(WARD, identity(WARD)), house.policy, tmp_path, kept_here)
        try:
            site.admit(bound(asked(1, is_private=True), FIRST), LAYOUT)
        except WorkRefused as error:
            refused.append(error)

    second = threading.Thread(target=admit)
    with SecureStore(tmp_path / "home" / "secure").alone():
        second.start()
        second.join(0.2)  # time enough to decide, if it did not wait
        kept_here.spend(RunId("other"), Ledger(1e-6).after(RELEASE))
    second.join()
    assert ["epsilon_total" in str(error) for error in refused] == [True]
    assert kept_here.spent(RunId("demo"), 1e-6).n_rounds == 0


# --- what the run was listed with ---


def site_that_decided(folder: Path, decided: DecidedTerms | None) -> Site:
    kept_here = SecureStore(folder / "secure")
    return Site(RunId("demo"), Identity(WARD, identity(WARD)), None, folder, kept_here, decided=decided)


@pytest.mark.parametrize("decided", [None, DecidedTerms(False, 1, False), DecidedTerms(True, 3, False)])
def test_a_run_that_was_listed_with_secure_aggregation_gets_no_other_round(
    tmp_path: Path, decided: DecidedTerms | None
) -> None:
    is_secure = decided is not None and decided.is_secure
    with pytest.raises(WorkRefused, match="listed this run as one with secure") if is_secure else nullcontext():
        site_that_decided(tmp_path, decided).check_plain(LAYOUT)


NOISY = under(asked(1, is_private=True), plan={"minimum": 4})
BARE = under(asked(1), plan={"minimum": 4})


@pytest.mark.parametrize(
    ("decided", "offer", "words"),
    [
        (DecidedTerms(True, 5, True), NOISY, r"sums of at least 5 clients, and a sum of this round may have only 4"),
        (DecidedTerms(True, 4, True), BARE, "as one whose clients add noise, and this round has no noise"),
        (DecidedTerms(True, 4, True), NOISY, ""),
        (DecidedTerms(True, 3, False), NOISY, ""),
        (DecidedTerms(True, 4, False), BARE, ""),
        (DecidedTerms(False, 9, False), BARE, ""),
        (None, BARE, ""),
    ],
)
def test_a_round_that_hides_less_than_the_run_was_listed_with_is_refused(
    tmp_path: Path, decided: DecidedTerms | None, offer: SecureInvitation, words: str
) -> None:
    site = site_that_decided(tmp_path, decided)
    if not words:
        assert site.admit(offer, LAYOUT).composition == offer.composition
        return
    with pytest.raises(WorkRefused, match=words):
        site.admit(offer, LAYOUT)
    assert SecureStore(tmp_path / "secure").begun(RunId("demo")) is None, "before it does anything"
