"""The federated algorithms by name, as `algorithm` in [training] has them."""

from typing import Literal, TypeAlias

Algorithm: TypeAlias = Literal["fedavg", "fedprox", "scaffold", "feddyn", "fednova", "qfedavg"]
ControlVariate: TypeAlias = Literal["change", "gradient"]  # how a client of "scaffold" makes its next one
