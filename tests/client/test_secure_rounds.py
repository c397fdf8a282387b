"""A whole client in secure rounds, against a coordinator in memory that may fail or lie at each step."""

import base64
import functools
import json
import logging
import math
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from tests.client.doubles.double import TOKEN, URL, Double, Handler, problem, stream
from tests.client.doubles.secure_double import PEERS, WARD, SecureDouble, peer_key
from tests.federations.consortium import OFFICERS, public_key, signed
from umbel.aggregation.plans.assignment import SecureOffer
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.privacy.section import release_of
from umbel.aggregation.privacy.sensitivity import rounded_bound
from umbel.aggregation.secagg.messages import AdvertiseKeys, Roster, encode_agreements, encode_indices
from umbel.aggregation.trust.members import MemberList, members_bytes
from umbel.aggregation.trust.public_keys import grouped
from umbel.aggregation.types import RunId
from umbel.client import Client, Evaluation, LocalPlan, RunEnd, SitePolicy, TrainResult, run_client
from umbel.client.errors import Alarm, CoordinatorGone, CoordinatorMisbehaved, UnfitWork, WorkRefused
from umbel.client.rounds.shutdown import Shutdown
from umbel.client.state.failures import FAILURES_MAX
from umbel.client.state.secure_store import RememberedSum
from umbel.client.state.store import Store

SAMPLES, LOSS = 613, 0.7853981633974483  # no other number of the test looks like these
LOST_KEYS = (
    "this client already began this attempt, and a restart or an error lost its keys; "
    "it can take part in the next attempt"
)


class Ward(Client):
    """Adds three quarters to every weight."""

    def __init__(self) -> None:
        self.model, self.sample_count = nn.Linear(30, 10), SAMPLES
        self.seeds: list[int] = []

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.seeds.append(plan.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.75)
        return TrainResult(self.sample_count, 4, 4, {"loss": LOSS, "odd": float("nan")})

    def evaluate(self, model: nn.Module) -> Evaluation:
        return Evaluation(3, {"accuracy": 0.5})


class Crash(BaseException):
    """Stands for kill -9: nothing in the client may catch it."""


