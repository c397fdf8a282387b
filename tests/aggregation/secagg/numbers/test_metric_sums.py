"""The table of metrics that nobody lists: clients' tables add up, and the sum comes apart or says that it does not."""

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.secagg.numbers.metric_sums import (
    NAME_BYTES_MAX,
    TABLE_NAMES_MAX,
    ListedMetrics,
    MetricSum,
    MetricSums,
    MetricTable,
    metric_words,
)
from umbel.aggregation.types import COHORT_MAX, require_metric_name

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-"
NAMES = st.text(LETTERS, min_size=1, max_size=NAME_BYTES_MAX)
KEYS = st.integers(0, (1 << 63) - 1)
WORDS = st.integers(-(1 << 63), (1 << 63) - 1)
SUMS = st.builds(MetricSum, st.just(1), st.integers(0, 1 << 38), st.integers(-(1 << 46), 1 << 46))
CLIENTS = st.lists(st.dictionaries(NAMES, SUMS, max_size=TABLE_NAMES_MAX), min_size=1, max_size=6)
CELL_WORDS, N_CELLS = 12, 240


def added(tables: Sequence[Sequence[int]]) -> list[int]:
    """Their sum modulo 2^64, as int64."""
    return [(sum(column) + (1 << 63)) % (1 << 64) - (1 << 63) for column in zip(*tables, strict=True)]


def words_at_random(drawn: random.Random) -> list[int]:
    """As many words as a table has."""
    return [drawn.getrandbits(64) - (1 << 63) for _ in range(N_CELLS * CELL_WORDS)]


def sums_of(clients: Sequence[Mapping[str, MetricSum]]) -> dict[str, MetricSum]:
    """Metric by metric, as listed metrics would be added up."""
    names = sorted({name for client in clients for name in client})
    found = {name: [client[name] for client in clients if name in client] for name in names}
    return {
        name: MetricSum(sum(one.clients for one in of), sum(one.samples for one in of), sum(one.value for one in of))
        for name, of in found.items()
    }


@given(CLIENTS, KEYS)
def test_clients_tables_add_up_to_each_metric_of_any_name_or_to_less_and_say_so(
    clients: list[dict[str, MetricSum]], key: int
) -> None:
    table = MetricTable(key, COHORT_MAX)
    found = table.split(added([table.join(client) for client in clients]))
    expected = sums_of(clients)
    assert found.by_name.items() <= expected.items()
    assert found.is_whole == (found.by_name == expected)
    assert list(found.by_name) == sorted(found.by_name)


@given(CLIENTS, KEYS, st.integers(0, 1000))
def test_masks_over_a_table_come_off(clients: list[dict[str, MetricSum]], key: int, seed: int) -> None:
    """Each client adds its mask modulo 2^64, and the coordinator subtracts all of them."""
    table, drawn = MetricTable(key, COHORT_MAX), random.Random(seed)
    masks = [words_at_random(drawn) for _ in clients]
    masked = [added([table.join(client), mask]) for client, mask in zip(clients, masks, strict=True)]
    unmasked = added([added(masked), [-one for one in added(masks)]])
    assert table.split(unmasked) == table.split(added([table.join(client) for client in clients]))


