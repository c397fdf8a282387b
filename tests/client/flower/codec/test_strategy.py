"""The strategy around another: every strategy gets ordinary arrays, and a hostile reply harms nobody but its sender."""

import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    Result,
    Strategy,
)

from tests.client.flower.codec.messages import (
    FIRST,
    AppGrid,
    Arrays,
    Spoiling,
    app_of,
    arrays_bytes,
    arrays_in,
    moved,
    record_of,
)
from umbel.client.flower.codec import Compressed, compressing
from umbel.client.flower.codec.terms import RECORD, STYPE, UPDATE, is_written, written

N_NODES = 4
FINE: dict[str, object] = {"name": "integer", "step": 0.02, "first_norm": 0.25}
CODECS: list[dict[str, object]] = [{}, FINE, {"name": "eden", "bits": 4}, {"name": "qsgd"}, {"name": "planes"}]


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Flower's strategies draw nodes with it, and add up in that order."""
    random.seed(1)


class Kept(FedAvg):
    """FedAvg that keeps the replies it got."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.replies: list[Message] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        self.replies = [*replies]
        return super().aggregate_train(server_round, self.replies)


def grid_of(spoil: Spoiling = lambda _node, content: content, train: Any = moved, n_plain: int = 0) -> AppGrid:
    """Nodes with the mod; the first `n_plain` without."""
    return AppGrid([app_of(train, [] if node < n_plain else [compressing]) for node in range(N_NODES)], spoil)


def run(strategy: Strategy, grid: AppGrid, rounds: int = 1, first: Arrays = FIRST) -> Result:
    return strategy.start(grid=grid, initial_arrays=record_of(first), num_rounds=rounds)


def ended(strategy: Strategy, grid: AppGrid, rounds: int = 1, first: Arrays = FIRST) -> dict[str, npt.NDArray[Any]]:
    return arrays_in(run(strategy, grid, rounds, first).arrays)


def farthest(found: Arrays, wanted: Arrays, name: str = "w.weight") -> float:
    return float(np.abs(found[name] - wanted[name]).max())


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_replies_are_small_and_their_mean_is_near(codec: dict[str, object]) -> None:
    plain, grid = AppGrid([app_of()] * N_NODES), grid_of()
    found, wanted = ended(Compressed(FedAvg(), codec), grid), ended(FedAvg(), plain)
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in wanted.items()}
    assert farthest(found, wanted) < 0.02, "the steps have a deviation of 0.01"
    assert float(found["n"]) == float(wanted["n"]) == 7
    sent, sent_plain = (sum(map(arrays_bytes, one.replies[:N_NODES])) for one in (grid, plain))
    assert sent < 0.95 * sent_plain
    if codec in ({}, {"name": "eden", "bits": 4}):
        assert sent < 0.45 * sent_plain


@pytest.mark.slow
def test_the_error_is_one_that_averages_out() -> None:
    """A mean over seeds, which a bias would not let come near."""
    wanted = ended(FedAvg(), AppGrid([app_of()] * N_NODES))["w.weight"]
    found = [
        ended(Compressed(FedAvg(), {"step": 2.0, "first_norm": 0.25}, seed=seed), grid_of())["w.weight"]
        for seed in range(12)
    ]
    errors = [float(np.square(one - wanted).sum()) for one in found]
    assert float(np.square(np.mean(found, axis=0) - wanted).sum()) < 2 * np.mean(errors) / len(found)


def test_a_strategy_gets_what_an_ordinary_client_sends() -> None:
    strategy = Kept()
    run(Compressed(strategy), grid_of())
    assert len(strategy.replies) == N_NODES
    assert {reply.metadata.src_node_id for reply in strategy.replies} == {*range(2, 2 + N_NODES)}
    for reply in strategy.replies:
        assert {*reply.content} == {"arrays", "metrics"}
        found = arrays_in(reply.content.array_records["arrays"])
        assert [*found] == [*FIRST]
        for name, one in found.items():
            assert (one.dtype, one.shape) == (FIRST[name].dtype, FIRST[name].shape)
        assert not is_written(reply.content.array_records["arrays"])


def test_equal_seeds_give_equal_bits_and_others_do_not() -> None:
    found = list[npt.NDArray[Any]]()
    for seed in (5, 5, 6):
        random.seed(1)
        found.append(ended(Compressed(FedAvg(), seed=seed), grid_of(), rounds=2)["w.weight"])
    same, again, other = found
    assert np.array_equal(same, again)
    assert not np.array_equal(same, other)


class Halfway(Strategy):
    """A user's own: sends each node its own part of the models, and goes half of the way to the median."""

    def __init__(self) -> None:
        self.arrays = ArrayRecord()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.arrays = arrays
        for node in grid.get_node_ids():
            names = [*arrays] if node % 2 else ["w.weight"]
            content = RecordDict({"part": ArrayRecord({name: arrays[name] for name in names}), "other": config})
            yield Message(RecordDict({**content, "arrays": content["part"]} if node % 2 else content), node, "train")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        parts = [arrays_in(one.content["arrays"])["w.weight"] for one in replies if one.has_content()]
        before = self.arrays["w.weight"].numpy()
        return record_of({"w.weight": before + (np.median(parts, axis=0) - before) / 2}), MetricRecord(
            {"n": len(parts)}
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        logging.getLogger("flwr").info("half of the way")


@pytest.mark.parametrize(
    "strategy",
    [FedMedian, lambda: FedAdam(eta=0.02), lambda: FedAvg(fraction_train=0.5, arrayrecord_key="arrays")],
    ids=["FedMedian", "FedAdam", "half of the nodes"],
)
def test_any_strategy_works_as_it_does_without(strategy: Callable[[], Strategy]) -> None:
    wanted = ended(strategy(), AppGrid([app_of()] * N_NODES), rounds=3)
    random.seed(1)
    found = ended(Compressed(strategy(), FINE), grid_of(), rounds=3)
    moved_by = np.abs(wanted["w.weight"] - FIRST["w.weight"]).mean()
    assert np.abs(found["w.weight"] - wanted["w.weight"]).mean() < 0.2 * moved_by


def test_an_own_strategy_whose_start_is_its_own() -> None:
    class Early(FedAvg):
        """Ends before the last round, and has its own state."""

        def start(self, *args: Any, **kwargs: Any) -> Result:
            self.n_rounds = 0
            result = super().start(*args, **kwargs)
            result.train_metrics_clientapp[99] = MetricRecord({"rounds": self.n_rounds})
            return result

        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            self.n_rounds += 1
            return super().aggregate_train(server_round, replies)

    inner, grid = Early(), grid_of()
    result = run(Compressed(inner), grid, rounds=2)
    assert result.train_metrics_clientapp[99]["rounds"] == 2
    assert all(is_written(one.array_records["arrays"]) for one in grid.replies if "arrays" in one)
    assert "configure_train" not in vars(inner), "the strategy is as it was"
    run(inner, grid)  # and can go on without
    assert RECORD not in grid.sent[-2 * N_NODES]


def test_the_summary_is_the_strategys_and_names_the_codec(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flwr")
    Compressed(Halfway(), {"name": "eden", "bits": 2}).summary()
    assert [record.getMessage().partition("──> ")[2] or record.getMessage() for record in caplog.records] == [
        "Training replies are compressed by umbel: eden, bits 2",
        "half of the way",
    ]


def test_flowers_own_wrappers_work_inside() -> None:
    """The mod that clips comes after this one, and its strategy inside."""
    apps = [app_of(mods=[compressing, fixedclipping_mod]) for _ in range(N_NODES)]
    inner = DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.0, 0.05, N_NODES)
    found = ended(Compressed(inner, FINE), AppGrid(apps))
    norm = float(np.linalg.norm(found["w.weight"] - FIRST["w.weight"]))
    assert 0 < norm < 0.06, "unclipped it is 0.12"


def test_evaluations_are_those_of_the_strategy() -> None:
    plain, grid = AppGrid([app_of()] * N_NODES), grid_of()
    results = [run(strategy, one) for strategy, one in ((FedAvg(), plain), (Compressed(FedAvg(), FINE), grid))]
    means = [one.evaluate_metrics_clientapp[1]["mean"] for one in results]
    assert means[0] == pytest.approx(means[1], abs=1e-4)
    assert all(RECORD not in content for content in grid.sent[N_NODES:])
    assert all(len(context.state) == 0 for context in grid.contexts)


@pytest.mark.slow
def test_the_step_follows_the_updates() -> None:
    """Whatever norm is expected first, later rounds have about the bytes of the right one."""
    sizes = []
    for norm in (0.02, 0.25, 2.5):
        grid = grid_of()
        run(Compressed(FedAvg(), {"first_norm": norm}), grid, rounds=6)
        trained = [one for one in grid.replies if "arrays" in one]
        sizes.append([sum(map(arrays_bytes, trained[n : n + N_NODES])) for n in range(0, len(trained), N_NODES)])
    firsts, lasts = ([one[n] for one in sizes] for n in (0, -1))
    assert firsts[0] > 1.3 * firsts[1] > 1.3 * 1.3 * firsts[2]
    assert max(lasts) < 1.02 * min(lasts)


def test_one_hostile_client_does_not_make_the_step_coarse_for_a_robust_strategy() -> None:
    def train(arrays: Arrays, node: int) -> Arrays:
        return {
            name: one + np.where(node == 0, 63, 0.3 * (0.5 - one)).astype(one.dtype) for name, one in arrays.items()
        }

    grid = AppGrid([app_of(train, [compressing])] * 9)
    first = {"w": np.zeros((20, 30), np.float32)}
    result = Compressed(FedMedian(fraction_evaluate=0.0)).start(
        grid=grid, initial_arrays=record_of(first), num_rounds=12
    )
    assert np.abs(arrays_in(result.arrays)["w"] - 0.5).mean() < 0.05


def test_a_counter_stays_an_integer_whatever_mean_the_strategy_makes() -> None:
    grid = grid_of()
    result = ended(Compressed(FedAvg()), grid, rounds=3)
    assert result["n"].dtype == np.float64, "Flower's mean"
    sent = [one.array_records["arrays"]["n"] for one in grid.sent if RECORD in one]
    assert {one.dtype for one in sent} == {"int64"}
    assert [int(one.numpy()) for one in sent[::N_NODES]] == [3, 7, 11]


# --- replies that are not as they should be ---------------------------------------------------------------------------


def update_of(content: RecordDict) -> bytes:
    return content.array_records["arrays"][UPDATE].data


def spoiled(change: Callable[[bytes], bytes]) -> Spoiling:
    """The update of the first node, changed."""

    def spoil(node: int, content: RecordDict) -> RecordDict:
        if node or "arrays" not in content:
            return content
        return RecordDict({**content, "arrays": written(change(update_of(content)))})

    return spoil


def with_record(record: Callable[[bytes], RecordDict]) -> Spoiling:
    def spoil(node: int, content: RecordDict) -> RecordDict:
        if node or "arrays" not in content:
            return content
        return RecordDict({"metrics": content["metrics"], **record(update_of(content))})

    return spoil


HUGE = ArrayRecord({UPDATE: Array("uint8", (1 << 60,), STYPE, b"abc")})
HOSTILE: dict[str, tuple[dict[str, object], Spoiling, str]] = {
    "nothing": ({}, spoiled(lambda _: b""), "the update has 0 bytes"),
    "cut short": ({}, spoiled(lambda one: one[:-5]), "fewer bytes than"),
    "too long for the model": ({}, spoiled(lambda one: one + bytes(1 << 20)), "an update of this model takes"),
    "longer than it says": ({}, spoiled(lambda one: one + b"1"), "more bytes than"),
    "not an update": ({}, spoiled(lambda one: b"LBMU" + one[4:]), "these bytes are not an umbel update"),
    "another codec": ({}, spoiled(lambda one: one[:5] + b"\2" + one[6:]), "asks for codec integer"),
    "another model": ({}, spoiled(lambda one: one[:16] + bytes(32) + one[48:]), "was made for layout"),
    "a lying length": ({}, spoiled(lambda one: one[:48] + b"\xff" * 8 + one[56:]), "the header declares"),
    "another rank": ({}, spoiled(lambda one: one[:72] + b"\7" + one[73:]), "this client's rank is 0"),
    "a norm that is no number": ({}, spoiled(lambda one: one[:68] + b"\0\0\xc0\x7f" + one[72:]), "the norm nan"),
    "a NaN": (
        {"name": "float32"},
        spoiled(lambda one: one[:-4] + b"\0\0\xc0\x7f"),
        "is nan; the training diverged",
    ),
    "an infinite scale": (
        {"name": "eden", "bits": 4},
        spoiled(lambda one: one[:68] + b"\0\0\x80\x7f" + one[72:]),
        "contains a NaN or an infinity",
    ),
    "a value beyond max_abs": (
        {"name": "float32"},
        spoiled(lambda one: one[:-4] + np.float32(65).tobytes()),
        "beyond the grid's max_abs 64",
    ),
    "a shape that is not its own": ({}, with_record(lambda _: RecordDict({"arrays": HUGE})), "its length, 3"),
    "other arrays beside it": (
        {},
        with_record(lambda one: RecordDict({"arrays": ArrayRecord({**written(one), "w": Array(np.zeros(1))})})),
        "has one array",
    ),
    "two records": (
        {},
        with_record(lambda one: RecordDict({"arrays": written(one), "more": written(one)})),
        "other ArrayRecords beside the update",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_reply_that_cannot_be_decoded_becomes_an_error_reply(what: str, caplog: pytest.LogCaptureFixture) -> None:
    codec, spoil, words = HOSTILE[what]
    strategy = Kept()
    result = run(Compressed(strategy, codec), grid_of(spoil))
    (bad,) = (one for one in strategy.replies if one.has_error())
    assert words in (bad.error.reason or "")
    assert bad.metadata.src_node_id == 2
    assert len(strategy.replies) == N_NODES
    assert float(result.arrays["n"].numpy()) == pytest.approx(7), "the others are counted"
    assert "the update of node 2 cannot be used" in caplog.text


@pytest.mark.slow
@given(data=st.data())
def test_whatever_arrives_a_round_goes_on(data: st.DataObject) -> None:
    def noise(update: bytes) -> bytes:
        place = data.draw(st.integers(0, len(update) - 1))
        return update[:place] + data.draw(st.binary(max_size=12)) + update[place + data.draw(st.integers(0, 12)) :]

    codec = data.draw(st.sampled_from(CODECS))
    result = run(Compressed(FedAvg(fraction_evaluate=0.0), codec), grid_of(spoiled(noise)))
    assert np.isfinite(result.arrays["w.weight"].numpy()).all()


def test_an_update_for_no_message_is_an_error_reply() -> None:
    strategy, grid = Kept(), grid_of()
    wrapped = Compressed(strategy)
    run(wrapped, grid)
    run_again = Compressed(strategy)
    late = Message(RecordDict({"arrays": written(b"abc")}), reply_to=Message(RecordDict(), 2, "train"))
    run_again.aggregate_train(1, [late])
    (reply,) = strategy.replies
    assert "it answers no message of this round" in (reply.error.reason or "")


def test_clients_without_the_mod_are_counted_with_one_warning_a_run(caplog: pytest.LogCaptureFixture) -> None:
    strategy = Compressed(FedAvg(), FINE)
    found = ended(strategy, grid_of(n_plain=2), rounds=3)
    wanted = ended(FedAvg(), AppGrid([app_of()] * N_NODES), rounds=3)
    assert farthest(found, wanted) < 0.002
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "is not compressed; its ClientApp needs the mod `compressing`" in warnings[0]
    run(strategy, grid_of(n_plain=2))
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 2


def test_a_message_of_several_records_goes_out_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Their replies are ordinary, and those of the other messages are not."""
    strategy, grid = Halfway(), AppGrid([app_of(mods=[compressing])] * N_NODES)
    for content in _sent(Compressed(strategy), grid):
        assert (RECORD in content) == (len(content.array_records) == 1)
    assert "a message has 2 ArrayRecords, so its reply is not compressed" in caplog.text


def _sent(strategy: Compressed, grid: AppGrid) -> list[RecordDict]:
    messages = strategy.configure_train(1, record_of(FIRST), ConfigRecord(), grid)
    return [message.content for message in messages]


def test_every_node_gets_terms_of_its_own_over_the_same_arrays() -> None:
    contents = _sent(Compressed(FedAvg()), grid_of())
    assert len({content.config_records[RECORD]["terms"] for content in contents}) == N_NODES
    assert len({id(content["arrays"]) for content in contents}) == 1
    assert all({*content} == {"arrays", "config", RECORD} for content in contents)


def test_each_start_is_a_run_of_its_own() -> None:
    strategy = Compressed(FedAvg(), FINE)
    first = ended(strategy, grid_of())
    ended(strategy, grid_of(), first={"w.weight": FIRST["w.weight"].astype(np.float64)})
    random.seed(1)
    assert np.array_equal(ended(strategy, grid_of())["w.weight"], first["w.weight"])


@pytest.mark.parametrize(
    "arrays", [{}, {"w.weight": np.zeros((0, 3), np.float32)}, {"w.weight": np.zeros((), np.float32)}]
)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_model_may_be_empty_or_one_number(arrays: Arrays, codec: dict[str, object]) -> None:
    strategy, grid = Kept(fraction_evaluate=0.0), grid_of(train=lambda arrays, _node: arrays)
    run(Compressed(strategy, codec), grid, first=arrays)
    assert all(is_written(one.array_records["arrays"]) for one in grid.replies)
    for reply in strategy.replies:
        found = arrays_in(reply.content.array_records["arrays"])
        assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in arrays.items()}


def test_a_changed_structure_is_an_error_of_each_node_and_not_of_the_run() -> None:
    strategy = Kept()
    grid = grid_of(train=lambda arrays, _node: {**arrays, "w.bias": np.zeros(3, np.float32)})
    result = run(Compressed(strategy), grid)
    assert all("array 'w.bias' came with the shape [20]" in (one.error.reason or "") for one in strategy.replies)
    assert result.arrays is None or len(result.arrays) == 0


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ({"bits": 4}, 'name = "integer" does not take the key bits'),
        ({"nme": "eden"}, "codec: unknown key 'nme'"),
        ({"name": "eden", "bits": 9}, "`bits` must lie between 1 and 8"),
        ({"name": "eden", "bits": "4"}, "codec: bits: "),
        ({"name": "auto"}, "needs the upload speeds of the clients"),
        ({"name": "topk", "error_feedback": True}, "error feedback needs a state at the client"),
        ({"name": object()}, "its values must be numbers, texts, true or false"),
        ({"step": float("nan")}, "not JSON compliant"),
    ],
)
def test_a_codec_that_cannot_be_used_is_refused_at_once(codec: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Compressed(FedAvg(), codec)


def test_a_structured_codec_is_refused_when_the_model_is_known() -> None:
    with pytest.raises(ValueError, match='set mode to "sketched"'):
        run(Compressed(FedAvg(), {"name": "lowrank"}), grid_of())
    run(Compressed(FedAvg(), {"name": "lowrank", "mode": "sketched"}), grid_of())
