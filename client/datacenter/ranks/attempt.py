"""A name for this attempt at a job, which all its ranks know and no earlier attempt had.

torchrun's agents count their restarts each for itself, so on several machines the counts differ, and all attempts have
one store, in which the words of dead ranks stay. So the ranks agree through that store:

```
each rank     draws a token, writes it under its rank, and waits for an answer to this token
rank 0        draws the name; reads the tokens; answers each with the name; and looks again until all have thanked it
```

A token of a dead rank gets an answer that nobody reads. A rank that lives has a token of its own, so only a rank 0 that
came after it, or at the same time, can have answered.
"""

import secrets
import time
from typing import Any

_LOOK_EVERY_S = 0.02
_TOKEN, _ANSWER, _THANKS = "umbel_token", "umbel_answer", "umbel_thanks"


def agreed_attempt(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """The name of this attempt, the same on all ranks. `store`: of the job, with what earlier attempts have left.

    Raises `TimeoutError`, or torch's `RuntimeError`, if the ranks do not all come within `timeout_s`.
    """
    own = secrets.token_hex(8)
    if rank == 0:
        _name_for_all(store, own, size, time.monotonic() + timeout_s)
        return own
    store.set(f"{_TOKEN}/{rank}", own)
    name: str = store.get(f"{_ANSWER}/{own}").decode()  # waits, for the timeout of the store
    store.add(f"{_THANKS}/{name}", 1)
    return name


def _name_for_all(store: Any, name: str, size: int, deadline: float) -> None:
    """Answer all other ranks with this name, until each has it."""
    keys, answered = [f"{_TOKEN}/{rank}" for rank in range(1, size)], set[str]()
    while store.add(f"{_THANKS}/{name}", 0) < size - 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of the {size} ranks have come")
        for token in (one.decode() for one in store.multi_get(keys)):  # waits until each rank has come once
            if token not in answered:
                answered.add(token)
                store.set(f"{_ANSWER}/{token}", name)
        time.sleep(_LOOK_EVERY_S)
