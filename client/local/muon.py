"""Muon for the matrices of hidden layers, and AdamW for everything else, behind one optimizer.

torch's Muon takes matrices alone, and wants embeddings, heads, biases and gains to be trained by AdamW. A step of Muon
is scaled to the size of a step of AdamW (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2), so one
learning rate and one weight decay do for both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from umbel.client.errors import WorkRefused


class MuonAndAdamW(Optimizer):
    """`torch.optim.Muon` over `matrices`, `torch.optim.AdamW` over `others`. Either may be empty, but not both.

    Raises `WorkRefused` if this torch is older than Muon.
    """

    def __init__(
        self, matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], lr: float, weight_decay: float
    ) -> None:
        self._parts = list[Optimizer]()
        if matrices:
            self._parts.append(_muon(matrices, lr, weight_decay))
        if others:
            self._parts.append(AdamW(others, lr=lr, weight_decay=weight_decay))
        super().__init__([part.param_groups[0] for part in self._parts], {})
        self._link()

    def _link(self) -> None:
        """Let both parts work on the groups and the state of this optimizer, which schedules and checkpoints see."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def step(self, closure: Any = None) -> Any:
        """Make one step, and return the loss if `closure` computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        super().load_state_dict(dict(state_dict))
        self._link()


def hidden_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters, divided into matrices of hidden layers and all others.

    Embeddings are those of `nn.Embedding` and `nn.EmbeddingBag`. The head is the model's last matrix.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    matrices = [one for one in model.parameters() if one.ndim == 2]
    kinds = (nn.Embedding, nn.EmbeddingBag)
    ends = {id(part.weight) for part in model.modules() if isinstance(part, kinds)} | {id(one) for one in matrices[-1:]}
    hidden = {id(one) for one in matrices} - ends
    return [one for one in trained if id(one) in hidden], [one for one in trained if id(one) not in hidden]


def _muon(matrices: Sequence[nn.Parameter], lr: float, weight_decay: float) -> Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise WorkRefused(
            f'the run asks for optimizer = "muon", which torch {torch.__version__} does not have: install torch 2.9 or '
            "newer here, or ask the operator for another optimizer"
        )
    return torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
