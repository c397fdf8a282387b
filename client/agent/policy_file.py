"""The site's policy in force: its file, and the member list that it names, read again whenever one of them changes.

While the file is not valid, the site takes part in no run: a person may just have made it stricter.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from umbel.aggregation.trust.members import MembersRefused
from umbel.client.errors import ClientError
from umbel.client.policy.members_store import members_in_force
from umbel.client.policy.policy import SitePolicy, read_policy

log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class InForce:
    """`policy`: None if the site has no policy file. `list_sha256`: of the trusted member list; empty without one.

    `trouble`: why nothing is allowed; empty if all is well.
    """

    policy: SitePolicy | None = None
    list_sha256: str = ""
    trouble: str = ""


class PolicyFile:
    """One site's policy. `path`: None for none. Only for the holder of the state directory's lock."""

    def __init__(self, path: Path | None, state_dir: Path) -> None:
        self._path = path
        self._state_dir = state_dir
        self._members: Path | None = None  # the list that the policy named last, also while one of the two is not valid
        self._seen: object = None
        self._in_force = InForce()

    def look(self) -> InForce:
        """The policy in force now. It costs two calls of `stat` while nothing has changed.

        The stamps are those of before the files were read: a change during the reading is read at the next look.
        """
        if self._path is None:
            return self._in_force
        seen = self._stamps()
        if seen != self._seen:
            before, self._in_force = self._in_force, self._read(self._path)
            if self._seen is not None:
                self._log_change(before)
            self._seen = seen
        return self._in_force

    def _read(self, path: Path) -> InForce:
        try:
            policy = read_policy(path)
            self._members = policy.members
            members = members_in_force(policy, self._state_dir)
        except MembersRefused as error:
            return InForce(trouble=f"{path}: {error}")
        except (ClientError, ValueError) as error:
            return InForce(trouble=str(error))
        except OSError as error:
            return InForce(trouble=f"{path} cannot be read: {error.strerror or error}")
        return InForce(policy, "" if members is None else members.sha256)

    def _log_change(self, before: InForce) -> None:
        now = self._in_force
        if now.trouble and now.trouble != before.trouble:
            log.error("this site takes part in no run until its policy is valid again: %s", now.trouble)
        elif not now.trouble and now != before:
            log.info("read the policy again: %s", self._path)

    def _stamps(self) -> object:
        return [_stamp(path) for path in (self._path, self._members) if path is not None]


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes when a file does; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
