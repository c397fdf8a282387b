"""For `preexec_fn` of a process that a test is to interrupt."""

import signal


def heed_interrupts() -> None:
    """A test run that was started in the background ignores SIGINT, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
