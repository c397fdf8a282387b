"""Sites in secure rounds, a process each, that kill themselves at a chosen step of a chosen round.

They run the SDK as any site does. Where one dies is seen on its line to the coordinator, before a request is sent or
after it was answered, or else its own training does it. All that it says is written down, and so are its secrets, for
the test alone. Processes are forked as those of `killing.py` are.
"""

import json
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import httpx
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from tests.federations.own_dithers import secret_of
from tests.servers import killing
from umbel.aggregation.plans.assignment import Assignment
from umbel.client import Client, LocalPlan, SitePolicy, TrainResult, run_client
from umbel.client.policy.site import SecureRandom

RUN = "mortal"
NAMES = ("east", "north", "south", "west")
SAMPLES = {"east": 1, "north": 2, "south": 4, "west": 8}  # no two sets of sites have the same sum
IN_TRAINING = "in training"
LATE_IN_TRAINING = "late in training"  # once its thread has asked for the state of the assignment
_SECRET_BYTES_MIN = 32  # keys, self masks, Shamir's coefficients
_ASSIGNMENT = re.compile("/v1/assignments/([^/]+)")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([killing.__name__, __name__])


@dataclass(frozen=True, slots=True)
class Said:
    """One request. `life`: which of the site's processes has sent it, from 0; `what`: `PUT report`; `body`: hex."""

    life: int
    what: str
    assignment: str
    body: str


_SAID = TypeAdapter(Said)


@dataclass(frozen=True)
class MortalSite:
    """One site, through all of its lives. `deaths`: what it dies of in a round, such as `before PUT report`.

    `folder`: has the site's state directory, and beside it what the test wants to know.
    """

    name: str
    url: str
    token: str
    policy: SitePolicy
    folder: Path
    deaths: Mapping[int, str] = field(default_factory=dict[int, str])

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self, life: int, after_round: int) -> ForkServerProcess:
        """A process that takes part until the run is finished, or until the first death after this round.

        Only the first has the token, so no other one can enrol.
        """
        process = _CONTEXT.Process(target=_live, args=(self, life, after_round), daemon=True)
        process.start()
        return process

    def said(self) -> list[Said]:
        """All that its processes have said, in order."""
        return [_SAID.validate_json(line) for line in self._said.read_bytes().splitlines()]

    def secrets(self) -> list[bytes]:
        """All that its processes have drawn for keys, masks and shares."""
        return [bytes.fromhex(line) for line in self._drawn.read_text().split()] if self._drawn.exists() else []

    def note_said(self, said: Said) -> None:
        _append(self._said, json.dumps(asdict(said)))

    def draw(self, n_bytes: int) -> bytes:
        """As `os.urandom`, written down."""
        drawn = _urandom(n_bytes)
        if n_bytes >= _SECRET_BYTES_MIN:
            _append(self._drawn, drawn.hex())
        return drawn

    @property
    def _said(self) -> Path:
        return self.folder / "said"

    @property
    def _drawn(self) -> Path:
        return self.folder / "drawn"


class Line(httpx.BaseTransport):
    """A site's way to its coordinator. `keys_are_exchanged`: in the attempt for which it was asked last."""

    def __init__(self, site: MortalSite, life: int, after_round: int) -> None:
        self.keys_are_exchanged = threading.Event()
        self.is_watched = threading.Event()  # whether it has asked for the status of an assignment
        self._site = site
        self._life = life
        self._deaths = {number: step for number, step in site.deaths.items() if number > after_round}
        self._round = 0
        self._inner = httpx.HTTPTransport()

    def dies_of(self, step: str) -> bool:
        """Whether the site does not outlive this step of this round."""
        return self._deaths.get(self._round) == step

    def reach(self, step: str) -> None:
        """Die here if this is the step."""
        if self.dies_of(step):
            os.kill(os.getpid(), signal.SIGKILL)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        what, assignment = f"{request.method} {path.rpartition('/')[2]}", _ASSIGNMENT.match(path)
        self.reach(f"before {what}")
        said = Said(self._life, what, assignment[1] if assignment else "", request.read().hex())
        self._site.note_said(said)
        if assignment and path.endswith(assignment[1]):
            self.is_watched.set()
        response = self._inner.handle_request(request)
        if what == "POST check-ins":
            response = self._asked(response)
        elif what == "GET masked-input" and response.status_code == 200:
            self.keys_are_exchanged.set()
        self.reach(f"after {what}")
        return response

    def _asked(self, response: httpx.Response) -> httpx.Response:
        """Note the round that a check-in's answer asks for, if it does."""
        body = response.read()
        if response.is_success and (assignment := json.loads(body)["assignment"]) is not None:
            self._round = assignment["round"]
            self.keys_are_exchanged.clear()
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(body))

    def close(self) -> None:
        self._inner.close()


class Repeatable(SecureRandom):
    """Rounds its levels alike in every attempt at a round, so that one model is to be expected of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def contribution_secret(self, offer: Assignment) -> bytes:
        return secret_of(f"{self._name}/{offer.round}")


class Ward(Client):
    """Adds one to each of its own weights, so that the mean tells whose updates are in it, and how much they weigh.

    It trains for as long as keys are being exchanged.
    """

    def __init__(self, name: str, line: Line) -> None:
        self.model, self.sample_count = fresh_model(), SAMPLES[name]
        self._row = NAMES.index(name)
        self._line = line

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        while not self._line.keys_are_exchanged.is_set() and not plan.should_stop():
            time.sleep(0.005)
        self._line.reach(IN_TRAINING)
        if self._line.dies_of(LATE_IN_TRAINING):
            self._line.is_watched.wait()
            time.sleep(1.0)
            self._line.reach(LATE_IN_TRAINING)
        with torch.no_grad():
            model.get_parameter("weight")[self._row] += 1.0
        return TrainResult(self.sample_count, 1, 1)


def fresh_model() -> nn.Module:
    """A row of weights for each site, all zero."""
    model = nn.Linear(16, len(NAMES), bias=False)
    nn.init.zeros_(model.weight)
    return model


_urandom = os.urandom


def _live(site: MortalSite, life: int, after_round: int) -> None:
    log = os.open(site.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    logging.basicConfig(level=logging.INFO, format=f"life {life} %(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # what is said is written down elsewhere
    torch.set_num_threads(1)  # threads of many processes on few cores wait for each other
    line = Line(site, life, after_round)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", site.draw)
        token = site.token if life == 0 else None
        app = Ward(site.name, line)
        end = run_client(
            app,
            site.url,
            site.state,
            RUN,
            token,
            site.name,
            policy=site.policy,
            transport=line,
            secure_random=Repeatable(site.name),
        )
    assert end.status == "finished", end


def _append(path: Path, text: str) -> None:
    """A whole line at once: a site has two threads, and may die at any moment."""
    with path.open("ab", buffering=0) as file:
        file.write(f"{text}\n".encode())
