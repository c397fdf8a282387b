"""Copies of the checkout, each with a worker; what a mutant meets there."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

from tests.mutation.choice import Mutant
from tests.mutation.neighbours import Neighbours
from tests.mutation.worker import Job, Report, log_of

Work = TypeVar("Work")
Result = TypeVar("Result")

_TESTS_OK, _TESTS_FAILED, _NO_TESTS = 0, 1, 5  # pytest's exit codes


class Outcome(StrEnum):
    FAILED = "a test failed"
    HUNG = "the tests did not end in time"
    SURVIVED = "no test failed"
    NOT_RUN = "no test runs it"

    @property
    def noticed(self) -> bool:
        return self in (Outcome.FAILED, Outcome.HUNG)


@dataclass(frozen=True)
class Limits:
    """How long tests may take, by the clock of the run without a mutant."""

    baseline_s: float = 900.0  # a test file
    budget_s: float = 90.0  # of tests for one mutant, the quick ones first
    slow: bool = False

    def of_mutant(self, seconds: float) -> float:
        return 30.0 + 6.0 * seconds


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    outcome: Outcome
    ran: Sequence[str]  # the tests that it met, up to the first that failed
    noticed_by: str | None
    left_out: int  # tests that run the line but were over the budget

    def after(self, before: Sequence[str]) -> "Verdict":
        """This verdict on a mutant that has met other tests `before`, and none of them noticed it."""
        outcome = Outcome.SURVIVED if before and self.outcome is Outcome.NOT_RUN else self.outcome
        return replace(self, outcome=outcome, ran=[*before, *self.ran])


Met: TypeAlias = Mapping[Mutant, Sequence[str]]


@dataclass
class Baseline:
    """The tests without a mutant: how long each takes, and the lines that it runs."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    failed: set[str] = field(default_factory=set[str])
    # By file and line. The test "" is the import of the file: a constant, a default.
    lines: dict[Path, dict[int, set[str]]] = field(default_factory=dict[Path, dict[int, set[str]]])

    def add(self, report: Report) -> None:
        self.seconds |= report.seconds
        self.failed |= set(report.failed)
        for file, lines in report.lines.items():
            known = self.lines.setdefault(Path(file), {})
            for line, tests in lines.items():
                known.setdefault(int(line), set()).update(tests)

    def tests_of(self, mutant: Mutant, mirrors: Iterable[Path], budget_s: float) -> tuple[list[str], int]:
        """The tests that run a mutated line, the quick ones first, and how many are over the budget.

        A line that runs at import can change every test that runs anything of its file.
        """
        lines = self.lines.get(mutant.path, {})
        runs = set[str]().union(*(lines.get(n, ()) for n in range(mutant.place.first, mutant.place.last + 1)))
        if "" in runs:
            runs = set[str]().union(*lines.values())
            runs |= {test for test in self.seconds if Path(test.partition("::")[0]) in set(mirrors)}
        sound = sorted(runs - self.failed - {""}, key=lambda test: self.seconds.get(test, 0.0))
        chosen, spent = list[str](), 0.0
        for test in sound:
            spent += self.seconds.get(test, 0.0)
            if chosen and spent > budget_s:
                break
            chosen.append(test)
        return chosen, len(sound) - len(chosen)


class Workplace:
    """One copy with its worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant that comes in the same second must not be taken for the last one
            "HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "mutants"),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",  # as tests/conftest.py has it, which comes too late for a worker
        }
        command = [sys.executable, "-m", "tests.mutation.worker"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def run(self, job: Job) -> tuple[int | None, Report]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        report = Path(job.report)
        report.unlink(missing_ok=True)
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["code"], Report(**json.loads(report.read_text())) if report.exists() else Report()

    @property
    def report(self) -> Path:
        return self.folder.with_suffix(".report")

    def last_words(self) -> str:
        """What the tests of the last job printed in the end."""
        return log_of(self.report).read_text(errors="replace")[-2000:]

    @contextmanager
    def mutated(self, mutant: Mutant) -> Generator[None]:
        file = self.folder / mutant.path
        file.write_text(mutant.source.mutated(mutant.place), encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(mutant.source.module.code, encoding="utf-8")


def copy_of(root: Path, folder: Path) -> None:
    """What git tracks or would track, with links as links, and the compiled kernels."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    kernels = [str(path.relative_to(root)) for path in root.glob("aggregation/**/*.so")]
    for name in {*filter(None, names), *kernels}:
        if (root / name).is_file() or (root / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name, follow_symlinks=False)


