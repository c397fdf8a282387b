"""q-FedAvg: clients count more, the greater the loss of the round's model on their data.

    w' = w - sum_k D_k / sum_k h_k
    D_k = F_k^q L (w - w_k),    h_k = q F_k^(q-1) |L (w - w_k)|^2 + L F_k^q

F_k is the loss of the round's model w over the training data of client k, w_k its model after local training, and L an
estimate of the Lipschitz constant of the gradients: 1 / learning rate unless the run file says it. q = 0 is FedAvg.
Li, Sanjabi, Beirami, Smith 2020, "Fair Resource Allocation in Federated Learning", algorithm 2.

With u_k = s_k (w_k - w), s_k = (F_k / loss_max)^q and r_k = q L |w_k - w|^2 / F_k this is

    w' = w + c sum_k a_k u_k / sum_k a_k    with c = sum_k a_k / sum_k a_k s_k (1 + r_k)

where a_k are the run's ordinary weights: in the paper clients are drawn in proportion to their samples, and all a_k
are 1. A client sends u_k, and reports F_k and |w_k - w|. The coordinator makes the mean of the u_k as of any updates,
and multiplies it by c. `loss_max` cancels, but for greater losses, which count as `loss_max`.

Both numbers are claims of the client. So s_k is at most 1; and r_k counts as at most `TERM_RATIO_MAX` times the median
of the round's (of an even number the upper one, because a step that is too short does less harm than one that is too
long), so that one client cannot stop the model by a made-up norm. Only weights are multiplied: floats that are
no running statistics.

Powers are made of products and square roots (`stated_order.py`), and sums are rounded once. So the coordinator, a
simulation and an auditor get the same bits, in whatever order the clients come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from umbel.aggregation.stated_order import power

if TYPE_CHECKING:  # the state of a round is read without torch
    from torch import Tensor

START_LOSS, CHANGE_NORM = "start_loss", "change_norm"  # the metrics of a report that have F_k and |w_k - w|
LOSS_MIN = 1e-10  # smaller losses count as this, so that r_k has a value
TERM_RATIO_MAX = 100.0
_WEIGHT_MIN = 2.0**-100  # of s_k: far from where float32 ends


@dataclass(frozen=True, slots=True)
class FairTerms:
    """What a run file says of q-FedAvg. `lipschitz`: L, with which 1 / L is in the unit of a learning rate."""

    q: float
    loss_max: float
    lipschitz: float


@dataclass(frozen=True, slots=True)
class FairReport:
    """What one client of a round says. `weight`: a_k. `loss`: F_k. `norm`: the L2 norm of w_k - w."""

    weight: int
    loss: float
    norm: float


def loss_weight(loss: float, terms: FairTerms) -> float:
    """s_k: a float32 in (0, 1]. `loss`: finite."""
    share = power(_counted(loss, terms) / terms.loss_max, terms.q)
    return float(np.float32(max(share, _WEIGHT_MIN)))


def weighed(change: Tensor, weight: float) -> Tensor:
    """u_k of w_k - w, as float32, on any device; each product rounded once. `weight`: s_k."""
    import torch

    return change * torch.tensor(weight, dtype=change.dtype, device=change.device)


def step_factor(reports: Sequence[FairReport], terms: FairTerms) -> float:
    """c: by which the weighted mean of the u_k is multiplied. `reports`: of at least one client, in any order."""
    terms_of = [_term(one, terms) for one in reports]
    most = TERM_RATIO_MAX * sorted(terms_of)[len(terms_of) // 2]
    sums = (
        one.weight * (loss_weight(one.loss, terms) * (1.0 + min(term, most)))
        for one, term in zip(reports, terms_of, strict=True)
    )
    return sum(one.weight for one in reports) / math.fsum(sums)


def _counted(loss: float, terms: FairTerms) -> float:
    return min(max(loss, LOSS_MIN), terms.loss_max)


def _term(one: FairReport, terms: FairTerms) -> float:
    """r_k."""
    return terms.q * terms.lipschitz * (one.norm * one.norm) / _counted(one.loss, terms)
