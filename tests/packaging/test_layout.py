"""Four folders at the top, one import name: what is packaged, and that nothing is ever imported twice."""

import re
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

from tests.repository import ROOT

FILES_MAX = 20
PARTS = ("aggregation", "client", "server", "sim")
NEEDING_TRITON = ("umbel.aggregation.kernels.cuda", "umbel.aggregation.kernels.triton_kernels")
NEEDING_FLOWER = (
    *(
        f"umbel.client.flower.{name}"
        for name in ("child", "codec", "host", "in_process", "local_grid", "records", "server_app")
    ),
    *(f"umbel.client.flower.codec.{name}" for name in ("arrays", "mod", "strategy", "terms")),
    *(
        f"umbel.sim.engines.flower.{name}"
        for name in ("choose", "nodes", "pieces", "processes", "sequential", "work", "worker")
    ),
    *(
        f"umbel.sim.flower.{name}"
        for name in ("attempts", "grid", "models", "native", "rows", "server_optimizers", "trial", "watching")
    ),
)
SERVER_AND_SIMULATOR_ONLY = (
    "aiosqlite",
    "alembic",
    "fastapi",
    "flwr",
    "matplotlib",
    "psutil",
    "pydantic_settings",
    "ray",
    "sklearn",
    "sqlalchemy",
    "starlette",
    "uvicorn",
)


def run_python(code: str) -> str:
    """What `code` prints in a fresh interpreter. Fails with its error output."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_python_lies_in_a_package() -> None:
    stray = [
        path for part in PARTS for path in (ROOT / part).rglob("*.py") if not (path.parent / "__init__.py").exists()
    ]
    assert stray == []


def test_a_folder_is_a_room_of_at_most_twenty_files() -> None:
    rooms = Counter(path.parent for part in PARTS for path in (ROOT / part).rglob("*.py"))
    assert {str(room.relative_to(ROOT)): n for room, n in rooms.items() if n > FILES_MAX} == {}


def test_no_module_is_imported_under_a_second_name() -> None:
    """Imported as `server` and as `umbel.server`, a module would be two, and its classes would differ."""
    imported = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(PARTS)})\b.*(?:import|$)", re.MULTILINE)
    for folder in (*PARTS, "tests", "umbel", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not imported.search(path.read_text()), path


@pytest.mark.nightly
def test_no_module_is_loaded_under_a_second_name() -> None:
    """By whatever code, when all of them are imported."""
    loaded = run_python(
        f"""
        import importlib, pkgutil, sys, umbel
        for module in pkgutil.walk_packages(umbel.__path__, "umbel."):
            if not module.name.startswith("umbel.server.store.migrations."):  # alembic runs these in its own context
                if module.name not in {(*NEEDING_TRITON, *NEEDING_FLOWER)!r}:
                    importlib.import_module(module.name)
        print(*sorted(name for name in sys.modules))
        """
    ).split()
    assert [name for name in loaded if name.split(".")[0] in PARTS] == []
    assert {f"umbel.{part}" for part in PARTS} <= set(loaded)


@pytest.mark.slow
def test_a_device_needs_no_library_of_the_server_or_the_simulator() -> None:
    """`pip install umbel` brings neither, and no Triton; importing the ground and the client must not ask for them."""
    run_python(
        f"""
        import importlib, pkgutil, sys

        class Forbid:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {("triton", *SERVER_AND_SIMULATOR_ONLY)!r}:
                    raise ImportError(f"a base install has no {{name}}")

        sys.meta_path.insert(0, Forbid())
        import umbel.aggregation, umbel.client
        for package in (umbel.aggregation, umbel.client):
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                if module.name not in {(*NEEDING_TRITON, *NEEDING_FLOWER)!r}:
                    importlib.import_module(module.name)
        """
    )
