"""An assignment that asks for no training: measure the model as it came on the site's own held-out data."""

import time
from pathlib import Path

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.reports import EvaluationDone
from umbel.client.app import Client
from umbel.client.errors import TrainingFailed, WorkRefused
from umbel.client.rounds.work import evaluated, finite, set_weights
from umbel.client.wire.fetch import load_model


def measure(app: Client, layout: Layout, start: Path, offer: Assignment) -> EvaluationDone | None:
    """What the site's own code says of the model in the file `start`; None if it has no held-out data.

    Raises `TrainingFailed` if that code fails, `WorkRefused` for an answer that makes no sense.
    """
    set_weights(app, load_model(start, layout))
    started = time.perf_counter()
    try:
        evaluation = evaluated(app)
    except Exception as error:
        # The message may quote data, so the coordinator hears the type alone; the log, with all of it, stays here.
        raise TrainingFailed(f"the client's own code failed with {type(error).__name__}; see its log") from error
    if evaluation is None or not evaluation.metrics:
        return None
    took_s, n_samples = time.perf_counter() - started, evaluation.sample_count
    if n_samples > offer.sample_count_max:
        raise WorkRefused(f"measured on {n_samples} samples, the run accepts at most {offer.sample_count_max}")
    try:
        return EvaluationDone(n_samples, finite(evaluation.metrics), took_s)
    except ValueError as error:
        raise WorkRefused(f"the site's code returned an evaluation that makes no sense: {error}") from error
