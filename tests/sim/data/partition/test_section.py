"""The [partition] section: whatever it allows is dealt out lawfully, and what cannot be is refused in words."""

import tomllib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from umbel.sim.data.partition import section as partition_section
from umbel.sim.data.partition.feature_skew import FeaturesSection, GrowingNoise
from umbel.sim.data.partition.heterogeneity import LabelSkew, heterogeneity
from umbel.sim.data.partition.partition import Partition, SizesSection, class_counts
from umbel.sim.data.partition.section import PartitionSection, features, split

SIZES = SizesSection("log-normal", sigma=1.0)
LABELS = np.random.default_rng(7).integers(0, 10, 3000)
GROUPS = np.random.default_rng(8).integers(0, 60, 3000)

sections = st.one_of(
    st.builds(dict, scheme=st.just("iid"), sizes=st.sampled_from([SizesSection(), SIZES])),
    st.builds(
        dict, scheme=st.just("dirichlet"), alpha=st.floats(1e-3, 1e3), sizes=st.sampled_from([SizesSection(), SIZES])
    ),
    st.builds(
        dict, scheme=st.just("dirichlet"), alpha=st.floats(1e-3, 1e3), by=st.just("class"), balanced=st.booleans()
    ),
    st.builds(dict, scheme=st.just("shards"), shards_each=st.integers(1, 4)),
    st.builds(dict, scheme=st.just("classes"), classes_each=st.integers(1, 10)),
    st.builds(dict, scheme=st.just("natural")),
)


@given(sections, st.integers(1, 50), st.integers(1, 20), st.sampled_from([0.0, 0.3]), st.integers(0, 1 << 62))
def test_whatever_the_scheme_no_sample_is_dealt_twice_and_each_client_has_its_least(
    options: dict[str, Any], n_clients: int, least: int, holdout: float, seed: int
) -> None:
    section = PartitionSection(**options, clients=n_clients, min_samples=least, holdout=holdout)
    partition, again = (split(section, LABELS, seed, GROUPS) for _ in range(2))
    assert partition.n_clients == n_clients
    held = partition.holdouts or (np.empty(0, np.int64),) * n_clients
    dealt = np.concatenate([*partition.shards, *held])
    assert len(np.unique(dealt)) == len(dealt)
    assert min(len(kept) + len(back) for kept, back in zip(partition.shards, held, strict=True)) >= least
    assert partition.sizes.min() >= 1
    if section.scheme in ("iid", "dirichlet", "shards"):
        assert len(dealt) == len(LABELS)
    assert all(np.array_equal(a, b) for a, b in zip(partition.shards, again.shards, strict=True))


@pytest.mark.parametrize(
    "section",
    [
        PartitionSection("iid", clients=20),
        PartitionSection("dirichlet", clients=20, alpha=1.0),
        PartitionSection("dirichlet", clients=20, alpha=1.0, by="class"),
        PartitionSection("shards", clients=20, shards_each=2),
        PartitionSection("classes", clients=20, classes_each=2),
        PartitionSection("natural", clients=20),
    ],
    ids=lambda section: f"{section.scheme} {section.by}",
)
def test_another_seed_gives_another_partition(section: PartitionSection) -> None:
    first, second = (split(section, LABELS, seed, GROUPS) for seed in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(first.shards, second.shards, strict=True))


@pytest.mark.parametrize("by", ["client", "class"])
def test_dirichlet_tends_to_iid_with_alpha_and_to_one_class_without(by: Any) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 1000))
    iid = _label_skew(split(PartitionSection("iid", clients=10), labels, 3), labels)
    mixed = _label_skew(split(PartitionSection("dirichlet", clients=10, alpha=1e8, by=by), labels, 3), labels)
    assert mixed.total_variation_mean < 1.5 * iid.total_variation_mean < 0.1
    assert mixed.effective_classes_min > 9.7
    alone = class_counts(labels, split(PartitionSection("dirichlet", clients=10, alpha=1e-5, by=by), labels, 3).shards)
    if by == "client":
        assert (alone.max(1) == 1000).all(), "as many clients as classes of their size: each has one to itself"
    else:
        assert (alone.max(0) >= 990).all(), "a class is one client's, save what others need to have any"


def test_sizes_may_be_skewed_beside_labels() -> None:
    section = PartitionSection("dirichlet", clients=30, alpha=0.1, sizes=SizesSection("power-law", exponent=1.0))
    found = heterogeneity(split(section, LABELS, 0), LABELS)
    assert found.sizes.gini > 0.4
    assert found.labels is not None
    assert found.labels.total_variation_mean > 0.6


