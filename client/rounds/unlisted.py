"""Names once what a masked sum leaves out of a client's metrics and counts, and what to write into the run file."""

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from umbel.aggregation.secagg.numbers.composition import Words
from umbel.aggregation.secagg.numbers.contribution import LocalWork
from umbel.aggregation.secagg.numbers.metric_sums import NAME_BYTES_MAX, TABLE_NAMES_MAX
from umbel.aggregation.types import ALL

log = logging.getLogger("umbel.client")


class UnlistedMetrics:
    """What this client has measured in a run and a masked sum has no room for. The log names each of them once.

    The coordinator is not told these names: a site that lacks a metric in a round, such as a sensitivity without a
    positive sample, would show something of its data.
    """

    def __init__(self) -> None:
        self._named = set[tuple[str, str]]()

    def note(self, work: LocalWork, words: Words, *, is_private: bool) -> None:
        """Log what stays at the site. `work`: as the policy lets it be sent. `is_private`: if the round has noise."""
        metrics, evaluation = work.metric_names, work.evaluation_names
        found = {
            "metrics": self._new("metrics", metrics, words.of_training.sent_of(metrics)),
            "evaluation": self._new("evaluation", evaluation, words.of_evaluation.sent_of(evaluation)),
            "counts": self._new("counts", work.counts, words.counts),
            "evaluation_counts": self._new("evaluation_counts", work.evaluation_counts, words.evaluation_counts),
        }
        if is_private and any(found.values()):
            log.info("metrics and counts stay at this site, because this private run would sum them without noise")
            return
        for key, listed in (("metrics", words.metrics), ("evaluation", words.evaluation)):
            if listed == ALL:
                _warn_of_table(key, found[key])
            else:
                _warn(key, found[key], json.dumps([*listed, *found[key]]))
        for key, lengths, counts in (
            ("counts", words.counts, work.counts),
            ("evaluation_counts", words.evaluation_counts, work.evaluation_counts),
        ):
            _warn(key, found[key], _table({**lengths, **{name: len(counts[name]) for name in found[key]}}))

    def _new(self, key: str, measured: Iterable[str], listed: Collection[str]) -> list[str]:
        """The names that were measured, are not listed, and were not named before."""
        names = [name for name in sorted(measured) if name not in listed and (key, name) not in self._named]
        self._named.update((key, name) for name in names)
        return names


def _warn(key: str, names: Sequence[str], line: str) -> None:
    if names:
        log.warning(
            "these %s stay at this site, because the run file does not list them: %s. To have them added up, ask the "
            "operator to write this into [secure_aggregation] of the next run file: %s = %s",
            _KINDS[key],
            ", ".join(names),
            key,
            line,
        )


def _warn_of_table(key: str, names: Sequence[str]) -> None:
    if names:
        log.warning(
            'these %s stay at this site: %s. With %s = "all" a masked sum has room for %d metrics of one client, with '
            "names of at most %d letters, digits, '_', '.', '/' or '-'. Report fewer metrics, or shorter names, or ask "
            "the operator to list those that matter in %s of [secure_aggregation] of the next run file",
            _KINDS[key],
            ", ".join(names),
            key,
            TABLE_NAMES_MAX,
            NAME_BYTES_MAX,
            key,
        )


_KINDS: Mapping[str, str] = {
    "metrics": "metrics of the training",
    "evaluation": "metrics of held-out data",
    "counts": "counts of the training",
    "evaluation_counts": "counts of held-out data",
}


def _table(lengths: Mapping[str, int]) -> str:
    """An inline table of TOML. Keys with a dot or a slash are quoted."""
    pairs = (
        f"{name if name.replace('-', '_').isidentifier() else json.dumps(name)} = {n}" for name, n in lengths.items()
    )
    return f"{{ {', '.join(pairs)} }}"
