"""The process of a ClientApp, as its starter sees it: started when it is needed, and killed when a call must end."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Thread
from typing import Any, TypeAlias, TypeVar

from umbel.aggregation.phrases import exit_words
from umbel.client.channel import Channel, ChannelMessage
from umbel.client.errors import AppError
from umbel.client.flower.calls import AppFailed, AppReply, AppStopped, Call, CallKind, FirstMessage, StopQuestion
from umbel.client.flower.project import Config, FlowerProject
from umbel.client.local.arrays import Array

T = TypeVar("T")
OutgoingMessage: TypeAlias = tuple[str, Mapping[str, Any]] | tuple[str, Mapping[str, Any], Sequence[Array]]
_LOOK_S = 0.1  # between two looks whether to stop
_LAST_WORDS_S = 1.0  # for what an ended process has sent, and for the end of one that has closed its socket
_DIED = "the client's app died"
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
            return self._exchanged(self._begun(), ("first", asked), _first_message, _go_on)
        except AppFailed as error:
            raise AppError(
                f"the first model is what the app's ServerApp sends first, but {error}. If it cannot run here, name "
                "the file of the run's first model with --model"
            ) from error
        finally:
            self.close()

    def call(self, call: Call, should_stop: StopQuestion) -> AppReply:
        """As `AppCaller.call`."""
        message = "call", *call.packed()
        try:
            return self._exchanged(self._running(should_stop), message, AppReply.of, should_stop)
        except OSError:  # it was killed at this moment
            return self._exchanged(self._running(should_stop), message, AppReply.of, should_stop)

    def close(self) -> None:
        """End the process and what the app has started, whatever they do."""
        if self._process is None or self._channel is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and what the app has started
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._channel.shut_down()  # for a thread that waits for it
        self._channel.close()
        self._process, self._channel = None, None

    def _running(self, should_stop: StopQuestion) -> Channel:
        """The process with the app made."""
        if self._process is not None and self._process.poll() is not None:  # it was killed since the last call
            self.close()
        if self._channel is not None:
            return self._channel
        channel = self._begun()
        try:
            self.kinds = self._exchanged(channel, ("app", self._app), _kinds, should_stop)
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

    def _exchanged(
        self,
        channel: Channel,
        message: OutgoingMessage,
        read: Callable[[ChannelMessage], T],
        should_stop: StopQuestion,
    ) -> T:
        """What the process answers to a message, as `read` has it. Ends the process unless it can take another call.

        Another thread sends and receives, because an app can halt either in the middle. Raises `OSError` if the process
        was gone before.
        """
        heard = Future[ChannelMessage]()
        Thread(target=_exchange, args=(channel, message, heard), daemon=True).start()
        try:
            self._await(heard, should_stop)
            answer = heard.result()
            if answer.kind != "failed":
                return read(answer)
            failure = self._failure(answer.fields)
        except EOFError:
            how = self._how_it_ended()
            self.close()
            raise AppFailed(f"the process of the Flower app ended by itself ({how})", _DIED) from None
        except (LookupError, TypeError, ValueError, OverflowError, MemoryError, RecursionError) as error:
            self.close()
            what = f"the process of the Flower app sent what is no answer ({type(error).__name__})"
            raise AppFailed(what, _DIED) from None
        except BaseException:
            self.close()
            raise
        raise failure

    def _failure(self, told: Mapping[str, Any]) -> AppFailed:
        if told["traceback"]:
            log.error("%s\n%s", told["what"], told["traceback"])
        wants_more = not self._app["node_config"] and "KeyError" in told["what"] and "node_config" in told["traceback"]
        hint = "; --node-config gives the app its context.node_config, and there is none" if wants_more else ""
        return AppFailed(f"{told['what']}{hint}", told["public"])

    def _await(self, heard: "Future[ChannelMessage]", should_stop: StopQuestion) -> None:
        """Wait until there is an answer. Raises `AppStopped`, and `EOFError` if the process ended without one."""
        assert self._process is not None
        while not wait([heard], _LOOK_S).done:
            if self._process.poll() is not None and not wait([heard], _LAST_WORDS_S).done:
                raise EOFError  # what the app has started may hold the socket open
            if (reason := should_stop()) is not None:
                raise AppStopped(reason)

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            return exit_words(self._process.wait(_LAST_WORDS_S))
        except subprocess.TimeoutExpired:
            return "it closed its socket"


def _exchange(channel: Channel, message: OutgoingMessage, heard: "Future[ChannelMessage]") -> None:
    try:
        channel.send(*message)
        heard.set_result(channel.receive())
    except BaseException as error:
        heard.set_exception(error)


def _first_message(message: ChannelMessage) -> FirstMessage:
    told = message.fields
    arrays = dict(zip(told["names"], message.arrays, strict=True))
    return FirstMessage(arrays, told["config"], told["strategy"])


def _kinds(message: ChannelMessage) -> list[CallKind]:
    return [*message.fields["kinds"]]


def _go_on() -> None:
    """Nothing asks to stop."""
