"""The rows of an experiment for pandas: one value a column."""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

Kind = Literal["rounds", "clients"]


def frame_of(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A `pandas.DataFrame` of these rows. Raises `ImportError` with a sentence if pandas is not installed."""
    try:
        pandas = importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise ImportError(
            "a frame needs pandas, which is not installed; install it with pip install pandas, or use "
            "list(results.rows), which has the same rows as dictionaries"
        ) from error
    return pandas.DataFrame(list(rows))


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose tables became columns, such as `test_metrics.auc` or `train_quantiles.loss.p10`; without lists."""
    found = dict[str, Any]()
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": one for key, one in flat(cast(Mapping[str, Any], value)).items()}
        elif not isinstance(value, list | tuple):
            found[name] = value
    return found


def of_clients(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each client of each attempt, with the attempt it belongs to. Empty without `[measure] clients`."""
    for row in rows:
        whose = {name: row[name] for name in ("point", "seed", "round", "attempt", "committed")}
        for client in row["clients"]:
            yield {**whose, **client}
