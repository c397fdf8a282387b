"""A process that runs tests in its folder, each job in a fork: what all jobs import from elsewhere, it imports once.

Jobs come as JSON, one a line, on standard input; the answer to each goes to standard output. The folder is a copy of
the checkout, so that every process that a test starts sees the mutated file too.
"""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("COVERAGE_CORE", "ctrace")  # other cores cannot tell which test ran a line
import coverage

# What forks are warned of since the worker has imported plugins, and what these need, for all of them.
_IMPORTED_BEFORE = (
    "ignore::pytest.PytestAssertRewriteWarning",
    "ignore::hypothesis.errors.HypothesisSideeffectWarning",
)
# What takes long to import and starts no thread: a fork of a process with threads may wait for one that it has not.
_FORKABLE = frozenset(
    {"cryptography", "fastapi", "httpx", "hypothesis", "numpy", "pydantic", "safetensors"}
    | {"scipy", "sklearn", "sqlalchemy", "starlette", "torch", "typer"}
)
_NOT_PYTESTS = 70  # an exit code


@dataclass(frozen=True)
class Job:
    """Tests to run, until the first failure or with a record of the lines that each test runs."""

    tests: list[str]
    report: str  # the file that the fork writes
    limit_s: float
    stop_at_failure: bool
    lines: bool
    slow: bool


@dataclass
class Report:
    """What the fork says, if it gets that far."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])  # by test
    failed: list[str] = field(default_factory=list[str])
    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict[str, dict[str, list[str]]])  # file, line: tests
    modules: list[str] = field(default_factory=list[str])


class _Recorder:
    def __init__(self, cover: coverage.Coverage | None) -> None:
        self.report, self._cover = Report(), cover

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if self._cover is not None:
            self._cover.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.report.seconds
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.report.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.report.failed.append(report.nodeid)


def run(job: Job) -> int:
    """Run the job in this process. pytest's exit code."""
    parts = [str(Path.cwd() / part / "*") for part in ("aggregation", "client", "server", "sim", "umbel")]
    cover = coverage.Coverage(data_file=None, config_file=False, include=parts, concurrency=["thread", "greenlet"])
    recorder = _Recorder(cover if job.lines else None)
    if job.lines:
        cover.start()
    words = [
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-o",
        "faulthandler_timeout=120",
    ]
    for warning in _IMPORTED_BEFORE:
        words += ["-W", warning]
    words += ["-x"] if job.stop_at_failure else []
    words += [] if job.slow else ["-m", "not slow"]
    code = pytest.main([*words, *job.tests], plugins=[recorder])
    if job.lines:
        cover.stop()
        recorder.report.lines = _lines(cover.get_data())
    recorder.report.modules = sorted(sys.modules)
    Path(job.report).write_text(json.dumps(asdict(recorder.report)))
    return int(code)


def _lines(data: coverage.CoverageData) -> dict[str, dict[str, list[str]]]:
    root = Path.cwd().resolve()
    return {
        str(Path(file).resolve().relative_to(root)): {
            str(line): contexts for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }


def log_of(report: str | Path) -> Path:
    """Where the fork that writes this report prints."""
    return Path(f"{report}.log")


def _in_a_fork(job: Job) -> dict[str, Any]:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # its own group: what a test starts ends with it
        quiet = os.open(log_of(job.report), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        status = _NOT_PYTESTS
        try:
            status = run(job)
        finally:
            sys.stdout.flush()
            os._exit(status)
    try:
        code = _exit_code(child, job.limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return {"code": code, "seconds": time.monotonic() - began}


def _exit_code(child: int, limit_s: float) -> int | None:
    """None if it was not done in time."""

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except TimeoutError:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _import_for_all(names: list[str]) -> None:
    """Import what a job imported of these libraries: forks then find it done."""
    for name in names:
        if name.partition(".")[0] in _FORKABLE and name not in sys.modules:
            with suppress(Exception):
                importlib.import_module(name)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not before the fork that is running is killed
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an import that prints must not speak in between
    for line in sys.stdin:
        job = Job(**json.loads(line))
        answer = _in_a_fork(job)
        if job.lines and Path(job.report).exists():
            _import_for_all(json.loads(Path(job.report).read_text())["modules"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
