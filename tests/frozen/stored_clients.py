"""State directories of clients that were killed, and what today's SDK makes of them.

`sender`: has an update that was never sent, and what error feedback has left over of two rounds. `trainer`: was in the
midst of a training. `member`: has pinned the second list of a consortium, was in two secure sums, and was killed as it
began to send a masked update. Their coordinators are in memory (`tests/client/doubles/double.py`), made again for each
test.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.client.doubles.double import TOKEN, URL, Double, Handler, kind_of
from tests.client.doubles.secure_double import PEERS, WARD, SecureDouble, peer_key
from tests.federations.consortium import OFFICERS, after, public_key, signed
from tests.vectors.test_bits import exact
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.trust.members import MemberList, members_bytes
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.aggregation.types import RunId
from umbel.client import Checkpoint, Client, LocalPlan, RunEnd, SitePolicy, TorchClient, TrainResult, run_client
from umbel.client.policy.earlier_sums import EarlierSums
from umbel.client.policy.members_store import MembersStore
from umbel.client.rounds.shutdown import Shutdown
from umbel.client.state.identity import make_own_key, own_keys
from umbel.client.state.secure_store import SecureStore
from umbel.client.state.state_dir import home_of
from umbel.client.wire.offers import read_offer

FACTS = "clients.json"
TOP_K = CodecPlan(Codec.TOPK, key=3, parameters={"share": 0.125, "precision": "float32"}, feedback=True)
N_ROUNDS, KILLED_IN, STEPS, KILLED_AFTER = 4, 3, 6, 3
PILOT_1, PILOT_2 = "pilot-1.json", "pilot-2.json"


class Crash(BaseException):
    """Stands for kill -9: nothing in the client may catch it."""


class Hasty(Shutdown):
    """Waits for nothing."""

    def wait(self, seconds: float) -> None:
        super().wait(0.0)


def dying_at(double: Double, kind: str) -> Callable[[Handler], Handler]:
    """The client dies as it makes this request, in the round in which it is to."""

    def wrap(handle: Handler) -> Handler:
        def mortal(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == kind and double.round == KILLED_IN:
                raise Crash
            return handle(request)

        return mortal

    return wrap


def until_killed(act: Callable[[], object]) -> None:
    try:
        act()
    except Crash:
        return
    raise AssertionError("this client was to be killed")


def digest_of(updates: list[Tensor]) -> list[str]:
    return [hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in updates]


def facts_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / FACTS).read_text()))


def goes_on(double: Double, state: Path, name: str, kept: Mapping[str, Any]) -> None:
    """A coordinator in memory stands where it stood, and knows the client."""
    (own,) = own_keys(state)
    double.keys[name] = public_key_bytes(own.public_key)
    double.round, double.model_bytes = kept["round"], bytes.fromhex(kept["model"])


def stands(double: Double) -> dict[str, Any]:
    return {"round": double.round, "model": double.model_bytes.hex()}


# --- an update that was never sent ------------------------------------------------------------------------------------


class Steady(Client):
    """Changes a weight of 24 by as much as Philox says, the same each round."""

    def __init__(self) -> None:
        self.model = nn.Linear(6, 4, bias=False)
        nn.init.zeros_(self.model.weight)
        self.sample_count, self.trained = 5, 0

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.trained += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(exact(24, 17).view(4, 6))
        return TrainResult(5, 2, 2)


def _sender(double: Double, app: Client, state: Path, token: str | None, **more: Any) -> RunEnd:
    transport = double.transport(**more)
    return run_client(app, URL, state, "demo", token, "sender", transport=transport, shutdown=Hasty())


def _double_of_sender() -> Double:
    double = Double(Steady().model, rounds=N_ROUNDS)
    double.codec = TOP_K
    return double


def leave_sender(state: Path) -> dict[str, Any]:
    double = _double_of_sender()
    until_killed(lambda: _sender(double, Steady(), state, TOKEN, wrap=dying_at(double, "POST update")))
    return stands(double)


def take_up_sender(state: Path, kept: Mapping[str, Any]) -> dict[str, Any]:
    """How often it trains, what it sends, and the model that comes of it."""
    double, app = _double_of_sender(), Steady()
    goes_on(double, state, "sender", kept)
    end = _sender(double, app, state, None)
    return {
        "ends": f"{end.status}, {end.reports} reports, {end.accepted} accepted",
        "trainings": app.trained,
        "updates": digest_of(double.updates),
        "model": hashlib.sha256(double.model_bytes).hexdigest(),
    }


# --- a training that was broken off -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Scales its inputs. Its gradients are those inputs in eighths of eighths: each step is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8) / 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


class Eighths(Dataset[Any]):
    """`n_read`: how many samples were asked for."""

    def __init__(self) -> None:
        self.n_read = 0

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.n_read += 1
        return (torch.arange(8) * (index + 3) % 11 - 5) / 8, torch.zeros(8)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()


class EachStep(Checkpoint):
    """Saves after each step, with what the SDK hands out; dies after some."""

    def __init__(self, inner: Checkpoint, n_saves: int) -> None:
        self._inner, self._left = inner, n_saves

    def is_due(self) -> bool:
        return True

    def save(self, state: Mapping[str, object]) -> None:
        if not self._left:
            raise Crash
        self._left -= 1
        self._inner.save(state)

    def load(self) -> dict[str, Any] | None:
        return self._inner.load()


class Trainer(TorchClient):
    """The ready trainer. `n_saves`: after so many it is killed; None: it is not."""

    def __init__(self, n_saves: int | None = None) -> None:
        self.data, self.n_saves = Eighths(), n_saves
        super().__init__(Scaled(), _loss, self.data, optimizer=_with_momentum, device="cpu", precision="float32")

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        if self.n_saves is not None:
            plan = replace(plan, checkpoint=EachStep(plan.checkpoint, self.n_saves))
        return super().train(model, plan)


def _with_momentum(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, learning_rate, momentum=0.5)


def _trainer(double: Double, app: Client, state: Path, token: str | None) -> RunEnd:
    return run_client(app, URL, state, "demo", token, "trainer", transport=double.transport(), shutdown=Hasty())


def _double_of_trainer() -> Double:
    return Double(Scaled(), training=TrainingSection(local_steps=STEPS, batch_size=4, learning_rate=0.25))


def leave_trainer(state: Path) -> dict[str, Any]:
    double = _double_of_trainer()
    until_killed(lambda: _trainer(double, Trainer(KILLED_AFTER), state, TOKEN))
    return {**stands(double), "torch": torch.__version__}


@dataclass(frozen=True, slots=True)
class TakenUp:
    """`n_read`: samples that were asked for; of a training that begins anew, all."""

    updates: list[str]
    n_read: int


def take_up_trainer(state: Path, kept: Mapping[str, Any]) -> TakenUp:
    double, app = _double_of_trainer(), Trainer()
    goes_on(double, state, "trainer", kept)
    _trainer(double, app, state, None)
    return TakenUp(digest_of(double.updates), app.data.n_read)


def train_undisturbed(state: Path) -> TakenUp:
    """The same training in one piece, on this machine."""
    double, app = _double_of_trainer(), Trainer()
    _trainer(double, app, state, TOKEN)
    return TakenUp(digest_of(double.updates), app.data.n_read)


# --- a site in secure rounds ------------------------------------------------------------------------------------------


class Ward(Steady):
    """A site of its own."""


def _double_of_member(rounds: int = N_ROUNDS) -> SecureDouble:
    return SecureDouble(Ward().model, rounds=rounds)


def _member(double: Double, state: Path, policy: SitePolicy, token: str | None, **more: Any) -> RunEnd:
    transport = double.transport(**more)
    return run_client(Ward(), URL, state, "demo", token, WARD, policy=policy, transport=transport, shutdown=Hasty())


def _lists(state: Path) -> tuple[MemberList, MemberList]:
    (own,) = own_keys(state)
    keys = {WARD: own.public_key, **{name: peer_key(name) for name in PEERS}}
    first = MemberList("pilot", 1, keys, {name: public_key(name) for name in OFFICERS}, 2)
    return first, after(first, members={**keys, "peer-9": peer_key("peer-9")})


def policy_of(folder: Path, file: str) -> SitePolicy:
    """`folder`: where the lists lie."""
    return SitePolicy("required", folder / file)


def leave_member(state: Path) -> dict[str, Any]:
    """The first sum under the first list, the second under the second, and then the end."""
    make_own_key(state, URL)
    first, second = _lists(state)
    for file, one in ((PILOT_1, first), (PILOT_2, second)):
        (state.parent / file).write_bytes(members_bytes(signed(one, *OFFICERS)))
    double = _double_of_member()
    double.members, start = first, double.model_bytes.hex()
    double.run_file = _double_of_member(1).run_file
    _member(double, state, replace(policy_of(state.parent, PILOT_1), members_sha256=first.sha256), TOKEN)
    double.members, double.run_file = second, _double_of_member().run_file
    policy = policy_of(state.parent, PILOT_2)
    until_killed(lambda: _member(double, state, policy, None, wrap=dying_at(double, "POST update")))
    return {**stands(double), "first": start}


def take_up_member(state: Path, kept: Mapping[str, Any]) -> tuple[RunEnd, dict[str, str]]:
    """How it ends; what it has declined, and why."""
    double = _double_of_member()
    double.members = _lists(state)[1]
    goes_on(double, state, WARD, kept)
    end = _member(double, state, policy_of(state.parent, PILOT_2), None)
    return end, double.declined


def ask_member_of_fewer(state: Path, kept: Mapping[str, Any]) -> None:
    """Ask it for a sum over the first round's model, of the same clients but one. Raises what it refuses it with."""
    double = SecureDouble(Ward().model, rounds=N_ROUNDS, peers=PEERS[1:])
    goes_on(double, state, WARD, {**kept, "model": kept["first"]})
    root, _ = home_of(state, URL)
    memory = EarlierSums(RunId("demo"), policy_of(state.parent, PILOT_2), SecureStore(root / "secure"))
    memory.check_invitation(read_offer(double.offered(), WARD, double.layout), [WARD, *PEERS])


def ask_member_under_old_list(state: Path, kept: Mapping[str, Any]) -> None:
    """Start it with a policy that names the first list. Raises what it refuses it with."""
    double = _double_of_member()
    goes_on(double, state, WARD, kept)
    _member(double, state, policy_of(state.parent, PILOT_1), None)


def pinned_epoch(state: Path) -> int:
    pin = MembersStore(state).pinned("pilot")
    assert pin is not None
    return pin.list.epoch


def leave_all(folder: Path) -> None:
    """State directories as they are kept, and what their coordinators knew."""
    left = {"sender": leave_sender, "trainer": leave_trainer, "member": leave_member}
    facts = {name: leave(folder / "clients" / name) for name, leave in left.items()}
    (folder / FACTS).write_text(json.dumps(facts))
