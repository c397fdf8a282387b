"""The federated algorithms by name, as `algorithm` in [training] has them."""

from typing import Literal, TypeAlias

Algorithm: TypeAlias = Literal["fedavg", "fedprox", "feddyn", "fednova", "qfedavg"]
