"""What the demo ends with beside a score: the coordinator's signed account checked, and a plain round made again.

The same code as `umbel run audit` and `umbel run replay`: any operator can do this to any run that keeps updates.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.client import Operator
from umbel.client.operator import audit
from umbel.client.operator.replay import ReplaySource, replay


@dataclass(frozen=True, slots=True)
class Proof:
    """`bundles`: of the audit chain, all verified. `round`: the last one, which came to `model_sha256` again; empty for
    a secure one, of which nobody has the updates.
    """

    bundles: int
    round: int
    model_sha256: str


def prove(operator: Operator, run: str, key: str, heads: Iterable[str]) -> Proof:
    """Verify a run's chain and make its last round again, if its updates are there.

    `key`: the audit key as it was told before the run; `heads`: noted on the way, the chain must hold them. Raises
    `AuditFailed` for what does not fit.
    """
    newest = operator.run(run).audit_head
    auditor, lines = audit.verify(audit.download(operator, run), [public_key_bytes(key)])
    for head in (*heads, newest):
        auditor.require_head(head)
    number = max(auditor.rounds)
    bundle, ended = auditor.rounds[number]
    assert auditor.created is not None, "the chain begins with the run's creation"
    if ended.plan.secure is not None:
        return Proof(len(lines), number, "")
    made = replay(ReplaySource(operator, run, bundle), ended, auditor.created, lambda _said: None)
    return Proof(len(lines), number, made.sha256)
