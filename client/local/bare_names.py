"""Names of tensors without what `torch.compile` and activation checkpointing put into them.

Both wrap a module, and its tensors then have names such as `_orig_mod.head.weight` and
`body._checkpoint_wrapped_module.weight`. The run knows them as `head.weight` and `body.weight`.
"""

_WRAPPED = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))


def bare_name(name: str) -> str:
    """The name that the tensor would have if nothing wrapped its modules."""
    parts = name.split(".")
    return name if _WRAPPED.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPED)