class Hasty(Shutdown):
    """Waits for nothing. `waits`: in seconds, those of a second or more."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits += [seconds] if seconds >= 1 else []
        super().wait(0.0)


def take_part(
    tmp_path: Path,
    double: SecureDouble,
    app: Client | None = None,
    policy: SitePolicy | None = None,
    wrap: Callable[[Handler], Handler] = lambda handler: handler,
    shutdown: Shutdown | None = None,
    **terms: Any,
) -> RunEnd:
    terms |= {"policy": policy, "transport": double.transport(wrap), "shutdown": shutdown or Hasty()}
    return run_client(app or Ward(), URL, tmp_path / "state", "demo", TOKEN, WARD, **terms)


def listed(tmp_path: Path, double: SecureDouble, **changes: object) -> SitePolicy:
    """A policy that names a member list with everyone in it; the coordinator has it, too."""
    own = Store(tmp_path / "state", URL).identity(WARD).public_key
    keys = {WARD: own, **{name: peer_key(name) for name in double.peers}}
    double.members = MemberList("pilot", 1, keys, {name: public_key(name) for name in OFFICERS}, 2)
    (tmp_path / "pilot.json").write_bytes(members_bytes(signed(double.members, *OFFICERS)))
    policy = SitePolicy("required", tmp_path / "pilot.json", double.members.sha256)
    return replace(policy, **changes)  # type: ignore[arg-type]  # what replace takes is known to the tests alone


def remembered(tmp_path: Path) -> tuple[RememberedSum, ...]:
    return Store(tmp_path / "state", URL).secure.sums(RunId("demo"))


# --- what goes as it should ---


def test_rounds_are_summed_and_nothing_else_is_told(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model, rounds=3)
    end = take_part(tmp_path, double, policy=listed(tmp_path, double))
    assert (end.status, end.reports, end.accepted, end.masked, end.opened) == ("finished", 3, 3, 3, 3)
    assert set(double.counts) == {0}, "nobody has asked for the sample count"
    for one in double.totals:
        assert (one.n_clients, one.sample_count, one.n_partial) == (5, SAMPLES + 40, 0)
        assert one.metrics["loss"] == pytest.approx((SAMPLES * LOSS + 40 * 0.5) / (SAMPLES + 40), abs=1e-6)
        mean = (SAMPLES * 0.75 + 40 * 0.25) / (SAMPLES + 40)
        assert torch.allclose(one.mean.mean_slice(0, 310), torch.full((310,), mean, dtype=torch.float64), atol=0.02)


def test_what_goes_up_holds_no_count_and_no_loss(tmp_path: Path) -> None:
    double, up = SecureDouble(Ward().model), list[bytes]()

    def listen(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            up.append(str(request.url).encode() + request.read())
            return handler(request)

        return handle

    take_part(tmp_path, double, policy=listed(tmp_path, double), wrap=listen)
    said = b"\n".join(up)
    assert len(said) > 1000
    for canary in canaries():
        assert canary not in said
    (upload,) = double.uploads.values()
    counts = torch.bincount(torch.frombuffer(upload.data[64:], dtype=torch.uint8).to(torch.int64), minlength=256)
    assert int((counts > 0).sum()) > 200, "the bytes look like any"


def canaries() -> list[bytes]:
    """The count and the loss, in the spellings in which they could be somewhere."""
    return [
        struct.pack("<q", SAMPLES),
        struct.pack("<d", LOSS),
        str(LOSS)[:8].encode(),
        f": {SAMPLES}".encode(),
        f":{SAMPLES}".encode(),
    ]


def test_nothing_secret_is_on_disk_at_any_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    double, secrets = SecureDouble(Ward().model, rounds=2), list[bytes]()
    draw = os.urandom

    def drawn(n_bytes: int) -> bytes:
        secrets.append(draw(n_bytes))
        return secrets[-1]

    monkeypatch.setattr(os, "urandom", drawn)
    policy, n_files = listed(tmp_path, double), Counter[str]()

    def look(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            answer = handler(request)
            for path in (tmp_path / "state").rglob("*"):
                if path.is_file():
                    data = path.read_bytes() if path.exists() else b""
                    n_files[path.name] += 1
                    keys = [secret for secret in secrets if len(secret) == 32]
                    written = [form for key in keys for form in (key, key.hex().encode(), base64.b64encode(key))]
                    assert not any(one in data for one in [*written, *canaries()]), path
            return answer

        return handle

    take_part(tmp_path, double, policy=policy, wrap=look)
    assert sum(len(secret) == 32 for secret in secrets) >= 6
    assert n_files["update.bin"]
    assert not n_files["report.json"] + n_files["checkpoint.safetensors"]
    assert not list(tmp_path.rglob("pending/*"))


def test_a_sum_that_is_still_under_way_is_given_its_shares_again(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    double.open_again = 2
    end = take_part(tmp_path, double)
    assert (end.status, end.accepted) == ("finished", 1)
    (said,) = [said for (_, phase), said in double.said.items() if phase == "unmasking"]
    assert len(said) == 3
    assert len(set(said)) == 1


def test_a_line_that_loses_the_first_answer_of_every_request(tmp_path: Path) -> None:
    double, lost = SecureDouble(Ward().model, rounds=2), Counter[str]()

    def lose(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            answer, kind = handler(request), f"{request.method} {request.url.path}"
            lost[kind] += 1
            if lost[kind] == 1 and "secure" in kind:
                raise httpx.ReadError("cut")
            return answer

        return handle

    end = take_part(tmp_path, double, wrap=lose)
    assert (end.status, end.accepted) == ("finished", 2)
    assert len(double.said) == 2 * 4
    assert all(len(said) == 2 and said[0] == said[1] for said in double.said.values()), "the same bytes again"


@pytest.mark.parametrize("phase", ["advertise-keys", "share-keys", "masked-input", "update", "report", "unmasking"])
def test_a_client_that_was_told_to_give_up_ends_when_the_coordinator_is_silent(tmp_path: Path, phase: str) -> None:
    double, silent = SecureDouble(Ward().model), threading.Event()

    def silence(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith(phase):
                silent.set()
            if silent.is_set():
                raise httpx.ConnectError("nobody listens")
            return handler(request)

        return handle

    with pytest.raises(CoordinatorGone):
        take_part(tmp_path, double, wrap=silence, shutdown=Shutdown(), give_up_after_s=0.2)
    assert silent.is_set()
    assert "PUT unmasking" not in double.log


@pytest.mark.parametrize("phase", ["advertise-keys", "share-keys", "masked-input", "update", "report", "unmasking"])
def test_a_login_page_of_the_network_is_waited_out_in_every_phase(tmp_path: Path, phase: str) -> None:
    double, n = SecureDouble(Ward().model), 0

    def behind_a_portal(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            nonlocal n
            is_page = (request.url.path.endswith(phase) or n > 0) and n < 3
            n += is_page
            return stream(200, b"<html>Sign in", {"Content-Type": "text/html"}) if is_page else handler(request)

        return handle

    end = take_part(tmp_path, double, wrap=behind_a_portal, shutdown=Shutdown(), give_up_after_s=60.0)
    assert (end.status, end.accepted, n) == ("finished", 1, 3)
    assert "PUT decline" not in double.log


def test_a_coordinator_that_needs_the_count_is_told_it(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model, rounds=2)
    double.needs_count = True
    take_part(tmp_path, double)
    assert double.counts == [0, SAMPLES, SAMPLES, SAMPLES]


def test_not_where_the_policy_keeps_it(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    double.needs_count = True
    with pytest.raises(WorkRefused, match="share_sample_count"):
        take_part(tmp_path, double, policy=SitePolicy(share_sample_count=False))
    assert double.counts == [0]


@pytest.mark.parametrize("outcome", ["late", "surplus"])
def test_a_report_that_does_not_count_is_forgotten(tmp_path: Path, outcome: str) -> None:
    double = SecureDouble(Ward().model)
    double.outcome = outcome
    end = take_part(tmp_path, double)
    assert (end.status, end.reports, end.accepted, end.opened) == ("finished", 1, 0, 0)
    assert "PUT consistency-check" not in double.log
    assert not list(tmp_path.rglob("pending/*"))


@pytest.mark.parametrize("phase", ["advertise-keys", "share-keys", "masked-input", "consistency-check", "unmasking"])
def test_a_round_that_goes_on_without_this_client(tmp_path: Path, phase: str) -> None:
    double = SecureDouble(Ward().model, rounds=2)
    double.over_in = phase

    def go_on(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            answer = handler(request)
            if answer.status_code == 409 and double.over_in:
                double.over_in, double.round = "", 2
            return answer

        return handle

    end = take_part(tmp_path, double, wrap=go_on)
    assert end.status == "finished"
    assert len(double.totals) == 1
    assert double.declined == {}
    assert end.opened == 1, "of the other it is not known what became of it, if its report was in"
    assert end.accepted == end.masked == (2 if phase in AFTER_INPUT else 1)


# --- what goes wrong ---


def another_roster(told: bytes) -> bytes:
    roster = Roster.decode(told, 9)
    return Roster(roster.opening, roster.adverts[:-1]).encode()


def forged_roster(told: bytes) -> bytes:
    roster = Roster.decode(told, 9)
    first = roster.adverts[0]
    forged = AdvertiseKeys(first.index, first.mask_key, first.channel_key, first.signature)
    return Roster(roster.opening, (forged, *roster.adverts[1:])).encode()


LIES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "a roster without this client": ("share-keys", another_roster, "contradicts itself"),
    "a key that is not its owner's": ("share-keys", forged_roster, "not signed by its stated sender"),
    "a roster that is cut": ("share-keys", lambda told: told[:-1], "breaks the protocol"),
    "an opening of another graph": ("share-keys", lambda told: told[:4] + bytes(32) + told[36:], "contradicts itself"),
    "an inbox that is cut": ("masked-input", lambda told: told[:-1], "breaks the protocol"),
    "this client is not in the sum": ("consistency-check", lambda _: encode_indices(range(4)), "contradicts itself"),
    "a sum of one": ("consistency-check", lambda _: encode_indices([4]), "too few clients"),
    "a sum with a stranger": ("consistency-check", lambda _: encode_indices(range(9)), "breaks the protocol"),
    "nobody has agreed": ("unmasking", lambda _: encode_agreements({}), "too few clients"),
    "nobody's agreement": (
        "unmasking",
        lambda told: told[:-1] + bytes([told[-1] ^ 1]),
        "not signed by its stated sender",
    ),
}


@pytest.mark.parametrize(("phase", "lie", "sentence"), LIES.values(), ids=LIES.keys())
def test_a_lie_ends_the_attempt_with_an_alarm(
    tmp_path: Path,
    phase: str,
    lie: Callable[[bytes], bytes],
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    double = SecureDouble(Ward().model)
    double.told[phase] = lie
    with pytest.raises(Alarm, match=sentence):
        take_part(tmp_path, double)
    assert len(double.declined) == 3, "each attempt is declined, and then a person should look"
    for reason in double.declined.values():
        assert sentence in reason
        assert not any(character.isdigit() for character in reason)
    assert [record.levelno for record in caplog.records if sentence in record.message] == [logging.ERROR] * 3
    after = {
        "share-keys": {"advertise-keys"},
        "masked-input": {"advertise-keys", "share-keys"},
        "consistency-check": {"advertise-keys", "share-keys"},
        "unmasking": {"advertise-keys", "share-keys", "consistency-check"},
    }
    assert {said for _, said in double.said} == after[phase], "nothing is said after it"
    assert not any(one.is_revealed for one in remembered(tmp_path))


def test_two_different_sums_are_an_alarm(tmp_path: Path) -> None:
    """The first is taken; what it is unmasked with is signed over another."""
    double = SecureDouble(Ward().model)
    double.told["consistency-check"] = lambda _: encode_indices(range(1, 5))
    with pytest.raises(Alarm, match="not signed by its stated sender"):
        take_part(tmp_path, double)


OFFERS: dict[str, Callable[[SecureOffer], SecureOffer]] = {
    "an unknown client": lambda offer: replace(offer, cohort=(*offer.cohort, ("zoe", peer_key("zoe")))),
    "another key": lambda offer: replace(offer, cohort=(("peer-1", peer_key("zoe")), *offer.cohort[1:])),
}


@pytest.mark.parametrize("change", OFFERS.values(), ids=OFFERS.keys())
def test_a_cohort_that_is_not_of_the_list_is_declined_until_it_is(
    tmp_path: Path, change: Callable[[SecureOffer], SecureOffer], caplog: pytest.LogCaptureFixture
) -> None:
    """However often: who was enrolled by mistake ends no site."""
    double, n_times = SecureDouble(Ward().model), FAILURES_MAX + 1
    policy = listed(tmp_path, double)

    def with_stranger(offer: SecureOffer) -> SecureOffer:
        if len(double.declined) == n_times:
            return offer
        return change(replace(offer, plan=replace(offer.plan, clients_max=6)))

    double.change_offer = with_stranger
    assert take_part(tmp_path, double, policy=policy).accepted == 1
    assert list(double.declined.values()) == ["the cohort has clients that are not on the member list"] * n_times
    assert {assignment for assignment, _ in double.said} == {f"demo.1.{n_times + 1}.ward-7"}, "nothing before it"
    logged = [one.getMessage() for one in caplog.records if "not on member list 'pilot', epoch 1" in one.getMessage()]
    assert len(logged) == n_times
    assert all("umbel run create --members" in line and "umbel client remove" in line for line in logged)


def test_a_client_that_is_not_on_its_own_list_leaves(tmp_path: Path) -> None:
    """It waits for nobody else's mistake, and no round will be another one."""
    double = SecureDouble(Ward().model)
    policy = listed(tmp_path, double)
    assert double.members is not None
    members = {name: key for name, key in double.members.members.items() if name != WARD}
    double.members = replace(double.members, members=members)
    (tmp_path / "pilot.json").write_bytes(members_bytes(signed(double.members, *OFFICERS)))
    with pytest.raises(Alarm, match="Ask an officer to compare the key's fingerprint"):
        take_part(tmp_path, double, policy=replace(policy, members_sha256=double.members.sha256))
    assert not double.said
    assert set(double.declined.values()) == {"this client is not on the member list with its own key"}


