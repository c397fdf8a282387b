"""The stand-in for a GPU refuses what a GPU refuses or rounds in its own way, and notes each copy."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.suite.stand_in_gpu import GPU, OnGpu, StandInGpu, Transfer

FLOAT, INT = torch.float32, torch.int64


def third() -> Tensor:
    return torch.arange(1, 1000, dtype=FLOAT)


def test_its_tensors_say_cuda_and_hold_values() -> None:
    with StandInGpu():
        there = (third().to(GPU) + 1)[2:5]
        assert isinstance(there, OnGpu)
        assert (there.device, there.is_cuda, there.is_meta) == (GPU, True, False)
        assert there.cpu().tolist() == there.tolist() == [4.0, 5.0, 6.0]
        with pytest.raises((TypeError, RuntimeError), match="numpy"):
            there.numpy()


def test_what_is_written_in_place_is_seen_through_every_view() -> None:
    with StandInGpu():
        whole = torch.zeros(6, device=GPU)
        part = whole[2:4]
        assert part.data_ptr() != whole.data_ptr()
        assert whole[0:3].data_ptr() == whole.data_ptr()
        part += 3
        whole[5] = 7.0
        whole[torch.tensor([0]).to(GPU)] = 1.0
        whole[1:2] = torch.full((1,), 9.0)
        assert whole.tolist() == [1.0, 9.0, 3.0, 3.0, 0.0, 7.0]


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "an operand of the CPU": (lambda there: there + torch.ones(999), "add: a GPU cannot use a tensor of the CPU"),
    "an index of the CPU": (lambda there: there[torch.tensor([1])], "a GPU cannot use an index of the CPU"),
    "a mean": (lambda there: there.mean(), "mean: its last bits are a library's own"),
    "a logarithm": (lambda there: there.log(), "log: its last bits are a library's own"),
    "a cube": (lambda there: there.pow(3), "pow: its last bits are a library's own"),
    "a product with itself": (lambda there: there @ there, "its last bits are a library's own"),
    "a sum of fractions": (lambda there: (there * 0.3).sum(), "sum: a library's order decides the last bits"),
    "a product and a sum at once": (lambda there: there.add(there, alpha=0.3), "a GPU fuses the product with the sum"),
}


@pytest.mark.parametrize(("operation", "says"), REFUSED.values(), ids=REFUSED)
def test_what_a_gpu_cannot_do_or_rounds_in_its_own_way_is_refused(
    operation: Callable[[Tensor], object], says: str
) -> None:
    with StandInGpu(), pytest.raises(AssertionError, match=says):
        operation(third().to(GPU))


def test_what_a_test_allows_is_done() -> None:
    with StandInGpu("log"):
        assert torch.equal(third().to(GPU).log().cpu(), third().log())


def test_whole_numbers_may_be_summed_in_any_order() -> None:
    with StandInGpu():
        assert third().to(GPU).sum().item() == 999 * 500


def test_it_divides_by_a_number_of_the_cpu_as_a_gpu_does() -> None:
    with StandInGpu():
        there = third().to(GPU)
        by_number, by_tensor = (there / 3.0).cpu(), (there / torch.tensor(3.0, device=GPU)).cpu()
        in_place = there.div_(3.0).cpu()
    assert torch.equal(by_tensor, third() / 3.0)
    assert torch.equal(by_number, third() * (1 / torch.tensor(3.0)))
    assert not torch.equal(by_number, by_tensor)
    assert torch.equal(in_place, by_number)


def test_each_copy_is_noted_in_the_dtype_in_which_it_crosses() -> None:
    with StandInGpu() as gpu:
        there = torch.arange(5).to(GPU)
        there.to(torch.int16).cpu()
        there.to("cpu", FLOAT)
        torch.empty(5)[:2].copy_(there[:2])
        there[0].item()
        there[:3].tolist()
        there.clone()
    assert gpu.transfers == [
        Transfer(False, INT, 5),
        Transfer(True, torch.int16, 5),
        Transfer(True, FLOAT, 5),
        Transfer(True, FLOAT, 2),
        Transfer(True, INT, 1),
        Transfer(True, INT, 3),
    ]
    assert gpu.down == gpu.transfers[1:]


def test_its_memory_is_counted_once_for_all_views_and_may_end() -> None:
    with StandInGpu(memory_bytes=4000) as gpu:
        first = torch.zeros(600, device=GPU)
        views = [first[at:] for at in range(10)]
        assert gpu.peak_bytes == 2400
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2400 bytes"):
            first.clone()
        del first, views
        torch.zeros(1000, device=GPU)
        assert gpu.peak_bytes == 4000


def test_its_tensors_are_of_no_use_once_it_has_gone() -> None:
    with StandInGpu():
        there = third().to(GPU)
    with pytest.raises(AssertionError, match="the test has left the GPU"):
        there.add(1)
    with pytest.raises(AssertionError, match="the test has left the GPU"):
        there[0].item()
