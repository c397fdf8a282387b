"""Files that only inform, such as the board and the notes. If one cannot be written, the site's work continues."""

import logging
from collections.abc import Callable

log = logging.getLogger("umbel.client")


class InformingFile:
    """One such file. `what`: it, as the beginning of a sentence. `is_current`: whether the last write succeeded."""

    def __init__(self, what: str) -> None:
        self.is_current = True
        self._what = what

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write`, and return whether it succeeded. An `OSError` is logged at the first failure in a row only."""
        try:
            write()
        except OSError as error:
            if self.is_current:
                log.error(
                    "%s cannot be written (%s). The work continues without it. Free some space on this disk, or make "
                    "the state directory writable; this process then writes it again by itself",
                    self._what,
                    error.strerror or error,
                )
            self.is_current = False
            return False
        if not self.is_current:
            log.info("%s is written again", self._what)
        self.is_current = True
        return True
