"""One thread that makes all collectives of a group, in the order in which they are asked for.

A hook of DDP that starts collectives inside callbacks of others fills Gloo's threads with waits, and hangs with two or
more buckets. Here every collective is made by one thread, so each rank makes them in the same order, and no callback
ever waits. On a GPU that thread only queues work, on a stream of its own.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor that is being made."""

    _made: "Future[tuple[Tensor, torch.cuda.Event | None]]"

    @classmethod
    def of(cls, tensor: Tensor) -> "Pending":
        """A tensor that is made already, by the current stream."""
        made: Future[tuple[Tensor, torch.cuda.Event | None]] = Future()
        made.set_result((tensor, None))
        return cls(made)

    def result(self) -> Tensor:
        """The tensor. On a GPU it is ready for the current stream, which waits for it by itself. Raises what the work
        has raised.
        """
        tensor, done = self._made.result()
        if done is not None:
            done.wait()
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


class Issuer:
    """Use it as a context, or call `close`: a thread that lives on at the end of the process can abort it."""

    def __init__(self, device: torch.device) -> None:
        self._thread, self._is_closed = ThreadPoolExecutor(1, "umbel-collectives"), False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __enter__(self) -> "Issuer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, work: Callable[[], Tensor]) -> Pending:
        """Do `work` after all that was submitted before. On a GPU, only the GPU waits for what `work` reads.

        Raises `RuntimeError` after `close`.
        """
        if self._is_closed:
            raise RuntimeError(
                "a mean over the ranks was asked for after the block of outer_sync or comm_hook had ended: train "
                "inside this block"
            )
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        return Pending(self._thread.submit(self._done, work, ready))

    def close(self) -> None:
        """Wait for the last work, and end the thread."""
        self._is_closed = True
        self._thread.shutdown()

    def _done(
        self, work: Callable[[], Tensor], ready: "torch.cuda.Event | None"
    ) -> "tuple[Tensor, torch.cuda.Event | None]":
        if self._stream is None or ready is None:
            return work(), None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            made, done = work(), torch.cuda.Event()
            done.record()
        return made, done
