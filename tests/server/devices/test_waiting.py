"""A request that is held open: what ends its wait, and that whoever cancels it is heard."""

import asyncio

import pytest
from starlette.types import Message

from umbel.server.clock import SystemClock
from umbel.server.devices.waiting import HeldRequest


class Peer:
    """The other end of a held request. It hangs up when told to; the end of its watch can be held back."""

    def __init__(self) -> None:
        self.hangs_up = asyncio.Event()
        self.is_watched = asyncio.Event()
        self.watch_ends = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def receive(self) -> Message:
        self.is_watched.set()
        try:
            await self.hangs_up.wait()
        except asyncio.CancelledError:
            self.watch_ends.set()
            await self.may_end.wait()
            raise
        return {"type": "http.disconnect"}


def test_a_cancelled_request_ends_even_while_its_watch_is_being_ended() -> None:
    async def scenario() -> None:
        peer, bell = Peer(), asyncio.Event()
        peer.may_end.clear()
        holding = asyncio.create_task(HeldRequest(peer.receive).hold(SystemClock(), bell, 60.0))
        await peer.is_watched.wait()
        bell.set()
        await peer.watch_ends.wait()
        holding.cancel()
        await asyncio.sleep(0)
        peer.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await holding

    asyncio.run(scenario())


def test_a_time_limit_around_a_held_request_is_kept() -> None:
    async def scenario() -> None:
        peer = Peer()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await HeldRequest(peer.receive).hold(SystemClock(), asyncio.Event(), 60.0)
        assert peer.watch_ends.is_set()

    asyncio.run(scenario())


def test_the_bell_the_time_and_a_peer_that_hangs_up_each_end_the_wait() -> None:
    async def scenario() -> None:
        peer, bell = Peer(), asyncio.Event()
        line = HeldRequest(peer.receive)
        bell.set()
        await line.hold(SystemClock(), bell, 60.0)
        await line.hold(SystemClock(), asyncio.Event(), 0.0)
        assert not line.is_gone
        peer.hangs_up.set()
        await line.hold(SystemClock(), asyncio.Event(), 60.0)
        assert line.is_gone

    asyncio.run(scenario())
