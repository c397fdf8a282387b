"""Shakespeare's plays, one client for each speaking role: given 80 characters, which one follows?

McMahan et al. 2017 (arXiv:1602.05629), section 3, and LEAF (Caldas et al. 2018, arXiv:1812.01097): a role is a speaker
in a play. One with fewer than two lines is dropped. The first 80 % of a role's lines are for training, the last 20 %,
at least one, for testing; lines are joined by spaces, and every 80 characters of the one text or the other are an
input. A role without 81 characters to train on has no input, and is dropped, too. Characters are LEAF's 80.

Two things differ from those papers, so results are near theirs but not equal. The text is another edition, whose lines
are lines of verse (there, a line may be a whole speech). Speakers without a name are left out with the stage
directions.

A million overlapping texts of 80 characters are kept as one text: `inputs` is a view of it, in which input i begins at
character i. Inputs that span two roles are unused.
"""

import gzip
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from umbel.sim.data.data_set import DataError, DataSet, LearningTask, Natural, SampleSet

FILE = "shakespeare_lines.tsv.gz"
BYTES_MAX = 64 << 20
WINDOW = 80
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
_HEADER = ["line_id", "play", "line_number", "speaker", "text"]
_DIRECTIONS = "Stage Directions"
_TEST_EVERY = 5
# The number of each byte; unknown ones count as the last character, as in LEAF.
_NUMBERS = bytes(CHARACTERS.find(chr(byte)) % len(CHARACTERS) for byte in range(256))


def load_shakespeare(folder: Path) -> DataSet:
    """The data set from its file in `folder`: tab-separated lines with the columns line_id, play, line_number, speaker
    and text, gzipped, in the order of the plays.

    Raises `OSError` if it cannot be read, `DataError` if it is not what its name says.
    """
    return roles_data(lines_of_roles(folder / FILE))


def lines_of_roles(path: Path) -> Mapping[str, Sequence[str]]:
    """What each role says, line by line, by its name: the play and the speaker."""
    header, *rows = [line.split("\t") for line in _text(path).splitlines()]
    if header != _HEADER or any(len(row) != len(_HEADER) for row in rows):
        raise DataError(f"every line of {path} must have the columns {', '.join(_HEADER)}, with tabs between them")
    lines = defaultdict[str, list[str]](list)
    for _, play, _, speaker, text in rows:
        if speaker not in ("", _DIRECTIONS):
            lines[f"{play}: {speaker}"].append(text)
    return lines


def roles_data(roles: Mapping[str, Sequence[str]]) -> DataSet:
    """The data set of what roles say. Raises `DataError` if none says enough."""
    parts = {name: _split(lines) for name, lines in roles.items() if len(lines) > 1}
    parts = {name: part for name, part in parts.items() if len(part[0]) > WINDOW}
    if not parts:
        raise DataError(f"no role has {WINDOW + 1} characters to train on")
    pieces = [piece for part in parts.values() for piece in part]
    ends = np.cumsum([len(piece) for piece in pieces])
    windows = [np.arange(end - len(piece), end - WINDOW) for piece, end in zip(pieces, ends, strict=True)]
    shards, holdouts = windows[::2], windows[1::2]
    samples = _samples(b"".join(pieces))
    return DataSet(
        "shakespeare",
        samples,
        np.concatenate(shards),
        samples.take(np.concatenate(holdouts)),
        len(CHARACTERS),
        Natural("role", tuple(parts), tuple(shards), tuple(holdouts)),
        LearningTask.NEXT_CHARACTER,
    )


def _samples(text: bytes) -> SampleSet:
    """`inputs`: uint8 (n, 80), a view; `targets`: int64 (n,). Numbers of characters."""
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return SampleSet(numbers.unfold(0, WINDOW, 1)[:-1], numbers[WINDOW:].to(torch.int64))


def _split(lines: Sequence[str]) -> tuple[bytes, bytes]:
    """What a role says in training lines, and in test lines, as numbers of characters."""
    n_test = max(1, len(lines) // _TEST_EVERY)
    return _numbered(lines[:-n_test]), _numbered(lines[-n_test:])


def _numbered(lines: Sequence[str]) -> bytes:
    return " ".join(lines).encode("latin-1", "replace").translate(_NUMBERS)


def _text(path: Path) -> str:
    try:
        with gzip.open(path) as file:
            data = file.read(BYTES_MAX + 1)
        if len(data) > BYTES_MAX:
            raise DataError(
                f"{path} unpacks to more than {BYTES_MAX} bytes, so it is not this data set's file: remove it"
            )
        return data.decode()
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not gzipped text: {error}") from error
