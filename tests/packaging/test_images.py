"""What goes into an image: the build context by Docker's own rules, and packages that are known by their hashes."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest
from packaging.markers import Marker
from packaging.utils import canonicalize_name

from tests.packaging.test_packaging import closure, pinned
from tests.repository import ROOT

DOCKERFILES = ("client.Dockerfile", "coordinator.Dockerfile")
LOCKS = ROOT / "deploy" / "locks"
EXTRAS = {
    "client": frozenset({"privacy"}),
    "example": frozenset({"privacy", "example"}),
    "coordinator": frozenset({"server", "postgres", "s3"}),
}
# What the README's four terminals leave in the checkout, and what may stand in it besides.
SECRETS = (
    "tokens",
    ".env",
    "init.safetensors",
    "coordinator-data/admin.key",
    "coordinator-data/audit.key",
    "coordinator-data/umbel.db",
    "coordinator-data/umbel.db-wal",
    "coordinator-data/blobs/models/ab/cd",
    "umbel-data/admin.key",
    "state-0/127-0-0-1-8750-1a2b3c4d/key.pem",
    "state-0/127-0-0-1-8750-1a2b3c4d/secure/sums.json",
    "state-0/members/pilot.json",
    "client/state/key.pem",
    "client/tokens",
    "server/umbel.db",
    "examples/tokens",
    "examples/records.csv",
    "deploy/admin.key",
    "deploy/locks/admin.key",
    "umbel/key.pem",
    "officer.pem",
    ".git/config",
    ".venv/pyvenv.cfg",
    "demo-out/coordinator/admin.key",
    "tests/fixture.pem",
)


# --- the build context ---


@dataclass(frozen=True, slots=True)
class Pattern:
    """One line of a .dockerignore. `keeps`: it began with an exclamation mark."""

    regex: re.Pattern[str]
    keeps: bool


def patterns(text: str) -> list[Pattern]:
    """What the lines of a .dockerignore mean: Go's filepath.Match, and `**` for any number of folders."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    return [Pattern(_regex(line.removeprefix("!")), line.startswith("!")) for line in lines if line]


def _regex(pattern: str) -> re.Pattern[str]:
    clean = PurePosixPath(pattern.strip().lstrip("/")).as_posix()
    written = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", clean)
    return re.compile("".join(written.get(piece, re.escape(piece)) for piece in pieces))


def is_left_out(path: str, rules: Iterable[Pattern]) -> bool:
    """Whether Docker leaves a file out: the last pattern decides that matches it, or a folder that it is in."""
    names = path.split("/")
    ways = ["/".join(names[: i + 1]) for i in range(len(names))]
    is_out = False
    for rule in rules:
        if any(rule.regex.fullmatch(way) for way in ways):
            is_out = not rule.keeps
    return is_out


