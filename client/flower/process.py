"""The process of a ClientApp, as its starter sees it: started when it is needed, and killed when a call must end."""

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from umbel.client.channel import Channel, ChannelMessage
from umbel.client.errors import AppError
from umbel.client.flower.calls import Answer, AppFailed, AppStopped, Call, CallKind, FirstMessage, StopQuestion
from umbel.client.flower.project import Config, FlowerProject

_LOOK_S = 0.1  # between two looks whether to stop
log = logging.getLogger("umbel.client")


class AppProcess:
    """Calls the ClientApp of a project in a process of its own."""

    def __init__(self, project: FlowerProject, node_config: Config) -> None:
        self._app: dict[str, Any] = {
            "app": project.component("clientapp"),
            "folder": str(project.folder),
            "run_config": dict(project.run_config),
            "node_config": dict(node_config),
        }
        self._project = project
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self.kinds: Sequence[CallKind] = ()  # what the app can be asked, once it is made

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and make the app, so that its errors come now. Raises `AppError`."""
        try:
            self._running(_go_on)
        except AppFailed as error:
            raise AppError(str(error)) from error

    def first_message(self, seed: int = 0) -> FirstMessage:
        """What the project's ServerApp would send to the first clients that train, with all generators at `seed`.

        Raises `AppError`.
        """
        asked = {**self._app, "server": self._project.component("serverapp"), "seed": seed}
        self.close()
        try:
            channel = self._begun()
            channel.send("first", asked)
            message = self._heard(channel, _go_on)
        except AppFailed as error:
            raise AppError(
                f"the first model is what the app's ServerApp sends first, but {error}. If it cannot run here, name "
                "the file of the run's first model with --model"
            ) from error
        finally:
            self.close()
        return FirstMessage(dict(zip(message.fields["names"], message.arrays, strict=True)), message.fields["config"])

    def call(self, call: Call, should_stop: StopQuestion) -> Answer:
        """As `AppCaller.call`."""
        try:
            channel = self._running(should_stop)
            channel.send("call", *call.packed())
        except OSError:  # it was killed since the last call
            self.close()
            channel = self._running(should_stop)
            channel.send("call", *call.packed())
        return Answer.of(self._heard(channel, should_stop))

    def close(self) -> None:
        """End the process and what the app has started, whatever they do."""
        if self._process is None or self._channel is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and what the app has started
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._channel.close()
        self._process, self._channel = None, None

    def _running(self, should_stop: StopQuestion) -> Channel:
        """The process with the app made."""
        if self._channel is not None:
            return self._channel
        channel = self._begun()
        channel.send("app", self._app)
        try:
            self.kinds = self._heard(channel, should_stop).fields["kinds"]
        except AppFailed:
            self.close()
            raise
        return channel

    def _begun(self) -> Channel:
        """A new process."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "umbel.client.flower.child", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal reaches only the starter
                env={**os.environ, "FLWR_TELEMETRY_ENABLED": "0"},  # a site tells nobody but its coordinator
            )
        self._channel = Channel(ours)
        return self._channel

    def _heard(self, channel: Channel, should_stop: StopQuestion) -> ChannelMessage:
        """The next message of the process. Ends the process unless it can take another call."""
        try:
            self._await(channel, should_stop)
            message = channel.receive()
        except EOFError:
            how = self._how_it_ended()
            self.close()
            raise AppFailed(f"the process of the Flower app ended by itself ({how})", "the client's app died") from None
        except BaseException:
            self.close()
            raise
        if message.kind == "failed":
            raise self._failure(message.fields)
        return message

    def _failure(self, told: Mapping[str, Any]) -> AppFailed:
        if told["traceback"]:
            log.error("%s\n%s", told["what"], told["traceback"])
        wants_more = not self._app["node_config"] and "KeyError" in told["what"] and "node_config" in told["traceback"]
        hint = "; --node-config gives the app its context.node_config, and there is none" if wants_more else ""
        return AppFailed(f"{told['what']}{hint}", told["public"])

    def _await(self, channel: Channel, should_stop: StopQuestion) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            while not selector.select(_LOOK_S):
                if (reason := should_stop()) is not None:
                    raise AppStopped(reason)

    def _how_it_ended(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _go_on() -> None:
    """Nothing asks to stop."""
