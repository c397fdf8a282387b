"""When a client may train, if its site takes part in several runs at once, and who is told what it does."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from umbel.aggregation.messages import WAIT_S_MAX
from umbel.aggregation.plans.assignment import Assignment


class Turn:
    """A client that has its machine for itself: it may always train, and nobody is told. An agent's runs share."""

    hold_s = WAIT_S_MAX  # how long a check-in may be held open

    def wait(self, _pause: Callable[[float], None]) -> None:
        """Wait until the client may check in, because it could train now. Raises `Interrupted` if it should leave."""

    def check(self) -> None:
        """Raise `Interrupted` if the client should leave before it begins an assignment."""

    @contextmanager
    def training(self, _offer: Assignment, _pause: Callable[[float], None]) -> Generator[None]:
        """Train in this block. Raises `AttemptRefused` if other runs of the site leave no room for it."""
        yield

    def waits(self, _reason: str) -> None:
        """Note that the client waits for work, and why."""

    def reported(self, _n_reports: int) -> None:
        """Note how many reports this client has sent."""