def files_below(folder: Path) -> Iterator[str]:
    """Relative paths of all files; a link is one, and is not followed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in (".git", ".venv")]
        for name in (*names, *(one for one in folders if (Path(parent) / one).is_symlink())):
            yield (Path(parent) / name).relative_to(folder).as_posix()


@pytest.fixture(scope="module")
def rules() -> list[Pattern]:
    return patterns((ROOT / ".dockerignore").read_text())


@pytest.fixture(scope="module")
def context(rules: list[Pattern]) -> list[str]:
    """The files of this checkout that go into an image."""
    return sorted(path for path in files_below(ROOT) if not is_left_out(path, rules))


@pytest.mark.parametrize(
    ("text", "path", "is_out"),
    [
        ("*.key", "admin.key", True),
        ("*.key", "data/admin.key", False),  # a star stops at a slash
        ("**/*.key", "data/deep/admin.key", True),
        ("**/*.key", "admin.key", True),
        ("data", "data/deep/admin.key", True),
        ("/data/", "data/admin.key", True),
        ("data\n!data/notes", "data/notes", False),
        ("!data/notes\ndata", "data/notes", True),  # the last one decides
        ("*\n!client/**/*.py", "client/a/b.py", False),
        ("*\n!client/**/*.py", "client/b.py", False),
        ("*\n!client/**/*.py", "client/key.pem", True),
        ("# data", "data", False),
        ("stat?", "state", True),
    ],
)
def test_the_patterns_are_read_as_docker_reads_them(text: str, path: str, is_out: bool) -> None:
    assert is_left_out(path, patterns(text)) is is_out


@pytest.mark.parametrize("path", SECRETS)
def test_what_the_example_leaves_in_the_checkout_goes_into_no_image(path: str, rules: list[Pattern]) -> None:
    assert is_left_out(path, rules)


def test_only_sources_and_what_installs_them_go_into_an_image(context: list[str]) -> None:
    kinds = {PurePosixPath(path).suffix for path in context}
    assert kinds <= {".py", ".mako", ".cpp", ".h", ".toml", ".txt", ".md", ".sh", ".typed", ""}
    assert {path for path in context if not PurePosixPath(path).suffix} <= {
        "LICENSE",
        "umbel/aggregation",
        "umbel/client",
        "umbel/server",
        "umbel/sim",
    }


def test_what_git_is_to_keep_out_of_commits_are_the_same_secrets_and_no_file_of_ours() -> None:
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "rev-parse"], capture_output=True, check=False).returncode != 0:
        pytest.skip("not a git checkout")
    named = [path for path in SECRETS if not path.startswith((".git/", ".venv/")) and not path.endswith(".csv")]
    shown = subprocess.run([*git, "check-ignore", "--no-index", *named], capture_output=True, text=True, check=False)
    assert sorted(shown.stdout.split()) == sorted(named)
    hidden = subprocess.run([*git, "ls-files", "-ci", "--exclude-standard"], capture_output=True, text=True, check=True)
    assert hidden.stdout == ""


@pytest.mark.parametrize("file", DOCKERFILES)
def test_everything_that_a_dockerfile_and_compose_name_is_in_the_context(file: str, context: list[str]) -> None:
    text = (ROOT / "deploy" / file).read_text() + (ROOT / "docker-compose.yml").read_text()
    named = [
        *re.findall(r"-r (\S+)", text),
        *re.findall(r"deploy/[\w-]+\.sh", text),
        *("examples/my_hospital.py", "examples/breast_cancer.toml"),
    ]
    assert len(named) >= 6
    assert set(named) <= set(context)


@pytest.mark.slow
def test_a_wheel_with_every_module_is_built_from_the_context_alone(context: list[str], tmp_path: Path) -> None:
    source, built = tmp_path / "app", tmp_path / "wheels"
    for path in context:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_symlink():
            (source / path).symlink_to(os.readlink(ROOT / path))
        else:
            (source / path).write_bytes((ROOT / path).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(built),
        ".",
    ]
    no_compiler = {"CC": "false", "CXX": "false"}  # the kernels take a minute; that their sources are there is below
    done = subprocess.run(
        command, cwd=source, env={**os.environ, **no_compiler}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = built.glob("umbel-*.whl")
    modules = {path for path in zipfile.ZipFile(wheel).namelist() if path.endswith((".py", ".mako", ".typed"))}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    wanted = {
        f"{name.replace('.', '/')}/{path.name}"
        for name, folder in packages.items()
        for path in (ROOT / folder).glob("*.py")
    }
    assert wanted <= modules
    assert {"umbel/py.typed", "umbel/server/store/migrations/script.py.mako"} <= modules
    kernels = {f"aggregation/kernels/{path.name}" for path in (ROOT / "aggregation" / "kernels").glob("kernels*.[ch]*")}
    assert len(kernels) > 1
    assert kernels <= set(context)


# --- the packages ---


@dataclass(frozen=True, slots=True)
class Locked:
    """One package of a lock file. `marker`: where it is wanted, None for everywhere."""

    name: str
    version: str
    marker: Marker | None
    hashes: Sequence[str]


def locked(file: Path) -> list[Locked]:
    """The packages of a lock file. Raises for a line that pip would read as anything else, such as another index."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    found: list[Locked] = []
    for entry in re.sub(r"\\\n", " ", text).splitlines():
        match = re.fullmatch(r"([\w.-]+)==(\S+)(?: ; (.+?))?((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", entry)
        assert match, entry
        marker = Marker(match[3]) if match[3] else None
        found.append(Locked(canonicalize_name(match[1]), match[2], marker, match[4].split()))
    return found


@pytest.mark.parametrize("name", [*EXTRAS, "build"])
def test_a_lock_file_has_the_versions_of_the_constraints_each_with_its_hashes(name: str) -> None:
    pins, packages = pinned(), locked(LOCKS / f"{name}.txt")
    assert packages
    assert len({one.name for one in packages}) == len(packages)
    for one in packages:
        if one.name.startswith(("nvidia-", "cuda-")) or (one.marker and not one.marker.evaluate()):
            continue  # what torch pins for a GPU by itself, and what is for another system
        assert pins[one.name] == one.version, one.name


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_file_has_every_package_that_an_install_brings(name: str) -> None:
    wanted = set(closure("umbel", EXTRAS[name], set())) - {"umbel"}
    assert wanted <= {one.name for one in locked(LOCKS / f"{name}.txt")}


def test_a_build_takes_the_locked_setuptools_isolated_or_not() -> None:
    (one,) = locked(LOCKS / "build.txt")
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert requires == [f"{one.name}=={one.version}"]


@pytest.mark.parametrize("file", DOCKERFILES)
def test_an_image_takes_no_package_whose_hash_is_not_known(file: str) -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "deploy" / file).read_text())
    installs = re.findall(r"pip install ([^&\n]+)", text)
    assert len(installs) == 2
    packages, umbel = installs
    assert "--require-hashes" in packages
    assert "deploy/locks/build.txt" in packages
    assert {"--no-deps", "--no-build-isolation", "."} <= set(umbel.split())


@pytest.mark.parametrize("file", DOCKERFILES)
def test_an_image_is_made_from_one_exact_version_of_python(file: str) -> None:
    text = (ROOT / "deploy" / file).read_text()
    (image,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", image)
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${PYTHON_IMAGE}"]
    assert f"PYTHON_IMAGE:-{image}}}" in (ROOT / "docker-compose.yml").read_text()
