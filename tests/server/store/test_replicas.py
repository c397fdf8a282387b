"""Clocks that are apart: refused at the start, warned of once while running; a slow answer alone proves nothing."""

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.serve.test_process import SERVE
from tests.servers.postgres import Cluster
from tests.servers.waits import LIMIT_S, until
from umbel.server.clock import SystemClock
from umbel.server.store.database import Database
from umbel.server.store.replicas import APART_MAX_S, ClockApart, ClockWatch, Replicas, ahead_s, require_agreement

WRONG_CLOCK = "import time\nright = time.time\ntime.time = lambda: right() + {}\n"


class OffClock(SystemClock):
    """The machine's clock, were it so many seconds off."""

    def __init__(self, off_s: float) -> None:
        self.off_s = off_s

    def now(self) -> float:
        return super().now() + self.off_s


@contextmanager
def opened(url: str) -> Generator[tuple[asyncio.Runner, Database]]:
    with asyncio.Runner() as runner:
        database = Database(url)
        try:
            yield runner, database
        finally:
            runner.run(database.close())


_S = st.floats(0.0, 1e4)


@given(before=st.floats(0.0, 2e9), there_s=_S, back_s=_S, off_s=st.floats(-1e6, 1e6))
def test_no_more_is_claimed_than_is_certain(before: float, there_s: float, back_s: float, off_s: float) -> None:
    theirs, after = before + there_s + off_s, before + there_s + back_s
    claimed = ahead_s(before, theirs, after)
    assert abs(claimed) <= abs(off_s) + 1e-3
    assert claimed * off_s >= 0
    assert abs(claimed - off_s) <= there_s + back_s + 1e-3


def test_a_clock_that_is_the_databases_is_fine_and_one_that_is_far_off_is_refused(postgresql: Cluster) -> None:
    with opened(postgresql.new_database()) as (runner, database):
        for fine_s in (0.0, APART_MAX_S - 2.0, 2.0 - APART_MAX_S):
            runner.run(require_agreement(database, OffClock(fine_s)))
        with pytest.raises(ClockApart, match=r"clock is [1-6]\d\.\d s ahead of the database's.*NTP"):
            runner.run(require_agreement(database, OffClock(60.0)))
        with pytest.raises(ClockApart, match="behind the database's"):
            runner.run(require_agreement(database, OffClock(-60.0)))


def test_sqlite_has_no_other_clock(tmp_path: Path) -> None:
    with opened(f"sqlite+aiosqlite:///{tmp_path / 'umbel.db'}") as (runner, database):
        runner.run(require_agreement(database, OffClock(60.0)))


@pytest.mark.slow
def test_a_coordinator_with_a_wrong_clock_does_not_start(postgresql: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRONG_CLOCK.format(120) + SERVE, "--data", str(tmp_path), "--port", "0"]
    environment = {**os.environ, "UMBEL_DATABASE_URL": postgresql.new_database()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 1
    told = re.search(r"umbel serve: this machine's clock is ([\d.]+) s ahead of the database's", done.stderr)
    assert told is not None, done.stderr
    assert APART_MAX_S < float(told[1]) <= 120.0, "no more is claimed than is certain"
    assert "Traceback" not in done.stderr


def test_one_that_drifts_while_running_is_warned_of_once_and_again_when_it_recurs(
    postgresql: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        database, clock = Database(postgresql.new_database()), OffClock(0.0)
        await database.migrate()
        replicas = Replicas(database, clock)
        await replicas.start()
        assert not caplog.records
        clock.off_s = 30.0
        await until("a warning", lambda: caplog.records)
        for _ in range(3):
            await replicas._look()  # pyright: ignore[reportPrivateUsage]
        await replicas.close()
        await database.close()

    with caplog.at_level(logging.WARNING, "umbel.server.store.replicas"):
        asyncio.run(scenario())
    [record] = caplog.records
    assert "s ahead of the database's: windows close" in record.getMessage()


def test_a_warning_is_not_repeated_before_the_clocks_have_agreed_again(caplog: pytest.LogCaptureFixture) -> None:
    watch = ClockWatch()
    for apart_s in (0.5, 3.0, 4.0, 0.0, -2.0):
        watch.note(apart_s)
    assert len(caplog.records) == 2
