"""Every role's lines become windows of 80 characters and the one that follows, and no window spans two roles."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.servers.real_data import real_files
from umbel.sim.data.data_set import DataError, DataSet, LearningTask
from umbel.sim.data.sets.fetch import SHAKESPEARE
from umbel.sim.data.sets.shakespeare import CHARACTERS, FILE, WINDOW, lines_of_roles, load_shakespeare, roles_data

HEADER = "line_id\tplay\tline_number\tspeaker\ttext\n"
LINES = """1	Hamlet		Stage Directions	Enter HAMLET
2	Hamlet	1.1.1	HAMLET	A little more than kin
3	Hamlet	1.1.2	GHOST	Mark me
4	Hamlet	1.1.3	HAMLET	and less than kind.
5	Lear	1.1.1	HAMLET	Nothing will come of nothing
6	Lear	1.1.2		a heading
"""


def text_of(numbers: torch.Tensor) -> str:
    return "".join(CHARACTERS[number] for number in numbers.tolist())


def windows(data: DataSet, rows: np.ndarray) -> list[tuple[str, str]]:
    part = data.samples.take(rows)
    return [
        (text_of(text), CHARACTERS[target]) for text, target in zip(part.inputs, part.targets.tolist(), strict=True)
    ]


def expected(lines: list[str]) -> list[tuple[str, str]]:
    """The same, spelled out."""
    text = " ".join(lines)
    return [(text[start : start + 80], text[start + 80]) for start in range(len(text) - 80)]


def written(folder: Path, text: str) -> Path:
    (folder / FILE).write_bytes(gzip.compress(text.encode()))
    return folder


def test_a_role_is_a_speaker_in_a_play_and_directions_are_none(tmp_path: Path) -> None:
    assert lines_of_roles(written(tmp_path, HEADER + LINES) / FILE) == {
        "Hamlet: HAMLET": ["A little more than kin", "and less than kind."],
        "Hamlet: GHOST": ["Mark me"],
        "Lear: HAMLET": ["Nothing will come of nothing"],
    }


spoken = st.lists(st.text(CHARACTERS.replace("\n", ""), max_size=60), min_size=0, max_size=14)


@given(st.lists(spoken, min_size=1, max_size=5))
def test_windows_are_those_of_each_role_alone_the_first_lines_to_train_on_and_the_last_to_test(
    speeches: list[list[str]],
) -> None:
    roles = {f"role {number}": lines for number, lines in enumerate(speeches)}
    cuts = {name: max(1, len(lines) // 5) for name, lines in roles.items()}
    kept = [name for name, lines in roles.items() if len(" ".join(lines[: -cuts[name]])) > WINDOW]
    if not kept:
        with pytest.raises(DataError, match="no role has 81 characters"):
            roles_data(roles)
        return
    data = roles_data(roles)
    assert data.natural is not None
    assert data.natural.names == tuple(kept)
    tested = list[tuple[str, str]]()
    for name, shard, holdout in zip(kept, data.natural.shards, data.natural.holdouts, strict=True):
        lines, cut = roles[name], cuts[name]
        assert windows(data, shard) == expected(lines[:-cut])
        assert windows(data, holdout) == expected(lines[-cut:])
        tested += expected(lines[-cut:])
    assert np.array_equal(np.concatenate(data.natural.shards), data.rows)
    assert [text_of(text) for text in data.test.inputs] == [text for text, _ in tested]
    assert (data.task, data.n_classes, data.input_shape) == (LearningTask.NEXT_CHARACTER, 80, (80,))


def test_a_million_windows_share_one_text() -> None:
    data = roles_data({"Hamlet: HAMLET": ["To be, or not to be: that is the question"] * 20_000})
    inputs = data.samples.inputs
    assert len(inputs) > 800_000
    assert inputs.dtype == torch.uint8
    assert inputs.untyped_storage().nbytes() == len(inputs) + WINDOW


def test_a_character_that_is_not_leaf_s_is_its_last() -> None:
    data = roles_data({"role": ["£$é" + "a" * 90, "b"]})
    assert data.samples.inputs[0, :4].tolist() == [79, 79, 79, CHARACTERS.index("a")]


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (gzip.compress(b"a,b,c\n"), "with tabs between"),
        (gzip.compress((HEADER + "1\tHamlet\n").encode()), "with tabs between"),
        (gzip.compress((HEADER + LINES).encode()), "no role has 81 characters"),
        (gzip.compress((HEADER + LINES).encode())[:-9], "not gzipped text"),
        (gzip.compress(b"\xff\xfe"), "not gzipped text"),
        (HEADER.encode(), "not gzipped text"),
        (gzip.compress(bytes(65 << 20)), "unpacks to more than"),
    ],
    ids=["other columns", "a column less", "short roles", "cut off", "no text", "not packed", "a bomb"],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, packed: bytes, why: str) -> None:
    (tmp_path / FILE).write_bytes(packed)
    with pytest.raises(DataError, match=why):
        load_shakespeare(tmp_path)


def test_the_real_plays_have_a_thousand_roles() -> None:
    data = load_shakespeare(real_files(SHAKESPEARE) / SHAKESPEARE.folder)
    assert data.natural is not None
    assert len(data.natural.names) == 1070
    assert (len(data.rows), len(data.test)) == (3_287_013, 737_531)
    hamlet = data.natural.shards[data.natural.names.index("Hamlet: HAMLET")]
    assert windows(data, hamlet[:1])[0][0].startswith("[Aside]  A little more than kin, and less than kind.")
