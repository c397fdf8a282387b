"""Kinds of tensors with a real coordinator and real clients: FedBN, personal heads and a frozen part of the model.

Each site adds its own number to all that it can train, so every value of every model can be told in advance.
"""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.contracts.house import House
from tests.servers.waits import LIMIT_S
from tests.suite.nights import at_night
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.base import base_sha256
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.tensors import TensorKind
from umbel.client import Client, LocalPlan, RunEnd, TrainResult, run_client
from umbel.client.cli.audit import replay_run
from umbel.client.errors import CoordinatorRefused, WorkRefused
from umbel.client.state.model_files import write_model
from umbel.client.training.shared_state import SharedState

pytestmark = pytest.mark.slow
ROUNDS = 2
SAMPLES = {"east": 2, "north": 3, "south": 7}
PLAIN = """
name = "kinds"
rounds = { count = 2, target = 3, minimum = 3, over_selection = 1.0, window_s = 100 }
"""
CHANGES = '[codec]\nname = "integer"\nstep = 0.01\nfirst_norm = 1.0\n[downlink]\nname = "change"\n'
KEPT = '[retention]\nupdates = "all"\n'
MASKED = '[codec]\nname = "integer"\nstep = 0.01\nfirst_norm = 1.0\n[secure_aggregation]\nexpected_sample_count = 4\n'
TENSORS = '[tensors]\nglobal = ["embedding.*"]\ncount = ["seen"]\nprivate = ["bn.*", "head.*"]\n'


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.bn, self.head = (
            nn.Embedding(40, 5),
            nn.Linear(50, 20),
            nn.BatchNorm1d(20),
            nn.Linear(20, 3),
        )
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))


class Ward(Client):
    """`own`: what its code declares private. `adapts`: whether it trains its head alone. `freezes`: whether
    its embedding is frozen.
    """

    def __init__(self, samples: int, own: str = "-", *, adapts: bool = False, freezes: bool = False) -> None:
        torch.manual_seed(0)
        self.model, self.sample_count, self._own, self._adapts = Net(), samples, own, adapts
        self._frozen = frozenset({"embedding.weight"} if freezes else ())
        self.model.get_submodule("embedding").requires_grad_(not freezes)

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        with torch.no_grad():
            trained = model.get_submodule("head") if self._adapts else model
            for value in (one for name, one in trained.state_dict().items() if name not in self._frozen):
                value.add_(self.sample_count / 64 if value.is_floating_point() else self.sample_count)
        return TrainResult(self.sample_count, 1, 1, {"loss": 1.0})

    def shares(self, name: str) -> TensorKind | None:
        return "private" if name.startswith(self._own) else None


class Sites:
    """Three sites, each in a thread."""

    def __init__(
        self, house: House, directory: Path, own: str = "-", *, adapts: bool = False, freezes: bool = False
    ) -> None:
        self.wards = {name: Ward(samples, own, adapts=adapts, freezes=freezes) for name, samples in SAMPLES.items()}
        self.ends: dict[str, RunEnd] = {}
        self.refusals: dict[str, Exception] = {}
        with house.operator() as operator:
            tokens = dict(zip(SAMPLES, operator.create_tokens(len(SAMPLES)), strict=True))
        self._threads = [
            threading.Thread(target=self._run, args=(house.url, directory / name, tokens[name]), daemon=True)
            for name in SAMPLES
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, state: Path, token: str) -> None:
        try:
            self.ends[state.name] = run_client(self.wards[state.name], url, state, "kinds", token, state.name)
        except WorkRefused as refusal:
            self.refusals[state.name] = refusal

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT_S)


def create(house: House, directory: Path, run_file: str) -> str:
    """Create the run from a file of the whole model; what the operator is told."""
    (directory / "kinds.toml").write_text(run_file)
    (directory / "init.safetensors").write_bytes(encode_model(Ward(1).model.state_dict()))
    made = house.umbel("create", str(directory / "kinds.toml"), "--model", str(directory / "init.safetensors"))
    assert made.exit_code == 0, made.output
    return made.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("leaves_frozen_out", [True, False], ids=["made by model init", "made from a state dict"])
def test_a_frozen_parameter_does_not_drift_and_an_old_model_that_sends_it_still_works(
    house: House, tmp_path: Path, leaves_frozen_out: bool
) -> None:
    model = Ward(1).model
    model.get_submodule("embedding").requires_grad_(False)
    layout = SharedState(model).layout if leaves_frozen_out else Layout.of_state(model.state_dict())
    write_model(tmp_path / "init.safetensors", model.state_dict(), layout)
    (tmp_path / "kinds.toml").write_text(PLAIN + '[codec]\nname = "integer"\nstep = 1.0\nfirst_norm = 1.0\n')
    house.told("create", str(tmp_path / "kinds.toml"), "--model", str(tmp_path / "init.safetensors"))
    sites = Sites(house, tmp_path, freezes=True)
    sites.join()
    assert {name: end.accepted for name, end in sites.ends.items()} == dict.fromkeys(SAMPLES, ROUNDS), sites.refusals
    house.told("export", "kinds", "--out", str(tmp_path / "model.safetensors"))
    _, made = decode_model((tmp_path / "model.safetensors").read_bytes())
    start = model.state_dict()["embedding.weight"]
    assert torch.equal(made["embedding.weight"], start) is leaves_frozen_out
    assert torch.allclose(made["embedding.weight"], start, atol=0.5)


def moved(start: Tensor, by: float) -> Tensor:
    return start + (by / 64 if start.is_floating_point() else by)


