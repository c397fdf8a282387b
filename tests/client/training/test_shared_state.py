"""What of a client's model travels: kinds of the run and of the site's own code, loading, changes, what stays."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.base import base_sha256
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.tensors import ListedKind, TensorKind, TensorRules
from umbel.client import Client, LocalPlan, TrainResult
from umbel.client.errors import TrainingFailed, WorkRefused
from umbel.client.training.shared_state import SharedState


class Net(nn.Module):
    """A body, a normalization layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.bn, self.head = nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)


class Site(Client):
    """`own`: the kinds that its code declares, by name."""

    def __init__(self, own: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model, self.sample_count, self.own = Net(), 4, own or {}

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        raise AssertionError("nobody trains here")

    def shares(self, name: str) -> TensorKind | None:
        return self.own.get(name)


def rules(base_sha256: str = "", **patterns: tuple[str, ...]) -> TensorRules:
    listed: dict[ListedKind, tuple[str, ...]] = {}
    for kind in ("global", "private", "base"):
        if kind in patterns:
            listed[kind] = patterns[kind]
    return TensorRules(listed, base_sha256)


FED_BN = rules(private=("bn.*",))


def tensor(site: Site, name: str) -> Tensor:
    """A tensor of the site's model, which shares its values."""
    found: Tensor = site.model.state_dict()[name]
    return found


def zeros(layout: Layout) -> dict[str, Tensor]:
    return layout.full_state({s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in layout.owners()})


# --- kinds ------------------------------------------------------------------------------------------------------------


def test_without_rules_all_of_the_model_travels() -> None:
    site = Site()
    assert SharedState(site).layout == Layout.of_state(site.model.state_dict())


def test_the_rules_of_the_run_say_what_stays() -> None:
    shared = SharedState(Site(), FED_BN)
    assert [spec.name for spec in shared.layout.tensors] == ["body.bias", "body.weight", "head.bias", "head.weight"]
    assert shared.names_of("private") == [f"bn.{x}" for x in ("weight", "bias", "running_mean", "running_var")] + [
        "bn.num_batches_tracked"
    ]


def test_a_site_may_keep_more_to_itself_and_declare_what_the_run_file_does_not_list() -> None:
    shared = SharedState(Site({"head.bias": "private", "body.bias": "global"}), TensorRules({"global": ("head.*",)}))
    kinds = {spec.name: spec.kind for spec in shared.layout.tensors if not spec.name.startswith("bn")}
    assert kinds == {"body.bias": "global", "body.weight": "mean", "head.weight": "global"}


def frozen_site(own: Mapping[str, Any] | None = None) -> Site:
    site = Site(own)
    site.model.get_submodule("body").requires_grad_(False)
    return site


def kinds_of(shared: SharedState) -> dict[str, TensorKind]:
    return {spec.name: spec.kind for spec in shared.layout.tensors if not spec.name.startswith("bn")}


def test_a_frozen_parameter_is_not_sent_unless_the_site_or_the_run_says_so() -> None:
    head: dict[str, TensorKind] = {"head.bias": "mean", "head.weight": "mean"}
    assert kinds_of(SharedState(frozen_site())) == {"body.bias": "global", "body.weight": "global", **head}
    own = SharedState(frozen_site({"body.bias": "mean"}), rules(private=("body.weight",)))
    assert kinds_of(own) == {"body.bias": "mean", **head}


def test_a_model_that_nothing_in_torch_trains_is_sent_whole() -> None:
    site = Site()
    site.model.requires_grad_(False)
    assert SharedState(site).layout == SharedState(Site()).layout


def test_what_was_frozen_first_stays_unsent_and_to_train_it_later_is_an_error() -> None:
    site = frozen_site()
    shared, before = SharedState(site), {name: value.clone() for name, value in site.model.state_dict().items()}
    list(shared.changes(before))
    site.model.get_submodule("body").requires_grad_(True)
    assert shared.under(None).layout == shared.layout
    with pytest.raises(LayoutError, match=r"parameter 'body.weight' trains now, .* `shares` return \"mean\" for it"):
        list(shared.changes(before))
    assert list(shared.sending_frozen().changes(before))


@pytest.mark.parametrize(
    ("own", "listed", "words"),
    [
        ({"bn.bias": "mean"}, FED_BN, "'bn.bias' has the kind mean by .* but the kind private in the run's"),
        ({"bn.bias": "global"}, FED_BN, "'bn.bias' has the kind global by .* but the kind private in the run's"),
        ({"bn.bias": "base"}, FED_BN, "'bn.bias' has the kind base by .* but the kind private in the run's"),
        (
            {"bn.bias": "secret"},
            None,
            r"shares\('bn.bias'\) of the client returned 'secret': return one of base, count, global",
        ),
        ({"bn.bias": 7}, None, "returned 7: return one of"),
        ({}, rules(private=("bn.wieght",)), "pattern 'bn.wieght' .* matches no tensor of this model"),
        ({}, rules(private=("bn.*",), base=("*.bias",)), "'bn.bias' is in two lists"),
    ],
)
def test_a_contradiction_is_refused_in_words(own: Mapping[str, Any], listed: TensorRules | None, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        SharedState(Site(own), listed)
    if listed is not None:
        with pytest.raises(WorkRefused, match=words):
            SharedState(Site({}), None).under(listed) if not own else SharedState(Site(own)).under(listed)


# --- what travels -----------------------------------------------------------------------------------------------------


def test_loading_overwrites_what_travels_and_leaves_what_stays() -> None:
    site = Site()
    shared, before = SharedState(site, FED_BN), {n: t.clone() for n, t in site.model.state_dict().items()}
    shared.load(zeros(shared.layout))
    for name, tensor in site.model.state_dict().items():
        assert torch.equal(tensor, before[name] if name.startswith("bn.") else torch.zeros_like(tensor)), name


def test_the_change_has_no_global_no_private_and_no_base_tensor() -> None:
    site = Site()
    shared = SharedState(
        site, TensorRules({"global": ("body.bias",), "private": ("bn.*",), "base": ("head.*",)}, "ab" * 32)
    )
    start = zeros(shared.layout)
    shared.load(start)
    with torch.no_grad():
        for parameter in site.model.parameters():
            parameter.add_(1.0)
    assert torch.equal(torch.cat(list(shared.changes(start))), torch.ones(6))  # body.weight alone


@pytest.mark.parametrize("listed", [None, FED_BN])
def test_code_that_has_changed_the_models_tensors_is_named(listed: TensorRules | None) -> None:
    site = Site()
    shared = SharedState(site, listed)
    start = zeros(shared.layout)
    site.model.add_module("extra", nn.Linear(1, 1))
    with pytest.raises(TrainingFailed, match="do not fit the client's own model"):
        shared.load(start)
    with pytest.raises(LayoutError, match="extra"):
        list(shared.changes(start))


def test_another_model_in_the_place_of_the_first_is_the_one_that_is_loaded() -> None:
    site = Site()
    shared = SharedState(site)
    site.model = Net()
    shared.load(zeros(shared.layout))
    assert not tensor(site, "body.weight").any()


# --- what stays -------------------------------------------------------------------------------------------------------


def test_private_tensors_move_to_another_process() -> None:
    one, other = Site(seed=1), Site(seed=2)
    kept = SharedState(one, FED_BN).private()
    assert set(kept) == {name for name in one.model.state_dict() if name.startswith("bn.")}
    tensor(one, "bn.bias").add_(1.0)
    assert not torch.equal(kept["bn.bias"], tensor(one, "bn.bias")), "they are copies"
    SharedState(other, FED_BN).set_private(kept)
    assert torch.equal(tensor(other, "bn.bias"), kept["bn.bias"])
    assert not torch.equal(tensor(other, "head.bias"), tensor(one, "head.bias"))


@pytest.mark.parametrize("stored", [{}, {"bn.bias": torch.zeros(3)}, {"bn.bias": torch.zeros(2, dtype=torch.int64)}])
def test_private_tensors_of_another_model_are_refused(stored: dict[str, Tensor]) -> None:
    with pytest.raises(LayoutError, match=r"the stored private tensors do not fit the model: tensor 'bn.bias'"):
        SharedState(Site(), rules(private=("bn.bias",))).set_private(stored)


# --- the base ---------------------------------------------------------------------------------------------------------


def based(site: Site, sha256: str | None = None) -> SharedState:
    base = {name: value for name, value in site.model.state_dict().items() if name.startswith("body.")}
    return SharedState(site, rules(base_sha256(base) if sha256 is None else sha256, base=("body.*",)))


def test_a_site_with_the_runs_base_takes_part_until_training_changes_the_base() -> None:
    site = Site()
    shared = based(site)
    shared.require_base()
    shared.load(zeros(shared.layout))
    shared.require_base()
    tensor(site, "body.weight").add_(1.0)
    with pytest.raises(WorkRefused, match=r"training has changed base tensors .* freeze them"):
        shared.require_base()


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        (
            based(Site(), "ab" * 32),
            r"the base tensors .* hash to .* but the run is for abababababab… \(base_sha256\)",
        ),
        (based(Site(), ""), "has 2 base tensors, but the run names no base_sha256"),
        (SharedState(Site({"body.bias": "base"})), "has 1 base tensor, but the run names no base_sha256"),
        (SharedState(Site(), rules("ab" * 32)), "the run is for a model with base tensors .* has none"),
    ],
)
def test_another_base_is_declined_with_what_to_do(shared: SharedState, words: str) -> None:
    with pytest.raises(WorkRefused, match=words):
        shared.require_base()


def test_a_tensor_that_training_has_made_sparse_or_put_in_place_of_another_is_refused_though_the_first_fitted() -> None:
    model = nn.Linear(3, 2)
    shared = SharedState(model)
    start = {name: tensor.clone() for name, tensor in shared.shared().items()}
    assert len(list(shared.changes(start))) == len(list(shared.changes(start))) == 2
    for other in (nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.eye(2, 3).to_sparse())):
        model.weight = other
        with pytest.raises(LayoutError):
            list(shared.changes(start))
