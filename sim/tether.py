"""`python -m umbel.sim.tether MODULE ARG...`: runs a module that ends when whoever started it is gone.

The starter keeps the other end of standard input and never writes to it; however it dies, SIGKILL included, the pipe
closes. Then this process asks itself to stop (SIGTERM), and insists after a few seconds.
"""

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable

GRACE_S = 5.0


def when_the_starter_is_gone(act: Callable[[], None]) -> None:
    """Call `act` on a daemon thread once standard input is at its end; end this process if that did not."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        act()
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="tether", daemon=True).start()


def main() -> None:
    """Run the module named by the first argument as `__main__`, tethered."""
    when_the_starter_is_gone(lambda: os.kill(os.getpid(), signal.SIGTERM))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
