"""Which mutations of the code does no test notice?

    make mutants                                      what changed since main, or since the last commit on main
    make mutants BASE=HEAD~3                          what changed since that commit
    make mutants RANDOM=200 SEED=20261123             two hundred places of the whole product, drawn with a seed
    make mutants RANDOM=20 SEED=1 IN="server/http/auth.py aggregation/secagg"
    make mutants AGAIN=verdicts.jsonl                 those that nobody noticed when --out wrote this file

A mutant is the code with one small mistake: a bound off by one, a refusal that refuses nothing, a lock that is gone, a
flag turned round. The tests near the file run once without a mutant, which tells the lines that each test runs. Then
each mutant meets the tests that run its line, the quick ones first, until one fails. Those that survive the nearest two
test files meet the others. A mutant survives if no test fails: no test decides that line. Either a test is missing, or
the line is not needed, or both ways are right.

What is drawn from folders leaves out files that draw plots, which a person looks at, and Triton's kernels, which need a
GPU. Everything happens in copies in a temporary folder. Tests marked slow take part with --slow only.
"""

import argparse
import json
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutation.choice import Mutant, again, at_random, changed_since, files_in, merge_base
from tests.mutation.neighbours import PARTS
from tests.mutation.trials import Baseline, Limits, Outcome, Verdict, tests_near, trials
from tests.repository import ROOT

_FIRST_RING = 2  # test files


def arguments(words: Sequence[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.mutation.mutants", description=__doc__, formatter_class=raw)
    parser.add_argument("places", nargs="*", default=list(PARTS), help="with --random: files and folders to draw from")
    parser.add_argument("--base", help="mutate the functions that changed since this commit (default: since main)")
    parser.add_argument("--random", type=int, metavar="N", help="mutate N places, drawn with --seed")
    parser.add_argument("--each", type=int, metavar="N", help="mutate N places of each file, drawn with --seed")
    parser.add_argument("--again", type=Path, metavar="FILE", help="mutate what survived when --out wrote this file")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--share", type=float, default=0.1, help="survivors that are tolerated (default 0.1)")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests (default 2)")
    parser.add_argument("--budget", type=float, default=90.0, metavar="S", help="of tests for a mutant (default 90 s)")
    parser.add_argument("--near", type=int, default=10, metavar="N", help="test files for a file, at most (default 10)")
    parser.add_argument("--tests", type=Path, nargs="+", help="these test files, in place of those near")
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow, too")
    parser.add_argument("--out", type=Path, help="write every verdict there, as JSON lines")
    return parser.parse_args(words)


def chosen(options: argparse.Namespace) -> list[Mutant]:
    if options.again is not None:
        told = [json.loads(line) for line in options.again.read_text(encoding="utf-8").splitlines()]
        return again(ROOT, [one for one in told if not Outcome[one["outcome"]].noticed])
    files = files_in(ROOT, options.places)
    if options.each is not None:
        return [mutant for path in files for mutant in at_random(ROOT, [path], options.each, options.seed)]
    if options.random is not None:
        return at_random(ROOT, files, options.random, options.seed)
    return changed_since(ROOT, options.base or merge_base(ROOT))


def tried(mutants: Sequence[Mutant], options: argparse.Namespace) -> list[Verdict]:
    """The verdicts. Most mutants are noticed by the tests of their own file; the others meet those further away."""
    paths = {mutant.path for mutant in mutants}
    near = (
        {path: list[Path](options.tests) for path in paths}
        if options.tests
        else tests_near(ROOT, paths, options.near, options.slow)
    )
    rings = [len(options.tests)] if options.tests else sorted({min(_FIRST_RING, options.near), options.near})
    noticed, survivors = list[Verdict](), list[Verdict]()
    pending, baseline, known = list(mutants), Baseline(), set[Path]()
    with trials(ROOT, options.workers, Limits(budget_s=options.budget, slow=options.slow)) as work:
        for ring in rings:
            wanted = {test for mutant in pending for test in near[mutant.path][:ring]}
            _say(f"{len(pending)} mutants; {len(wanted - known)} test files are near: first without a mutant")
            began = time.monotonic()
            work.learn(baseline, wanted - known, _say)
            known |= wanted
            _say(f"{len(baseline.seconds)} tests are known after {time.monotonic() - began:.0f} s")
            met = {verdict.mutant: verdict.ran for verdict in survivors}
            survivors = list[Verdict]()
            for verdict in work.verdicts(pending, baseline, {path: tests[:3] for path, tests in near.items()}, met):
                (noticed if verdict.outcome.noticed else survivors).append(verdict)
                if ring == rings[-1] and not verdict.outcome.noticed:
                    _say(described(verdict))
            pending = [verdict.mutant for verdict in survivors]
    return [*noticed, *survivors]


def described(verdict: Verdict) -> str:
    mutant, ran = verdict.mutant, Counter(test.partition("::")[0] for test in verdict.ran)
    tests = ", ".join(f"{file} ({count})" for file, count in sorted(ran.items()))
    more = f", and {verdict.left_out} over the budget were not run" if verdict.left_out else ""
    return (
        f"\n{mutant.path}:{mutant.place.first}: {verdict.outcome}\n{mutant.source.difference(mutant.place)}\n"
        f"  {len(verdict.ran)} tests ran{more}{': ' + tests if tests else ''}"
    )


def record(verdict: Verdict) -> dict[str, object]:
    mutant = verdict.mutant
    return {
        "path": str(mutant.path),
        "line": mutant.place.first,
        "difference": mutant.source.difference(mutant.place),
        "outcome": verdict.outcome.name,
        "tests": len(verdict.ran),
        "noticed_by": verdict.noticed_by,
        "left_out": verdict.left_out,
    }


def summary(verdicts: Sequence[Verdict]) -> str:
    by_folder: Mapping[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_folder[str(verdict.mutant.path.parent)].append(verdict)
    lines = [
        f"{folder}: {sum(v.outcome.noticed for v in of)} of {len(of)} noticed"
        for folder, of in sorted(by_folder.items())
    ]
    counts = Counter(verdict.outcome for verdict in verdicts)
    lines.append(", ".join(f"{outcome}: {counts[outcome]}" for outcome in Outcome))
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    options = arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its workers and their copies go with it
    mutants = chosen(options)
    if not mutants:
        _say("nothing to mutate")
        return
    verdicts = tried(mutants, options)
    if options.out:
        options.out.write_text("".join(json.dumps(record(verdict)) + "\n" for verdict in verdicts))
    survivors = sum(not verdict.outcome.noticed for verdict in verdicts)
    _say(f"\n{summary(verdicts)}")
    _say(f"{len(verdicts) - survivors} of {len(verdicts)} noticed; survivors may be {options.share:.0%} of them")
    sys.exit(survivors > options.share * len(verdicts))


if __name__ == "__main__":
    main()
