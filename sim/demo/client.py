"""One client process of the demo: a few clinics, each a thread with its own key, state directory and shard.

`python -m umbel.sim.demo.client` reads and writes JSON lines. Standard input: the list of sites; then, once all are
ready, the pace as a number, which starts them. At the end of standard input the process ends, so that it does not
outlive the demo. Standard output: each client's public key, if it is to be listed; `ready` and the time of a rehearsal;
a line whenever a client begins to train or is done.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from umbel.client import LocalPlan, TorchClient, TrainResult, read_policy, run_client
from umbel.client.state.identity import make_own_key, own_keys
from umbel.sim.demo.digits import DigitNet
from umbel.sim.processes import when_the_starter_is_gone

_OUTPUT = threading.Lock()
SHARD_FILE = "shard.safetensors"
POLICY_FILE = "policy.toml"
BATCH_SIZE = 16
REHEARSAL_STEPS = 84  # three clients, four passes over some 110 samples, in batches of 16


@dataclass(frozen=True, slots=True)
class DemoSite:
    """One client's settings. `directory` holds its shard and its state; `token` enrols it, once.

    `has_policy`: its key is to be listed, and when it starts, `directory` holds a policy that pins the list.
    """

    name: str
    directory: str
    server_url: str
    run: str
    token: str
    wait_s: float
    has_policy: bool = False

    @property
    def state(self) -> Path:
        return Path(self.directory) / "state"


@dataclass(frozen=True, slots=True)
class SiteEvent:
    """One line of standard output. `n_trainings`: how often this client has begun to train since its start.

    `public_key`: with `key`, base64. `rehearsal_s`: with `ready`, the time of `rehearse`.
    """

    event: str
    client: str = ""
    n_trainings: int = 0
    public_key: str = ""
    rehearsal_s: float = 0.0


class SlowDataset(Dataset[tuple[Tensor, Tensor]]):
    """A shard that waits before each sample. It stands for a slow machine; all else in the demo is real."""

    def __init__(self, images: Tensor, labels: Tensor, wait_s: float) -> None:
        self._images, self._labels, self.wait_s = images, labels, wait_s

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.wait_s)
        return self._images[index], self._labels[index]


class Clinic(TorchClient):
    """The SDK's trainer, which also prints when it begins."""

    def __init__(self, site: DemoSite) -> None:
        shard = load_file(Path(site.directory) / SHARD_FILE)
        self._data = SlowDataset(shard["images"], shard["labels"], site.wait_s)
        super().__init__(DigitNet(), nn.CrossEntropyLoss(), self._data, device="cpu")
        self._name, self._n_trainings = site.name, 0

    def slow_down(self, pace: float) -> None:
        """Multiply the wait for each sample."""
        self._data.wait_s *= pace

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self._n_trainings += 1
        _say(SiteEvent("training", self._name, self._n_trainings))
        return super().train(model, plan)


def main() -> None:
    """Read the sites, wait for `go`, take part until the run is over."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    sites = TypeAdapter(list[DemoSite]).validate_json(_read_line())
    for site in sites:
        if site.has_policy:
            _say(SiteEvent("key", site.name, public_key=make_key(site)))
    clinics = [Clinic(site) for site in sites]
    train_on_nothing(1)  # torch's first step takes a second or two
    _say(SiteEvent("ready", rehearsal_s=rehearse()))
    pace = float(_read_line())
    for clinic in clinics:
        clinic.slow_down(pace)
    when_the_starter_is_gone(lambda: os._exit(1))
    if not _take_part(sites, clinics):
        sys.exit(1)


def make_key(site: DemoSite) -> str:
    """This client's public key, made if missing, as `umbel fingerprint --server` prints it."""
    make_own_key(site.state, site.server_url)
    (key,) = own_keys(site.state)
    return key.public_key


def rehearse() -> float:
    """Seconds for about the steps of a process in a round, while the other processes do the same."""
    began = time.monotonic()
    train_on_nothing(REHEARSAL_STEPS)
    return time.monotonic() - began


def train_on_nothing(n_steps: int) -> None:
    samples = TensorDataset(torch.zeros(BATCH_SIZE, 8, 8), torch.zeros(BATCH_SIZE, dtype=torch.int64))
    client = TorchClient(DigitNet(), nn.CrossEntropyLoss(), samples, device="cpu")
    client.train(client.model, LocalPlan(steps=n_steps, batch_size=BATCH_SIZE))


def _take_part(sites: Sequence[DemoSite], clinics: Sequence[Clinic]) -> bool:
    """Run every client to its end; whether all ended well."""
    well: list[str] = []

    def run(site: DemoSite, clinic: Clinic) -> None:
        policy = read_policy(Path(site.directory) / POLICY_FILE) if site.has_policy else None
        run_client(clinic, site.server_url, site.state, site.run, token=site.token, name=site.name, policy=policy)
        _say(SiteEvent("done", site.name))
        well.append(site.name)

    threads = [
        threading.Thread(target=run, args=(site, clinic), name=site.name)
        for site, clinic in zip(sites, clinics, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(well) == len(sites)


def _say(event: SiteEvent) -> None:
    with _OUTPUT:  # the clients' threads share it
        print(json.dumps(asdict(event)), flush=True)


def _read_line() -> str:
    line = sys.stdin.readline()
    if not line:
        sys.exit("the demo has ended")
    return line


if __name__ == "__main__":
    main()
