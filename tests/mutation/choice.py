"""Which places to mutate: those of the functions that changed since a commit, or some at random."""

import ast
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.neighbours import PARTS
from tests.mutation.places import Place, Source, source_of

_BEYOND = re.compile(r"plot|triton")  # a person looks at a plot; Triton's kernels need a GPU


@dataclass(frozen=True, eq=False)
class Mutant:
    """One place of one file."""

    path: Path
    source: Source
    place: Place


def changed_since(root: Path, base: str) -> list[Mutant]:
    """Every mutant of the functions, and of the statements outside functions, that changed since `base`."""
    chosen: list[Mutant] = []
    for path, lines in _changed_lines(root, base).items():
        code = (root / path).read_text(encoding="utf-8")
        touched = _whole_functions(code, lines)
        chosen += [mutant for mutant in _of_file(path, code) if mutant.place.first in touched]
    return chosen


def at_random(root: Path, paths: Iterable[Path], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of all those files' together."""
    everything = [mutant for path in paths for mutant in _of_file(path, (root / path).read_text(encoding="utf-8"))]
    return random.Random(seed).sample(everything, min(count, len(everything)))


def files_in(root: Path, names: Sequence[str]) -> list[Path]:
    """The product's files among these files, and in these folders those that tests of this machine can judge."""
    for name in names:
        if not (root / name).exists():
            raise SystemExit(f"{name} does not exist: name files or folders of {', '.join(PARTS)}")
    inside = {path.resolve() for name in names for path in (root / name).rglob("*.py") if not _BEYOND.search(path.name)}
    found = inside | {(root / name).resolve() for name in names}
    return sorted(path.relative_to(root.resolve()) for path in found if path.suffix == ".py")


def again(root: Path, survivors: Iterable[Mapping[str, object]]) -> list[Mutant]:
    """The mutants that these records of an earlier run name, as far as they can still be made."""
    wanted: defaultdict[Path, list[tuple[object, object]]] = defaultdict(list)
    for one in survivors:
        wanted[Path(str(one["path"]))].append((one["line"], one["difference"]))
    found: list[Mutant] = []
    for path, places in sorted(wanted.items()):
        mutants = _of_file(path, (root / path).read_text(encoding="utf-8")) if (root / path).exists() else []
        for line, difference in places:
            # At its line of before first: to write a difference takes some time.
            ranked = sorted(mutants, key=lambda one: abs(one.place.first - int(str(line))))
            found += next(([one] for one in ranked if one.source.difference(one.place) == difference), [])
    return found


def merge_base(root: Path) -> str:
    """Where this branch left main; on main itself, and in a clone without it, the commit before this one."""
    if not _git(root, "branch", "--list", "main"):
        return "HEAD~1"
    base, head = (_git(root, *words).strip() for words in (("merge-base", "HEAD", "main"), ("rev-parse", "HEAD")))
    return base if base != head else "HEAD~1"


def _of_file(path: Path, code: str) -> list[Mutant]:
    source = source_of(code)
    return [Mutant(path, source, place) for place in source.places]


def _changed_lines(root: Path, base: str) -> Mapping[Path, set[int]]:
    lines: defaultdict[Path, set[int]] = defaultdict(set)
    path = Path()
    for line in _git(root, "diff", "--unified=0", "--no-color", "--diff-filter=d", base, "--", *PARTS).splitlines():
        if line.startswith("+++ b/"):
            path = Path(line.removeprefix("+++ b/"))
        elif path.suffix == ".py" and (hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line)):
            start, length = int(hunk[1]), int(hunk[2] or 1)
            # Where lines were only taken away, what stands around the gap has changed.
            lines[path] |= set(range(start, start + length)) or {start, start + 1}
    for name in _git(root, "ls-files", "--others", "--exclude-standard", "--", *PARTS).splitlines():
        if name.endswith(".py"):  # new, and not yet known to git: all of it
            lines[Path(name)] = set(range(1, len((root / name).read_text(encoding="utf-8").splitlines()) + 1))
    return lines


def _whole_functions(code: str, lines: set[int]) -> set[int]:
    """These lines, and all the lines of the functions that hold one of them."""
    return lines.union(*(span for span in _functions(code) if not lines.isdisjoint(span)))


def _functions(code: str) -> Iterator[range]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout
