"""The `Grid` that a simulated ServerApp speaks to."""

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from flwr.common.constant import ErrorCode

from umbel.aggregation.phrases import counted
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import client_name
from umbel.client.flower.host import number_of
from umbel.client.flower.local_grid import RUN_NUMBER, LocalGrid
from umbel.client.flower.records import SERVER_NODE, TTL_S
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.flower.work import FlowerEngine, NodeAnswer, NodeCall, SentContent
from umbel.sim.engines.work import EngineError
from umbel.sim.federation.possible import SimulationError
from umbel.sim.flower.attempts import TASKS, Asked, Attempts, NodeNumber
from umbel.sim.flower.models import ModelDigests
from umbel.sim.flower.rows import FlowerRows

log = logging.getLogger("umbel.sim")
_OLDER = ("fitins.", "evaluateins.")  # what the messages of older strategies hold
_LOOKS_OF_ONE_ROUND = 4  # Flower's strategies look twice before they send
_LOOKS_WITH_ALL = 8  # more of them change nothing, so a ServerApp that goes on looking waits for ever
_LOOK_AGAIN_S, _NOBODY_COMES_S = 600.0, 30 * 86_400.0  # virtual, between two looks of a ServerApp that waits for nodes


@dataclass(slots=True)
class _Kept:
    """What nodes keep, and how often each was called."""

    states: dict[NodeNumber, bytes] = field(default_factory=dict[NodeNumber, bytes])
    n_calls: dict[NodeNumber, int] = field(default_factory=dict[NodeNumber, int])


