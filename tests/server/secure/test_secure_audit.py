"""What is signed of secure rounds: the chain fits, a forged plan is found out, and nothing in it is one client's.

Nobody is told that such a round could be made again.
"""

import asyncio
import io
import json
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.federations.audit_house import operating
from tests.federations.secure_cohort import STATE, Attempt, secure_run
from tests.federations.server_device import Json, LateClock, house
from umbel.aggregation.audit.bundle import AuditFailed, RoundEnded, seal
from umbel.aggregation.trust.public_keys import public_key_bytes, public_key_text
from umbel.client.cli.audit import audit_run, replay_run
from umbel.client.operator.audit import AuditLine, download, parse_bundle, verify
from umbel.client.operator.operator import Operator

N, N_ROUNDS = 4, 2
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()


def after_two_rounds(data: Path, act: Callable[[Operator], object], sections: str = "") -> list[Json]:
    """Have an operator do something when a run of two secure rounds is over; their records.

    `sections`: of the run file, beside those that it needs.
    """

    async def scenario() -> list[Json]:
        async with house(data) as it:
            await it.begin(secure_run(count=N_ROUNDS, target=N) + sections, STATE)
            devices = await it.devices(N, sample_count=0)
            for number in range(1, N_ROUNDS + 1):
                await Attempt.of(it, LateClock(), devices, number).go()
                await it.ended(number)
            await operating(it, act)
            return await it.ended(N_ROUNDS)

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[AuditLine], bytes]:
    """A secure run's bundles, and the key that they are signed with."""
    found: list[tuple[list[AuditLine], bytes]] = []
    after_two_rounds(
        tmp_path_factory.mktemp("run"),
        lambda operator: found.append((list(download(operator, "demo")), public_key_bytes(operator.audit_key()))),
    )
    return found[0]


LIST = "07f5be6fa2bdb100" * 4
PRIVATE = f'members_sha256 = "{LIST}"\n[privacy]\nepsilon = 8.0\ndelta = 1e-5\nclip_norm = 0.5\n'


@dataclass(frozen=True)
class Audit:
    """What an audit of a private run that is over has told. `records`: the coordinator's."""

    lines: list[AuditLine]
    key: bytes
    records: list[Json]
    for_people: str
    for_programs: Json


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """A private run that is bound to a member list, audited."""
    lines, keys, told = list[AuditLine](), list[bytes](), [io.StringIO(), io.StringIO()]

    def act(operator: Operator) -> None:
        lines.extend(download(operator, "demo"))
        keys.append(public_key_bytes(operator.audit_key()))
        for as_json, output in enumerate(told):
            with redirect_stdout(output):
                audit_run(operator, "demo", as_json=bool(as_json))

    records = after_two_rounds(tmp_path_factory.mktemp("run"), act, PRIVATE)
    return Audit(lines, keys[0], records, told[0].getvalue(), json.loads(told[1].getvalue()))


def test_an_audit_tells_what_the_signed_plans_have_cost_and_the_list_that_the_signed_run_file_names(
    private: Audit,
) -> None:
    spent = private.for_programs["privacy"]
    assert spent == {"epsilon": private.records[-1]["epsilon"], "delta": 1e-5, "budget": 8.0, "sums": 2, "sums_max": 2}
    assert private.for_programs["members_sha256"] == LIST
    lines = private.for_people.splitlines()
    assert "privacy cost by the signed plans: epsilon 8 of 8 is spent, at delta 1e-05, by 2 of at most 2 sums" in lines
    assert f"member list, by the signed run file: {LIST}" in lines


def test_an_audit_ends_in_the_command_that_repeats_it(private: Audit) -> None:
    key, head = private.for_programs["keys"][0], private.for_programs["head"]
    assert f"  umbel run audit demo --key {key} --head {head}" in private.for_people.splitlines()


def test_an_auditor_counts_as_the_bundles_come(private: Audit) -> None:
    costs = list[float]()
    for n_bundles in (1, 2, 3):
        auditor, _ = verify(private.lines[:n_bundles], [private.key])
        spent = auditor.privacy()
        assert spent is not None
        assert spent.sums == n_bundles - 1
        costs.append(spent.epsilon)
    assert costs == [0.0, *(record["epsilon"] for record in private.records)]


def test_a_sum_that_is_left_out_of_the_count_is_found(private: Audit) -> None:
    def forget(number: int, raw: Json) -> None:
        if number == 2:
            raw["facts"]["plan"]["n_released"] = 0

    with pytest.raises(AuditFailed, match="it counts 0 revealed sums, but 1 was revealed before it"):
        verify(signed_anew(private.lines, forget), [PUBLIC])


def test_a_sum_that_was_revealed_in_vain_costs_too(private: Audit) -> None:
    def one_more(number: int, raw: Json) -> None:
        if number == 2:
            raw["facts"]["plan"]["n_released"] = 2

    auditor, _ = verify(signed_anew(private.lines, one_more), [PUBLIC])
    spent = auditor.privacy()
    assert spent is not None
    assert spent.sums == 3


def test_of_a_run_without_noise_or_list_an_audit_tells_neither(chain: tuple[list[AuditLine], bytes]) -> None:
    auditor, _ = verify(chain[0], [chain[1]])
    assert (auditor.privacy(), auditor.members_sha256) == (None, "")


