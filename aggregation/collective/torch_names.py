"""Collectives of torch that had another name in an older version than 2.13."""

from typing import Any

import torch.distributed as dist

_here: Any = dist
all_gather_single: Any = getattr(_here, "all_gather_single", None) or _here.all_gather_into_tensor
reduce_scatter_single: Any = getattr(_here, "reduce_scatter_single", None) or _here.reduce_scatter_tensor
