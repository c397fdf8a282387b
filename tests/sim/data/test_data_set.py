"""A data set says who trains on what, holds out a share of each class, and can be cut down."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.data.data_set import DataError, DataSet, Natural, SampleSet, held_out, natural_of
from umbel.sim.data.partition.partition import Indices

NOTHING = np.empty(0, dtype=np.int64)


def rows(*numbers: int) -> Indices:
    return np.array(numbers, dtype=np.int64)


def samples(n: int) -> SampleSet:
    return SampleSet(torch.arange(2.0 * n).view(n, 2), torch.arange(n) % 3)


def wards() -> DataSet:
    """Ten samples: two wards train on seven of them, one holds back another, two are nobody's."""
    natural = Natural("ward", ("east", "west"), (rows(0, 3, 5), rows(1, 2, 8, 9)), (rows(4), NOTHING))
    return DataSet("wards", samples(10), rows(0, 1, 2, 3, 5, 8, 9), samples(4), 3, natural)


def test_labels_groups_and_the_whole_go_by_the_rows_that_are_trained_on() -> None:
    data = wards()
    assert data.input_shape == (2,)
    assert data.labels.tolist() == [0, 1, 2, 0, 2, 2, 0]
    groups = data.groups
    assert groups is not None
    assert groups.tolist() == [0, 1, 1, 0, 0, 1, 1]
    whole = data.whole()
    assert whole.train.inputs[:, 0].tolist() == [0, 2, 4, 6, 10, 16, 18]
    assert whole.test is data.test


def test_of_a_data_set_of_which_all_is_trained_on_nothing_is_copied() -> None:
    data = DataSet("all", samples(5), np.arange(5), samples(2), 3)
    assert data.whole().train is data.samples
    assert data.groups is None


@given(st.integers(1, 10), st.integers(1, 6), st.integers(0, 1 << 62))
def test_a_limit_draws_so_many_and_leaves_out_who_has_none_left(n_train: int, n_test: int, seed: int) -> None:
    data = wards()
    limited, again = (data.limited(n_train, n_test, seed) for _ in range(2))
    assert np.array_equal(limited.rows, again.rows)
    assert len(limited.rows) == min(n_train, 7)
    assert len(limited.test) == min(n_test, 4)
    assert set(limited.rows.tolist()) <= set(data.rows.tolist())
    natural, full = limited.natural, data.natural
    assert natural is not None
    assert full is not None
    assert np.array_equal(np.sort(np.concatenate(natural.shards)), limited.rows)
    for name, shard, holdout in zip(natural.names, natural.shards, natural.holdouts, strict=True):
        before = full.names.index(name)
        assert set(shard.tolist()) <= set(full.shards[before].tolist())
        assert np.array_equal(holdout, full.holdouts[before])
    if n_train < 7:
        assert any(not np.array_equal(limited.rows, data.limited(n_train, None, other).rows) for other in range(60))


def test_no_limit_changes_nothing() -> None:
    data = wards()
    assert data.limited(None, None, 1) is data
    assert data.limited(100, 100, 1) is data


def test_holders_come_in_the_order_of_their_numbers_or_names() -> None:
    numbered = natural_of("user", np.array([1, 10, 2, 10, 9]), rows(1, 2, 3, 4), NOTHING)
    assert numbered.names == ("2", "9", "10"), "who trains on nothing is left out"
    assert [shard.tolist() for shard in numbered.shards] == [[2], [4], [1, 3]]
    named = natural_of("user", np.array(["Zoe", "Ann", "Zoe"]), rows(0, 1, 2), NOTHING)
    assert named.names == ("Ann", "Zoe")
    assert [shard.tolist() for shard in named.shards] == [[1], [0, 2]]


def test_who_trains_on_nothing_is_no_holder_and_a_set_of_nothing_no_set() -> None:
    with pytest.raises(DataError, match="ward 'west' has no sample"):
        Natural("ward", ("east", "west"), (rows(1), NOTHING), (NOTHING, NOTHING))
    with pytest.raises(DataError, match="no sample to train on"):
        DataSet("none", samples(5), NOTHING, samples(2), 3)
    with pytest.raises(ValueError, match="needs a name"):
        Natural("ward", ("east",), (rows(1), rows(2)), (NOTHING, NOTHING))


@given(st.lists(st.integers(0, 4), min_size=10, max_size=200), st.floats(0.05, 0.6), st.integers(0, 1 << 62))
def test_what_is_held_out_is_a_share_of_every_class(labels: list[int], share: float, seed: int) -> None:
    known = np.array(labels, dtype=np.int64)
    train, out = held_out(known, share, seed)
    assert np.array_equal(np.sort(np.concatenate([train, out])), np.arange(len(known)))
    assert len(out) == int(np.ceil(round(share * len(known), 9)))
    for label in range(5):
        expected = len(out) / len(known) * np.count_nonzero(known == label)
        assert abs(np.count_nonzero(known[out] == label) - expected) < 2
    assert np.array_equal(out, held_out(known, share, seed)[1])


def test_another_seed_holds_out_others_and_everything_cannot_be_held_out() -> None:
    labels = np.arange(100, dtype=np.int64) % 4
    assert not np.array_equal(held_out(labels, 0.2, 1)[1], held_out(labels, 0.2, 2)[1])
    with pytest.raises(DataError, match="smaller test_share"):
        held_out(labels[:1], 0.2, 1)
