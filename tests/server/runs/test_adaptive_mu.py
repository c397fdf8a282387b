"""A coordinator's mu survives restarts, and comes back with the version that a rollback goes back to. Audits agree."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.federations.audit_house import operating
from tests.federations.lifecycle_house import lifecycle_run, obeyed, train
from tests.federations.server_device import Device, House, house, small_state
from umbel.aggregation.audit.bundle import AuditFailed, RoundEnded
from umbel.aggregation.canonical import parsed
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.proximal import MuState
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.aggregation.types import RunId
from umbel.client.operator.audit import AuditLine, download, parse_bundle, verify
from umbel.client.operator.operator import Operator
from umbel.server.store.keys import AuditKey

pytestmark = pytest.mark.usefixtures("any_database")
LAYOUT = Layout.of_state(small_state())
KEYS = 'algorithm = "fedprox"\nproximal_mu = 0.5\nadaptive_mu = true\nmu_step = 0.25'
RUN = lifecycle_run().replace("[training]", f"[training]\n{KEYS}")


async def trained(device: Device, loss: float | None) -> float:
    """The mu of a round in which the client reports this loss."""
    assignment = await train(device, LAYOUT, 0.5, metrics={"accuracy": 0.5} if loss is None else {"loss": loss})
    assert assignment["training"]["mu_rule"] == {"proximal_mu": 0.5, "step": 0.25}
    return float(assignment["training"]["proximal_mu"])


async def audited(it: House) -> list[AuditLine]:
    """The run's bundles, which an auditor has verified."""
    found = list[AuditLine]()

    def act(operator: Operator) -> None:
        found.extend(download(operator, "demo"))
        verify(found, [public_key_bytes(operator.audit_key())])

    await operating(it, act)
    return found


def forged(lines: Sequence[AuditLine], key: AuditKey, lie: Callable[[RoundEnded], RoundEnded]) -> list[AuditLine]:
    """The chain of a coordinator that lies in its newest bundle, and signs everything anew."""
    found = list[AuditLine]()
    for number, line in enumerate(lines):
        facts = parse_bundle(line.bundle).facts
        if number == len(lines) - 1:
            assert isinstance(facts, RoundEnded)
            facts = lie(facts)
        sealed = key.seal(RunId("demo"), number, found[-1].sha256 if found else "", facts)
        found.append(AuditLine(parsed(sealed.text), sealed.sha256, sealed.signature, None))
    return found


def with_mu(ended: RoundEnded, mu: float) -> RoundEnded:
    """Another mu in the plan and in what the clients were asked for."""
    assert isinstance(ended.plan.mu, MuState)
    plan = replace(ended.plan, mu=replace(ended.plan.mu, proximal_mu=mu))
    return replace(ended, plan=plan, training=replace(ended.training, proximal_mu=mu))


@pytest.mark.slow
def test_mu_comes_back_after_a_restart_and_with_the_version_of_a_rollback(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN, small_state())
            [device] = await it.devices(1)
            assert [await trained(device, loss) for loss in (1.0, 2.0, None)] == [0.5, 0.5, 0.75]
        async with house(tmp_path) as it:  # the loss of round 2 is not forgotten
            device.http = it.http
            assert [await trained(device, loss) for loss in (3.0, 2.5)] == [0.75, 1.0]
            await it.ended(5)  # else the rollback would spoil round 5, whose model is still being made
            await obeyed(it, "rollback", to=1, reason="round 2 diverged")
        async with house(tmp_path) as it:
            device.http = it.http
            assert [await trained(device, loss) for loss in (1.5, 1.0)] == [0.5, 0.75], "as after version 1"
            ended = await it.ended(8)
            assert [one["proximal_mu"] for one in ended] == [0.5, 0.5, 0.75, 0.75, 1.0, 1.0, 0.5, 0.75]
            lines = await audited(it)
            key = AuditKey.load(it.settings.audit_key_path)
            trusted = [public_key_bytes(key.public)]
            assert verify(forged(lines, key, lambda facts: facts), trusted)[0].head == lines[-1].sha256
            with pytest.raises(AuditFailed, match=r"they give 0\.75 after the loss 1\.5 .* its plan says 0\.5 .*"):
                verify(forged(lines, key, lambda facts: with_mu(facts, 0.5)), trusted)
            with pytest.raises(AuditFailed, match=r"its training loss is 9\.0, .* but its reports give 1\.0"):
                verify(forged(lines, key, lambda facts: replace(facts, metrics={"loss": 9.0})), trusted)

    asyncio.run(scenario())