def test_targets_without_classes_are_dealt_by_schemes_that_do_not_look_at_them() -> None:
    targets = np.random.default_rng(0).random((3000, 80))
    assert split(PartitionSection("iid", clients=7), targets, 0).sizes.sum() == 3000
    assert split(PartitionSection("natural"), targets, 0, GROUPS).n_clients == 60
    with pytest.raises(ValueError, match='choose "iid" or "natural"'):
        split(PartitionSection("shards", clients=7, shards_each=2), targets, 0)


def test_a_natural_partition_of_some_groups_leaves_the_others_out() -> None:
    whole, some = (split(PartitionSection("natural", only=only), LABELS, 0, GROUPS) for only in (None, ("7", "11")))
    assert whole.names is not None
    assert some.names is not None
    assert some.names == ("7", "11")
    for name, shard in zip(some.names, some.shards, strict=True):
        assert shard.tolist() == whole.shards[whole.names.index(name)].tolist()


def test_a_natural_partition_needs_to_know_whose_samples_they_are() -> None:
    with pytest.raises(ValueError, match="needs the holder of each sample, but this data set names none"):
        split(PartitionSection("natural"), LABELS, 0)


@pytest.mark.parametrize(
    "section",
    [
        PartitionSection("shards", clients=100, shards_each=1, min_samples=31),
        PartitionSection("classes", clients=100, classes_each=1, min_samples=31),
        PartitionSection("iid", clients=100, min_samples=31),
        PartitionSection("dirichlet", clients=100, alpha=1.0, by="class", min_samples=31),
        PartitionSection("natural", min_samples=100),
    ],
    ids=lambda section: section.scheme,
)
def test_a_least_number_that_cannot_be_met_is_refused_with_what_to_do(section: PartitionSection) -> None:
    with pytest.raises(ValueError, match="use fewer clients, or a smaller min_samples"):
        split(section, LABELS, 0, GROUPS)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "set clients"),
        ({"clients": 0}, "clients must lie between"),
        ({"scheme": "dirichlet", "clients": 3}, "needs alpha"),
        ({"scheme": "dirichlet", "clients": 3, "alpha": 0.0}, "alpha must lie between"),
        ({"scheme": "shards", "clients": 3}, "needs shards_each"),
        ({"scheme": "classes", "clients": 3}, "needs classes_each"),
        ({"clients": 3, "alpha": 1.0}, 'alpha is for scheme = "dirichlet"'),
        ({"clients": 3, "by": "class"}, 'by = "class" is for scheme = "dirichlet"'),
        ({"scheme": "dirichlet", "clients": 3, "alpha": 1.0, "balanced": True}, "`balanced` is only for"),
        ({"scheme": "natural", "sizes": SIZES}, "leave `sizes` out"),
        ({"scheme": "dirichlet", "clients": 3, "alpha": 1.0, "by": "class", "sizes": SIZES}, "leave `sizes` out"),
        ({"clients": 3, "holdout": 1.0}, "holdout must lie between"),
        ({"clients": 3, "only": ("a",)}, 'only is for scheme = "natural"'),
        ({"scheme": "natural", "only": ()}, "`only` is empty"),
        ({"clients": 3, "min_samples": 0}, "min_samples must lie between"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        PartitionSection(**options)


def test_the_example_of_the_documentation_is_a_section() -> None:
    assert partition_section.__doc__ is not None
    text = partition_section.__doc__.split("```toml")[1].split("```")[0]
    section = TypeAdapter(PartitionSection).validate_python(tomllib.loads(text)["partition"])
    assert section.sizes == SIZES
    assert section.features == FeaturesSection("noise", variance=0.1)
    assert features(section, 100, 5) == features(section, 100, 5) != features(section, 100, 6)
    assert isinstance(features(section, 100, 5), GrowingNoise)
    assert features(PartitionSection(clients=3), 3, 5) is None


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="aplha"):
        TypeAdapter(PartitionSection).validate_python({"clients": 3, "aplha": 1})


@given(sections, st.integers(1, 400), st.integers(1, 40))
def test_a_split_is_lawful_or_refused_with_a_sentence(options: dict[str, Any], n_clients: int, n_samples: int) -> None:
    section = PartitionSection(**options, clients=n_clients)
    try:
        partition = split(section, LABELS[:n_samples], 0, GROUPS[:n_samples])
    except ValueError as refusal:
        assert any(word in str(refusal) for word in ("too few", "cannot be cut", "classes_each must", "use fewer"))  # noqa: PT017
        return
    assert partition.n_clients == n_clients
    assert partition.sizes.min() >= 1


def _label_skew(partition: Partition, labels: np.ndarray) -> LabelSkew:
    skew = heterogeneity(partition, labels).labels
    assert skew is not None
    return skew