class SimulatedGrid(LocalGrid):
    """Each push of messages is an attempt at a round: it ends before the next one begins.

    Nodes that are late or lost send nothing; `pull_messages` has an error in their place.
    """

    def __init__(self, attempts: Attempts, engine: FlowerEngine, rows: FlowerRows, n_nodes: int, seed: int) -> None:
        super().__init__()
        self._attempts, self._engine, self._rows = attempts, engine, rows
        self._ids = [number_of(client_name(number)) for number in range(n_nodes)]
        self._numbers = {node: number for number, node in enumerate(self._ids)}
        self._seed = seed
        self._kept, self._digests = _Kept(), ModelDigests()
        self._content_numbers = itertools.count()
        self._n_rounds, self._n_before = 0, 0  # so far, and before the strategy that runs now
        self._looks, self._n_seen = 0, 0  # since the last message
        self.arrays: ArrayRecord | None = None  # of the newest message
        self._is_warned = False
        self._thread = threading.get_ident()  # in which the ServerApp runs

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are present. If a ServerApp looks again and again, it waits for more: then time passes until
        more are. Looks from other threads do not count: Flower's older server has one that only looks.
        """
        if threading.get_ident() != self._thread:
            return self._ids_of(self._present())
        with self._answering:
            return self._ids_of(self._look())

    def _look(self) -> Indices:
        present, n_nodes = self._present(), len(self._numbers)
        self._looks += 1
        if self._looks > _LOOKS_WITH_ALL if len(present) == n_nodes else self._looks > _LOOKS_OF_ONE_ROUND:
            present = self._more_than(self._n_seen)
        self._n_seen = len(present)
        return present

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._attempts.now

    def _ids_of(self, nodes: Indices) -> list[int]:
        return [self._ids[number] for number in nodes.tolist()]

    def _present(self) -> Indices:
        n_nodes = len(self._numbers)
        return self._attempts.devices.waiting(self._attempts.now, self._n_rounds + 1, 1, n_nodes, n_nodes)

    def _more_than(self, n_seen: int) -> Indices:
        """Advance time until more nodes than these are present. Raises `SimulationError` if that is never so."""
        began, n_nodes = self._attempts.now, len(self._numbers)
        while len(present := self._present()) <= n_seen:
            if n_seen == n_nodes or self._attempts.now > began + _NOBODY_COMES_S:
                others = "there are no others" if n_seen == n_nodes else f"of {n_nodes:,} no more are ever present"
                raise SimulationError(
                    f"the ServerApp waits for more than {counted(n_seen, 'node')}, and {others}: set flower.clients, "
                    "let its strategy ask for fewer, or let more devices be present ([fleet])"
                )
            self._attempts.now += _LOOK_AGAIN_S
        return present

    def answers(self, messages: Sequence[Message], *, timeout_s: float | None) -> Sequence[Message | None]:
        if not messages:
            return []
        self._looks = 0
        contents = self._contents(messages)
        found: list[Message | None] = [None] * len(messages)
        for group in _groups(messages):
            self._answer(group, messages, contents, found, timeout_s)
        return found

    def _answer(
        self,
        group: Sequence[int],
        messages: Sequence[Message],
        contents: Sequence[SentContent],
        found: list[Message | None],
        timeout_s: float | None,
    ) -> None:
        """Answer messages of one kind to different nodes, which are one attempt if they ask for work."""
        place = {self._number(messages[i]): i for i in group}

        def work(nodes: Sequence[NodeNumber]) -> dict[NodeNumber, NodeAnswer]:
            return self._called([self._call(node, messages[place[node]], contents[place[node]]) for node in nodes])

        kind, _, _ = messages[group[0]].metadata.message_type.partition(".")
        if kind not in TASKS:  # a question takes no time
            answers: Mapping[NodeNumber, NodeAnswer] = work([*place])
        else:
            first = messages[group[0]]
            self.arrays = next(iter(first.content.array_records.values()), self.arrays)
            self.warn_of(self.arrays)
            asked = Asked(
                TASKS[kind],
                self._round_of(first, is_new=TASKS[kind].makes_model),
                [*place],
                [contents[i].n_bytes for i in group],
                self._digests.of(self.arrays),
                timeout_s,
            )
            played = self._attempts.play(asked, work)
            self._rows.add(played)
            answers = played.answers
            _require_any(answers, asked)
        for node, answer in answers.items():
            found[place[node]] = _reply(answer, messages[place[node]])

    def warn_of(self, arrays: ArrayRecord | None) -> None:
        """Say once that this model, of the last round, holds a NaN or an infinity: its metrics are no numbers."""
        if arrays is None or self._is_warned or not _holds_no_number(arrays):
            return
        self._is_warned = True
        which = f"the model after round {self._n_rounds}" if self._n_rounds else "the first model"
        log.warning("%s holds a NaN or an infinity, so metrics and later models that depend on it are useless", which)

    def _called(self, calls: Sequence[NodeCall]) -> dict[NodeNumber, NodeAnswer]:
        answers = dict[NodeNumber, NodeAnswer]()
        with closing(self._engine.run(calls)) as found:  # so that an engine has stopped before another thread closes it
            for position, answer in found:
                self.require_open()
                answers[calls[position].number] = answer
                self._kept.states[calls[position].number] = answer.state
        return {call.number: answers[call.number] for call in calls}  # in the order of the calls

    def _call(self, node: NodeNumber, message: Message, content: SentContent) -> NodeCall:
        told = message.metadata
        self._kept.n_calls[node] = n = self._kept.n_calls.get(node, 0) + 1
        metadata = {
            "run_id": RUN_NUMBER,
            "message_id": told.message_id,
            "src_node_id": SERVER_NODE,
            "dst_node_id": told.dst_node_id,
            "reply_to_message_id": "",
            "group_id": told.group_id,
            "created_at": time.time(),
            "ttl": told.ttl or TTL_S,
            "message_type": told.message_type,
        }
        seed = derive_seed(self._seed, "flower node", node, n)
        return NodeCall(node, content, metadata, seed, self._kept.states.get(node, b""))

    def _number(self, message: Message) -> NodeNumber:
        node = message.metadata.dst_node_id
        if (number := self._numbers.get(node)) is None:
            raise EngineError(f"the ServerApp sent a message to the node {node}, which is not one of get_node_ids()")
        return number

    def _contents(self, messages: Sequence[Message]) -> list[SentContent]:
        """Messages with one content have it once."""
        known = dict[int, SentContent]()
        for message in messages:
            if id(message.content) not in known:
                known[id(message.content)] = SentContent(next(self._content_numbers), message.content)
        return [known[id(message.content)] for message in messages]

    def begin_strategy(self) -> int:
        """A strategy starts, whose rounds count from 1; how many rounds there were before."""
        self._n_before = self._n_rounds
        return self._n_before

    def _round_of(self, message: Message, *, is_new: bool) -> int:
        """The number of the round: what the message says, or else one more than the last round of training."""
        said = round_said(message)
        self._n_rounds = max(1, self._n_rounds + is_new) if said is None else self._n_before + said
        return self._n_rounds


def _holds_no_number(arrays: ArrayRecord) -> bool:
    """Whether a value is a NaN or an infinity."""
    try:
        values = [one.numpy() for one in arrays.values()]
    except (TypeError, ValueError):  # bytes that are no array
        return False
    return not all(np.isfinite(one).all() for one in values if one.dtype.kind in "fc")


def round_said(message: Message) -> int | None:
    """The `server-round` of a message, or of an older strategy its group of messages; None: neither."""
    for record in message.content.config_records.values():
        if isinstance(record, ConfigRecord) and isinstance(number := record.get("server-round"), int) and number >= 1:
            return number
    is_older, group = any(name.startswith(_OLDER) for name in message.content), message.metadata.group_id
    return int(group) if is_older and group.isdecimal() and int(group) >= 1 else None


def _groups(messages: Sequence[Message]) -> list[list[int]]:
    """The messages' positions: those of one kind together, each to another node."""
    found, n_before = dict[tuple[str, int], list[int]](), dict[tuple[str, int], int]()
    for i, message in enumerate(messages):
        key = message.metadata.message_type, message.metadata.dst_node_id
        n_before[key] = nth = n_before.get(key, -1) + 1
        found.setdefault((message.metadata.message_type, nth), []).append(i)
    return [*found.values()]


def _reply(answer: NodeAnswer, message: Message) -> Message:
    if answer.content is None:
        code, reason = answer.error or (ErrorCode.UNKNOWN, "")
        return Message(Error(code, reason), reply_to=message)
    return Message(answer.content, reply_to=message)


def _require_any(answers: Mapping[NodeNumber, NodeAnswer], asked: Asked) -> None:
    """Raise `EngineError` if the code of every node has failed, because no later round would be better."""
    errors = [answer.error for answer in answers.values() if answer.content is None]
    if errors and len(errors) == len(answers):
        _, reason = errors[0] or (0, "")
        nodes = counted(len(errors), "node")
        raise EngineError(f"in round {asked.number} {asked.task.value} failed at all {nodes} that were asked: {reason}")
