"""Calls a ClientApp in this process, where nobody asks it to stop: in simulations."""

from umbel.client.flower.calls import AppReply, Call, StopQuestion
from umbel.client.flower.host import AppHost


class InProcess:
    """An `AppCaller`. Raises whatever the app raises."""

    def __init__(self, host: AppHost) -> None:
        self._host = host

    def call(self, call: Call, should_stop: StopQuestion) -> AppReply:
        return self._host.answer(call)

    def close(self) -> None:
        """Nothing is held."""
