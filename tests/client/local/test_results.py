"""What a site's own code returns: metrics with weights of their own, and how they are averaged over batches."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from umbel.client import Evaluation, TorchClient, TrainResult, WeightedMean
from umbel.client.local.progress import CountSums, Means, measured_so_far, note_measured
from umbel.client.rounds.site_code import with_personal


def test_a_metric_keeps_its_own_weight_and_is_a_number_itself() -> None:
    done = TrainResult(10, 1, 1, {"loss": 0.5, "recall": WeightedMean(torch.tensor(0.25), torch.tensor(4))})
    assert (done.metrics, done.weights) == ({"loss": 0.5, "recall": 0.25}, {"recall": 4})
    assert type(done.metrics["recall"]) is float
    assert replace(done, sample_count=9).weights == {"recall": 4}
    assert repr(WeightedMean(0.5, 3)) == "WeightedMean(0.5, 3)"


def test_what_was_measured_on_nothing_is_left_out() -> None:
    found = Evaluation(10, {"loss": 0.5, "recall": WeightedMean(math.nan, 0)})
    assert (found.metrics, found.weights) == ({"loss": 0.5}, {"recall": 0})
    assert replace(found, sample_count=9).weights == {"recall": 0}


@pytest.mark.parametrize(("weight", "error"), [(0.5, TypeError), (-1, ValueError), (1 << 41, ValueError)])
def test_a_weight_that_is_no_count_is_refused(weight: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="weight"):
        WeightedMean(0.5, weight)  # type: ignore[arg-type]


def test_a_sites_own_model_has_the_weights_of_its_metrics_too() -> None:
    one = Evaluation(10, {"recall": WeightedMean(0.5, 3)})
    other = Evaluation(10, {"recall": WeightedMean(0.75, 4)})
    assert with_personal(one, other) == Evaluation(
        10, {"recall": WeightedMean(0.5, 3), "personal.recall": WeightedMean(0.75, 4)}
    )
    both = with_personal(None, other)
    assert both is not None
    assert both.weights == {"personal.recall": 4}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_batches_come_to_the_fraction_over_all_of_them(batches: list[tuple[int, int]]) -> None:
    """`hits` of `hits + misses`, where some batches have neither."""
    means, counts = Means(), CountSums()
    for hits, misses in batches:
        n = hits + misses
        measured: dict[str, torch.Tensor | WeightedMean] = {
            "recall": WeightedMean(hits / n if n else math.nan, n),
            "loss": torch.tensor(1.0),
        }
        note_measured(measured, 7, means, counts)
    resumed = Means()
    resumed.set_state(means.state(), torch.device("cpu"))
    hits, n = sum(one for one, _ in batches), sum(map(sum, batches))
    for one in (means, resumed):
        found = Evaluation(7, one.result())
        assert found.weights == {"recall": n}
        assert found.metrics == ({"recall": pytest.approx(hits / n), "loss": 1.0} if n else {"loss": 1.0})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=12))
def test_one_process_goes_on_with_what_several_have_measured(batches: list[tuple[int, int, int]]) -> None:
    """Batches of `n` samples, with `hits` among them, each measured by one of four processes."""
    whole, several = (Means(), CountSums()), [(Means(), CountSums()) for _ in range(4)]
    for by, n, hits in batches:
        measured: dict[str, torch.Tensor | WeightedMean] = {
            "loss": torch.tensor(float(n)),
            "recall": WeightedMean(0.5 if hits else math.nan, hits),
            "seen": torch.tensor([n, hits]),
        }
        note_measured(measured, n, *whole)
        note_measured(measured, n, *several[by])
    saves = [{"means": means.state(), **({"counts": counts.state()} if means else {})} for means, counts in several]
    for takes_sums in (True, False):
        found = measured_so_far(saves, takes_sums=takes_sums)
        means, counts = Means(), CountSums()
        means.set_state(found["means"], torch.device("cpu"))
        counts.set_state(found["counts"], torch.device("cpu"))
        assert means.result() == (pytest.approx(whole[0].result()) if takes_sums else {})
        assert means.n_samples == (whole[0].n_samples if takes_sums else 0)
        assert [one.tolist() for one in counts.result().values()] == (
            [one.tolist() for one in whole[1].result().values()] if takes_sums else []
        )
        firsts = [one.first("loss") for one, _ in several if one]
        assert means.first("loss") == pytest.approx(sum(one for one in firsts if one is not None) / len(firsts))


def test_a_metric_that_has_a_weight_of_its_own_only_sometimes_is_refused() -> None:
    means = Means()
    means.add({"recall": WeightedMean(0.5, 2)}, 7)
    with pytest.raises(ValueError, match="return it in each batch, with the weight 0"):
        means.add({"recall": torch.tensor(0.5)}, 7)


def test_a_name_that_no_metric_may_have_is_refused_at_the_first_batch() -> None:
    with pytest.raises(ValueError, match="metric name '<b>' must be 1 to 64 letters"):
        Means().add({"<b>": torch.tensor(0.5)}, 7)
    with pytest.raises(ValueError, match="metric name 'two words' must be"):
        CountSums().add({"two words": torch.tensor([1])})


def test_the_ready_trainer_takes_weighted_metrics() -> None:
    """The sensitivity over 300 samples, in batches with very different numbers of positive ones."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(300, 2, generator=draw)
    target = (torch.arange(300) > 290).long() | (inputs[:, 0] > 1.0).long()

    def sensitivity(logits: torch.Tensor, target: torch.Tensor) -> WeightedMean:
        positive = target == 1
        return WeightedMean((logits[positive] > 0).float().mean(), int(positive.sum()))

    model = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    data = TensorDataset(inputs, target)
    client = TorchClient(
        model, "one-logit", data, data, device="cpu", metrics={"sensitivity": sensitivity}, evaluation_batch_size=64
    )
    found = client.evaluate(model)
    assert found is not None
    with torch.no_grad():
        said = model(inputs)[target == 1] > 0
    assert found.metrics["sensitivity"] == pytest.approx(float(said.double().mean()), abs=1e-7)
    assert found.weights == {"sensitivity": int(target.sum())}
