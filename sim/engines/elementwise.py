"""Functions of single values that give the same bits wherever a value stands in memory.

Torch works through a tensor in vectors of sixteen values or so and takes the last few one by one; for some functions
these two ways differ in the last bit. A client's values would then depend on how many others are stacked before it. So
those functions are made of others, of which both ways agree: `tanh`, `exp`, `erf`, and plain arithmetic.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def sigmoid(values: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2."""
    return torch.tanh(values * 0.5).mul_(0.5).add_(0.5)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """For `make_fx`: what activations are made of instead, and their derivatives."""
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
