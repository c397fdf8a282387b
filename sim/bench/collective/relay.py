"""A relay of packets with a rate and a delay: `python -m umbel.sim.bench.collective.relay MBIT_S ROUND_TRIP_MS PID...`.

Each PID is a process in a network namespace. The relay makes the interface `tun0` there, and passes
IPv4 packets between the interfaces until it is killed: those to the address ...N go to the Nth. It loses no packet.

A packet takes its place in the queue of its sender's link, then half of the round trip, and then its place in the queue
of its receiver's link. (Linux has a queue with a delay, netem, but not every kernel contains it.)
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

INTERFACE, MTU = "tun0", 9000
_DEVICE, _TUN_SET_IFF, _TUN, _NO_PROTOCOL = "/dev/net/tun", 0x4004_54CA, 0x0001, 0x1000  # linux/if_tun.h
_NEW_NET = 0x4000_0000  # linux/sched.h
_DESTINATION_END = 20  # of an IPv4 header; its last byte is the number of the host


def why_no_relay() -> str:
    """Why there can be no relay here; empty if there can."""
    try:
        os.close(os.open(_DEVICE, os.O_RDWR))
    except OSError as error:
        return f"{_DEVICE} cannot be opened ({error.strerror})"
    return ""


@dataclass(slots=True)
class Queues:
    """Packets on their way. `rate`: bytes a second of each link, each way; `delay_s`: one way."""

    n_hosts: int
    rate: float
    delay_s: float
    _up_free: list[float] = field(init=False)  # when the last packet will have left its sender
    _down_free: list[float] = field(init=False)
    _waiting: list[deque[tuple[float, bytes]]] = field(init=False)  # by receiver, the first to arrive first

    def __post_init__(self) -> None:
        self._up_free, self._down_free = [0.0] * self.n_hosts, [0.0] * self.n_hosts
        self._waiting = [deque[tuple[float, bytes]]() for _ in range(self.n_hosts)]

    def sent(self, sender: int, packet: bytes, now: float) -> None:
        """Take a packet; one for nobody here is dropped, as by a real switch."""
        if len(packet) < _DESTINATION_END or packet[0] >> 4 != 4:
            return
        receiver = packet[_DESTINATION_END - 1] - 1
        if not 0 <= receiver < self.n_hosts:
            return
        takes = len(packet) / self.rate
        left = self._up_free[sender] = max(now, self._up_free[sender]) + takes
        arrives = self._down_free[receiver] = max(left + self.delay_s, self._down_free[receiver]) + takes
        self._waiting[receiver].append((arrives, packet))

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Remove the packets that have arrived, each with its receiver."""
        arrived = list[tuple[int, bytes]]()
        for receiver, waiting in enumerate(self._waiting):
            while waiting and waiting[0][0] <= now:
                arrived.append((receiver, waiting.popleft()[1]))
        return arrived

    def next_at(self) -> float | None:
        """When the next packet arrives; None if there is none."""
        return min((waiting[0][0] for waiting in self._waiting if waiting), default=None)


def relay(devices: Sequence[int], queues: Queues) -> None:
    """Pass packets for ever."""
    number = {device: i for i, device in enumerate(devices)}
    while True:
        at = queues.next_at()
        timeout = None if at is None else max(0.0, at - time.monotonic())
        for device in select.select(devices, [], [], timeout)[0]:
            queues.sent(number[device], os.read(device, MTU + 64), time.monotonic())
        for receiver, packet in queues.due(time.monotonic()):
            os.write(devices[receiver], packet)


def opened(pid: int) -> int:
    """A new interface in the namespace of a process, as a descriptor of its packets. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of process {pid}")
    device = os.open(_DEVICE, os.O_RDWR)
    fcntl.ioctl(device, _TUN_SET_IFF, struct.pack("16sH22x", INTERFACE.encode(), _TUN | _NO_PROTOCOL))
    return device


def main(mbit_s: float, round_trip_ms: float, pids: Sequence[int]) -> None:
    devices = [opened(pid) for pid in pids]
    relay(devices, Queues(len(devices), mbit_s * 1e6 / 8, round_trip_ms / 2e3))


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), [int(one) for one in sys.argv[3:]])
