"""Whatever is changed in a chain of bundles, its auditor says so in a sentence."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from tests.federations.audit_chain_of import AUDIT_KEY, CLIENT_KEYS, FILE, chained, play
from umbel.aggregation.audit.bundle import AuditFailed, RoundEnded, RunCreated, Sealed, json_sha256, seal
from umbel.aggregation.audit.replay import Replay
from umbel.aggregation.canonical import Json, canonical, parsed
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.plans.schedule import RateSchedule
from umbel.aggregation.run.sections import CanarySection
from umbel.aggregation.trust.public_keys import public_key_bytes, public_key_text
from umbel.client.operator.audit import AuditLine, parse_bundle, read_lines, verify

PLAYED = play()
KEYS = [public_key_bytes(PLAYED.public_key)]


def line_of(sealed: Sealed) -> AuditLine:
    return AuditLine(parsed(sealed.text), sealed.sha256, sealed.signature, None)


LINES = [line_of(one) for one in PLAYED.bundles]


def forged(number: int, change: Callable[[dict[str, Any]], object]) -> list[AuditLine]:
    """The chain as a coordinator could sign it that lies in one bundle, and links and signs everything anew."""
    lines: list[AuditLine] = []
    for line in LINES:
        raw: Any = json.loads(canonical(line.bundle))
        if raw["number"] == number:
            change(raw["facts"])
        raw["previous"] = lines[-1].sha256 if lines else ""
        lines.append(line_of(seal(parse_bundle(raw), AUDIT_KEY)))
    return lines


@given(data=st.data())
def test_one_byte_changed_anywhere_is_noticed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = "".join(f"{line.text}\n" for line in LINES).encode()
    place = data.draw(st.integers(0, len(text) - 2))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != text[place]))
    path = tmp_path_factory.getbasetemp() / "audit.jsonl"
    path.write_bytes(text[:place] + bytes([byte]) + text[place + 1 :])
    said, heads = "", list[str]()
    try:
        heads = verify(read_lines(path), KEYS)[0].heads
    except AuditFailed as failed:
        said = str(failed)
    # What is not signed may change: the coordinator's word on when updates went.
    assert said.startswith("bundle ") or heads == [line.sha256 for line in LINES]


def test_the_order_matters() -> None:
    rng = random.Random(1)
    for _ in range(5):
        shuffled = rng.sample(LINES, len(LINES))
        if shuffled != LINES:
            with pytest.raises(AuditFailed, match="bundle"):
                verify(shuffled, KEYS)


def test_a_chain_without_bundles_is_none() -> None:
    with pytest.raises(AuditFailed, match="every run has at least the bundle of its creation"):
        verify([], KEYS)


def _sample_count(facts: dict[str, Any]) -> None:
    report = facts["clients"][0]["report"]
    report["body"] = report["body"].replace('"sample_count": 10', '"sample_count": 90')
    facts["clients"][0]["weight"] = 90
    facts["sum"]["total_weight"] += 80


def _weight(facts: dict[str, Any]) -> None:
    facts["clients"][0]["weight"] += 1
    facts["sum"]["total_weight"] += 1


def _dropped(facts: dict[str, Any]) -> None:
    facts["clients"].pop(0)


def _other_model(facts: dict[str, Any]) -> None:
    facts["model_in"]["sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (
            2,
            _sample_count,
            r"bundle 2 \(round 1, attempt 2\): the report of a was not signed with this client's key",
        ),
        (2, _dropped, r"its sum has \d+ reports, but the bundle has \d+ accepted ones"),
        (2, _other_model, "its round did not begin with the run's newest model"),
        (
            2,
            lambda facts: facts["sum"].update(total_weight=5),
            "its sum has the weight 5, but its reports have 21 together",
        ),
        (2, _weight, "the weight of a is .*; its report gives 10"),
        (2, lambda facts: facts["clients"][0].update(draws=1, client="b"), "not sorted by name, or one appears twice"),
        (
            2,
            lambda facts: facts["clients"][0]["report"].update(created=1_700_000_000),
            "not signed with this client's key",
        ),
        (2, lambda facts: facts.update(attempt=1), "its plan belongs to another round"),
        (
            1,
            lambda facts: facts.update(committed=True),
            "it has a sum although its round made no model, or it has no sum",
        ),
        (
            1,
            lambda facts: facts.update(layout_digest="0" * 64),
            "its model layout is not the one that the run was created with",
        ),
        (
            1,
            lambda facts: facts["grid"].update(step=0.5, max_abs=1.0),
            "its `grid` is not the one that follows from its `plan`",
        ),
        (
            1,
            lambda facts: facts.update(run_file_sha256="0" * 64),
            "its run file is not the one that the run was created with",
        ),
        (1, lambda facts: facts.update(server_learning_rate=2.0), "differs from the run file"),
        (0, lambda facts: facts["run_file"].update(seed=8), "the run file does not match its hash"),
    ],
)
def test_a_coordinator_that_lies_and_signs_is_caught(
    number: int, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    with pytest.raises(AuditFailed, match=said):
        verify(forged(number, change), KEYS)


# --- chains that go on in another way ---------------------------------------------------------------------------------


def lines_of(*facts: RunCreated | RoundEnded) -> list[AuditLine]:
    return [line_of(one) for one in chained(facts)]


def played() -> tuple[RunCreated, RoundEnded, RoundEnded]:
    """The facts of `LINES`: the creation, the abandoned attempt, the committed one."""
    created, abandoned, committed = (parse_bundle(line.bundle).facts for line in LINES)
    assert isinstance(created, RunCreated)
    assert isinstance(abandoned, RoundEnded)
    assert isinstance(committed, RoundEnded)
    return created, abandoned, committed


def rolled_back(to: int, copy_of: int) -> list[AuditLine]:
    """The chain, and an attempt at round 2 that ended in a rollback. `to`: the version that it names."""
    created, abandoned, committed = played()
    assert committed.model_out is not None
    copied = (created.model, committed.model_out)[copy_of]
    last = replace(
        abandoned,
        round=2,
        attempt=1,
        plan=FILE.round_plan(2, 1),
        model_in=committed.model_out,
        model_out=replace(copied, version=2),
        rolled_back_to=to,
    )
    return lines_of(created, abandoned, committed, last)


@pytest.mark.parametrize("version", [0, 1])
def test_a_run_may_go_back_to_any_of_its_versions(version: int) -> None:
    auditor, taken = verify(rolled_back(version, version), KEYS)
    assert len(taken) == 4
    assert list(auditor.rounds) == [1], "a rollback makes no round"


@pytest.mark.parametrize(("version", "copied"), [(0, 1), (1, 0), (-1, 1), (2, 1)])
def test_a_rollback_to_another_model_than_it_names_is_found(version: int, copied: int) -> None:
    with pytest.raises(AuditFailed, match=f"it rolled back to version {version}, but its model is not that version's"):
        verify(rolled_back(version, copied), KEYS)


def with_canaries(*attempts: int, n_rounds_before: int = 0) -> list[AuditLine]:
    """A run that begins with these attempts at its canary, of which the last passes."""
    created, abandoned, _ = played()
    file = replace(FILE, canary=CanarySection(2))
    whole: Any = parsed(canonical(file))
    created = replace(created, run_file=whole, run_file_sha256=json_sha256(file))
    tried = replace(abandoned, run_file_sha256=created.run_file_sha256)
    plans = [file.canary_plan(attempt) for attempt in attempts]
    canaries = [
        replace(tried, attempt=plan.attempt, committed=plan is plans[-1], plan=plan, grid=plan.grid) for plan in plans
    ]
    return lines_of(created, *[tried] * n_rounds_before, *canaries, *[tried] * (1 - n_rounds_before))


def test_a_run_may_begin_with_a_canary_that_takes_several_attempts() -> None:
    assert len(verify(with_canaries(1, 2), KEYS)[1]) == 4


@pytest.mark.parametrize(
    ("attempts", "n_rounds_before", "said"),
    [
        ([2], 0, r"should be \(1, 1\), not \(1, 2\)"),
        ([1, 1], 0, r"should be \(1, 2\), not \(1, 1\)"),
        ([1], 1, "an attempt at the first round came before it"),
    ],
)
def test_a_canary_out_of_its_place_is_found(attempts: list[int], n_rounds_before: int, said: str) -> None:
    with pytest.raises(AuditFailed, match=said):
        verify(with_canaries(*attempts, n_rounds_before=n_rounds_before), KEYS)


def with_schedule(rate: float) -> list[AuditLine]:
    """A run of three rounds whose server's rate falls by half after each; both attempts at round 1 state `rate`."""
    created, abandoned, committed = played()
    schedule = RateSchedule("step", every=1, factor=0.5, per_clients=FILE.rounds.target)
    file = replace(FILE, aggregation=replace(FILE.aggregation, schedule=schedule))
    whole: Any = parsed(canonical(file))
    created = replace(created, run_file=whole, run_file_sha256=json_sha256(file))
    attempts = (
        replace(one, run_file_sha256=created.run_file_sha256, server_learning_rate=rate)
        for one in (abandoned, committed)
    )
    return lines_of(created, *attempts)


