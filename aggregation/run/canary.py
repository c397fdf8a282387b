"""Whether the clients of a canary are fit for whole rounds: a verdict on each client, with the reasons. Pure.

A canary is a small first round: fetch, train a share of the steps, encode, upload, report. The measurements are
extrapolated to a whole round,

    T = download + steps_full * step_s + upload,

and compared with the round's window, the grid and the client's memory, each with a margin: no measurement of a few
steps is exact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from umbel.aggregation.phrases import counted, part_of
from umbel.aggregation.reports import Probe, WorkDone
from umbel.aggregation.round.states import Closing
from umbel.aggregation.run.records import ClientRecord, Fate, RoundRecord
from umbel.aggregation.run.run_end import Run
from umbel.aggregation.types import ClientId

TIME_MARGIN = 1.2  # of T: lines and machines are busier at other hours
ABS_HEADROOM = 2.0  # of the largest change: a whole round moves further than a share of it
MEMORY_HEADROOM = 0.1  # of the peak, to be free beside it: allocators fragment, other programs grow
DEVICE_SHARE_MAX = 0.95  # of the accelerator's memory
LOSS_GROWTH_MAX = 10.0
CAUSES_SHOWN = 8
_CAUSE_CHARS = 200


@dataclass(frozen=True, slots=True)
class CanaryTerms:
    """What a whole round asks of a client."""

    window_s: float
    max_abs: float  # of the grid
    model_bytes: int


@dataclass(frozen=True, slots=True)
class CanaryUpdate:
    """What a client of a canary sent."""

    work: WorkDone
    update_bytes: int
    largest_change: float  # of one value


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    client: ClientId
    causes: tuple[str, ...] = ()  # why it does not pass; empty if it passes
    measured: str = ""  # the measurements, in words

    @property
    def passes(self) -> bool:
        return not self.causes

    @property
    def reason(self) -> str:
        """Causes and measurements in one line."""
        return "; ".join((*self.causes, *filter(None, (self.measured,))))


def judge_clients(
    terms: CanaryTerms,
    sent: Mapping[ClientId, CanaryUpdate],
    missing: Mapping[ClientId, str],
) -> tuple[CanaryVerdict, ...]:
    """A verdict on each client of a canary, in the order of names.

    `sent`: from those that reported, each report with its probe. `missing`: why each of the others did not.
    """
    reported = [_judge(terms, client, one) for client, one in sent.items()]
    silent = [CanaryVerdict(client, (why,)) for client, why in missing.items()]
    return tuple(sorted((*reported, *silent), key=lambda verdict: verdict.client))


def conclusion(verdicts: Sequence[CanaryVerdict], minimum: int) -> tuple[bool, str]:
    """Whether enough clients pass, and a sentence about it, with a cause for each client that does not pass."""
    failed = [one for one in verdicts if not one.passes]
    n_pass = len(verdicts) - len(failed)
    counts = f"{part_of(n_pass, len(verdicts), 'client', 'passes', 'pass')} the canary"
    causes = [f"{one.client}: {_short(one.causes[0])}" for one in failed[:CAUSES_SHOWN]]
    if len(failed) > CAUSES_SHOWN:
        causes.append(f"and {len(failed) - CAUSES_SHOWN} more")
    head = counts if n_pass >= minimum else f"{counts}, at least {minimum} must"
    return n_pass >= minimum, ". ".join((head, *(("; ".join(causes),) if causes else ())))


def _judge(terms: CanaryTerms, client: ClientId, sent: CanaryUpdate) -> CanaryVerdict:
    probe = sent.work.probe
    assert probe is not None, "reports of a canary without a probe are refused"
    whole = _Whole(terms, probe, sent)
    found = (
        whole.cause(),
        _cause_of_loss(probe),
        _cause_of_size(terms.max_abs, sent.largest_change),
        _cause_of_memory(probe),
    )
    measured = [
        whole.words(),
        _loss_words(probe),
        f"largest change {sent.largest_change:.3g} of max_abs {terms.max_abs:g}",
    ]
    if probe.memory_bytes is not None:
        measured.append(f"peak memory {_size(probe.memory_bytes)}")
    return CanaryVerdict(client, tuple(cause for cause in found if cause), "; ".join(one for one in measured if one))


class _Whole:
    """A whole round of work at the measured speed."""

    def __init__(self, terms: CanaryTerms, probe: Probe, sent: CanaryUpdate) -> None:
        self._terms, self._probe, self._up = terms, probe, sent.work.upload_bytes_per_s
        self._down_s = terms.model_bytes / probe.download_bytes_per_s if probe.download_bytes_per_s else 0.0
        self._up_s = sent.update_bytes / self._up if self._up else 0.0
        self.seconds = self._down_s + probe.steps_full * probe.step_s + self._up_s

    def words(self) -> str:
        """`a whole round takes 820 s: 12.1 s a step x 60 steps + 80 s up at 1.2 MB/s`"""
        return f"a whole round takes {self.seconds:.3g} s: {self._sum()}"

    def cause(self) -> str:
        needed_s = TIME_MARGIN * self.seconds
        if needed_s <= self._terms.window_s:
            return ""
        return f"window_s of at least {math.ceil(needed_s)} needed, not {self._terms.window_s:g}: {self._sum()}"

    def _sum(self) -> str:
        probe = self._probe
        parts = [f"{probe.step_s:.3g} s a step x {counted(probe.steps_full, 'step')}"]
        for seconds, rate, way in (
            (self._up_s, self._up, "up"),
            (self._down_s, probe.download_bytes_per_s, "down"),
        ):
            if rate:
                parts.append(f"{seconds:.3g} s {way} at {_size(rate)}/s")
        return " + ".join(parts)


def _cause_of_loss(probe: Probe) -> str:
    first, last = probe.first_loss, probe.last_loss
    if not probe.is_loss_finite:
        return "the training loss is not finite: check the data, then try a smaller learning_rate"
    if first is None or last is None or last - first <= (LOSS_GROWTH_MAX - 1) * max(abs(first), 1.0):
        return ""
    return f"the training loss grows from {first:.3g} to {last:.3g}: try a smaller learning_rate"


def _cause_of_size(max_abs: float, largest: float) -> str:
    if ABS_HEADROOM * largest <= max_abs:
        return ""
    return (
        f"the largest change of one value is {largest:.3g}, too near to max_abs {max_abs:g}: raise max_abs to at least "
        f"{ABS_HEADROOM * largest:.3g}, or try a smaller learning_rate"
    )


def _cause_of_memory(probe: Probe) -> str:
    peak, free = probe.memory_bytes, probe.memory_free_bytes
    if peak is not None and free is not None and free < MEMORY_HEADROOM * peak:
        return f"only {_size(free)} of memory are free beside its peak of {_size(peak)}: try a smaller batch_size"
    peak, total = probe.device_memory_bytes, probe.device_memory_total_bytes
    if peak is not None and total is not None and peak > DEVICE_SHARE_MAX * total:
        return f"it uses {_size(peak)} of the accelerator's {_size(total)}: try a smaller batch_size"
    return ""


def _loss_words(probe: Probe) -> str:
    losses = [loss for loss in (probe.first_loss, probe.last_loss) if loss is not None]
    return f"loss {' to '.join(f'{loss:.3g}' for loss in losses)}" if losses else ""


def _short(cause: str) -> str:
    return cause if len(cause) <= _CAUSE_CHARS else cause[: _CAUSE_CHARS - 1] + "…"


def _size(n_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.3g} {unit}"
    return f"{n_bytes:.3g} B"


@dataclass(frozen=True, slots=True)
class CanaryClosed:
    """A canary has closed; its accepted clients sent these updates."""

    sent: Mapping[ClientId, CanaryUpdate]


def verdicts_on(run: Run, closing: Closing, trial: CanaryClosed) -> tuple[CanaryVerdict, ...]:
    """A verdict on each client of the canary, by what the run file asks of the first round."""
    terms = CanaryTerms(run.file.rounds_of(1).window_s, closing.plan.max_abs, run.model.size_bytes)
    return judge_clients(terms, trial.sent, closing.missing)


def with_verdicts(record: RoundRecord, verdicts: Sequence[CanaryVerdict], passes: bool) -> RoundRecord:
    """The record of a canary, with the verdict on each client that reported."""
    by_client = {verdict.client: verdict for verdict in verdicts}
    clients = tuple(_with_verdict(client, by_client[ClientId(client.client)]) for client in record.clients)
    return replace(record, committed=passes, clients=clients)


def _with_verdict(client: ClientRecord, verdict: CanaryVerdict) -> ClientRecord:
    if client.fate not in (Fate.ACCEPTED, Fate.PARTIAL):
        return client
    return replace(client, fate=client.fate if verdict.passes else Fate.UNFIT, reason=verdict.reason)
