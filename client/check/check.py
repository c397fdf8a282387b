"""Check a site's own client before it takes part in a run, in one process and without a network.

```
one training          what it returns and leaves behind          result_checks.py
more trainings        told to stop, out of time; FedProx,        plan_checks.py
                      clip and structured codec
again, and anew       the same weights with the same seed;       repeat_checks.py
                      evaluations
rounds                two rounds, a kill, a secure round         round_checks.py
```
"""

import copy
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.base import base_sha256
from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.check.observed import ObservedTraining
from umbel.client.check.plan_checks import KEYS, check_gradients, check_stops
from umbel.client.check.practice_run import STEPS, PracticeRun, practice_run
from umbel.client.check.repeat_checks import check_evaluates, check_repeats
from umbel.client.check.result_checks import check_failed, check_left, check_result
from umbel.client.check.round_checks import CheckedRounds, check_resumes, check_rounds, check_secure, logged
from umbel.client.check.trainee import Trainee
from umbel.client.errors import AppError, TrainingFailed
from umbel.client.findings import ClientCheck, ClientFinding, passed, skipped, wrong
from umbel.client.local.devices import generators, set_generators
from umbel.client.training.encoding_device import encoding_device
from umbel.client.training.shared_state import SharedState
from umbel.client.user_code import checked_client

Make = Callable[[], Client]


def check_client(client: Client | Make, run_file: RunFile | None = None, *, steps: int = STEPS) -> ClientCheck:
    """Check a client, and say in words what is wrong with it.

    Random generators of the process are restored. Memory: three clients, and some twenty copies of the model's weights.

    Args:
        client: a function that makes the client, so that it can be made anew as after a restart; or a client, of which
            copies are checked.
        run_file: the check uses its [training], [codec] and [tensors]; by default it uses usual settings.
        steps: of one training, at least 4.

    Raises `ValueError` for too few steps, `AppError` for an unusable client, `LayoutError` or `WorkRefused` for a run
    file whose [tensors] or `base_sha256` do not fit it.
    """
    make, app, anew = _made(client)
    base = _base_rules(app) if run_file is None else None
    run = practice_run(run_file, steps, base, in_one_call=app.trains_in_one_call)
    with tempfile.TemporaryDirectory(prefix="umbel-check-") as folder, logged(), _generators_kept(app):
        checks = _Checks(run, make, app, anew, Path(folder))
        found = list(checks.findings())
    named = {one.check for one in found}
    found += [skipped(name, checks.why_skipped) for name in CHECKS if name not in named]
    return ClientCheck(tuple(sorted(found, key=lambda one: CHECKS.index(one.check))))


CHECKS = (
    *("train", "tensors", "weights", "base", "state", "process", "samples", "steps", "metrics", "counts"),
    *("determinism", "stop", "deadline", *KEYS, "evaluate", "restart", "rounds", "resume", "secure"),
)
"""The names of all checks, in their order."""
_BLOCKING = frozenset({"train", "tensors", "weights", "base", "state", "samples", "steps", "metrics", "counts"})
"""A client sends nothing, or leaves a part out, if one of these is wrong, so rounds would show the same fault again."""


@contextmanager
def _generators_kept(app: Client) -> Generator[None]:
    """Restore the process-wide generators of random numbers after this block."""
    device = encoding_device(app.model)
    before = generators(device)
    try:
        yield
    finally:
        set_generators(before, device)


def _made(client: Client | Make) -> tuple[Make, Client, Client]:
    """A function that makes the client as it is at its start, and two clients that it has made."""
    if isinstance(client, Client):
        make = _copies_of(checked_client(client, "the client"))
        return make, make(), make()
    one, other = checked_client(client(), "the function"), checked_client(client(), "the function")
    if one is not other:
        return client, one, other
    make = _copies_of(one)  # the function returns the same object again, which a training would change
    return make, make(), make()