def signed_anew(lines: Iterable[AuditLine], change: Callable[[int, Json], None]) -> list[AuditLine]:
    """The chain as a coordinator with another key would have signed it, with something changed in its bundles."""
    anew: list[AuditLine] = []
    for number, line in enumerate(lines):
        raw: Any = json.loads(json.dumps(line.bundle))
        change(number, raw)
        raw["key"] = public_key_text(PUBLIC)
        raw["previous"] = anew[-1].sha256 if anew else ""
        sealed = seal(parse_bundle(raw), KEY)
        anew.append(replace(line, bundle=json.loads(sealed.text), sha256=sealed.sha256, signature=sealed.signature))
    return anew


def test_the_chain_of_a_secure_run_fits(chain: tuple[list[AuditLine], bytes]) -> None:
    lines, key = chain
    auditor, taken = verify(lines, [key])
    assert len(taken) == 1 + N_ROUNDS
    assert sorted(auditor.rounds) == [1, 2]
    assert auditor.n_reports_unsigned == 0
    assert auditor.n_reports_signed == N * N_ROUNDS
    verify(signed_anew(lines, lambda _number, _raw: None), [PUBLIC])


def _shown(raw: Json) -> None:
    raw["facts"]["sum"]["shown"]["update_rms"] *= 3


def _spread(raw: Json) -> None:
    raw["facts"]["sum"]["shown"]["spread"] *= 8


def _bits(raw: Json) -> None:
    raw["facts"]["plan"]["secure"]["bits"] += 1


def _unit(raw: Json) -> None:
    raw["facts"]["plan"]["secure"]["weight_unit"] += 1


def _minimum(raw: Json) -> None:
    raw["facts"]["plan"]["secure"]["minimum"] += 1


def _metrics(raw: Json) -> None:
    raw["facts"]["plan"]["secure"]["metrics"] = ["loss"]


def _step(raw: Json) -> None:
    raw["facts"]["plan"]["codec"]["inverse_step"] *= 2


_PLANNED = [_bits, _unit, _minimum, _metrics, _step]


@pytest.mark.parametrize(
    ("number", "change"), [(1, _shown), (1, _spread), *((number, one) for number in (1, 2) for one in _PLANNED)]
)
def test_numbers_that_do_not_follow_are_found(
    number: int, change: Callable[[Json], None], chain: tuple[list[AuditLine], bytes]
) -> None:
    forged = signed_anew(chain[0], lambda at, raw: change(raw) if at == number else None)
    with pytest.raises(AuditFailed, match="plan for masked updates does not follow"):
        verify(forged, [PUBLIC])


def tried_again(lines: list[AuditLine], *, is_unwrapping: bool) -> list[AuditLine]:
    """The chain as if two attempts at round 2 had failed. `is_unwrapping`: the second took more bits than the first."""
    planned = parse_bundle(lines[2].bundle).facts
    assert isinstance(planned, RoundEnded)
    assert planned.plan.secure is not None
    fewer, more = planned.plan.secure.bits, planned.plan.secure.unwrapping().bits
    assert fewer < more

    def change(number: int, raw: Json) -> None:
        facts = raw["facts"]
        if number >= 2:
            facts.update(committed=False, sum=None, model_out=None, clients=[])
        if number == 3:
            raw["number"], facts["attempt"], facts["plan"]["attempt"] = 3, 2, 2
            facts["plan"]["secure"]["bits"] = more if is_unwrapping else fewer

    return signed_anew([*lines, lines[2]], change)


def test_an_attempt_after_one_that_has_failed_takes_the_bits_that_no_sum_exceeds(
    chain: tuple[list[AuditLine], bytes],
) -> None:
    verify(tried_again(chain[0], is_unwrapping=True), [PUBLIC])
    with pytest.raises(
        AuditFailed, match=r"bundle 3 \(round 2, attempt 2\): its plan for masked updates does not follow"
    ):
        verify(tried_again(chain[0], is_unwrapping=False), [PUBLIC])


def test_bundles_and_records_hold_sums_and_nothing_of_one_client(tmp_path: Path) -> None:
    lines: list[AuditLine] = []
    records = after_two_rounds(tmp_path, lambda operator: lines.extend(download(operator, "demo")))
    for record, line in zip(records, lines[1:], strict=True):
        assert record["sample_count"] == 3 + 5 + 7 + 9
        for client in record["clients"]:
            assert (client["sample_count"], client["steps_done"], client["steps_planned"]) == (0, 0, 0)
            assert client["metrics"] == client["evaluation"] == {}
        bundle: Any = line.bundle
        facts = bundle["facts"]
        assert len(facts["clients"]) == N
        for participant in facts["clients"]:
            assert (participant["announced"], participant["weight"]) == (0, 1)
            assert set(json.loads(participant["report"]["body"])) == {"update_sha256", "signature"}
            assert not {"metrics", "evaluation", "sample_count"} & participant.keys()


def test_a_replay_says_that_single_updates_were_never_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def replayed(operator: Operator) -> None:
        with pytest.raises(typer.Exit):
            replay_run(operator, "demo", all_=True)

    after_two_rounds(tmp_path, replayed)
    told = capsys.readouterr().err
    for number in (1, 2):
        assert f"round {number} cannot be computed again" in told
    assert "masked" in told
