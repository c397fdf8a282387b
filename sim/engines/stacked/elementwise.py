"""Functions of single values that give the same bits wherever a value stands in memory.

Torch computes in vectors of about sixteen values and handles the last few one by one; for some functions these two ways
differ in the last bit. A client's values would then depend on how many others are stacked before it. So those functions
are built from functions for which both ways agree: `tanh`, `exp`, `erf`, and plain arithmetic.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_VECTOR = 16  # float32 values that a processor takes at once, at most
_aten = torch.ops.aten


def sigmoid(values: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2."""
    return torch.tanh(values * 0.5).mul_(0.5).add_(0.5)


def whole_vectors(n: int) -> int:
    """n rounded up to whole vectors."""
    return -(-n // _VECTOR) * _VECTOR


def log_softmax(values: Tensor) -> Tensor:
    """`torch.log_softmax` over the last dimension, float32 (..., classes), within rounding.

    Torch handles a row shorter than a vector value by value, seven times as slowly. Such rows are transposed, so that
    the same class of many rows is contiguous, and padded to whole vectors.
    """
    n_classes = values.shape[-1]
    if n_classes >= _VECTOR:
        return torch.log_softmax(values, -1)
    rows = values.reshape(-1, n_classes)
    turned = values.new_zeros(n_classes, whole_vectors(len(rows)))
    turned[:, : len(rows)] = rows.t()
    return torch.log_softmax(turned, 0)[:, : len(rows)].t().contiguous().view(values.shape)


def log_softmax_backward(errors: Tensor, logs: Tensor) -> Tensor:
    """The gradient of `log_softmax`'s input, float32 (..., classes), from that of its output `logs`."""
    if logs.shape[-1] >= _VECTOR:
        return torch._log_softmax_backward_data(errors, logs, logs.ndim - 1, torch.float32)
    return logs.exp().mul_(errors.sum(-1, keepdim=True)).neg_().add_(errors)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """For `make_fx`: replacements of activations and their derivatives."""
    from torch._decomp import get_decompositions

    smooth = (_aten.silu, _aten.elu, _aten.softplus, _aten.gelu, _aten.mish, _aten.hardswish, _aten.log_sigmoid_forward)
    backwards = (
        _aten.silu_backward,
        _aten.elu_backward,
        _aten.softplus_backward,
        _aten.gelu_backward,
        _aten.mish_backward,
        _aten.hardswish_backward,
        _aten.log_sigmoid_backward,
    )
    return {**get_decompositions([*smooth, *backwards]), _aten.sigmoid.default: _sigmoid}


def _sigmoid(values: Tensor) -> Tensor:
    return torch.tanh(values * 0.5) * 0.5 + 0.5
