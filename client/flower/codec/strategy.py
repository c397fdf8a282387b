"""The Flower strategy that has trained weights sent compressed, around any other strategy."""

import json
import logging
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.codec.one_update import read_one
from umbel.aggregation.codec.section import CodecSection, codec_key
from umbel.aggregation.codec.step import RoundShown
from umbel.aggregation.codec.update_codec import UpdateCodec
from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.plans.codec import CodecPlan
from umbel.client.flower.codec.arrays import FirstDtypes, StartArrays
from umbel.client.flower.codec.terms import Terms, is_written, put_in, update_in
from umbel.client.flower.records import error_with, message_with
from umbel.client.toml_file import findings

MAX_ABS = 64.0  # as in a run file
_OVERRIDDEN = ("configure_train", "aggregate_train", "summary")
_NOT_ONE, _PLAIN = "not one record", "a plain reply"  # what is warned of once
_SECTION = TypeAdapter(CodecSection)
log = logging.getLogger("flwr")


@dataclass(frozen=True, slots=True)
class _Model:
    """What the messages with one ArrayRecord share. `given`: that of the strategy; `sent`: the one that is sent."""

    given: ArrayRecord
    sent: ArrayRecord
    start: StartArrays
    codec: UpdateCodec


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one node was asked. Its message gets its id when it is sent, so the metadata are kept."""

    metadata: Metadata
    model: _Model
    rank: int


@dataclass(slots=True)
class _Round:
    """A round of training."""

    plan: CodecPlan
    n_values: int  # of a model
    asked: list[_Asked] = field(default_factory=list[_Asked])
    rms: list[float] = field(default_factory=list[float])  # of each update that could be read

    @property
    def shown(self) -> RoundShown:
        """What the next round's codec follows from.

        The median: a few clients with far larger updates must not make the step too coarse for all others.
        """
        rms = median(self.rms) if self.rms else None
        return RoundShown(window_s=0.0, n_values=self.n_values, update_rms=rms)  # only "auto" reads the window


class Compressed(Strategy):
    """A strategy whose clients send their weight changes compressed, if their ClientApp has the mod `compressing`.

    Replies are decoded one by one to ordinary arrays, before `strategy` gets them: what the client started from, plus
    the decoded change. A reply that cannot be decoded becomes an error reply. One that is not compressed is passed on,
    with one warning a run. All else is done by `strategy`. Wrap other wrappers, such as Flower's for differential
    privacy, and not the other way round, because they read the clients' arrays.

    Args:
        strategy: any strategy of the Message API that sends one ArrayRecord to a client.
        codec: the keys of a run file's section [codec], such as {"name": "eden", "bits": 4}. Not "auto", error
            feedback, or structured codecs, which need more than Flower's messages show.
        seed: of the random numbers that codecs round with.
        max_abs: the greatest absolute value of the change of one weight; a larger one is refused.

    Raises `ValueError` with a sentence for a codec that cannot be used.
    """

    def __init__(
        self,
        strategy: Strategy,
        codec: Mapping[str, object] | None = None,
        *,
        seed: int = 0,
        max_abs: float = MAX_ABS,
    ) -> None:
        self.strategy = strategy
        self._section = _section_of(codec or {})
        self._seed, self._max_abs = seed, max_abs
        Terms(self._section.first(1, 0), max_abs, 0)  # refuses what no client could use
        # While `start` runs, the strategy's own attributes of these names are this object's.
        self._configure_train = strategy.configure_train
        self._aggregate_train = strategy.aggregate_train
        self._summary = strategy.summary
        self._dtypes = FirstDtypes()
        self._round: _Round | None = None  # the last one
        self._warned = set[str]()

    # --- training -----------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's messages, with what a client needs to compress its reply."""
        messages = [*self._configure_train(server_round, arrays, config, grid)]
        models, opened = dict[int, _Model](), False
        if self._round is not None:
            self._round.asked.clear()
        # Strategies draw nodes in any order, and the same nodes get the same ranks.
        for rank, message in enumerate(sorted(messages, key=lambda one: one.metadata.dst_node_id)):
            records = message.content.array_records
            if len(records) != 1:  # which one a client trains from is not known here
                self._warn_once(_NOT_ONE, f"a message has {len(records)} ArrayRecords, so its reply is not compressed")
                continue
            ((name, record),) = records.items()
            if id(record) not in models:  # most messages share it
                sent = self._dtypes.kept(record)
                start = StartArrays.of(sent)
                if not opened:
                    self._round, opened = self._next_round(server_round, start.layout.n_values), True
                models[id(record)] = _Model(record, sent, start, self._terms(0).codec(start.layout))
            model = models[id(record)]
            self._opened.asked.append(_Asked(message.metadata, model, rank))
            message.content = put_in(RecordDict({**message.content, name: model.sent}), self._terms(rank))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's aggregate of the replies, decoded."""
        asked = {} if self._round is None else {one.metadata.message_id: one for one in self._round.asked}
        return self._aggregate_train(server_round, [self._ordinary(reply, asked) for reply in replies])

    def _next_round(self, number: int, n_values: int) -> _Round:
        key, before = codec_key(self._seed, number), self._round
        if before is None:
            return _Round(self._section.first(n_values, key), n_values)
        return _Round(self._section.after(before.plan, number, before.shown, key), n_values)

    @property
    def _opened(self) -> _Round:
        assert self._round is not None, "a round is opened before anyone is asked"
        return self._round

    def _terms(self, rank: int) -> Terms:
        return Terms(self._opened.plan, self._max_abs, rank)

    def _ordinary(self, reply: Message, asked: Mapping[str, _Asked]) -> Message:
        """The reply as the strategy knows it, or an error reply."""
        if reply.has_error():
            return reply
        records, node = reply.content.array_records, reply.metadata.src_node_id
        one = asked.get(reply.metadata.reply_to_message_id)
        if not any(map(is_written, records.values())):
            if one is not None:
                self._warn_once(
                    _PLAIN, f"the reply of node {node} is not compressed; its ClientApp needs the mod `compressing`"
                )
            return reply
        try:
            if one is None:
                raise ValueError("it answers no message of this round")
            if len(records) != 1:
                raise ValueError("it has other ArrayRecords beside the update")
            ((name, record),) = records.items()
            return message_with(reply.metadata, RecordDict({**reply.content, name: self._decoded(record, one)}))
        except (UpdateRefused, ValueError) as error:
            log.warning("umbel's compression: the update of node %d cannot be used: %s", node, error)
            return _with_error(reply, f"umbel's compression: the update cannot be used: {error}")

    def _decoded(self, record: ArrayRecord, asked: _Asked) -> ArrayRecord:
        """What the client has trained, as far as its update says. Raises an `UpdateRefused` or `ValueError`."""
        update = read_one(asked.model.codec, update_in(record), asked.rank)
        moved = asked.model.start.moved(update.change)
        if update.rms is not None:
            self._opened.rms.append(update.rms)
        return moved

    # --- what the strategy does ---------------------------------------------------------------------------------------

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the strategy's own `start`, which takes these arguments. Each call is a new run."""
        self._dtypes, self._round = FirstDtypes(), None
        self._warned.clear()
        with self._in_place():
            return self.strategy.start(*args, **kwargs)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's messages."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The strategy's metrics."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the codec, and then the strategy's summary."""
        log.info("\t├──> Training replies are compressed by umbel: %s", self._words)
        self._summary()

    @property
    def _words(self) -> str:
        """The codec, with the keys that were given."""
        given = {one.name: getattr(self._section, one.name) for one in fields(self._section)}
        keys = [f"{name} {value}" for name, value in given.items() if name != "name" and value]
        return ", ".join([str(self._section.name), *keys])

    @contextmanager
    def _in_place(self) -> Generator[None]:
        """Have the strategy call this object's methods where its `start` calls its own."""
        with ExitStack() as stack:
            for name in _OVERRIDDEN:
                if name in vars(self.strategy):
                    stack.callback(setattr, self.strategy, name, vars(self.strategy)[name])
                else:
                    stack.callback(delattr, self.strategy, name)
                setattr(self.strategy, name, getattr(self, name))
            yield

    def _warn_once(self, kind: str, what: str) -> None:
        """Once a run."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("umbel's compression: %s", what)


def _section_of(codec: Mapping[str, object]) -> CodecSection:
    """Raises `ValueError` with a sentence."""
    try:
        section = _SECTION.validate_json(json.dumps({"name": "integer", **codec}, allow_nan=False), strict=True)
    except TypeError as error:
        raise ValueError(f"codec: its values must be numbers, texts, true or false: {error}") from error
    except ValidationError as error:
        raise ValueError(f"codec: {findings(error, lambda _section, _key: '')}") from error
    if section.name == "auto":
        raise ValueError(
            'codec: name = "auto" needs the upload speeds of the clients, which Flower does not show: set name to '
            '"integer" and choose a step'
        )
    return section


def _with_error(reply: Message, why: str) -> Message:
    error = Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, why)
    return error_with(reply.metadata, error)