@dataclass
class Trials:
    """Workplaces that take one piece of work after another."""

    root: Path
    places: Sequence[Workplace]
    limits: Limits

    def learn(self, baseline: Baseline, tests: Iterable[Path], told: Callable[[str], None]) -> None:
        """Run these test files without a mutant, each once."""

        def one(test: Path, place: Workplace) -> tuple[Path, int | None, Report]:
            code, report = place.run(self._job(place, [str(test)], self.limits.baseline_s, lines=True))
            if code not in (_TESTS_OK, _TESTS_FAILED, _NO_TESTS, None):
                # No verdict would mean anything: a test that cannot run notices every mutant, or none.
                raise SystemExit(f"pytest could not run {test} (exit code {code}):\n{place.last_words()}")
            return test, code, report

        for test, code, report in self._each(sorted(tests), one):
            baseline.add(report)
            if code not in (_TESTS_OK, _NO_TESTS):
                told(
                    f"{test} fails without a mutant ({', '.join(report.failed[:3]) or 'not done in time'}): "
                    "its failures are left out"
                )

    def verdicts(
        self, mutants: Sequence[Mutant], baseline: Baseline, mirrors: Mapping[Path, Sequence[Path]], met: Met
    ) -> Iterator[Verdict]:
        """What becomes of each, among the tests that it has not `met` before."""

        def one(mutant: Mutant, place: Workplace) -> Verdict:
            found, left_out = baseline.tests_of(mutant, mirrors.get(mutant.path, ()), self.limits.budget_s)
            before = met.get(mutant, ())
            tests = [test for test in found if test not in before]
            verdict = self._verdict(mutant, place, tests, left_out, sum(baseline.seconds.get(t, 0.0) for t in tests))
            return verdict.after(before)

        return self._each(mutants, one)

    def _verdict(self, mutant: Mutant, place: Workplace, tests: list[str], left_out: int, seconds: float) -> Verdict:
        if not tests:
            return Verdict(mutant, Outcome.NOT_RUN, [], None, left_out)
        with place.mutated(mutant):
            job = self._job(place, tests, self.limits.of_mutant(seconds), lines=False)
            code, report = place.run(job)
        noticed_by = report.failed[0] if report.failed else None
        if code is None:
            return Verdict(mutant, Outcome.HUNG, list(report.seconds), noticed_by, left_out)
        outcome = Outcome.SURVIVED if code == _TESTS_OK else Outcome.FAILED
        return Verdict(mutant, outcome, list(report.seconds), noticed_by, left_out)

    def _job(self, place: Workplace, tests: list[str], limit_s: float, lines: bool) -> Job:
        return Job(tests, str(place.report), limit_s, stop_at_failure=not lines, lines=lines, slow=self.limits.slow)

    def _each(self, work: Iterable[Work], do: Callable[[Work, Workplace], Result]) -> Iterator[Result]:
        free: SimpleQueue[Workplace] = SimpleQueue()
        for place in self.places:
            free.put(place)

        def take(piece: Work) -> Result:
            place = free.get()
            try:
                return do(piece, place)
            finally:
                free.put(place)

        with ThreadPoolExecutor(len(self.places)) as pool:
            try:
                yield from (done.result() for done in as_completed([pool.submit(take, piece) for piece in work]))
            finally:
                pool.shutdown(cancel_futures=True)


@contextmanager
def trials(root: Path, workers: int, limits: Limits) -> Generator[Trials]:
    """Workers in fresh copies, which end with the block; a checkout is never mutated."""
    with ExitStack() as stack:
        # A process that a test left behind may still write there, which must not cost the verdicts.
        temporary = tempfile.TemporaryDirectory(prefix="umbel-mutants-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        places: list[Workplace] = []
        for number in range(workers):
            copy_of(root, folder / str(number))
            places.append(Workplace(folder / str(number)))
            stack.callback(places[-1].close)
        yield Trials(root, places, limits)


def tests_near(root: Path, paths: Iterable[Path], count: int, slow: bool) -> dict[Path, list[Path]]:
    neighbours = Neighbours(root, slow)
    return {path: neighbours.tests_near(path, count) for path in paths}
