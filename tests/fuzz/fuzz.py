"""Coverage-guided fuzzing of the readers with atheris (libFuzzer).

    python -m tests.fuzz.fuzz [SECONDS [READER ...]]

fuzzes each reader for so long, one after the other, beginning with what earlier runs have found interesting. That is
kept in `corpus/READER.txt`, one input a line, base64, which the tests replay. A crash ends the run and leaves the input
in a file; put it into the corpus together with the mend.
"""

import subprocess
import sys
import tempfile
from base64 import b64decode, b64encode
from pathlib import Path

from tests.fuzz.readers import READERS, seeds

CORPUS = Path(__file__).parent / "corpus"
_KEPT_MAX, _KEPT_BYTES_MAX = 100, 2048


def corpus(name: str) -> list[bytes]:
    """What is known to be interesting for a reader."""
    path = CORPUS / f"{name}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [*seeds()[name], *map(b64decode, lines)]


def fuzz(name: str, seconds: int, keep: bool = True) -> str:
    """Fuzz one reader; libFuzzer's last line. Raises `AssertionError`, with its report, for a finding."""
    with tempfile.TemporaryDirectory() as folder:
        for i, data in enumerate(corpus(name)):
            (Path(folder) / f"{i}").write_bytes(data)
        command = [sys.executable, "-m", "tests.fuzz.target", name, folder, f"-max_total_time={seconds}"]
        done = subprocess.run([*command, f"-artifact_prefix={name}-"], capture_output=True, text=True, errors="replace")
        assert done.returncode == 0, done.stderr[-8000:]
        if keep:
            _keep(name, [path.read_bytes() for path in Path(folder).iterdir()])
    return next(line for line in reversed(done.stderr.splitlines()) if "DONE" in line)


def _keep(name: str, inputs: list[bytes]) -> None:
    """The smallest ones: a corpus that is read at every test run must stay small."""
    new = sorted(
        {data for data in inputs if len(data) <= _KEPT_BYTES_MAX} - set(seeds()[name]), key=lambda d: (len(d), d)
    )
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.txt").write_text("".join(b64encode(data).decode() + "\n" for data in new[:_KEPT_MAX]))


def main() -> None:
    seconds, *names = sys.argv[1:] or ["60"]
    for name in names or READERS:
        print(name, fuzz(name, int(seconds)), flush=True)


if __name__ == "__main__":
    main()
