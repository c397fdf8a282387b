"""FedDyn: each client remembers how far it has drifted, and is pulled back.

    client  y = argmin L_i(y) - <q_i, y> + alpha/2 |y - x|^2 by local steps;   q_i' = q_i - alpha (y - x)
    server  h' = h - alpha/m  sum over the round's clients of (y_i - x);       x' = mean of y_i - h' / alpha

Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", algorithm 1. m is the number of all clients.
alpha is `proximal_mu`, because the quadratic term is FedProx's. This file has the client's part, and
`optimizers/feddyn.py` the server's, where the sum is weighted by samples.

A client keeps its *pull*, -q_i, which is added to each gradient of a weight.
"""

from torch import Tensor


def next_pull(pull: Tensor, change: Tensor, alpha: float) -> Tensor:
    """-q_i' of -q_i, as float32. `change`: y - x."""
    return pull + change * alpha
