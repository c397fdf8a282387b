"""Means that are attached to a loop of one's own, in real groups: alike on all ranks, and as published."""

import copy
import io
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.aggregation.collective.ranks import in_ranks
from tests.suite.nights import at_night
from umbel.client.datacenter.loops.issuing import Issuer
from umbel.client.datacenter.ranks.group import GroupError
from umbel.datacenter import CodecName, MeanRecord, comm_hook, outer_sync

pytestmark = pytest.mark.slow
HERE = "tests.client.datacenter.loops.test_attach"
STEPS, EVERY, RATE = 40, 5, 0.1
CODECS: tuple[CodecName, ...] = ("float32", "8bit", "4bit", "2bit")


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 150), nn.BatchNorm1d(150), nn.ReLU(), nn.Linear(150, 150), nn.Linear(150, 4))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(32, 20, generator=draw)
    return inputs, inputs[:, :4].argmax(1)


def backward(model: nn.Module, rank: int, step: int) -> float:
    inputs, targets = batch(rank, step)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss.item()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def hooked(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """After training with each codec, in many small buckets: the model, and the losses."""
    rank, found = dist.get_rank(group), dict[str, Tensor]()
    for codec in CODECS:
        ddp = DistributedDataParallel(network(), bucket_cap_mb=0.02)
        optimizer, losses = SGD(ddp.parameters(), lr=RATE), list[float]()
        with comm_hook(ddp, codec=codec) as hook:
            for step in range(STEPS):
                optimizer.zero_grad()
                losses.append(backward(ddp, rank, step))
                optimizer.step()
            assert hook.steps == STEPS
            found[f"{codec}: bytes"] = torch.tensor(hook.n_bytes)
        found[f"{codec}: model"], found[f"{codec}: losses"] = flat(ddp), torch.tensor(losses)
        del ddp
    return found


@pytest.mark.parametrize("n_ranks", [2, *at_night(4)])
def test_a_hook_of_few_bits_trains_as_well_and_all_ranks_alike(n_ranks: int, tmp_path: Path) -> None:
    by_rank = in_ranks(f"{HERE}:hooked", n_ranks, tmp_path)
    exact = torch.stack([one["float32: losses"] for one in by_rank]).mean(0)
    whole = float(by_rank[0]["float32: bytes"])
    for codec, share in zip(CODECS, (1, 0.27, 0.14, 0.08), strict=True):
        for one in by_rank:
            assert torch.equal(one[f"{codec}: model"], by_rank[0][f"{codec}: model"]), codec
        losses = torch.stack([one[f"{codec}: losses"] for one in by_rank]).mean(0)
        assert float(losses[-10:].mean()) < 0.6 * float(losses[:5].mean()), codec
        assert float(losses[-10:].mean()) == pytest.approx(float(exact[-10:].mean()), rel=0.1), codec
        assert float(by_rank[0][f"{codec}: bytes"]) <= 1.5 * share * whole, codec  # small buckets are padded


def sharded(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """After training of a model that FSDP2 shards, without and with few bits, and without them again."""
    rank, found = dist.get_rank(group), dict[str, Tensor]()
    for name in ("plain", "4bit", "8bit"):
        model = network()
        model[1] = nn.LayerNorm(150)
        for layer in (model[0], model[3]):
            fully_shard(layer)
        fully_shard(model)
        optimizer = SGD(model.parameters(), lr=RATE)
        losses, n_bytes = list[float](), 0
        with ExitStack() as held:
            hook = None if name == "plain" else held.enter_context(comm_hook(model, codec=cast(CodecName, name)))
            for step in range(STEPS):
                optimizer.zero_grad()
                losses.append(backward(model, rank, step))
                optimizer.step()
            if hook is not None:
                assert hook.steps == STEPS
                n_bytes = hook.n_bytes
        optimizer.zero_grad()
        backward(model, rank, STEPS)  # torch's own means are back
        found[f"{name}: losses"], found[f"{name}: bytes"] = torch.tensor(losses), torch.tensor(n_bytes)
    n_values = sum(one.numel() for one in model.parameters())
    return {**found, "float32 bytes": torch.tensor(STEPS * 4 * n_values * (group.size() - 1) // group.size())}


def test_a_sharded_model_trains_as_well_in_few_bits(tmp_path: Path) -> None:
    by_rank = in_ranks(f"{HERE}:sharded", 2, tmp_path)
    exact = torch.stack([one["plain: losses"] for one in by_rank]).mean(0)
    for codec, share in (("8bit", 0.27), ("4bit", 0.14)):
        losses = torch.stack([one[f"{codec}: losses"] for one in by_rank]).mean(0)
        assert float(losses[-10:].mean()) < 0.6 * float(losses[:5].mean()), codec
        assert float(losses[-10:].mean()) == pytest.approx(float(exact[-10:].mean()), rel=0.1), codec
        assert float(by_rank[0][f"{codec}: bytes"]) <= 1.5 * share * float(by_rank[0]["float32 bytes"]), codec


def test_a_hook_needs_a_model_of_several_ranks() -> None:
    with pytest.raises(ValueError, match="not a plain Linear"), comm_hook(nn.Linear(2, 2)):
        pass


def in_two_groups(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Ranks 0 and 1 train one model, and 2 and 3 another one; both have a hook twice."""
    rank = dist.get_rank(group)
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    assert isinstance(mine, dist.ProcessGroup)
    ddp = DistributedDataParallel(network(), process_group=mine)
    optimizer = SGD(ddp.parameters(), lr=RATE)
    for codec in CODECS[:2]:
        ddp = DistributedDataParallel(ddp.module, process_group=mine)
        with comm_hook(ddp, codec=codec):
            backward(ddp, rank, 0)
            optimizer.step()
    return {"model": flat(ddp)}


def test_hooks_of_some_ranks_come_and_go(tmp_path: Path) -> None:
    models = [one["model"] for one in in_ranks(f"{HERE}:in_two_groups", 4, tmp_path)]
    assert [torch.equal(one, models[0]) for one in models] == [True, True, False, False]
    assert torch.equal(models[2], models[3])


def settings() -> dict[str, dict[str, Any]]:
    """Of `outer_sync`, by name: with each codec, and with fragments that overlap with training."""
    by_codec: dict[str, dict[str, Any]] = {codec: {"codec": codec} for codec in CODECS}
    return by_codec | {"streaming": {"codec": "4bit", "fragments": 3, "delay": 2, "keep": 0.5}}


def diloco(group: dist.ProcessGroup) -> dict[str, Tensor]:
    rank, found = dist.get_rank(group), dict[str, Tensor]()
    for name, setting in settings().items():
        model = network()
        if rank:
            nn.init.zeros_(next(model.parameters()))  # ranks that begin apart get the model of rank 0
        optimizer = SGD(model.parameters(), lr=RATE)
        with outer_sync(model, optimizer, every=EVERY, **setting) as sync:
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
            found[f"{name}: starts"] = torch.cat([one["start"] for one in sync.state_dict()["fragments"]])
        found[f"{name}: model"], found[f"{name}: loss"] = flat(model), held_out(model)
        found[f"{name}: statistics"] = torch.cat([one for one in model.buffers() if one.is_floating_point()])
    return found


def apart(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Ranks that come with other models or arguments."""
    rank, refusals = dist.get_rank(group), 0
    for setting in ({"seed": rank}, {"every": 5 + rank}, {"codec": CODECS[rank]}, {}):
        model = network() if setting or not rank else nn.Linear(20, 4, bias=False)
        terms: dict[str, Any] = {"every": 5, **setting}
        try:
            with outer_sync(model, SGD(model.parameters(), lr=RATE), **terms):
                pass
        except ValueError as error:
            refusals += "rank 1 has come with another model, or with other arguments, than rank 0" in str(error)
    return {"refusals": torch.tensor(refusals)}


def test_ranks_that_come_with_other_terms_are_refused(tmp_path: Path) -> None:
    assert [int(one["refusals"]) for one in in_ranks(f"{HERE}:apart", 2, tmp_path)] == [4, 4]


def held_out(model: nn.Module) -> Tensor:
    """The loss on samples that no rank has seen."""
    model.eval()
    inputs, targets = (torch.cat(parts) for parts in zip(*(batch(9, step) for step in range(20)), strict=True))
    with torch.no_grad():
        return nn.functional.cross_entropy(model(inputs), targets)


def test_diloco_is_that_of_the_paper_and_all_ranks_agree(tmp_path: Path) -> None:
    by_rank = in_ranks(f"{HERE}:diloco", 2, tmp_path)
    for name, one in by_rank[0].items():
        assert torch.equal(one, by_rank[1][name]), name
    exact, before = float(by_rank[0]["float32: loss"]), float(held_out(network()))
    for name in settings():
        assert torch.equal(by_rank[0][f"{name}: starts"], by_rank[1][f"{name}: starts"]), name
        assert float(by_rank[0][f"{name}: loss"]) < exact + 0.2 * (before - exact), name
    torch.testing.assert_close(by_rank[0]["float32: model"], by_hand(), rtol=1e-4, atol=1e-5)


def told_of_means(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """What each rank is told of its means, and the changes that these were of."""
    rank, model, found = dist.get_rank(group), network(), list[MeanRecord]()
    optimizer, before = SGD(model.parameters(), lr=RATE), list[Tensor]()
    optimizer.register_step_post_hook(lambda *_: before.append(flat(model)))  # before the mean's own
    with outer_sync(model, optimizer, every=EVERY, codec="4bit", on_mean=found.append):
        starts = [flat(model)]
        for step in range(2 * EVERY + 2):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
            starts.append(flat(model))
    changes = [starts[at] - before[last] for at, last in ((0, EVERY - 1), (EVERY, 2 * EVERY - 1), (2 * EVERY, -1))]
    numbers = [[one.scalars()[tag] for tag in sorted(one.scalars())] for one in found]
    return {
        "changes": torch.stack(changes),
        "numbers": torch.tensor(numbers),
        "steps": torch.tensor([one.step for one in found]),
    }


def test_a_loop_is_told_of_each_mean_what_it_has_cost_and_how_well_the_ranks_agree(tmp_path: Path) -> None:
    by_rank = in_ranks(f"{HERE}:told_of_means", 2, tmp_path)
    mean = (by_rank[0]["changes"] + by_rank[1]["changes"]) / 2
    for one in by_rank:
        assert one["steps"].tolist() == [EVERY, 2 * EVERY, 2 * EVERY + 2]
        n_bytes, apply_s, sum_s, wait_s, share, rate, cosines, norms = one["numbers"].T
        torch.testing.assert_close(norms, one["changes"].norm(dim=1))
        expected = nn.functional.cosine_similarity(one["changes"], mean)
        torch.testing.assert_close(cosines, expected, rtol=0, atol=0.03)  # 4 bits
        assert len(set(n_bytes.tolist())) == 1
        assert 0.5 <= n_bytes[0] / mean[0].numel() <= 0.75  # half a byte for each of two ways, of half of the values
        assert bool((torch.stack([apply_s, sum_s, wait_s, rate]) > 0).all())
        assert bool(((share > 0) & (share < 1)).all())


def stopped_between(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The models of loops that end between two means, right after one, and with one under way."""
    rank, found = dist.get_rank(group), dict[str, Tensor]()
    for name, setting in settings().items():
        for n_steps in (EVERY - 2, 2 * EVERY + 2, 2 * EVERY):
            model = network()
            optimizer = SGD(model.parameters(), lr=RATE)
            with outer_sync(model, optimizer, every=EVERY, **setting):
                for step in range(n_steps):
                    optimizer.zero_grad()
                    backward(model, rank, step)
                    optimizer.step()
            found[f"{name}: {n_steps}"] = torch.cat([flat(model), dict(model.named_buffers())["1.running_var"]])
    return found


def test_all_ranks_leave_the_block_with_one_model_whatever_the_number_of_steps(tmp_path: Path) -> None:
    by_rank = in_ranks(f"{HERE}:stopped_between", 2, tmp_path)
    for name, one in by_rank[0].items():
        assert torch.equal(one, by_rank[1][name]), name
    for n_steps in (EVERY - 2, 2 * EVERY + 2, 2 * EVERY):
        n_weights = len(flat(network()))
        torch.testing.assert_close(
            by_rank[0][f"float32: {n_steps}"][:n_weights], by_hand(n_steps), rtol=1e-4, atol=1e-5
        )


def by_hand(n_steps: int = STEPS) -> Tensor:
    """DiLoCo (algorithm 1) with two workers, and Nesterov's momentum in float64."""
    model = network()
    start = {name: one.clone() for name, one in model.state_dict().items()}
    velocity = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in start.items()}
    for first in range(0, n_steps, EVERY):
        changes = list[dict[str, Tensor]]()
        for rank in range(2):
            model.load_state_dict(start)
            optimizer = SGD(model.parameters(), lr=RATE)
            for step in range(first, min(first + EVERY, n_steps)):
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
            changes.append({name: start[name].double() - one.double() for name, one in model.state_dict().items()})
        for name, one in start.items():
            if not one.is_floating_point():
                continue
            mean = (changes[0][name] + changes[1][name]) / 2
            velocity[name] = 0.9 * velocity[name] + mean
            is_statistic = "running" in name
            start[name] = (one.double() - (mean if is_statistic else 0.7 * (mean + 0.9 * velocity[name]))).float()
    model.load_state_dict(start)
    return flat(model)


def test_one_process_is_a_group_of_its_own_and_goes_on_from_its_state() -> None:
    def trained(stops_at: int | None) -> Tensor:
        model = network()
        optimizer, state, weights = SGD(model.parameters(), lr=RATE), None, model.state_dict()
        for first, last in ((0, STEPS),) if stops_at is None else ((0, stops_at), (stops_at, STEPS)):
            with outer_sync(model, optimizer, every=EVERY, codec="4bit") as sync:
                if state is not None:
                    model.load_state_dict(weights)
                    sync.load_state_dict(state)
                for step in range(first, last):
                    optimizer.zero_grad()
                    backward(model, 0, step)
                    optimizer.step()
                state, weights = sync.state_dict(), copy.deepcopy(model.state_dict())
        return flat(model)

    assert not dist.is_initialized()
    assert torch.equal(trained(None), trained(13))
    assert not dist.is_initialized()


def test_the_means_of_fragments_are_told_when_they_are_applied_also_after_a_resumption() -> None:
    found, state = list[MeanRecord](), dict[str, Any]()
    for first, last in ((0, 4), (4, 8)):
        model = network()
        optimizer = SGD(model.parameters(), lr=RATE)
        with outer_sync(model, optimizer, every=4, fragments=2, delay=1, on_mean=found.append) as sync:
            if state:
                found.clear()  # those of the end of the first block, which its checkpoint does not have
                sync.load_state_dict(state)
            for step in range(first, last):
                optimizer.zero_grad()
                backward(model, 0, step)
                optimizer.step()
            state = sync.state_dict()
    assert [(one.step, one.fragment) for one in found] == [(5, 0), (7, 1), (8, 0), (8, 1)]
    assert found[0].update_norm is None, "it was sent by the block before"
    assert found[0].scalars().keys() == found[1].scalars().keys() - {"updates/update_norm", "updates/update_cosine"}
    assert [one.scalars()["updates/update_cosine"] for one in found[1:]] == [pytest.approx(1.0)] * 3


def broken_off(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The model after a loop that was never stopped, and after one that went on from a checkpoint, with each setting.

    Both optimizers remember something, and with a delay a mean is under way at the checkpoint.
    """
    rank, found = dist.get_rank(group), dict[str, Tensor]()
    streaming = {"fragments": 3, "delay": 2, "keep": 0.5}
    for name, setting in {**settings(), "streaming in 2 bits": {"codec": "2bit", **streaming}}.items():
        for stops_at in (None, 9, 16):
            found[f"{name}: {stops_at}"] = flat(trained_in_parts(rank, stops_at, setting))
    return found


def trained_in_parts(rank: int, stops_at: int | None, setting: dict[str, Any]) -> nn.Module:
    saved, model = dict[str, Any](), network()
    for first, last in ((0, STEPS),) if stops_at is None else ((0, stops_at), (stops_at, STEPS)):
        model = network()
        optimizer = SGD(model.parameters(), lr=RATE, momentum=0.5)
        with outer_sync(model, optimizer, every=EVERY, **setting) as sync:
            if saved:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["inner"])
                sync.load_state_dict(saved["outer"])
            for step in range(first, last):
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
                if step == 12:  # a look at the state changes nothing
                    sync.state_dict()
            states = {"model": model.state_dict(), "inner": optimizer.state_dict(), "outer": sync.state_dict()}
            file = io.BytesIO()
            torch.save(states, file)
            file.seek(0)
            saved = torch.load(file)
    return model


def test_a_loop_that_was_broken_off_makes_the_same_bits(tmp_path: Path) -> None:
    for one in in_ranks(f"{HERE}:broken_off", 2, tmp_path):
        for name, model in one.items():
            assert torch.equal(model, one[f"{name.partition(':')[0]}: None"]), name


def test_a_state_of_something_else_is_refused() -> None:
    def begun(setting: dict[str, Any], model: nn.Module, state: dict[str, Any] | None = None) -> dict[str, Any]:
        with outer_sync(model, SGD(model.parameters(), lr=RATE), every=1, **setting) as sync:
            if state is not None:
                sync.load_state_dict(state)
            sync.stepped()
            return sync.state_dict()

    fed = begun({"codec": "2bit"}, network())
    with pytest.raises(ValueError, match="the state is of another model, or of another number of fragments"):
        begun({"codec": "2bit"}, nn.Linear(2, 2), fed)
    with pytest.raises(ValueError, match="of a codec with error feedback, and this codec has none"):
        begun({"codec": "4bit"}, network(), fed)
    fed["fragments"][0]["kept"]["of_part"] = torch.zeros(3)
    with pytest.raises(ValueError, match="of another number of ranks than 1: start as many ranks as before"):
        begun({"codec": "2bit"}, network(), fed)


def test_numbers_that_do_not_fit_are_refused() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=RATE)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"every": 0}, "every must be at least 1"),
        ({"every": 5, "fragments": 6}, "fragments between 1 and the smaller of every"),
        ({"every": 5, "delay": 5}, "delay must lie between 0 and every - 1 = 4 steps, not 5"),
        ({"every": 5, "keep": 1.0}, "keep must be at least 0 and below 1, not 1.0"),
        ({"every": 5, "codec": "3bit"}, 'codec must be one of "float32", "8bit", "4bit" and "2bit"'),
    ]
    for setting, sentence in refused:
        with pytest.raises(ValueError, match=sentence), outer_sync(model, optimizer, **setting):
            pass
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"every": 2.5}, "every must be a whole number, not 2.5"),
        ({"every": 5, "seed": "a"}, "seed must be a whole number, not 'a'"),
        ({"every": 5, "on_mean": 5}, "on_mean must be a function that takes the record of a mean, not 5"),
    ]
    for setting, sentence in kinds:
        with pytest.raises(TypeError, match=sentence), outer_sync(model, optimizer, **setting):
            pass


def test_a_mean_after_the_block_is_refused() -> None:
    with Issuer(torch.device("cpu")) as issuer:
        assert issuer.submit(lambda: torch.ones(1)).result() == 1
    with pytest.raises(RuntimeError, match="after the block of outer_sync or comm_hook had ended"):
        issuer.submit(lambda: torch.ones(1))


def alone_from_the_second_mean(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Rank 1 fails after the first mean; the store that its process keeps stays."""
    rank, model = dist.get_rank(group), network()
    optimizer = SGD(model.parameters(), lr=RATE)

    def told(_: object) -> None:
        if rank == 1:
            raise ZeroDivisionError

    def train() -> None:
        with outer_sync(model, optimizer, every=1, on_mean=told):
            for _ in range(2):
                optimizer.step()

    with pytest.raises(ZeroDivisionError if rank == 1 else GroupError) as raised:
        train()
    return {"is_named": torch.tensor("another rank of this job is lost" in str(raised.value))}


def test_a_rank_that_is_lost_is_named(tmp_path: Path) -> None:
    found = in_ranks(f"{HERE}:alone_from_the_second_mean", 2, tmp_path)
    assert [bool(one["is_named"]) for one in found] == [True, False]
