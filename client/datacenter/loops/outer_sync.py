"""Local training with a rare mean of all ranks' models, attached to a training loop that stays its owner's: DiLoCo.

```python
from umbel.datacenter import outer_sync

with outer_sync(model, optimizer, every=100, codec="4bit") as sync:
    for inputs, targets in loader:      # the loop as it was
        ...
        optimizer.step()
```

After `every` steps of the inner optimizer the ranks average what they have changed since the last time, and an outer
optimizer makes a step with that (Douillard et al., DiLoCo, 2023, algorithm 1: Nesterov with a rate of 0.7 and a
momentum of 0.9). The inner optimizer's state stays local. Floating-point buffers, such as the statistics of batch
normalization, become their plain float32 mean: a step with momentum, or rounding, could make a variance negative.

With `fragments` F, the model is divided into F parts that are sent in turn, evenly over the `every` steps, and with
`delay` a part's mean is applied so many steps after it was sent, while training goes on: the network and the processor
work at the same time (Douillard et al., Streaming DiLoCo, 2025). What a rank has trained meanwhile is kept by `keep`:

    x <- (1 - keep) x_global + keep x_local

At the end of the block what the ranks have trained since their last mean is averaged too, with nothing of their own
kept. So all ranks leave the block with one model, the global one, whatever the number of steps.
"""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from umbel.aggregation.collective.mean import Mean
from umbel.aggregation.seeds import derive_seed
from umbel.client.datacenter.loops.issuing import Issuer, Pending
from umbel.client.datacenter.loops.mean_record import LoopMeter, MeanRecord, norm_and_cosine
from umbel.client.datacenter.ranks.group import losses_named

Outer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]