@pytest.mark.parametrize(
    ("sections", "error"),
    [*at_night((KEPT, 1e-6)), (KEPT + CHANGES, 0.01), (MASKED, 0.01)],
    ids=["float32", "integers and changes", "masked"],
)
def test_private_tensors_stay_a_global_one_never_moves_counts_add_up_and_the_others_are_averaged(
    house: House, tmp_path: Path, sections: str, error: float, capsys: pytest.CaptureFixture[str]
) -> None:
    said = create(house, tmp_path, PLAIN + sections + TENSORS)
    assert "left out of the upload: 7 private tensors (bn.bias, bn.num_batches_tracked, bn.running_mean, …)" in said
    sites, start = Sites(house, tmp_path), Ward(1).model.state_dict()
    sites.join()
    assert {name: (end.status, end.accepted) for name, end in sites.ends.items()} == dict.fromkeys(
        SAMPLES, ("finished", ROUNDS)
    ), sites.refusals

    house.told("export", "kinds", "--out", str(tmp_path / "model.safetensors"))
    layout, made = decode_model((tmp_path / "model.safetensors").read_bytes())
    assert {spec.name: spec.kind for spec in layout.tensors} == {
        "body.bias": "mean",
        "body.weight": "mean",
        "embedding.weight": "global",
        "seen": "count",
    }
    assert made["seen"].tolist() == [ROUNDS * sum(SAMPLES.values())] * 2
    mean = sum(n * n for n in SAMPLES.values()) / sum(SAMPLES.values())
    assert torch.equal(made["embedding.weight"], start["embedding.weight"])
    assert torch.allclose(made["body.weight"], moved(start["body.weight"], ROUNDS * mean), atol=error)
    for name, ward in sites.wards.items():
        for kept in (one for one in start if one.startswith(("bn.", "head."))):
            expected = moved(start[kept], ROUNDS * SAMPLES[name])
            assert torch.allclose(ward.model.state_dict()[kept], expected, atol=1e-5), (name, kept)

    assert not house.told("show", "kinds")["turned_away"], "clients apply the rules at their first check-in"
    if sections != MASKED:
        with house.operator() as operator:
            replay_run(operator, "kinds", all_=True)
        assert capsys.readouterr().out.count("the same hash") == ROUNDS


BASE = '[tensors]\nbase = ["embedding.*", "body.*", "bn.*", "seen"]\n'


def bound_to_the_base() -> str:
    base = {name: value for name, value in Ward(1).model.state_dict().items() if not name.startswith("head.")}
    return f'base_sha256 = "{base_sha256(base)}"\n'


@pytest.mark.nightly
def test_adapters_alone_travel_on_a_base_that_every_site_has(house: House, tmp_path: Path) -> None:
    said = create(house, tmp_path, bound_to_the_base() + PLAIN + BASE)
    assert "left out of the upload: 9 base tensors" in said
    sites, start = Sites(house, tmp_path, adapts=True), Ward(1).model.state_dict()
    sites.join()
    assert {end.status for end in sites.ends.values()} == {"finished"}, sites.refusals
    house.told("export", "kinds", "--out", str(tmp_path / "model.safetensors"))
    _, made = decode_model((tmp_path / "model.safetensors").read_bytes())
    assert set(made) == {"head.weight", "head.bias"}
    mean = sum(n * n for n in SAMPLES.values()) / sum(SAMPLES.values())
    assert torch.allclose(made["head.bias"], moved(start["head.bias"], ROUNDS * mean), atol=1e-6)


@pytest.mark.nightly
def test_a_site_with_another_base_declines_and_says_so_to_the_operator(house: House, tmp_path: Path) -> None:
    create(house, tmp_path, bound_to_the_base() + PLAIN.replace("3", "1") + BASE)
    with house.operator() as operator:
        [token] = operator.create_tokens(1)
    other = Ward(2, adapts=True)
    with torch.no_grad():
        other.model.state_dict()["body.bias"][0] += 1
    with pytest.raises(WorkRefused, match=r"the base tensors of this client's model hash to .* load the base model"):
        run_client(other, house.url, tmp_path / "west", "kinds", token, "west")
    declined = {one["reason"] for record in house.told("show", "kinds")["ended"] for one in record["clients"]}
    assert any("the base tensors of this client's model hash to" in reason for reason in declined)


@pytest.mark.nightly
def test_a_site_whose_code_keeps_a_tensor_of_the_runs_model_is_refused_with_the_tensors_name(
    house: House, tmp_path: Path
) -> None:
    create(house, tmp_path, PLAIN + TENSORS)
    ward = Ward(2, "body.bias")
    with house.operator() as operator:
        [token] = operator.create_tokens(1)
    with pytest.raises(CoordinatorRefused, match=r"tensor 'body.bias' is missing"):
        run_client(ward, house.url, tmp_path / "east", "kinds", token, "east")
    [away] = house.told("show", "kinds")["turned_away"]
    assert "tensor 'body.bias' is missing" in away["reason"]


@pytest.mark.nightly
def test_a_run_file_that_contradicts_its_model_file_is_refused_by_the_coordinator(house: House) -> None:
    with house.operator() as operator:
        model = operator.upload_model(encode_model(Ward(1).model.state_dict()))
        with pytest.raises(CoordinatorRefused, match=r"'bn.bias' is private by .* must not leave a site") as refused:
            operator.create_run("kinds", PLAIN + TENSORS, model)
        assert (refused.value.kind, refused.value.status) == ("malformed-request", 422)
