"""What decides how much each site puts into a masked sum; all of it the coordinator's choice, and the same for all.

Each bound changes the parts of those sites alone that are beyond it: of two sums of the same clients, with bounds
between which one site lies, a difference is that site's update. So a site remembers with a sum what its terms were, and
takes part in no second sum of nearly the same clients under others (`sum_memory.py`).

In a private round no client weighs more than another, so whether a round is private is one of the terms: the difference
of a sum with weights and one without would tell of the weights.

Not among them is the step of the levels, which follows what the last sum has shown. It bounds a part, too, but a
hundred times as high as a first round is planned for: docs/explanation/limits-of-security.md says what remains.
How exact values are rounded is none, for rounding at random moves no mean.
"""

import hashlib

from umbel.aggregation.canonical import canonical
from umbel.client.rounds.secure_offers import Asked


def terms_sha256(asked: Asked) -> str:
    """SHA-256, in hex, of what the training is and of every bound on what comes of it.

    It is kept on disk for as long as a run lasts, so a release that hashed anything else would stop every run.
    """
    offer, plan = asked.assignment, asked.offer.plan
    training = offer.training
    terms = {
        "local_epochs": training.local_epochs,
        "local_steps": training.local_steps,
        "batch_size": training.batch_size,
        "learning_rate": training.learning_rate,
        "proximal_mu": training.proximal_mu,
        "is_private": plan.is_private,
        "clip_norm": offer.codec.clip_norm,
        "max_abs": offer.grid.max_abs,
        "sample_count_max": offer.sample_count_max,
        "weight_unit": plan.weight_unit,
        "minimum_work": plan.minimum_work,
    }
    return hashlib.sha256(canonical(terms).encode()).hexdigest()
