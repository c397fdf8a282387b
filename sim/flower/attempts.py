"""Attempts that a ServerApp's messages make: each push to some nodes is one attempt, with a window, in virtual time.

Which nodes answer in time depends only on their devices, so the window is played before the work, and only those nodes
work. A node that fails in its work answers with an error, and the next one that would have been in time takes its
place.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import numpy as np
from flwr.app import MessageType, RecordDict

from umbel.aggregation.plans.codec import TOTAL_WEIGHT_MAX
from umbel.aggregation.plans.round import Task
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import Closing, Gathered, Recruiting, Training
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.ledger import Ending, client_records, round_record
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.types import (
    METRIC_ABS_MAX,
    METRICS_MAX,
    SAMPLE_COUNT_MAX,
    ClientId,
    client_name,
    require_metric_name,
)
from umbel.client.flower.records import SAMPLES
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.flower.work import NodeAnswer, bytes_of
from umbel.sim.federation.local_work import steps_asked
from umbel.sim.federation.window import Cohort, Played, Window
from umbel.sim.fleet.fates import CohortAsk, Fates
from umbel.sim.fleet.faults import Fault
from umbel.sim.fleet.fleet import Devices

EVALUATION_BATCH = 256
_REPORT_BYTES = 200  # of the reply to an evaluation, before one has come
TASKS: Mapping[str, Task] = {MessageType.TRAIN: Task.TRAINING, MessageType.EVALUATE: Task.EVALUATION}

log = logging.getLogger("umbel.sim")
NodeNumber = int
PlainWork = EvaluationDone | WorkDone
Answers = Mapping[NodeNumber, NodeAnswer]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a ServerApp asks of some nodes. `n_bytes`: of each message; `timeout_s`: None: as long as the window."""

    task: Task
    number: int  # of the round
    nodes: Sequence[NodeNumber]
    n_bytes: Sequence[int]
    model_sha256: str | None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlayedAttempt:
    """An attempt that is over. `answers`: of nodes that were in time; one with an error is no report."""

    record: RoundRecord
    played: Played
    answers: Answers
    declines: Mapping[ClientId, str]
    samples: tuple[int, int] | None  # of nodes that were in time, and of the others; None: some have never said it


