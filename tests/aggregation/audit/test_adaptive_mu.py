"""A mu that does not follow from the losses of earlier rounds, or a loss that the reports do not give, is found."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.aggregation.audit.test_chain import KEYS, line_of, played
from tests.federations.audit_chain_of import FILE, chained
from umbel.aggregation.audit.adaptive_mu import MuChecks
from umbel.aggregation.audit.bundle import AuditFailed, ModelId, RoundEnded, RunCreated, SignedReport, json_sha256
from umbel.aggregation.canonical import canonical, parsed
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.proximal import MuRule, MuState
from umbel.aggregation.plans.training import TrainingSection
from umbel.client.operator.audit import verify

ADAPTIVE = replace(
    FILE,
    rounds=replace(FILE.rounds, count=9),
    training=TrainingSection(algorithm="fedprox", proximal_mu=0.5, adaptive_mu=True),
)
FIXED = replace(ADAPTIVE, training=TrainingSection(algorithm="fedprox", proximal_mu=0.5))
RULE = MuRule(0.5, 0.1)
LOSSES = (1.0, 2.0, 3.0)  # of rounds 1, 2 and 3


def model(version: int) -> ModelId:
    return ModelId(version, f"{version}" * 64, "f" * 64)


def created(file: Any = ADAPTIVE) -> RunCreated:
    whole: Any = parsed(canonical(file))
    return replace(played()[0], run_file=whole, run_file_sha256=json_sha256(file), model=model(0))


def attempt(number: int, attempt: int, version: int, mu: MuState | None, file: Any = ADAPTIVE) -> RoundEnded:
    """An abandoned attempt at a round, over this version of the model."""
    _, abandoned, _ = played()
    plan = replace(file.round_plan(number, attempt), mu=mu)
    return replace(
        abandoned,
        round=number,
        attempt=attempt,
        run_file_sha256=json_sha256(file),
        model_in=model(version),
        plan=plan,
        training=file.training_of(plan),
    )


def committed(
    attempted: RoundEnded, losses: Mapping[str, float | None], claimed: float | None, weights: Mapping[str, int] = {}
) -> RoundEnded:
    """The attempt with reports of these losses, by client. `claimed`: the loss that the coordinator says."""
    _, _, template = played()
    clients = []
    for one in template.clients:
        assert one.report is not None
        body = json.loads(one.report.body)
        loss = losses[one.client]
        body["metrics"] = {"accuracy": 0.5} if loss is None else {"accuracy": 0.5, "loss": loss}
        body["weights"] = {"loss": weights[one.client]} if one.client in weights else {}
        clients.append(replace(one, report=SignedReport(json.dumps(body))))
    return replace(
        attempted,
        committed=True,
        clients=tuple(clients),
        sum=template.sum,
        metrics={} if claimed is None else {"loss": claimed},
        model_out=model(attempted.model_in.version + 1),
    )


def alike(attempted: RoundEnded, loss: float) -> RoundEnded:
    return committed(attempted, {"a": loss, "b": loss}, loss)


def rolled_back(attempted: RoundEnded, to: int) -> RoundEnded:
    made = replace(model(to), version=attempted.model_in.version + 1)
    return replace(attempted, rolled_back_to=to, model_out=made)


def states() -> list[MuState]:
    """The mu of rounds 1 to 4."""
    found = [RULE.first]
    for loss in LOSSES:
        found.append(RULE.after(found[-1], loss))
    return found


def check(facts: Sequence[RoundEnded], file: Any = ADAPTIVE) -> None:
    verify([line_of(one) for one in chained([created(file), *facts])], KEYS)


def honest() -> list[RoundEnded]:
    """Three rounds, of which the second takes two attempts, then a rollback to version 2 in round 4."""
    first, second, third, fourth = states()
    return [
        alike(attempt(1, 1, 0, first), LOSSES[0]),
        attempt(2, 1, 1, second),
        alike(attempt(2, 2, 1, second), LOSSES[1]),
        alike(attempt(3, 1, 2, third), LOSSES[2]),
        rolled_back(attempt(4, 1, 3, fourth), 1),
        alike(replace(attempt(4, 2, 4, second), model_in=replace(model(1), version=4)), 0.5),
        attempt(5, 1, 5, RULE.after(second, 0.5)),
    ]


def test_an_honest_chain_passes_through_retries_and_a_rollback() -> None:
    assert [one.training.proximal_mu for one in honest()] == [0.5, 0.5, 0.5, 0.6, 0.7, 0.5, 0.5]
    check(honest())


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize(
    "change",
    [{"proximal_mu": 0.4}, {"loss": 7.0}, {"falls": 3}],
    ids=["another mu", "another loss to compare with", "other falls"],
)
def test_another_mu_in_any_plan_is_found(place: int, change: dict[str, float]) -> None:
    facts = honest()
    assert facts[place].plan.mu is not None
    plan = replace(facts[place].plan, mu=replace(facts[place].plan.mu, **change))  # type: ignore[type-var]  # not None
    facts[place] = replace(facts[place], plan=plan, training=ADAPTIVE.training_of(plan))
    with pytest.raises(AuditFailed, match=rf"bundle {place + 1} .*: its mu does not follow from the run file"):
        check(facts)


@pytest.mark.parametrize("place", range(7))
def test_another_mu_in_what_clients_were_asked_is_found(place: int) -> None:
    facts = honest()
    facts[place] = replace(facts[place], training=replace(facts[place].training, proximal_mu=0.41))
    with pytest.raises(AuditFailed, match=rf"bundle {place + 1} .*and its `training` 0\.41"):
        check(facts)


@pytest.mark.parametrize("rule", [None, MuRule(0.5, 0.2), MuRule(0.4, 0.1)])
def test_another_rule_in_what_clients_were_asked_is_found(rule: MuRule | None) -> None:
    facts = honest()
    facts[3] = replace(facts[3], training=replace(facts[3].training, mu_rule=rule))
    with pytest.raises(AuditFailed, match=r"bundle 4 .*its mu"):
        check(facts)


def test_a_mu_that_goes_on_after_a_rollback_is_found() -> None:
    facts = honest()
    plan = replace(facts[5].plan, mu=facts[4].plan.mu)
    facts[5] = replace(facts[5], plan=plan, training=ADAPTIVE.training_of(plan))
    with pytest.raises(AuditFailed, match=r"bundle 6 .*its mu"):
        check(facts)


def test_a_mu_that_the_run_file_does_not_let_adapt_is_found() -> None:
    plain = alike(attempt(1, 1, 0, None, FIXED), 1.0)
    check([plain], FIXED)
    for wrong in (
        replace(plain, plan=replace(plain.plan, mu=MuState(0.5))),
        replace(plain, training=replace(plain.training, mu_rule=RULE)),
    ):
        with pytest.raises(AuditFailed, match="which the run file does not ask for"):
            check([wrong], FIXED)


FIRST = attempt(1, 1, 0, RULE.first)
ON_ITS_OWN = {"a": 30, "b": 0}


@pytest.mark.parametrize(
    ("losses", "weights", "true"),
    [
        ({"a": 1.0, "b": 3.0}, {}, (10 * 1.0 + 11 * 3.0) / 21),
        ({"a": 1.0, "b": None}, {}, 1.0),
        ({"a": None, "b": None}, {}, None),
        ({"a": 1.0, "b": 3.0}, {"a": 30}, (30 * 1.0 + 11 * 3.0) / 41),
        ({"a": 1.0, "b": None}, ON_ITS_OWN, 1.0),
    ],
)
def test_the_loss_must_be_the_mean_of_the_reports(
    losses: dict[str, float | None], weights: dict[str, int], true: float | None
) -> None:
    check([committed(FIRST, losses, true, weights)])
    for wrong in (None, 2.5) if true is not None else (1.0,):
        with pytest.raises(AuditFailed, match=rf"its training loss is {wrong}, .* but its reports give"):
            check([committed(FIRST, losses, wrong, weights)])


def test_another_order_of_the_reports_is_no_lie() -> None:
    losses = {"a": 0.1, "b": 0.7}
    true = (10 * 0.1 + 11 * 0.7) / 21
    check([committed(FIRST, losses, true * (1 + 1e-14))])
    with pytest.raises(AuditFailed, match="its training loss is"):
        check([committed(FIRST, losses, true * (1 + 1e-8))])


def test_of_a_secure_round_the_loss_of_the_sum_is_taken() -> None:
    """Its reports say no loss."""
    secure = SecurePlan(bits=20, weight_unit=1, clients_max=3)
    first = replace(alike(FIRST, 9.0), plan=replace(FIRST.plan, secure=secure))
    checks = MuChecks(RULE)
    checks.follow(first, [{"update_sha256": "e" * 64}] * 2)
    checks.follow(attempt(2, 1, 1, MuState(0.5, 9.0)), [])
    with pytest.raises(AuditFailed, match=r"they give 0\.5 after the loss 9 and 0 falls in a row; its plan says 0\.6 "):
        checks.follow(attempt(2, 1, 1, MuState(0.6, 9.0)), [])


def test_reports_whose_metrics_are_no_numbers_are_named() -> None:
    ended = alike(FIRST, 1.0)
    report = SignedReport('{"sample_count": 10, "steps_done": 4, "metrics": {"loss": "high"}}')
    broken = replace(ended, clients=(replace(ended.clients[0], report=report), *ended.clients[1:]))
    with pytest.raises(AuditFailed, match="metrics are no numbers by name"):
        check([broken])