def _copies_of(client: Client) -> Make:
    """A function that makes copies of a client. The client must not change meanwhile."""

    def copied() -> Client:
        try:
            return copy.deepcopy(client)
        except Exception as error:
            raise AppError(
                f"the client cannot be copied ({type(error).__name__}: {error}): name a function that makes a new one"
            ) from error

    return copied


def _base_rules(app: Client) -> TensorRules | None:
    """Rules with the hash of the base tensors that the client declares; None if it declares none."""
    base = SharedState(app).base()
    return TensorRules({}, base_sha256(base)) if base else None


class _Checks:
    """One run of all checks."""

    def __init__(self, run: PracticeRun, make: Make, app: Client, anew: Client, folder: Path) -> None:
        self.why_skipped = ""
        self._run, self._make, self._folder = run, make, folder
        self._first = Trainee(app, run.file.tensor_rules)
        self._start = self._first.save(folder / "start.safetensors")
        self._fresh = Trainee(anew, run.file.tensor_rules, self._first.private)
        self._found: dict[str, ClientFinding] = {}  # what is wrong, the first of each check
        self._ignored = set[str]()  # what a run asks of gradients, and the client does not do

    def findings(self) -> Iterator[ClientFinding]:
        try:
            for finding in self._all():
                if finding.verdict == "wrong":
                    self._found.setdefault(finding.check, finding)
                yield finding
        except (TrainingFailed, LayoutError) as error:  # the weights no longer fit the model
            if not self._found:
                advice = "Keep the names, shapes and dtypes of all tensors"
                yield self._found.setdefault(
                    "tensors", wrong("tensors", f"the client has changed its model: {error}", advice)
                )
        if self._found:
            self.why_skipped = f"the check {next(iter(self._found))} has found a fault, which must be corrected first"

    @cached_property
    def _restarted(self) -> Trainee:
        """A client that was made anew, as after a restart. It does not train before it resumes a killed training."""
        return Trainee(self._make(), self._run.file.tensor_rules, self._first.private)

    def _is_wrong(self, *checks: str) -> bool:
        return any(check in self._found for check in checks)

    def _all(self) -> Iterator[ClientFinding]:
        first, start = self._first, self._start
        baseline = first.train(start, self._run.plain())
        if (failed := check_failed(baseline)) is not None:
            yield failed
            return
        assert baseline.result is not None, "check_failed has seen it"
        yield passed("train", "train returned a result")
        yield from check_left(first, baseline)
        yield from check_result(first, baseline, baseline.result)
        if self._is_wrong("tensors", "base"):
            return
        trained = first.save(self._folder / "trained.safetensors")
        yield from self._of_trainings(baseline, trained)
        if not self._is_wrong(*_BLOCKING):
            yield from self._of_rounds(baseline)

    def _of_trainings(self, baseline: ObservedTraining, trained: Path) -> Iterator[ClientFinding]:
        first, fresh, start, run = self._first, self._fresh, self._start, self._run
        yield check_repeats(first, fresh, start, run, baseline)
        repeats = not self._is_wrong("determinism")
        yield from check_evaluates(first, self._restarted, start, run, baseline if repeats else None, trained)
        if not self._is_wrong("steps"):
            yield from check_stops(first, start, run)
        if repeats and not self._is_wrong("weights"):
            for finding in check_gradients(first, start, run, baseline):
                self._ignored |= {finding.check} if finding.verdict in ("wrong", "warning") else set()
                yield finding

    def _of_rounds(self, baseline: ObservedTraining) -> Iterator[ClientFinding]:
        ignored = frozenset(self._ignored | ({"evaluate"} if self._is_wrong("evaluate") else set()))
        first = self._first
        rounds = CheckedRounds(self._run, first.shared.layout, self._start, self._folder, ignored)
        yield check_rounds(rounds, first.reset())
        if not self._is_wrong("determinism", "evaluate"):
            yield check_resumes(rounds, self._fresh.reset(), self._restarted.reset(), baseline)
        yield check_secure(rounds, first.reset())
