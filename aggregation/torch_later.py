"""`torch`, imported when it is first used: importing it takes longer than all else that a coordinator starts with.

A coordinator that was killed listens again, and answers check-ins and chunks, while torch is still on its way; only
what reads values waits for it. Modules that it starts with write `from umbel.aggregation.torch_later import torch`, and
name `Tensor` in annotations only.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Later(ModuleType):
        """Looks up every name in the real module, which Python imports once, whichever threads ask for it."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("torch"), name)
            setattr(self, name, value)  # to look it up each time takes 15 us
            return value

    torch = _Later("torch")
