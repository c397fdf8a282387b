"""Federated averaging in one process; updates are written, read and summed as between clients and a coordinator.

McMahan et al. 2017 (arXiv:1602.05629), algorithm 1: in each round some clients train the model on samples of their own,
and it moves by the mean of their changes, weighted by samples. All but the codec follows from the seed: the split, the
first weights, who is asked, the order of samples. So two codecs differ by what they do to updates alone.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.codec.update_codec import Part
from umbel.aggregation.codec.vectors.codec import Projections
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.grid import Grid
from umbel.aggregation.plans.round import Weighting, ranks_of
from umbel.aggregation.round.weighting import Candidate, draw
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import ClientId
from umbel.sim.bench.codec.uplink import Uplink
from umbel.sim.data.partition.labels import shard_partition
from umbel.sim.data.samples import Samples, TrainAndTest, score
from umbel.sim.engines.local.threads import one_thread
from umbel.sim.models import two_layer_net

_MAX_ABS = 64.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Who trains, and how: `n_asked` of `n_clients` in a round, each with `shards_each` shards of a label or two.

    In a round each takes at most `n_steps` steps of SGD at `learning_rate`, on `batch_size` samples of its own each and
    none twice. The model is scored after every `score_every`-th round, and after each of the last `n_last`.
    """

    name: str
    n_clients: int
    shards_each: int
    n_asked: int
    n_rounds: int
    learning_rate: float
    n_steps: int = 60
    batch_size: int = 10
    score_every: int = 5
    n_last: int = 20

    def is_scored(self, number: int) -> bool:
        return number % self.score_every == 0 or number > self.n_rounds - self.n_last


@dataclass(frozen=True, slots=True)
class Scored:
    """After round `number`. `accuracy`: on the test set, 0 to 1; `client_bytes`: uploaded by then, a client's mean."""

    number: int
    client_bytes: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class CodecRun:
    """A run, from its first round to its last. `n_bytes`: of its `n_updates`, headers included; `sha256`: of its last
    model, of `n_values` weights."""

    curve: tuple[Scored, ...]
    n_values: int
    n_updates: int
    n_bytes: int
    sha256: str

    def accuracy(self, n_last: int) -> float:
        """The mean of the last scores."""
        last = self.curve[-n_last:]
        return sum(scored.accuracy for scored in last) / len(last)

    @property
    def bits(self) -> float:
        """Of one weight in one update."""
        return 8 * self.n_bytes / self.n_updates / self.n_values

    @property
    def client_bytes(self) -> float:
        """What a client has uploaded in all, in the mean of all clients."""
        return self.curve[-1].client_bytes


class Federation:
    """A setting with its data dealt out. Every run begins at the same place, and sees the same samples."""

    def __init__(self, setting: Setting, data: TrainAndTest, seed: int) -> None:
        self._setting, self._seed, self._test = setting, seed, data.test
        hands = shard_partition(
            data.train.targets.numpy(), setting.n_clients, setting.shards_each, derive_seed(seed, "split")
        )
        self._clients: Mapping[ClientId, Samples] = {
            ClientId(f"client-{i:04d}"): data.train.take(hand) for i, hand in enumerate(hands)
        }
        self._model = two_layer_net(seed)
        self._start = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._layout = Layout.of_state(self._start)

    def train(self, section: CodecSection) -> CodecRun:
        """A whole run with this codec. Raises `UpdateRefused` if training diverges."""
        with one_thread():
            return self._train(section)

    def _train(self, section: CodecSection) -> CodecRun:
        grid = Grid.finest(max_abs=_MAX_ABS, total_weight_max=sum(map(len, self._clients.values())))
        uplink = Uplink(section, grid, self._layout, self._seed)
        master, sizes, curve = self._layout.master_of(self._start), list[int](), list[Scored]()
        for number in range(1, self._setting.n_rounds + 1):
            total, parts, within = uplink.codec.new_sum(), list[Part](), uplink.within()
            for client, rank in ranks_of(self._cohort(number)).items():
                update = uplink.write(client, rank, self._change(master, client, number, within))
                part = Part(len(self._clients[client]), rank)
                total.add(uplink.read(update, rank), part.weight)
                parts.append(part)
                sizes.append(len(update))
            master = self._layout.add_mean(master, uplink.codec.mean(total, parts))
            uplink.go_on(total)
            if self._setting.is_scored(number):
                curve.append(Scored(number, sum(sizes) / self._setting.n_clients, self._accuracy(master)))
        sha256 = hashlib.sha256(encode_model(master)).hexdigest()
        return CodecRun(tuple(curve), self._layout.n_values, len(sizes), sum(sizes), sha256)

    def _cohort(self, number: int) -> Mapping[ClientId, int]:
        candidates = [Candidate(client, len(samples)) for client, samples in self._clients.items()]
        return draw(Weighting.SAMPLES, candidates, self._setting.n_asked, derive_seed(self._seed, "cohort", number))

    def _change(self, start: Mapping[str, Tensor], client: ClientId, number: int, within: Projections) -> Tensor:
        """What a client's training changes: float32, in layout order. `within`: what gradients are taken to."""
        samples, setting = self._clients[client], self._setting
        self._model.load_state_dict(start)
        order = torch.Generator().manual_seed(derive_seed(self._seed, "order", number, client))
        chosen = torch.randperm(len(samples), generator=order)[: setting.n_steps * setting.batch_size]
        projected = [(self._model.get_parameter(name), project) for name, project in within.items()]
        optimizer = torch.optim.SGD(self._model.parameters(), lr=setting.learning_rate)
        for batch in chosen.split(setting.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self._model(samples.inputs[batch]), samples.targets[batch]).backward()
            for parameter, project in projected:
                assert parameter.grad is not None
                parameter.grad = project(parameter.grad)
            optimizer.step()
        return self._layout.subtract(self._model.state_dict(), start)

    def _accuracy(self, master: Mapping[str, Tensor]) -> float:
        self._model.load_state_dict(master)
        return score(self._model, self._test).accuracy