def test_the_servers_rate_is_computed_again_from_its_schedule() -> None:
    assert len(verify(with_schedule(1.0), KEYS)[1]) == 3
    assert len(verify(with_schedule(1.0 + 1e-9), KEYS)[1]) == 3, "a last digit of another machine"
    with pytest.raises(AuditFailed, match=r"server_learning_rate differs from the run file"):
        verify(with_schedule(0.5), KEYS)


# --- keys, heads and replays ------------------------------------------------------------------------------------------


def test_another_clients_key_does_not_pass() -> None:
    other = public_key_text(CLIENT_KEYS["c"].public_key().public_bytes_raw())
    with pytest.raises(AuditFailed, match="the report of a was not signed with"):
        verify(forged(2, lambda facts: facts["clients"][0].update(key=other)), KEYS)


def test_a_chain_that_another_key_has_signed_is_refused() -> None:
    stranger = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    with pytest.raises(AuditFailed, match="bundle 0: it names the audit key"):
        verify(LINES, [stranger])


def test_a_noted_head_must_be_there() -> None:
    auditor, _ = verify(LINES, KEYS)
    auditor.require_head(LINES[1].sha256)
    with pytest.raises(AuditFailed, match="bundles are missing, or were replaced"):
        verify(LINES[:2], KEYS)[0].require_head(LINES[2].sha256)


def test_a_bundle_of_a_kind_that_is_not_known_is_named() -> None:
    raw: Json = {"kind": "rumour", "facts": {}}
    with pytest.raises(AuditFailed, match="this version of umbel does not know bundles of the kind 'rumour'"):
        parse_bundle(raw)


def test_updates_of_another_round_do_not_add_up() -> None:
    auditor, _ = verify(LINES, KEYS)
    _, ended = auditor.rounds[1]
    again = Replay(ended, PLAYED.layout, AggregationSection())
    for one in ended.accepted:
        update = PLAYED.updates["a"]
        again.fold(one, update[:64], [update[64:]])
    with pytest.raises(AuditFailed, match="the updates add up to"):
        again.require_sum()
    with pytest.raises(AuditFailed, match="0 updates of weight 0 together"):
        Replay(replace(ended, clients=()), PLAYED.layout, AggregationSection()).require_sum()