def test_a_metric_is_in_the_cells_of_the_documented_example() -> None:
    """docs/reference/secure-aggregation.md, "A table of metrics": other clients find the same cells."""
    words = MetricTable(29, 10).join({"loss": MetricSum(1, 10, -5)})
    cells = {place // CELL_WORDS: words[place : place + CELL_WORDS] for place in range(0, len(words), CELL_WORDS)}
    filled = {place: cell for place, cell in cells.items() if any(cell)}
    assert list(filled) == [44, 95, 125, 183, 212]
    assert all(cell == [1, 1936945004, *[0] * 7, 113949726802512, 10, -5] for cell in filled.values())


def test_the_greatest_cohort_adds_up_the_same_name_without_a_wrap() -> None:
    """The last letters have the greatest bytes, and a check may have all 48 bits."""
    table, name = MetricTable(7, COHORT_MAX), "z" * NAME_BYTES_MAX
    one = table.join({name: MetricSum(1, 3, -5)})
    found = table.split([(COHORT_MAX * word + (1 << 63)) % (1 << 64) - (1 << 63) for word in one])
    assert found == MetricSums({name: MetricSum(COHORT_MAX, 3 * COHORT_MAX, -5 * COHORT_MAX)})


@pytest.mark.parametrize(("n_names", "n_failed_most"), [(32, 0), (100, 1)])
def test_tables_of_many_names_come_apart(n_names: int, n_failed_most: int) -> None:
    """In 100 rounds, each with its own key. Decision 21 has the probabilities: 2.5e-6 for 32 names, 4e-5 for 100."""
    names = {f"site.metric_{i}": MetricSum(1, i, -i) for i in range(n_names)}
    found = [one.split(one.join(names)) for one in (MetricTable(key, 10) for key in range(100))]
    assert sum(not one.is_whole for one in found) <= n_failed_most
    assert all(one.by_name == names for one in found if one.is_whole)


def test_a_table_with_far_more_names_than_it_has_room_for_says_so() -> None:
    table = MetricTable(3, 10)
    names = {f"metric_{i}": MetricSum(1, i, i) for i in range(400)}
    found = table.split(table.join(names))
    assert not found.is_whole
    assert found.by_name.items() <= names.items()


def test_names_that_do_not_come_apart_in_one_round_do_in_another() -> None:
    names = {f"metric_{i}": MetricSum(1, 1, 1) for i in range(170)}
    outcomes = [one.split(one.join(names)).is_whole for one in (MetricTable(key, 10) for key in range(40))]
    assert 0 < sum(outcomes) < len(outcomes)


@given(
    st.dictionaries(st.integers(0, N_CELLS * CELL_WORDS - 1), WORDS, max_size=60),
    st.dictionaries(NAMES, SUMS, max_size=5),
    KEYS,
)
def test_words_that_a_client_made_up_give_at_most_names_that_metrics_may_have(
    changed: dict[int, int], names: dict[str, MetricSum], key: int
) -> None:
    table = MetricTable(key, 100)
    words = table.join(names)
    for place, word in changed.items():
        words[place] = word
    found = table.split(words)
    assert len(found.by_name) <= N_CELLS
    for name, one in found.by_name.items():
        require_metric_name(name)
        assert 1 <= one.clients <= 100
    if found.is_whole and found.by_name.keys() == names.keys():
        assert words == table.join(found.by_name)


@given(st.integers(0, 1000), KEYS)
def test_words_at_random_hold_no_metric(seed: int, key: int) -> None:
    assert MetricTable(key, COHORT_MAX).split(words_at_random(random.Random(seed))) == MetricSums({}, is_whole=False)


def test_a_name_in_one_cell_that_its_other_cells_lack_comes_out_once() -> None:
    """Taking it out leaves less than nothing in the other cells. This must not go on for ever."""
    table = MetricTable(1, 10)
    words = table.join({"loss": MetricSum(1, 10, 20)})
    first = next(place for place in range(0, len(words), CELL_WORDS) if words[place])
    words = [word if first <= place < first + CELL_WORDS else 0 for place, word in enumerate(words)]
    assert table.split(words) == MetricSums({"loss": MetricSum(1, 10, 20)}, is_whole=False)


@pytest.mark.parametrize("name", ["a b", "a\nb", "\x1b[31m", "a\0b", "é", "x" * (NAME_BYTES_MAX + 1), ""])
def test_a_name_that_no_metric_may_have_or_that_is_too_long_stays_at_the_client(name: str) -> None:
    assert MetricTable(0, 10).sent_of([name, "loss"]) == ("loss",)


def test_a_cell_with_a_name_that_no_metric_may_have_is_no_metric() -> None:
    """A hostile client can write any bytes into its cells."""
    table = MetricTable(5, 10)
    for name in ("a b", "a\nb", "a\0b"):
        assert table.split(table.join({name: MetricSum(1, 2, 3)})) == MetricSums({}, is_whole=False)


def test_a_cell_that_counts_more_clients_than_the_cohort_has_is_no_metric() -> None:
    table = MetricTable(5, 10)
    for clients, comes_out in ((10, True), (11, False), (-1, False)):
        assert bool(table.split(table.join({"loss": MetricSum(clients, 2, 3)})).by_name) is comes_out


def test_a_client_with_more_metrics_than_the_table_takes_sends_the_first_ones_by_name() -> None:
    names = [f"n{i:02}" for i in range(TABLE_NAMES_MAX + 8)]
    assert MetricTable(0, 10).sent_of(reversed(names)) == tuple(names[:TABLE_NAMES_MAX])


def test_a_metric_of_no_client_leaves_no_trace() -> None:
    assert not any(MetricTable(0, 10).join({"loss": MetricSum()}))


@given(st.lists(NAMES, unique=True, max_size=5), CLIENTS, KEYS)
def test_listed_metrics_have_three_words_each_in_the_order_of_the_list(
    names: list[str], clients: list[dict[str, MetricSum]], key: int
) -> None:
    listed = metric_words(tuple(names), key, 10)
    assert listed == ListedMetrics(tuple(names))
    tables = [listed.join({name: client[name] for name in listed.sent_of(client)}) for client in clients]
    assert {len(one) for one in tables} == {listed.n_words} == {3 * len(names)}
    expected = sums_of(clients)
    found = listed.split(added(tables)) if names else listed.split([])
    assert found == MetricSums({name: expected.get(name, MetricSum()) for name in names})
    assert list(found.by_name) == names


def test_one_clients_metrics_are_in_no_repr() -> None:
    assert "loss" not in repr(MetricSums({"loss": MetricSum(1, 2, 3)}))


def test_a_table_adds_23_kb_to_an_update() -> None:
    assert metric_words("all", 0, 10).n_words * 8 == 23_040
    assert metric_words("all", 0, 10).n_words == N_CELLS * CELL_WORDS