def nesterov(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """DiLoCo's outer optimizer."""
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(slots=True)
class _Fragment:
    """A part of the model, and how it is averaged. `start`: its values after the last outer step, on its device."""

    tensors: Sequence[Tensor]
    mean: Mean
    start: nn.Parameter
    outer: Optimizer
    keep: float = 0.0
    offset: int = 0  # in steps, of its turns
    n_sent: int = 0
    due: int = 0  # the step at which the mean under way is applied
    averaged_at: int = 0  # the last step of which nothing is on this rank alone
    sum_s: float = 0.0  # which the issuing thread has needed for the last mean
    under_way: Pending | None = field(default=None, repr=False)
    sent: Tensor | None = field(default=None, repr=False)  # kept alive, because a GPU may still have to read it

    def flat(self) -> Tensor:
        return torch.cat([one.detach().reshape(-1).to(torch.float32) for one in self.tensors])

    def apply(self, change: Tensor, step: int) -> None:
        """Make the outer step with the ranks' mean change. `step`: of the inner optimizer."""
        self.start.grad, self.under_way, self.sent = change, None, None
        self.outer.step()
        self.take_global(self.keep)
        if self.keep == 0:  # what was trained while the mean was under way is gone
            self.averaged_at = step

    def take_global(self, keep: float = 0.0) -> None:
        """Give the model the values after the last outer step. `keep`: the share of its own that remains."""
        first, values = 0, self.start.detach()
        for one in self.tensors:
            new = values[first : first + one.numel()].view(one.shape).to(one.dtype)
            one.data.copy_(new if keep == 0 else torch.lerp(new, one.data, keep))
            first += one.numel()


class OuterSync:
    """See the module. `mean`: how the changes of parameters are averaged; `exact`: those of buffers; `issuer`: in which
    thread. `on_mean`: gets a record of each mean of parameters, after it was applied.
    """

    def __init__(
        self,
        model: nn.Module,
        mean: Mean,
        exact: Mean,
        issuer: Issuer,
        *,
        every: int,
        outer: Outer = nesterov,
        fragments: int = 1,
        delay: int = 0,
        keep: float = 0.0,
        seed: int = 0,
        on_mean: Callable[[MeanRecord], None] | None = None,
    ) -> None:
        """Raises `ValueError` for numbers that do not fit together, and `TypeError` for other types."""
        numbers: dict[str, object] = {"every": every, "fragments": fragments, "delay": delay, "seed": seed}
        for name, number in numbers.items():
            if not isinstance(number, int):
                raise TypeError(f"{name} must be a whole number, not {number!r}")
        if on_mean is not None and not callable(on_mean):
            raise TypeError(f"on_mean must be a function that takes the record of a mean, not {on_mean!r}")
        tensors = [one for one in model.parameters() if one.requires_grad]
        buffers = [one for one in model.buffers() if one.is_floating_point()]
        if not tensors:
            raise ValueError("the model has no parameter that is trained, so there is nothing to average")
        if every < 1 or not 1 <= fragments <= min(every, len(tensors)):
            raise ValueError(
                f"every must be at least 1, and fragments between 1 and the smaller of every and the model's "
                f"{len(tensors)} trained parameters; they are {every} and {fragments}"
            )
        if not 0 <= delay < every:
            raise ValueError(f"delay must lie between 0 and every - 1 = {every - 1} steps, not {delay}")
        if not 0 <= keep < 1:
            raise ValueError(f"keep must be at least 0 and below 1, not {keep}")
        self._issuer, self._seed = issuer, seed
        self.every, self.delay = every, delay
        self.steps = 0  # of the inner optimizer
        self._fragments = [
            _fragment(part, mean, outer, keep, number * every // fragments)
            for number, part in enumerate(_parts(tensors, fragments))
        ]
        self._on_mean, self._ended, self._meter = on_mean, list[MeanRecord](), LoopMeter()
        self._n_of_parameters = len(self._fragments)
        if buffers:
            self._fragments.append(_fragment(buffers, exact, partial(SGD, lr=1.0)))

    def stepped(self) -> None:
        """Take note of a step of the inner optimizer, and send or apply what is due."""
        began = time.monotonic()
        self.steps += 1
        for number, one in enumerate(self._fragments):
            if one.under_way is not None and self.steps >= one.due:
                self._apply(number, one, one.under_way)
            if self.steps > one.offset and (self.steps - one.offset) % self.every == 0:
                self._send(number, one)
        self._tell(began)

    def finish(self) -> None:
        """Average what the ranks have trained since their last means, so that all hold the same model, the global one.

        All ranks must call it after the same number of steps.
        """
        began = time.monotonic()
        self._apply_all()
        for number, one in enumerate(self._fragments):
            if self.steps > one.averaged_at:
                self._send(number, one)
        self._apply_all()
        for one in self._fragments:
            one.take_global()
        self._tell(began)

    def _apply_all(self) -> None:
        """Wait for all means that are under way."""
        for number, one in enumerate(self._fragments):
            if one.under_way is not None:
                self._apply(number, one, one.under_way)

    def _apply(self, number: int, one: _Fragment, under_way: Pending) -> None:
        began, sent = time.monotonic(), one.sent
        with losses_named():
            change = under_way.result()
        got = time.monotonic()
        is_told = self._on_mean is not None and number < self._n_of_parameters
        # Before the step, because an optimizer may change the gradient that it gets.
        figures = norm_and_cosine(sent, change) if is_told and sent is not None else (None, None)
        compared = time.monotonic()
        one.apply(change, self.steps)
        if is_told:
            times, n_bytes = (got - began, time.monotonic() - compared), one.mean.sent_bytes(one.start.numel())
            self._ended.append(MeanRecord(self.steps, number, one.sum_s, *times, n_bytes, *figures))

    def _tell(self, began: float) -> None:
        """Tell of the means that ended in this call. `began`: the call, whose time is not the loop's own."""
        self._meter.add(time.monotonic() - began)
        if self._on_mean is None or not self._ended:
            return
        ended, self._ended = self._ended, []
        share, rate = self._meter.ended(self.steps)
        for one in ended:
            self._on_mean(replace(one, compute_share=share, steps_per_s=rate))

    def _send(self, number: int, one: _Fragment) -> None:
        change, mean = one.start.detach() - one.flat(), one.mean
        key = derive_seed(self._seed, "outer", number, 0 if mean.feedback else one.n_sent)

        def averaged() -> Tensor:
            began = time.monotonic()
            made = mean.mean(change, key, number)
            one.sum_s = time.monotonic() - began
            return made

        one.n_sent, one.averaged_at, one.sent = one.n_sent + 1, self.steps, change
        one.under_way, one.due = self._issuer.submit(averaged), self.steps + self.delay
        if not self.delay:
            self._apply(number, one, one.under_way)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the loop must have of this rank, between two steps, beside the model and the inner
        optimizer. It waits for means that are under way and stores them, but they are applied when they are due. So a
        loop that goes on from here makes the same bits as one that was not broken off.
        """
        return {
            "steps": self.steps,
            "fragments": [self._state_of(number, one) for number, one in enumerate(self._fragments)],
        }

    def _state_of(self, number: int, one: _Fragment) -> dict[str, Any]:
        under_way = None if one.under_way is None else one.under_way.result().clone()
        return {
            "start": one.start.detach().clone(),
            "outer": copy.deepcopy(one.outer.state_dict()),
            "n_sent": one.n_sent,
            "under_way": under_way,
            "due": one.due,
            "averaged_at": one.averaged_at,
            "kept": one.mean.kept(number, one.start.numel()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state_dict` of this rank. The model and the inner optimizer are the loop's own to restore.

        Raises `ValueError` for the state of another model, another codec, or another number of ranks.
        """
        found = state["fragments"]
        if [len(one["start"]) for one in found] != [one.start.numel() for one in self._fragments]:
            raise ValueError("the state is of another model, or of another number of fragments")
        self.steps = state["steps"]
        self._meter.ended(self.steps)  # begin anew, as the steps before were made by another process
        for number, (one, stored) in enumerate(zip(self._fragments, found, strict=True)):
            one.start.data.copy_(stored["start"])
            one.outer.load_state_dict(copy.deepcopy(stored["outer"]))
            one.n_sent, one.due, one.averaged_at = stored["n_sent"], stored["due"], stored["averaged_at"]
            change = stored["under_way"]
            one.under_way = None if change is None else Pending.of(change.to(one.start.device, copy=True))
            self._restore_kept(number, one, stored["kept"])
            one.sum_s, one.sent = 0.0, None  # no thread reads it any more

    def _restore_kept(self, number: int, one: _Fragment, kept: Mapping[str, Tensor]) -> None:
        """In the issuing thread: on a GPU the kept tensors must belong to its stream."""
        start = one.start.detach()

        def restored() -> Tensor:
            one.mean.restore(number, start.numel(), kept, start.device)
            return start

        self._issuer.submit(restored).result()


def _parts(tensors: Sequence[Tensor], n: int) -> list[list[Tensor]]:
    """`n` runs of neighbours, none empty, of about the same number of values."""
    total, parts, done = sum(one.numel() for one in tensors), [list[Tensor]()], 0
    for i, one in enumerate(tensors):
        is_full, are_needed = done * n >= total * len(parts), len(tensors) - i == n - len(parts)
        if parts[-1] and len(parts) < n and (is_full or are_needed):
            parts.append([])
        parts[-1].append(one)
        done += one.numel()
    return parts


def _fragment(tensors: Sequence[Tensor], mean: Mean, outer: Outer, keep: float = 0.0, offset: int = 0) -> _Fragment:
    start = nn.Parameter(torch.cat([one.detach().reshape(-1).to(torch.float32) for one in tensors]))
    return _Fragment(tensors, mean, start, outer([start]), keep, offset)
