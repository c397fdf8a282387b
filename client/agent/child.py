"""The process of one run, which an agent starts: `python -m umbel.client.agent.child`, its order on standard input.

It is a process of its own, because a site's code may crash, leak memory, or hold Python's lock for long.
"""

import logging
import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from umbel.aggregation.types import ClientId
from umbel.client.agent.notes import Doing, Notebook
from umbel.client.agent.order import CHILD_ORDER, EARLIER_AT_WORK, LEAVE, RETIRE, WITHDRAW, ChildOrder
from umbel.client.agent.room import Room, SharedTurn
from umbel.client.errors import ClientError
from umbel.client.files import locked_file, make_private
from umbel.client.loop import ClientLoop, RunEnd, require_kernels
from umbel.client.policy.site import Site
from umbel.client.rounds.shutdown import Interrupted, Shutdown
from umbel.client.rounds.withdrawal import while_allowed
from umbel.client.rounds.worker import RoundWorker
from umbel.client.state.enrol import identify
from umbel.client.state.state_dir import LOCK_FILE, home_of, work_dir
from umbel.client.state.store import Store
from umbel.client.user_code import load_app, where_raised
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.transport import Transport, connect

_RETIRED = "the agent asked this process to leave after its round"
_WITHDRAWN = "this site no longer allows the run"
log = logging.getLogger("umbel.client")


class Orders:
    """Reads what the agent says after the first line, in a thread."""

    def __init__(self, pipe: BinaryIO, shutdown: Shutdown) -> None:
        self.retired: str | None = None
        self._pipe = pipe
        self._shutdown = shutdown
        self._has_left = False  # whether it was asked to leave; the main thread may not have heard of it yet
        threading.Thread(target=self._listen, name="the agent's orders", daemon=True).start()

    def repeat(self) -> None:
        """Repeat an order to leave if the site's code has swallowed it while it was loaded."""
        if self._has_left and self._shutdown.reason is None:
            os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self) -> None:
        while line := self._pipe.readline():
            if line == RETIRE:
                self.retired = _RETIRED
            if line == LEAVE:
                self._leave()
            if line == WITHDRAW:
                self._shutdown.withdraw(_WITHDRAWN)
        self._leave()

    def _leave(self) -> None:
        if not self._has_left and self._shutdown.reason is None:  # a second signal would end the client at once
            self._has_left = True  # before the signal: whoever repeats a swallowed order must see it
            os.kill(os.getpid(), signal.SIGTERM)  # a signal also ends a wait for an answer


def live(order: ChildOrder, pipe: BinaryIO) -> int:
    """Take part in the run until it is over, or the agent asks to leave. Returns the exit status: 0, 1 after an error,
    `EARLIER_AT_WORK` while an earlier process has the run's directory.
    """
    home, _ = home_of(order.state, order.server)
    work = make_private(work_dir(home, order.run))
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_file(work / LOCK_FILE, waits=False))
        except BlockingIOError:
            return EARLIER_AT_WORK
        return _live(order, pipe, home, work)


def _live(order: ChildOrder, pipe: BinaryIO, home: Path, work: Path) -> int:
    shutdown = Shutdown()
    with shutdown.on_signals():
        notebook = Notebook(work)
        orders = Orders(pipe, shutdown)
        try:
            turn = SharedTurn(Room(home, order.at_once), notebook, lambda: orders.retired)
            end = _take_part(order, orders, turn, shutdown)
        except Interrupted as interruption:  # a second signal, or one while the site's code was loaded
            notebook.note(Doing.LEFT, str(interruption))
            return 0
        except (ClientError, ValueError, OSError) as error:
            notebook.note(Doing.FAILED, str(error))
        except Exception as error:
            log.error("run %s: the site's own code failed", order.run, exc_info=error)
            notebook.note(Doing.FAILED, f"{order.app} failed with {where_raised(error)}")
        else:
            said = f"{end.reason} ({end.reports_in_words})"
            if end.status == "interrupted":
                notebook.note(Doing.LEFT, said)
            else:
                notebook.note(Doing.OVER, f"{end.status}: {said}")
            return 0
    return 1


def _take_part(order: ChildOrder, orders: Orders, turn: SharedTurn, shutdown: Shutdown) -> RunEnd:
    require_kernels()
    app = load_app(order.app)
    with shutdown.on_signals(), connect(order.server) as replicas:  # once more: the site's code may handle signals, too
        orders.repeat()
        store = Store(order.state, order.server, order.run)
        identity = identify(store, None, None)
        coordinator = CoordinatorClient(Transport(replicas, while_allowed(identity.authorize, shutdown)))
        site = Site(order.run, identity, order.policy, order.state, store.secure, decided=order.decided)
        worker = RoundWorker(app, coordinator, store, ClientId(identity.name), site, shutdown)
        return ClientLoop(worker, turn).live()


def log_for(run: str) -> None:
    """Log to standard error, each line with the run's name."""
    form = f"%(asctime)s %(levelname)s run {run}: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, datefmt="%Y-%m-%dT%H:%M:%S%z")
    logging.getLogger("umbel").setLevel(logging.INFO)


def private_pipe() -> BinaryIO:
    """Standard input, which the site's own code can then no longer read."""
    pipe = os.fdopen(os.dup(0), "rb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return pipe


def main() -> int:
    pipe = private_pipe()
    order = CHILD_ORDER.validate_json(pipe.readline())
    log_for(order.run)
    os.environ["UMBEL_RUN"] = order.run
    return live(order, pipe)


if __name__ == "__main__":
    sys.exit(main())
