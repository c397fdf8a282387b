"""Which test files stand near a product file: they mirror its name, or import it directly or by hops."""

import ast
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

_SLOW = re.compile(r"^pytestmark = .*\bmark\.slow\b", re.MULTILINE)
PARTS = ("aggregation", "client", "server", "sim", "umbel")


class Neighbours:
    """The imports of a checkout, read and not run."""

    def __init__(self, root: Path, slow: bool = False) -> None:
        """`slow`: with the test files that are slow as a whole."""
        self._root = root
        self._slow = slow
        self._files = {_module(path): path for path in _python_files(root)}
        self._imports = {path: frozenset(self._imported(path)) - {path} for path in self._files.values()}

    @cached_property
    def tests(self) -> Sequence[Path]:
        tests = sorted(path for path in self._imports if path.name.startswith("test_"))
        return [path for path in tests if self._slow or not _SLOW.search((self._root / path).read_text("utf-8"))]

    def tests_near(self, product: Path, count: int) -> list[Path]:
        """So many, the nearest first. A helper of the tests is no hop: it is part of the test that imports it."""
        near = {test: hops for test in self.tests if (hops := self._hops(test).get(product)) is not None}
        mirrors = {test for test in near if _mirrors(test, product)}
        size = {test: (self._root / test).stat().st_size for test in near}  # the best guess at how long it takes

        def distance(test: Path) -> tuple[bool, int, bool, int]:
            return test not in mirrors, near[test], test.parts[1] != product.parts[0], size[test]

        return sorted(near, key=distance)[:count]

    def _hops(self, test: Path) -> Mapping[Path, int]:
        """The fewest hops from a test to each file that it imports."""
        hops, waiting = {test: 0}, deque([test])
        while waiting:
            here = waiting.popleft()
            for path in self._imports[here]:
                cost = path.parts[0] != "tests"
                if path not in hops or hops[here] + cost < hops[path]:
                    hops[path] = hops[here] + cost
                    waiting.append(path)
        return hops

    def _imported(self, path: Path) -> Iterator[Path]:
        for node in ast.walk(ast.parse((self._root / path).read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (self._files[name] for name in names if name in self._files)


def _python_files(root: Path) -> Iterator[Path]:
    """By their real folders: `umbel/aggregation` is a link to `aggregation`."""
    for part in (*PARTS, "tests"):
        for path in sorted((root / part).rglob("*.py")):
            relative = path.relative_to(root)
            if not any((root / folder).is_symlink() for folder in relative.parents):
                yield relative


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    name = ".".join(parts if parts[0] in ("umbel", "tests") else ("umbel", *parts))
    return name.removesuffix(".__init__")


def _mirrors(test: Path, product: Path) -> bool:
    return test.stem == f"test_{product.stem}"
