"""The auditor's check of FedProx's adaptive mu: each round's follows from the losses of the rounds before it."""

from collections.abc import Iterable, Mapping
from typing import Any

from umbel.aggregation.audit.bundle import AuditFailed, RoundEnded
from umbel.aggregation.counts import most_reported
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.proximal import LOSS, MuRule, MuState

_CLOSE = 1e-9  # of the mean of absolute values: more than the order of the reports can change


class MuChecks:
    """Follows the mu of one run. `rule`: of its run file; None: mu does not adapt."""

    def __init__(self, rule: MuRule | None) -> None:
        self._rule = rule
        self._of_versions = [] if rule is None else [rule.first]  # of a round that begins with each version

    def follow(self, ended: RoundEnded, reports: Iterable[Mapping[str, Any]]) -> None:
        """Check the next ended attempt, whose models are already checked. Raises `AuditFailed`.

        `reports`: the bodies of the accepted reports, as JSON objects. Those of a secure round say no loss, so there
        the loss of the unmasked sum is taken as it is.
        """
        rule, training = self._rule, ended.training
        if rule is None:
            if ended.plan.mu is not None or training.mu_rule is not None:
                raise AuditFailed("its mu adapts to the training loss, which the run file does not ask for")
            return
        expected = self._of_versions[-1]
        if (ended.plan.mu, training.mu_rule) != (expected, rule) or training.proximal_mu != expected.proximal_mu:
            raise AuditFailed(
                f"its mu does not follow from the run file and the rounds before it: they give {_words(expected)}; its "
                f"plan says {_words(ended.plan.mu)}, and its `training` {training.proximal_mu:g}"
            )
        if ended.rolled_back_to is not None:
            self._of_versions.append(self._of_versions[ended.rolled_back_to])
        elif ended.sum is not None:
            loss = ended.metrics.get(LOSS)
            if not ended.plan.is_secure:
                _require_loss(loss, list(reports))
            self._of_versions.append(rule.after(expected, loss))


def _words(state: MuState | None) -> str:
    if state is None:
        return "none"
    loss = "no loss" if state.loss is None else f"the loss {state.loss:g}"
    return f"{state.proximal_mu:g} after {loss} and {counted(state.falls, 'fall')} in a row"


def _require_loss(claimed: float | None, reports: list[Mapping[str, Any]]) -> None:
    """Raise `AuditFailed` unless this is the mean of the reports' losses, except for rounding."""
    try:
        rows = [(body["metrics"], _weight(body)) for body in reports if body.get("metrics")]
        is_kept = LOSS in most_reported(metrics for metrics, _ in rows)
        losses = [(float(metrics[LOSS]), weight) for metrics, weight in rows if is_kept and LOSS in metrics]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise AuditFailed("a report's metrics are no numbers by name") from error
    total = sum(weight for _, weight in losses)
    expected = sum(loss * weight for loss, weight in losses) / total if total else None
    is_same = claimed is expected
    if claimed is not None and expected is not None:
        size = sum(abs(loss) * weight for loss, weight in losses) / total
        is_same = abs(claimed - expected) <= _CLOSE * size
    if not is_same:
        raise AuditFailed(
            f"its training loss is {claimed}, from which the next mu follows, but its reports give {expected}"
        )


def _weight(body: Mapping[str, Any]) -> int:
    """How many things the loss of a report is the mean of: all its samples, unless it says otherwise."""
    return int((body.get("weights") or {}).get(LOSS, body["sample_count"]))
