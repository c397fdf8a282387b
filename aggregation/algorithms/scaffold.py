"""SCAFFOLD: each client corrects its steps by how its own gradient differs from the gradient of all clients.

    client  y = x;   y <- y - eta (g_i(y) - c_i + c)  in each of K steps
            c_i' = g_i(x)                        option I, "gradient": of all its samples, at the round's model
            c_i' = c_i - c + (x - y) / (K eta)   option II, "change"
    server  x' = x + rate (mean of y - x);   c' = c + s (mean of c_i' - c_i)

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
algorithm 1. Both means are weighted by samples; the paper's clients have equal weights. s is the share of all clients'
samples that is in the round, so a client's change always counts in c by its share of all samples, and c stays the mean
of all c_i. (With the share of the clients, m / N, it would count by its share of the round's samples, which differs
from round to round. Then c would be no mean of the c_i, and the model would come to rest elsewhere.) c and all c_i
begin with zeros.

c is a part of the run's model: a tensor of the kind control for each weight (`Layout.with_control`). So it goes down,
and the change c_i' - c_i goes up, beside the weights: through the same codec, grid and masks. On the way up it is
multiplied by the *scale*, K eta, because a round's change of a weight is about K eta times a gradient. So one step of
the codec suits both.

What a client keeps is c_i plus the change *as the coordinator reads it*. Then c stays the mean of all c_i, although the
codec rounds, or sends only a part: what was not sent is in the next change. (Horvath et al. 2019, "Stochastic
Distributed Learning with Gradient Quantization and Variance Reduction", DIANA, has such shifts.) Kept unrounded, the
errors of the first rounds would pull all clients for ever.

Which secure rounds may have it, and why the others may not, is in `TrainingTerms.why_not_masked`.
"""

import torch
from torch import Tensor

from umbel.aggregation.stated_order import divisor


def control_after(offset: Tensor, change: Tensor, walked: float | Tensor) -> Tensor:
    """c_i' by option II, as float32, on the device of `change`. `offset`: c - c_i; `change`: y - x; `walked`: K eta, a
    tensor if the rows of `change` are those of several clients.
    """
    return (change / (walked if isinstance(walked, Tensor) else divisor(walked, change))).add_(offset).neg_()


def gradient_of(change: Tensor, rate: float) -> Tensor:
    """c_i' by option I, from the change that one step of gradient descent with this rate makes."""
    return (change / divisor(rate, change)).neg_()


def scaled(control: Tensor, control_before: Tensor, scale: float) -> Tensor:
    """What a client sends of its new control variate, as float32."""
    return (control - control_before).mul_(scale)


def kept(control_before: Tensor, read: Tensor, scale: float) -> Tensor:
    """What a client keeps, as float32. `read`: what the coordinator reads of what it has sent, float64."""
    return (read / scale).add_(control_before).to(torch.float32)


def control_rate(share: float, scale: float) -> float:
    """By what the server multiplies the mean of what clients send of their control variates: s / scale."""
    return share / scale
