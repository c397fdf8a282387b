"""What decides how much each site puts into a masked sum; all of it the coordinator's choice, and the same for all.

Each bound changes the parts of those sites alone that are beyond it: of two sums of the same clients, with bounds
between which one site lies, a difference is that site's update. So a site remembers with a sum what its terms were, and
takes part in no second sum of nearly the same clients under others (`sum_memory.py`).

Not among them is the step of the levels, which follows what the last sum has shown. It bounds a part, too, but at
32,766 steps a value, 500 times what a first round is planned for: docs/security.md says what remains.
"""

import hashlib

from umbel.aggregation.canonical import canonical
from umbel.client.secure_offer import Asked


def terms_sha256(asked: Asked) -> str:
    """SHA-256, in hex, of what the training is and of every bound on what comes of it."""
    offer, plan = asked.assignment, asked.offer.plan
    terms = {
        "training": offer.training,
        "clip_norm": offer.codec.clip_norm,
        "max_abs": offer.grid.max_abs,
        "sample_count_max": offer.sample_count_max,
        "weight_unit": plan.weight_unit,
        "minimum_work": plan.minimum_work,
    }
    return hashlib.sha256(canonical(terms).encode()).hexdigest()