@dataclass(slots=True)
class Attempts:
    """The attempts of one run, one after another. `samples`: of a node, while none has replied."""

    file: RunFile
    devices: Devices
    samples: int
    now: float = 0.0  # virtual seconds
    n_committed: int = 0
    _n_samples: dict[Task, dict[NodeNumber, int]] = field(default_factory=lambda: {task: {} for task in Task})
    _n_attempts: dict[tuple[Task, int], int] = field(default_factory=dict[tuple[Task, int], int])
    _reply_bytes: dict[Task, int] = field(default_factory=dict[Task, int])  # of the last attempt, the mean
    _is_warned: bool = False  # of a number of samples that no record holds

    def play(self, asked: Asked, work: Callable[[Sequence[NodeNumber]], Answers]) -> PlayedAttempt:
        """Play one attempt. `work`: calls nodes, each once."""
        opened = self._opened(asked)
        order = sorted(range(len(asked.nodes)), key=lambda i: client_name(asked.nodes[i]))
        nodes, sent = [asked.nodes[i] for i in order], [asked.n_bytes[i] for i in order]
        names = [client_name(node) for node in nodes]
        sizes = np.array([self._size(asked.task, node) for node in nodes], dtype=np.int64)
        steps = self._steps(asked, sizes)
        fates = self._fates(opened, nodes, steps, sent)
        works = [_expected(asked.task, int(size), int(n)) for size, n in zip(sizes, steps, strict=True)]
        declines, answers = _unreadable(names, fates), dict[NodeNumber, NodeAnswer]()
        while True:
            played = Window(opened, Cohort(names, fates, works)).play(declines)
            new = [i for i, name in enumerate(names) if name in played.ended.accepted and nodes[i] not in answers]
            if not new:
                break
            found = work([nodes[i] for i in new])
            answers |= found
            for i in new:
                answer = found[nodes[i]]
                if answer.content is None:
                    assert answer.error is not None, "an answer has a content or an error"
                    declines[names[i]] = answer.error[1] or "it answered with an error"
                else:
                    works[i] = self._done(asked.task, nodes[i], answer.content, works[i])
        record, counted = self._ended(asked, played, nodes, answers, declines)
        return PlayedAttempt(record, played, counted, played.declined(declines), self._samples(asked, played))

    def _opened(self, asked: Asked) -> Training:
        """The window of these nodes, and of no other."""
        key, n = (asked.task, asked.number), len(asked.nodes)
        self._n_attempts[key] = attempt = self._n_attempts.get(key, 0) + 1
        rounds = self.file.rounds_of(asked.number)
        target = max(1, math.ceil(round(n / rounds.asked_share, 9)))
        window_s = rounds.window_s if asked.timeout_s is None else min(rounds.window_s, asked.timeout_s)
        plan = replace(
            self.file.round_plan(asked.number, attempt),
            target=target,
            over_selection=n / target,
            minimum=1,
            window_s=window_s,
            task=asked.task,
            sample_count_max=min(self.file.aggregation.sample_count_max, TOTAL_WEIGHT_MAX // n),
        )
        candidates = tuple(Candidate(client_name(node), self._size(asked.task, node)) for node in asked.nodes)
        opened, _ = advance(Recruiting(plan, since=self.now), Gathered(self.now, candidates))
        assert isinstance(opened, Training), "all that it wants are here"
        return opened

    def _size(self, task: Task, node: NodeNumber) -> int:
        """How many samples the node has: as it last said, or else as other nodes have said, in the mean."""
        known = self._n_samples[task]
        return known.get(node) or (round(sum(known.values()) / len(known)) if known else self.samples)

    def _done(self, task: Task, node: NodeNumber, content: RecordDict, expected: PlainWork) -> PlainWork:
        """What the node has reported. Without a number of samples that umbel's records take, they have the estimate."""
        metrics = numbers_of(content)
        said = metrics.pop(SAMPLES, None)
        count = expected.sample_count
        if said is not None and 1 <= said <= SAMPLE_COUNT_MAX:
            count = self._n_samples[task][node] = int(said)
        elif said is not None and not self._is_warned:
            self._is_warned = True
            log.warning(
                "node %d says %s = %g, and umbel's records take 1 to 2^40: they have an estimate in its place. The "
                "ServerApp gets the reply as it is",
                node,
                SAMPLES,
                said,
            )
        if isinstance(expected, EvaluationDone):
            return EvaluationDone(count, metrics)
        return replace(expected, sample_count=count, metrics=metrics)

    def _samples(self, asked: Asked, played: Played) -> tuple[int, int] | None:
        """Of the nodes that were in time, and of the others, as they have said by now."""
        known, accepted = self._n_samples[asked.task], played.ended.accepted
        if any(node not in known for node in asked.nodes):
            return None
        n_in = sum(known[node] for node in asked.nodes if client_name(node) in accepted)
        return n_in, sum(known[node] for node in asked.nodes) - n_in

    def _steps(self, asked: Asked, sizes: Indices) -> Indices:
        if asked.task is Task.EVALUATION:
            return np.maximum(1, -(-sizes // EVALUATION_BATCH))
        return steps_asked(self.file.training_plan(asked.number), sizes, 1.0)

    def _fates(
        self,
        opened: Training,
        nodes: Sequence[NodeNumber],
        steps: Indices,
        sent: Sequence[int],
    ) -> Fates:
        plan = opened.plan
        is_evaluation = plan.task is Task.EVALUATION
        expected = self._reply_bytes.get(plan.task, _REPORT_BYTES if is_evaluation else max(sent))
        ask = CohortAsk(
            steps=steps,
            batch_size=EVALUATION_BATCH if is_evaluation else self.file.training_plan(plan.number).batch_size,
            down_bytes=np.array(sent, dtype=np.int64),
            update_bytes=np.array([expected]),
            window_s=plan.window_s,
        )
        return self.devices.fates(np.array(nodes, dtype=np.int64), plan.number, plan.attempt, opened.opened_at, ask)

    def _ended(
        self,
        asked: Asked,
        played: Played,
        nodes: Sequence[NodeNumber],
        answers: Answers,
        declines: Mapping[ClientId, str],
    ) -> tuple[RoundRecord, Answers]:
        """The record, and the answers of nodes that were in time."""
        sizes = {
            client_name(node): bytes_of(answer.content)
            for node, answer in answers.items()
            if answer.content is not None
        }
        if sizes:
            self._reply_bytes[asked.task] = sum(sizes.values()) // len(sizes)
        ended = played.ended
        if isinstance(ended, Closing) and asked.task.makes_model:
            self.n_committed += 1
        book = played.book(sizes, declines)
        ending = Ending(self.n_committed, asked.model_sha256, ended.reason, played.at, max(asked.n_bytes))
        record = round_record(ended, client_records(ended, book), book.opened_at, ending)
        self.now = max(self.now, played.at)
        counted = {node: answers[node] for node in nodes if client_name(node) in ended.accepted}
        failed = {node: one for node, one in answers.items() if one.content is None}
        return record, counted | failed


def _unreadable(names: Sequence[ClientId], fates: Fates) -> dict[ClientId, str]:
    """Nodes whose bytes are no reply, with the reason."""
    words = {Fault.GARBAGE: "the reply could not be read", Fault.LENGTH: "the reply has a wrong length"}
    kinds = zip(names, fates.fault.tolist(), strict=True)
    return {name: words[Fault(kind)] for name, kind in kinds if kind in words}


def _expected(task: Task, size: int, n_steps: int) -> PlainWork:
    """What a node would report, before it has worked."""
    if task is Task.EVALUATION:
        return EvaluationDone(size, {})
    return WorkDone(size, n_steps, n_steps, _NO_UPDATE)


_NO_UPDATE = hashlib.sha256().hexdigest()  # Flower's replies have no digest, and nobody reads it


def numbers_of(content: RecordDict) -> dict[str, float]:
    """The finite numbers of a reply that can be metrics of umbel's, by name, and `SAMPLES`."""
    records: list[Mapping[str, object]] = [*content.metric_records.values()]
    # Flower's bridge for older apps puts their metrics elsewhere.
    records += [one for name, one in content.config_records.items() if name.endswith("res.metrics")]
    fit = {name: value for one in records for name, value in one.items() if is_metric(value, name)}
    named = {_LEGACY_NAMES.get(name, name): float(value) for name, value in fit.items()}
    first = sorted(named.items(), key=lambda one: (one[0] != SAMPLES, one))
    return dict(sorted(first[: METRICS_MAX + (SAMPLES in named)]))


_LEGACY_NAMES = {"num_examples": SAMPLES}


def is_metric(value: object, name: str) -> TypeGuard[int | float]:
    """Whether it can be a metric of umbel's."""
    if not isinstance(value, int | float) or not abs(value) <= METRIC_ABS_MAX:
        return False
    with suppress(ValueError):
        require_metric_name(name)
        return True
    return False
