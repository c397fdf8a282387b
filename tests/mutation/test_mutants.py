"""What `make mutants` mutates, and which tests it runs for that."""

from pathlib import Path
from subprocess import run

import pytest

from tests.mutation.choice import Mutant, again, at_random, changed_since, files_in
from tests.mutation.neighbours import Neighbours
from tests.mutation.places import source_of
from tests.mutation.trials import Baseline, Limits, Trials, Workplace
from tests.mutation.worker import Job, Report, log_of

CODE = '''"""A bank."""

MOST = 100


def pay(amount: int, is_sure: bool = False) -> int:
    """Pay."""
    if amount > MOST:
        raise ValueError("too much, and not sure")
    with lock:
        record(amount, sure=is_sure)
    return MOST - amount


def unpay(amount: int) -> int:
    return -amount
'''


def mutations(code: str) -> set[str]:
    source = source_of(code)
    return {source.difference(place) for place in source.places}


@pytest.mark.parametrize(
    "mutation",
    [
        "-MOST = 100\n+MOST = 101",
        "-    if amount > MOST:\n+    if amount >= MOST:",
        "-    if amount > MOST:\n+    if False:",
        "-    if amount > MOST:\n+    if True:",
        "-    with lock:\n+    if True:",
        "-        record(amount, sure=is_sure)\n+        pass",
        "-        record(amount, sure=is_sure)\n+        record(amount, )",
        "-    return MOST - amount\n+    return MOST + amount",
        "-def pay(amount: int, is_sure: bool = False) -> int:\n+def pay(amount: int, is_sure: bool = True) -> int:",
    ],
)
def test_bounds_refusals_locks_calls_and_flags_are_mutated(mutation: str) -> None:
    assert mutation in mutations(CODE)


def test_what_is_said_to_people_is_not_mutated() -> None:
    assert not [mutation for mutation in mutations(CODE) if "too much" in mutation or "Pay." in mutation]


def project(root: Path) -> None:
    (root / "aggregation").mkdir()
    (root / "tests").mkdir()
    (root / "aggregation" / "bank.py").write_text(CODE)
    (root / "aggregation" / "shop.py").write_text("from umbel.aggregation.bank import pay\n")
    (root / "tests" / "test_bank.py").write_text("import umbel.aggregation.bank\n")
    (root / "tests" / "test_shop.py").write_text("from umbel.aggregation.shop import pay\n")
    (root / "tests" / "test_other.py").write_text("import umbel\n")


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false"]
    run(["git", *who, *words], cwd=root, check=True, capture_output=True)


def test_of_a_change_the_whole_functions_are_mutated_that_it_touches(tmp_path: Path) -> None:
    project(tmp_path)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "begin")
    assert changed_since(tmp_path, "HEAD") == []
    (tmp_path / "aggregation" / "bank.py").write_text(CODE.replace("return MOST - amount", "return MOST - 2 * amount"))
    lines = {mutant.place.first for mutant in changed_since(tmp_path, "HEAD")}
    assert {8, 10, 11, 12} <= lines <= set(range(6, 13)), "of `pay`, not of `unpay`"
    (tmp_path / "aggregation" / "new.py").write_text("ALL = 1\n")
    assert {mutant.path.name for mutant in changed_since(tmp_path, "HEAD")} == {"bank.py", "new.py"}


def test_a_seed_draws_the_same_mutants_again(tmp_path: Path) -> None:
    project(tmp_path)
    paths = [Path("aggregation/bank.py")]
    drawn, again, others = (
        [(one.place.first, one.source.difference(one.place)) for one in at_random(tmp_path, paths, 5, seed)]
        for seed in (1, 1, 2)
    )
    assert drawn == again != others
    assert len(drawn) == 5


def test_folders_are_drawn_from_without_what_no_test_here_can_judge(tmp_path: Path) -> None:
    project(tmp_path)
    for name in ("bank_plot.py", "triton_kernels.py"):
        (tmp_path / "aggregation" / name).write_text(CODE)
    assert [path.name for path in files_in(tmp_path, ["aggregation"])] == ["bank.py", "shop.py"]
    assert files_in(tmp_path, ["aggregation/bank_plot.py"]) == [Path("aggregation/bank_plot.py")], "named is named"


def test_what_survived_is_tried_again_where_it_stands_now(tmp_path: Path) -> None:
    project(tmp_path)
    told = [
        {"path": str(mutant.path), "line": mutant.place.first, "difference": mutant.source.difference(mutant.place)}
        for mutant in _mutants()[::4]
    ]
    gone = {"path": "aggregation/gone.py", "line": 1, "difference": "-a\n+b"}
    (tmp_path / "aggregation" / "bank.py").write_text(CODE.replace("MOST = 100", "# More?\n\nMOST = 100"))
    found = again(tmp_path, [*told, gone])
    assert [(one.place.first - 2, one.source.difference(one.place)) for one in found] == [
        (one["line"], one["difference"]) for one in told
    ]


def test_the_tests_that_mirror_a_file_come_first_and_those_that_do_not_reach_it_not_at_all(tmp_path: Path) -> None:
    project(tmp_path)
    near = Neighbours(tmp_path).tests_near(Path("aggregation/bank.py"), 10)
    assert near == [Path("tests/test_bank.py"), Path("tests/test_shop.py")]


def test_a_mutant_meets_the_tests_that_run_its_line_the_quick_ones_first() -> None:
    [mutant] = [one for one in _mutants() if "if False" in one.source.difference(one.place)]
    baseline = Baseline()
    lines = {"8": ["slow", "quick", "red"], "12": ["quick"], "17": ["other"], "3": [""]}
    seconds = {"slow": 2.0, "quick": 0.1, "other": 0.1, "red": 0.1, "tests/test_bank.py::own": 0.2}
    baseline.add(Report(seconds=seconds, failed=["red"], lines={"aggregation/bank.py": lines}))
    assert baseline.tests_of(mutant, [], budget_s=10.0) == (["quick", "slow"], 0)
    assert baseline.tests_of(mutant, [], budget_s=1.0) == (["quick"], 1)
    [constant] = [one for one in _mutants() if "MOST = 101" in one.source.difference(one.place)]
    found, _ = baseline.tests_of(constant, [Path("tests/test_bank.py")], budget_s=10.0)
    assert set(found) == {"quick", "slow", "other", "tests/test_bank.py::own"}, "it runs at import"


class _BrokenPlace(Workplace):
    """A copy in which pytest ends with this exit code before any test."""

    def __init__(self, folder: Path, code: int) -> None:
        self.folder, self._code = folder, code

    def run(self, job: Job) -> tuple[int | None, Report]:
        log_of(job.report).write_text("an error in a plugin")
        return self._code, Report()


def test_where_pytest_cannot_run_there_are_no_verdicts(tmp_path: Path) -> None:
    work = Trials(tmp_path, [_BrokenPlace(tmp_path / "0", code=3)], Limits())
    with pytest.raises(SystemExit, match=r"could not run tests/test_pay\.py \(exit code 3\):\san error in a plugin"):
        work.learn(Baseline(), [Path("tests/test_pay.py")], print)


def _mutants() -> list[Mutant]:
    source = source_of(CODE)
    return [Mutant(Path("aggregation/bank.py"), source, place) for place in source.places]
