"""Functions whose bits do not hang on what stands beside a value."""

import pytest
import torch

from umbel.sim.engines.stacked.lockstep import log_softmax, log_softmax_backward

CLASSES = [1, 2, 7, 10, 15, 16, 17, 62]


def answers(n_clients: int, n_classes: int) -> torch.Tensor:
    return 5 * torch.randn(n_clients, 11, n_classes, generator=torch.Generator().manual_seed(n_classes))


@pytest.mark.parametrize("n_classes", CLASSES)
def test_log_softmax_is_that_of_torch(n_classes: int) -> None:
    values = answers(100, n_classes)
    torch.testing.assert_close(log_softmax(values), torch.log_softmax(values, 2), rtol=1e-6, atol=1e-6)
    assert log_softmax(values).is_contiguous()


@pytest.mark.parametrize("n_classes", CLASSES)
@pytest.mark.parametrize("n_together", [1, 2, 3, 7, 16, 33])
def test_the_bits_of_a_client_do_not_hang_on_how_many_are_beside_it(n_classes: int, n_together: int) -> None:
    values = answers(100, n_classes)
    logs = log_softmax(values)
    errors = values.flip(0)
    back = log_softmax_backward(errors, logs)
    for first in range(100 - n_together):
        some = slice(first, first + n_together)
        assert torch.equal(log_softmax(values[some]), logs[some])
        assert torch.equal(log_softmax_backward(errors[some], logs[some]), back[some])


@pytest.mark.parametrize("n_classes", CLASSES)
def test_its_derivative_is_that_of_torch(n_classes: int) -> None:
    values = answers(10, n_classes).requires_grad_()
    logs = torch.log_softmax(values, 2)
    errors = torch.randn(logs.shape, generator=torch.Generator().manual_seed(1))
    (wanted,) = torch.autograd.grad(logs, values, errors)
    torch.testing.assert_close(log_softmax_backward(errors, logs.detach()), wanted, rtol=1e-5, atol=1e-5)


def test_no_rows_have_no_outcome() -> None:
    assert log_softmax(torch.empty(0, 11, 10)).shape == (0, 11, 10)
