"""Who this client is with one coordinator: the directory, the key, and the enrolment. It needs no torch."""

from pathlib import Path

from umbel.client.private_keys import load_or_make_key
from umbel.client.state.identity import Identity
from umbel.client.state.state_dir import ENROLMENT_FILE, KEY_FILE, EnrolledAs, enrolment_in, home_of


class Home:
    """One client's directory for one coordinator. Only for the holder of the state directory's lock, and its children.

    `path`: the directory; `server_url`: the address that names it.
    """

    def __init__(self, state_dir: Path, server: str) -> None:
        """`server`: `URL[,URL...]`; see `home_of`."""
        self.state_dir = state_dir
        self.path, self.server_url = home_of(state_dir, server)

    def enrolled_name(self) -> str | None:
        known = enrolment_in(self.path).read()
        return None if known is None else known.client

    def remember_enrolment(self, name: str) -> None:
        enrolment_in(self.path).write(EnrolledAs(name, self.server_url))

    def enrolled_elsewhere(self) -> list[EnrolledAs]:
        """The enrolments in this state directory with coordinators at other addresses."""
        homes = sorted(path.parent for path in self.state_dir.glob(f"*/{ENROLMENT_FILE}"))
        found = (enrolment_in(home).read() for home in homes if home != self.path)
        return [one for one in found if one is not None]

    def identity(self, name: str) -> Identity:
        return Identity(name, load_or_make_key(self.path / KEY_FILE))