def test_another_key_for_this_very_client_is_an_alarm(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    double.change_offer = lambda offer: replace(offer, cohort=(*offer.cohort[:-1], (WARD, peer_key("zoe"))))
    with pytest.raises(Alarm, match="another key for this client"):
        take_part(tmp_path, double)
    assert not double.said


def test_a_round_of_another_member_list_is_refused(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    policy = listed(tmp_path, double)
    double.change_offer = lambda offer: replace(offer, members_sha256="ab" * 32)
    with pytest.raises(WorkRefused, match="another member list") as refused:
        take_part(tmp_path, double, policy=policy)
    assert not double.said
    assert double.members is not None
    assert "names another member list (ABAB ABAB ABAB ABAB), but this site trusts" in str(refused.value)
    assert f"'pilot', epoch 1 ({grouped(double.members.sha256)[:19]})" in str(refused.value)
    assert f'members_sha256 = "{double.members.sha256}"' in str(refused.value)


def test_a_round_that_is_bound_to_no_list_is_refused_with_the_line_that_binds_it(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    policy = listed(tmp_path, double)
    double.change_offer = lambda offer: replace(offer, members_sha256="")
    with pytest.raises(WorkRefused, match="this round names no member list, but this site trusts") as refused:
        take_part(tmp_path, double, policy=policy)
    assert f'list the run file needs members_sha256 = "{policy.members_sha256}"' in str(refused.value)


def test_a_list_that_is_pinned_holds_without_a_policy_too(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    take_part(tmp_path, double, policy=listed(tmp_path, double))
    again = SecureDouble(Ward().model, rounds=2)
    again.keys, again.tokens, again.round = double.keys, double.tokens, 2
    with pytest.raises(WorkRefused, match="this round names no member list, but this site trusts"):
        take_part(tmp_path, again)


UNUSABLE: dict[str, Callable[[SecureOffer], SecureOffer]] = {
    "a name that is none": lambda offer: replace(offer, cohort=(("Peer\x1b[2J", peer_key("zoe")), *offer.cohort[1:])),
    "a key that is none": lambda offer: replace(offer, cohort=(("peer-1", "AAAA"), *offer.cohort[1:])),
    "the same client twice": lambda offer: replace(offer, cohort=(offer.cohort[0], *offer.cohort)),
    "a window without end": lambda offer: replace(offer, window_s=1e300),
    "more draws than anybody has": lambda offer: replace(offer, draws=99),
    "no attempt": lambda offer: replace(offer, attempt_id="x"),
    "a minimum above the cohort": lambda offer: replace(offer, plan=replace(offer.plan, clients_max=9, minimum=9)),
}


@pytest.mark.parametrize("change", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_an_offer_that_no_secure_round_has_is_refused(
    tmp_path: Path, change: Callable[[SecureOffer], SecureOffer]
) -> None:
    double = SecureDouble(Ward().model)
    double.change_offer = change
    with pytest.raises(CoordinatorMisbehaved, match="invalid secure round"):
        take_part(tmp_path, double)
    assert not double.said


def private_double(rounds: int = 1, **changes: float) -> SecureDouble:
    """`changes`: of the noise."""
    double = SecureDouble(Ward().model, rounds=rounds)
    noise = replace(NoisePlan.of(4.0, 10**9, 320, least=3, colluders=1), **changes)  # type: ignore[arg-type]
    double.plan = replace(double.plan, metrics=(), evaluation=(), weight_unit=1, noise=noise)
    double.codec = replace(double.codec, clip_norm=1.0)
    return double


def test_a_private_round_has_noise_and_no_count(tmp_path: Path) -> None:
    double = private_double()
    assert take_part(tmp_path, double).accepted == 1
    (one,) = double.totals
    assert (one.n_clients, one.sample_count, one.metrics) == (5, 5, {})


ENOUGH = rounded_bound(256.0, 320)  # for a norm of 1 on a step of 1 / 256


@pytest.mark.parametrize(
    "changes",
    [{"n_values": 321}, {"least": 4}, {"bound_squared": ENOUGH - 1}],
    ids=["length", "clients", "the length of an update"],
)
def test_noise_that_is_not_for_this_round_is_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    double = private_double(**changes)
    with pytest.raises(CoordinatorMisbehaved, match="invalid secure round: its noise"):
        take_part(tmp_path, double)


def test_noise_for_the_longest_update_that_the_clip_leaves_is_enough(tmp_path: Path) -> None:
    double = private_double(bound_squared=ENOUGH)
    assert double.codec.inverse_step == 256.0
    assert take_part(tmp_path, double).accepted == 1


@pytest.mark.parametrize("change", [{"clip_norm": None}, {"inverse_step": 2.0**70}], ids=["no clip", "too fine a step"])
def test_a_private_round_whose_noise_is_not_for_its_updates_is_refused(
    tmp_path: Path, change: dict[str, float | None]
) -> None:
    """What is longer than the noise is for is sent as zeros. Where that is all updates but one, the sum is that one."""
    double = private_double(variance_per_client=2.0**-20)
    double.codec = replace(double.codec, **change)  # type: ignore[arg-type]
    with pytest.raises(CoordinatorMisbehaved, match="invalid secure round"):
        take_part(tmp_path, double)
    assert not double.said


def test_a_private_round_that_weighs_its_updates_is_refused() -> None:
    """Divided by a great unit, a norm is far below the clip that the noise is for."""
    plan = private_double().plan
    with pytest.raises(ValueError, match="must have noise"):
        replace(plan, weight_unit=2)


@pytest.mark.slow
def test_a_budget_of_privacy_is_counted_by_the_site_itself_and_kept(tmp_path: Path) -> None:
    double = private_double(rounds=2, variance_per_client=1e9)
    double.plan = replace(double.plan, bits=24)
    assert double.plan.noise is not None
    cost = Ledger(1e-6).after(release_of(double.plan.noise)).epsilon
    with pytest.raises(WorkRefused, match="this round would bring this site's privacy cost for the run to"):
        take_part(tmp_path, double, policy=listed(tmp_path, double, epsilon=1.01 * cost))
    assert len(double.totals) == 1
    spent = json.loads(next(tmp_path.rglob("spent/*.json")).read_bytes())
    assert spent["n_rounds"] == 1


POLICIES: dict[str, tuple[dict[str, object], str]] = {
    "a cohort that is too small": ({"minimum_cohort": 6}, "a sum of at least 6 clients"),
    "a minimum that is too low": ({"minimum_cohort": 4}, "could unmask a sum of 3"),
    "a model that is too large": ({"max_parameters": 300}, "this model has 310"),
    "a budget of privacy": ({"epsilon": 1.0}, "adds no noise"),
}


@pytest.mark.parametrize(("limits", "sentence"), POLICIES.values(), ids=POLICIES.keys())
def test_a_policy_is_kept_before_a_word_is_said(tmp_path: Path, limits: dict[str, object], sentence: str) -> None:
    double, app = SecureDouble(Ward().model), Ward()
    with pytest.raises(WorkRefused, match=sentence):
        take_part(tmp_path, double, app, listed(tmp_path, double, **limits))
    assert not double.said
    assert not app.seeds
    assert all(sentence in reason for reason in double.declined.values())


def test_a_cohort_that_does_not_suit_the_policy_is_declined_and_the_client_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four clients three open everything, which is too few for this site; of five it takes four."""
    double, app, shutdown = SecureDouble(Ward().model, rounds=2), Ward(), Hasty()
    policy = listed(tmp_path, double, threshold_share=0.75)

    def others_come(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            double.peers = PEERS if len(double.declined) == 8 and not double.totals else PEERS[1:]
            if len(double.declined) == 9:
                double.round = 3
            return handler(request)

        return handle

    end = take_part(tmp_path, double, app, policy, others_come, shutdown)
    assert (end.status, end.accepted, len(app.seeds)) == ("finished", 1, 1)
    assert all("at least 4 of 4" in reason for reason in double.declined.values())
    assert {assignment for assignment, _ in double.said} == {"demo.1.9.ward-7"}
    assert shutdown.waits == [1, 2, 4, 8, 16, 32, 60, 60, 1], "and from the start again, once it has taken part"
    said = [record.message for record in caplog.records if "round 1: this client declines: " in record.message]
    assert [message.rpartition(". ")[2] for message in said[2:4]] == [
        f"It asks for work again in {n} s" for n in (4, 8)
    ]


def test_who_waits_after_a_declined_attempt_leaves_at_once(tmp_path: Path) -> None:
    class Leaving(Shutdown):
        def wait(self, seconds: float) -> None:
            if seconds >= 1:
                self.request("the night is over")
            super().wait(seconds)

    double = SecureDouble(Ward().model)
    end = take_part(tmp_path, double, policy=listed(tmp_path, double, threshold_share=0.9), shutdown=Leaving())
    assert (end.status, end.reason) == ("interrupted", "the night is over")
    assert len(double.declined) == 1


def test_a_policy_without_a_list_takes_no_secure_round(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    with pytest.raises(WorkRefused, match="could otherwise make up the other clients"):
        take_part(tmp_path, double, policy=SitePolicy())


def test_without_a_policy_the_coordinator_is_believed_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double = SecureDouble(Ward().model, rounds=2)
    assert take_part(tmp_path, double).accepted == 2
    assert sum("this site has no member list" in record.message for record in caplog.records) == 1


def test_a_run_that_is_not_allowed_is_not_asked_for(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    with pytest.raises(WorkRefused, match="does not allow run 'demo'"):
        take_part(tmp_path, double, policy=SitePolicy(allowed_runs=("other",)))
    assert not double.log


def test_too_few_in_the_roster_for_the_policy(tmp_path: Path) -> None:
    """The cohort was large enough, and then not all of it came: one day it may, so that ends no client."""
    double = SecureDouble(Ward().model, peers=(*PEERS, "peer-5"))
    policy = listed(tmp_path, double, minimum_cohort=6)
    double.plan = replace(double.plan, minimum=6)
    double.told["share-keys"] = lambda told: Roster(told[4:36], Roster.decode(told, 9).adverts[1:]).encode()
    end = take_part(tmp_path, double, policy=policy, wrap=until_declined(double, 3, then=2))
    assert (end.status, end.reports) == ("finished", 0)
    assert all("a sum of at least 6 clients" in reason for reason in double.declined.values())
    assert {phase for _, phase in double.said} == {"advertise-keys"}


# --- killed, and once only ---


class Mortal(Ward):
    """A site that is killed while it trains, if its time has come; else it trains on once the keys are exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.is_dead = threading.Event()
        self.may_go_on = threading.Event()

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        while not self.may_go_on.wait(0.01):
            if self.is_dead.is_set():
                raise Crash
        return super().train(model, plan)

    def dying_at(self, at: str) -> Callable[[Handler], Handler]:
        """The request never arrives, nor does any other. The thread beside the training hears nothing any more."""
        method, _, word = at.partition(" ")

        def wrap(handler: Handler) -> Handler:
            def handle(request: httpx.Request) -> httpx.Response:
                if request.method == method and request.url.path.endswith(f"/{word}"):
                    self.is_dead.set()
                if self.is_dead.is_set():
                    raise Crash if threading.current_thread() is threading.main_thread() else httpx.ReadError("dead")
                if request.url.path.endswith("/masked-input"):
                    self.may_go_on.set()
                return handler(request)

            return handle

        return wrap


@pytest.mark.parametrize(
    "at", ["GET share-keys", "PUT share-keys", "GET masked-input", "POST update", "PUT report", "GET unmasking"]
)
def test_a_client_that_is_killed_goes_on_with_the_next_attempt(tmp_path: Path, at: str) -> None:
    double, mortal = SecureDouble(Ward().model), Mortal()
    with pytest.raises(Crash):
        take_part(tmp_path, double, mortal, wrap=mortal.dying_at(at))
    assert not list(tmp_path.rglob("report.json"))

    end = take_part(tmp_path, double)

    assert (end.status, end.accepted) == ("finished", 1)
    assert double.declined == {"demo.1.1.ward-7": LOST_KEYS}
    assert not list(tmp_path.rglob("pending/*"))
    first, second = (double.said[f"demo.1.{attempt}.ward-7", "advertise-keys"] for attempt in (1, 2))
    assert first[0][4:68] != second[0][4:68], "other keys"


def until_declined(double: SecureDouble, n_times: int, then: int) -> Callable[[Handler], Handler]:
    """The round is offered until it was declined so often; then the run goes on with another, of another model."""

    def wrap(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            answer = handler(request)
            if request.url.path.endswith("/decline") and len(double.declined) == n_times:
                double.round, double.attempt = then, 1
                double.change_model()
            return answer

        return handle

    return wrap


def test_a_site_may_give_no_second_update_for_a_round_in_which_it_has_revealed_shares(tmp_path: Path) -> None:
    double, mortal = SecureDouble(Ward().model, rounds=2), Mortal()
    policy = listed(tmp_path, double, retrain_after_release=False)
    with pytest.raises(Crash):
        take_part(tmp_path, double, mortal, policy, wrap=mortal.dying_at("PUT unmasking"))

    app = Ward()
    end = take_part(tmp_path, double, app, policy, wrap=until_declined(double, 3, then=2))

    assert (end.status, end.accepted) == ("finished", 1)
    assert double.declined.keys() == {f"demo.1.{attempt}.ward-7" for attempt in (1, 2, 3)}
    for reason in double.declined.values():
        assert "already revealed shares for round 1" in reason
    assert len(app.seeds) == 1
    assert [one.n_clients for one in double.totals] == [5]


@pytest.mark.parametrize("repeated", [1, 2])
def test_nor_for_a_round_before_it(tmp_path: Path, repeated: int) -> None:
    double = SecureDouble(Ward().model, rounds=2)
    policy = listed(tmp_path, double, retrain_after_release=False)
    take_part(tmp_path, double, policy=policy)
    double.repeats_round(repeated)
    end = take_part(tmp_path, double, policy=policy, wrap=until_declined(double, 1, then=3))
    assert (end.status, end.reports) == ("finished", 0)
    (reason,) = double.declined.values()
    assert "already revealed shares for round 2" in reason


def test_by_itself_it_gives_another_one_trained_anew(tmp_path: Path) -> None:
    """Two sums were of no use, the coordinator says, and one was cut off; each was opened to the end."""
    double, app, mortal = SecureDouble(Ward().model), Ward(), Mortal()
    double.fails_after_sum = 2
    policy = listed(tmp_path, double)
    with pytest.raises(Crash):
        take_part(tmp_path, double, mortal, policy, wrap=mortal.dying_at("PUT unmasking"))
    end = take_part(tmp_path, double, app, policy)
    assert (end.status, end.accepted) == ("finished", 3)
    assert [one.n_clients for one in double.totals] == [5, 5, 5]
    assert double.declined == {"demo.1.1.ward-7": LOST_KEYS}
    assert len({*mortal.seeds, *app.seeds, 1001}) == 5, "each from a seed of its own, none from the coordinator's"
    assert [(one.round, one.is_revealed) for one in remembered(tmp_path)] == [(1, True)] * 4


def test_no_secure_round_is_trained_from_the_seed_that_the_coordinator_gives(tmp_path: Path) -> None:
    double, app = SecureDouble(Ward().model, rounds=3), Ward()
    double.keeps_model = True
    take_part(tmp_path, double, app)
    assert len(set(app.seeds)) == 3
    assert not {1001, 1002, 1003} & set(app.seeds)


def test_that_a_sum_may_hold_its_update_is_on_disk_before_the_update_leaves(tmp_path: Path) -> None:
    """And whose the sum is before that is signed, and that shares were revealed before they are."""
    double, before = SecureDouble(Ward().model), dict[str, list[tuple[int, bool]]]()

    def look(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            kind = f"{request.method} {request.url.path.rpartition('/')[2]}"
            before[kind] = [(len(one.clients), one.is_revealed) for one in remembered(tmp_path)]
            return handler(request)

        return handle

    take_part(tmp_path, double, wrap=look)
    assert before["PUT share-keys"] == []
    assert before["POST update"] == [(0, False)]
    assert before["PUT consistency-check"] == [(5, False)]
    assert before["PUT unmasking"] == [(5, True)]
    (one,) = remembered(tmp_path)
    assert (one.round, one.cohort, one.clients) == (1, (*PEERS, WARD), (*PEERS, WARD))


# --- who is in the sum, from round to round ---


def shrink(double: SecureDouble) -> Callable[[Handler], Handler]:
    """After the first round a client is asked no more."""

    def wrap(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            answer = handler(request)
            if double.totals:
                double.peers = PEERS[1:]
            return answer

        return handle

    return wrap


def test_a_cohort_that_has_lost_one_client_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = SecureDouble(Ward().model, rounds=2)
    policy = listed(tmp_path, double, cohort_change="warn")
    assert take_part(tmp_path, double, policy=policy, wrap=shrink(double)).accepted == 2
    found = [record.message for record in caplog.records if "differ only by peer-1, so" in record.message]
    assert len(found) == 1, "when it is asked, and not again when the sum is opened"


@pytest.mark.parametrize("cohort_change", [None, "refuse"], ids=["by itself", "in so many words"])
def test_or_refused_if_the_policy_names_a_list(
    tmp_path: Path, cohort_change: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    double = SecureDouble(Ward().model, rounds=2)
    policy = listed(tmp_path, double, cohort_change=cohort_change)
    wrap = both(shrink(double), until_declined(double, 3, then=3))
    end = take_part(tmp_path, double, policy=policy, wrap=wrap)
    assert (end.status, end.accepted) == ("finished", 1), "three refusals in a row, and it goes on"
    assert len(double.declined) == 3
    assert all("differ only by peer-1, so" in reason for reason in double.declined.values())
    logged = [record for record in caplog.records if "this client declines: " in record.message]
    assert [record.levelname for record in logged] == ["WARNING"] * 3
    assert all("differ only by peer-1, so" in record.message for record in logged)
    assert {assignment for assignment, _ in double.said} == {"demo.1.1.ward-7"}


@pytest.mark.parametrize(
    ("masked", "evaluations", "words"),
    [
        (4, 1, "3 masked updates and 1 masked evaluation sent"),
        (1, 0, "1 masked update sent"),
        (2, 2, "2 masked evaluations sent"),
    ],
)
def test_an_evaluation_is_not_called_an_update(masked: int, evaluations: int, words: str) -> None:
    end = RunEnd("ward-7", "demo", "finished", "", masked, masked, masked, 1, evaluations)
    assert end.reports_in_words == f"{words}; this client helped to unmask the sums of 1 of them"


def test_a_sum_that_has_lost_one_client_is_not_signed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = SecureDouble(Ward().model, rounds=2)
    double.told["consistency-check"] = lambda told: encode_indices(range(1, 5)) if double.totals else told
    policy = listed(tmp_path, double, cohort_change="refuse")
    shutdown = Hasty()
    wrap = until_declined(double, 1, then=3)
    end = take_part(tmp_path, double, policy=policy, wrap=wrap, shutdown=shutdown)
    assert (end.status, end.accepted, end.opened) == ("finished", 2, 1)
    assert end.reports_in_words == "2 masked updates sent; this client helped to unmask the sums of 1 of them"
    assert shutdown.waits == [1], "an attempt that it declined late is one too"
    assert sum("does not sign this sum and reveals no shares" in record.message for record in caplog.records) == 1
    assert not [phase for assignment, phase in double.said if assignment.startswith("demo.2") and phase in AFTER_INPUT]
    (reason,) = double.declined.values()
    assert double.declined.keys() == {"demo.2.1.ward-7"}
    assert "differ only by peer-1, so" in reason, "so that nobody waits for its signature"


def test_a_refusal_that_the_coordinator_does_not_take_ends_nothing(tmp_path: Path) -> None:
    """Then the time for its signature has to run out; the client goes on."""
    double = SecureDouble(Ward().model, rounds=2)
    double.told["consistency-check"] = lambda told: encode_indices(range(1, 5)) if double.totals else told

    def deaf(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if not request.url.path.endswith("/decline"):
                return handler(request)
            double.round, double.attempt = 3, 1
            double.change_model()
            return problem(404, "not-found")

        return handle

    policy = listed(tmp_path, double, cohort_change="refuse")
    end = take_part(tmp_path, double, policy=policy, wrap=deaf)
    assert (end.status, end.accepted) == ("finished", 2)


def test_the_same_model_with_one_client_less_is_refused_by_any_policy(tmp_path: Path) -> None:
    """The coordinator calls it the next round. The difference of the two sums would be peer-1's update."""
    double, app = SecureDouble(Ward().model, rounds=2), Ward()
    double.keeps_model = True
    wrap = both(shrink(double), until_declined(double, 3, then=3))
    end = take_part(tmp_path, double, app, listed(tmp_path, double), wrap)
    assert (end.status, end.accepted) == ("finished", 1)
    assert all("over the same model" in reason for reason in double.declined.values())
    assert len(double.totals) == len(app.seeds) == 1


def test_so_is_a_sum_over_it_of_which_one_was_left_out(tmp_path: Path) -> None:
    """All are invited again, so it hangs on who is in the sum."""
    double, app = SecureDouble(Ward().model, rounds=2), Ward()
    double.keeps_model = True
    double.told["consistency-check"] = lambda told: encode_indices(range(1, 5)) if double.totals else told
    end = take_part(tmp_path, double, app, listed(tmp_path, double), until_declined(double, 1, then=3))
    assert (end.status, end.accepted, len(app.seeds)) == ("finished", 2, 2)
    assert [one.clients for one in remembered(tmp_path)] == [(*PEERS, WARD), ()], "the second was not signed"
    assert not [phase for assignment, phase in double.said if assignment.startswith("demo.2") and phase in AFTER_INPUT]


def both(*wraps: Callable[[Handler], Handler]) -> Callable[[Handler], Handler]:
    return lambda handler: functools.reduce(lambda inner, wrap: wrap(inner), wraps, handler)


AFTER_INPUT = ("consistency-check", "unmasking")


# --- leaving, and failing ---


def test_who_is_told_to_leave_stays_until_the_sum_is_opened(tmp_path: Path) -> None:
    double, shutdown = SecureDouble(Ward().model, rounds=3), Shutdown()

    class Leaving(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            shutdown.request("the night is over")
            return super().train(model, plan)

    end = take_part(tmp_path, double, Leaving(), shutdown=shutdown)
    assert (end.status, end.accepted) == ("interrupted", 1)
    assert len(double.totals) == 1


def test_training_that_fails_says_no_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = SecureDouble(Ward().model)

    class Failing(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            raise ValueError(f"{SAMPLES} samples, loss {LOSS}")

    with pytest.raises(UnfitWork, match="the client's own code failed with ValueError"):
        take_part(tmp_path, double, Failing())
    assert set(double.declined.values()) == {"this client does not take part in this attempt"}, "not even the type"
    told = [one for one in caplog.records if "own code failed with ValueError" in one.message and one.exc_info]
    assert len(told) == len(double.declined), "the site's log has one line and one traceback for each failure"
    assert len([one for one in caplog.records if "client's own code failed" in one.message]) <= len(told) + 1
    assert not {phase for _, phase in double.said} & {"consistency-check", "unmasking"}


UNFIT: dict[str, tuple[TrainResult, float, str]] = {
    "no step": (
        TrainResult(3, 0, 4),
        0.5,
        "steps_done = 0 and steps_planned = 4: steps_done must be between 1 and steps_planned",
    ),
    "not finite": (TrainResult(3, 1, 1), float("nan"), "the update is not finite"),
}


@pytest.mark.parametrize(("result", "shift", "sentence"), UNFIT.values(), ids=UNFIT.keys())
def test_work_that_must_not_be_sent_is_declined(
    tmp_path: Path, result: TrainResult, shift: float, sentence: str
) -> None:
    class Unfit(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            with torch.no_grad():
                model.get_parameter("bias")[0] += shift
            return result

    double = SecureDouble(Ward().model)
    with pytest.raises(WorkRefused, match=sentence):
        take_part(tmp_path, double, Unfit())
    assert not double.uploads
    assert set(double.declined.values()) == {"this client does not take part in this attempt"}, "not why"


@pytest.mark.parametrize("loss", [1e9, 1e31, math.inf, math.nan])
def test_a_metric_beyond_what_a_sum_takes_is_cut_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: float
) -> None:
    """None is left out for its value: a coordinator could bring it about that one site's alone is in the sum."""

    class Steep(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            return replace(super().train(model, plan), metrics={"loss": loss, "odd": 1e9})

    double = SecureDouble(Ward().model)
    assert take_part(tmp_path, double, Steep()).accepted == 1
    assert not double.declined
    (one,) = double.totals
    assert one.metrics["loss"] == pytest.approx((SAMPLES * 65536 + 40 * 0.5) / (SAMPLES + 40))
    assert sum("these metrics are sent as +-65536" in record.message for record in caplog.records) == 1
    assert one.measured_by["training.loss"] == len(PEERS) + 1
    assert f"because they are larger or are not numbers: loss = {loss:g}\n" in caplog.text, "odd is not added up"


def test_a_site_may_keep_its_metrics_out_of_the_sum(tmp_path: Path) -> None:
    """Of a sum in which all others' are cut to a known value, one site's is what is left."""
    double = SecureDouble(Ward().model)
    policy = listed(tmp_path, double, share_metrics=False)
    assert take_part(tmp_path, double, policy=policy).accepted == 1
    (one,) = double.totals
    assert one.n_clients == len(PEERS) + 1
    assert set(one.measured_by.values()) == {len(PEERS)}
    assert one.metrics["loss"] == pytest.approx(0.5), "the others'"


class Counting(Ward):
    """Counts too. `numbers`: of its confusion matrix."""

    def __init__(self, numbers: Sequence[int] = (3, 1, 0, 2)) -> None:
        super().__init__()
        self._numbers = numbers

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return replace(super().train(model, plan), counts={"confusion": self._numbers, "odd": 7})

    def evaluate(self, model: nn.Module) -> Evaluation:
        return Evaluation(3, {"accuracy": 0.5}, {"scores": [1, 0, 0, 2]})


def counting_double() -> SecureDouble:
    """The other clients have no counts, so a sum is what the ward sent."""
    double = SecureDouble(Ward().model)
    double.plan = replace(double.plan, counts={"confusion": 4}, evaluation_counts={"scores": 4})
    return double


def words_of_counts(double: SecureDouble) -> dict[str, int]:
    (one,) = double.totals
    assert (one.counts, one.evaluation_counts) == ({}, {}), "those of one client are left out"
    return dict(one.counted_by)


def test_counts_that_the_round_asks_for_are_in_the_sum(tmp_path: Path) -> None:
    double = counting_double()
    assert take_part(tmp_path, double, Counting()).accepted == 1
    assert words_of_counts(double)["training.confusion"] == 1


def test_a_site_that_shares_no_metrics_shares_no_counts(tmp_path: Path) -> None:
    double = counting_double()
    policy = listed(tmp_path, double, share_metrics=False)
    assert take_part(tmp_path, double, Counting(), policy).accepted == 1
    assert words_of_counts(double) == {"training.confusion": 0, "evaluation.scores": 0}


class Empty(Ward):
    """Has nothing to measure a model on."""

    def evaluate(self, model: nn.Module) -> Evaluation | None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("app", "shares", "accuracy", "n_measured"),
    [
        (Ward, True, (3 * 0.5 + 16 * 0.25) / 19, len(PEERS) + 1),
        (Ward, False, 0.25, len(PEERS)),
        (Empty, True, 0.25, len(PEERS)),
    ],
)
def test_an_evaluation_under_masks_looks_the_same_whatever_a_site_measures(
    tmp_path: Path, app: type[Ward], shares: bool, accuracy: float, n_measured: int
) -> None:
    """A site without held-out data, and one whose policy keeps its metrics, take part with zeros."""
    double = SecureDouble(Ward().model)
    double.measures = True
    ward = app()
    end = take_part(tmp_path, double, ward, listed(tmp_path, double, share_metrics=shares))
    assert (end.accepted, end.masked, end.masked_evaluations) == (1, 1, 1)
    assert not double.declined
    assert not ward.seeds, "it does not train"
    (one,) = double.totals
    assert (one.n_clients, one.n_partial, one.measured_by["evaluation.accuracy"]) == (len(PEERS) + 1, 0, n_measured)
    assert one.evaluation == {"accuracy": pytest.approx(accuracy)}
    assert one.metrics.keys() == {"loss"}, "the double's own, in which the ward has no part"
    assert one.measured_by["training.loss"] == len(PEERS)


def test_a_site_whose_evaluation_fails_declines_without_its_reason(tmp_path: Path) -> None:
    class Broken(Ward):
        def evaluate(self, model: nn.Module) -> Evaluation:
            raise KeyError("patient 7")

    double = SecureDouble(Ward().model)
    double.measures = True
    with pytest.raises(UnfitWork, match="KeyError"):
        take_part(tmp_path, double, Broken())
    assert not double.uploads
    assert set(double.declined.values()) == {"this client does not take part in this attempt"}


def test_counts_of_another_length_are_not_sent_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal would tell the coordinator how many numbers the site has."""
    double = counting_double()
    assert take_part(tmp_path, double, Counting(range(9))).accepted == 1
    assert words_of_counts(double)["training.confusion"] == 0
    assert "the counts 'confusion' have 9 numbers, and the run asks for 4, so they are not sent" in caplog.text


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (SitePolicy(share_metrics=False), "forbids sending its metrics"),
        (SitePolicy("required", Path("pilot.json")), "requires secure aggregation"),
        (SitePolicy(share_sample_count=False), "forbids sending its sample count"),
        (SitePolicy(max_parameters=300), "this model has 310"),
    ],
    ids=["metrics", "required", "count", "size"],
)
def test_a_plain_round_is_held_against_the_policy_too(
    tmp_path: Path, policy: SitePolicy, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if policy.members is not None:
        policy = listed(tmp_path, SecureDouble(Ward().model))
    double, app = Double(Ward().model), Ward()
    with pytest.raises(WorkRefused, match=sentence):
        run_client(app, URL, tmp_path / "state", "demo", TOKEN, WARD, policy=policy, transport=double.transport())
    assert not app.seeds
    assert all(sentence in reason for reason in double.declined.values())
