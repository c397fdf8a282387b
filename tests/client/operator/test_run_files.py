"""Mistakes in a run file: the file, the section and the key are named, and what was meant if that can be told."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from umbel.aggregation.canonical import canonical
from umbel.aggregation.run.file import RunFile
from umbel.client.operator.run_files import read_run_file

GOOD = 'name = "ward"\n[rounds]\ncount = 1\ntarget = 2\n'


def test_a_good_file_is_read_with_its_text(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD)
    text, run = read_run_file(file)
    assert (text, run.name, run.rounds.target) == (GOOD, "ward", 2)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            GOOD.replace("target", "targett"),
            ": [rounds] unknown key 'targett' (did you mean 'target'?); [rounds] 'target' is missing",
        ),
        (GOOD + "learning_rate = 0.1\n", ": [rounds] unknown key 'learning_rate' (it belongs in [training])"),
        ("target = 2\n" + GOOD, ": unknown key 'target' (it belongs in [rounds])"),
        (GOOD + "seed = 7\n", "unknown key 'seed' (it belongs at the top, before the first section)"),
        (GOOD + "zzz = 7\n", "unknown key 'zzz'"),
        (GOOD + "[trainig]\n", ": unknown key 'trainig' (did you mean 'training'?)"),
        (GOOD + '[codec]\nnaem = "auto"\n', ": [codec] unknown key 'naem' (did you mean 'name'?)"),
        (GOOD + "[privacy]\nepsilom = 1\n", ": [privacy] unknown key 'epsilom' (did you mean 'epsilon'?)"),
        (GOOD + "epsilon = 1\n", "unknown key 'epsilon' (it belongs in [privacy])"),
        (GOOD.replace("= 2", "= true"), ": rounds.target: Input should be a valid integer"),
        (GOOD.replace("ward", "No Slug"), ": name must be 1 to 63 of a-z"),
        (GOOD.replace("= 2", "="), " is not valid TOML: Invalid value (at line 4"),
        (GOOD + "window_s = 2020-01-01\n", " does not parse: 2020-01-01 is a date, which no key takes"),
        (
            GOOD + '[secure_aggregation]\nmetrics = "loss"\n',
            ': secure_aggregation.metrics must be a list of names or "all"',
        ),
        (
            GOOD + "[secure_aggregation]\nmetrics = [1]\n",
            ': secure_aggregation.metrics must be a list of names or "all"',
        ),
        (GOOD + '[retention]\nversions = "few"\n', ': retention.versions must be a whole number or "all"'),
        (GOOD + "[training]\noptions = { a = [1] }\n", ": training.options.a must be a text, a number, true or false"),
        (GOOD + "[training]\nbool = 1\n", ": [training] unknown key 'bool'"),
        ("\udcff", " does not parse: "),
    ],
)
def test_a_mistake_is_named_with_its_file(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"run\.toml") as caught:
        read_run_file(file)
    assert sentence in str(caught.value)
    assert "Value error" not in str(caught.value)


NUMBERS = [
    ("", "seed"),
    *(
        (section, key)
        for section in ("rounds", "override")
        for key in ("target", "minimum", "over_selection", "window_s")
    ),
    *(("rounds", key) for key in ("count", "window_min_s", "attempts_max")),
    *(
        (section, key)
        for section in ("training", "override")
        for key in ("local_steps", "local_epochs", "batch_size", "learning_rate", "proximal_mu")
    ),
    *(("aggregation", key) for key in ("server_learning_rate", "max_abs", "sample_count_max")),
    ("coverage", "samples"),
    *(("evaluation", key) for key in ("every", "clients", "window_s")),
    *(("canary", key) for key in ("clients", "minimum", "share", "window_s")),
    *(("stop", key) for key in ("patience", "min_delta", "target")),
    ("retention", "versions"),
    *(("override", key) for key in ("first_round", "last_round")),
]
NEEDED = {
    "rounds": {"count": "2", "target": "3"},
    "evaluation": {"every": "1", "clients": "1"},
    "stop": {"metric": '"training.loss"', "patience": "1"},
    "override": {"first_round": "1", "evaluate": "true"},
}


def written(section: str, key: str, value: str) -> str:
    """A run file with this value in this place, and whatever else that needs."""
    sections = {"rounds": dict(NEEDED["rounds"])}
    if section:
        sections[section] = {**NEEDED.get(section, {}), key: value}
    lines = ['name = "ward"', f"{key} = {value}" if not section else ""]
    for name, pairs in sections.items():
        lines.append(f"[[{name}]]" if name == "override" else f"[{name}]")
        lines += [f"{one} = {what}" for one, what in pairs.items()]
    return "\n".join(lines)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "true", "2020-01-01", '"7"', "[]", "-1", "1" + "0" * 400])
@pytest.mark.parametrize(("section", "key"), NUMBERS)
def test_what_is_no_number_is_refused_everywhere(section: str, key: str, value: str, tmp_path: Path) -> None:
    if (section, key, value) == ("stop", "target", "-1"):
        return
    file = tmp_path / "run.toml"
    file.write_text(written(section, key, value))
    with pytest.raises(ValueError, match=r"run\.toml"):
        read_run_file(file)


@given(
    place=st.sampled_from(NUMBERS),
    value=st.one_of(st.integers(-(1 << 70), 1 << 70), st.floats(), st.sampled_from([5e-324, 1e10, 1e308, 10**18])),
)
def test_a_file_that_is_accepted_can_be_planned_stored_and_read_again(
    place: tuple[str, str], value: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("run") / "run.toml"
    file.write_text(written(*place, repr(value)))
    try:
        _, run = read_run_file(file)
    except ValueError:
        return
    for number in {1, run.rounds.count}:
        plan = run.round_plan(number, 1)
        assert 0.1 <= plan.window_s <= 366 * 86_400
        assert plan.n_wanted >= plan.target >= plan.minimum >= 1
        run.training_plan(number)
    run.first_plan(10)
    files = TypeAdapter(RunFile)
    assert files.validate_json(canonical(files.dump_python(run, mode="json"))) == run


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(ValueError, match=r"/dev/zero is no run file: it has more than 1048576 bytes"):
        read_run_file(Path("/dev/zero"))
