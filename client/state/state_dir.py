"""A client's state directory: one process at a time holds it, and each coordinator has a directory in it.

`home.py` has who the client is there, and `store.py` its work, which needs torch.
"""

import hashlib
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from umbel.aggregation.types import RunId, require_slug
from umbel.client.errors import StateError
from umbel.client.files import JsonFile, locked_file, make_private
from umbel.client.wire.addresses import addresses_in

STATE_DEFAULT = Path("~/.umbel")
KEY_FILE = "key.pem"
LOCK_FILE = "lock"
ENROLMENT_FILE = "enrolment.json"


@dataclass(frozen=True, slots=True)
class EnrolledAs:
    """The name that this client enrolled under, and the coordinator's (first) address then."""

    client: str
    server: str = ""

    def __post_init__(self) -> None:
        require_slug(self.client, "client")


_ENROLMENT = TypeAdapter(EnrolledAs)


def enrolment_in(home: Path) -> JsonFile[EnrolledAs]:
    """The enrolment in a coordinator's directory."""
    return JsonFile(home / ENROLMENT_FILE, _ENROLMENT)


@contextmanager
def locked(state_dir: Path, advice: str = "give each client its own state directory with --state") -> Generator[None]:
    """Hold a state directory for this process. Raises `StateError` with this advice if another process holds it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_file(make_private(state_dir) / LOCK_FILE, waits=False))
        except BlockingIOError as error:
            raise StateError(f"another client process uses {state_dir}; {advice}") from error
        yield


def home_of(state_dir: Path, server: str) -> tuple[Path, str]:
    """The directory for a coordinator, made if it is missing, and the address that names it.

    `server`: `URL[,URL...]`. The first address that this client is enrolled under names the directory, else the first
    of all. So addresses may come, go and change places, as long as the one of the enrolment stays in the list.
    """
    home, address = _place_of(state_dir, server)
    return make_private(home), address


def key_file_of(state_dir: Path, server: str) -> Path:
    """The path of the client's key for a coordinator. Makes nothing. `server`: as in `home_of`."""
    return _place_of(state_dir, server)[0] / KEY_FILE


def work_dir(home: Path, run: RunId) -> Path:
    """The directory of an agent's run in a coordinator's directory."""
    return home / "runs" / run


def _place_of(state_dir: Path, server: str) -> tuple[Path, str]:
    addresses = addresses_in(server)
    homes = [state_dir / _directory_name(address) for address in addresses]
    known = next((i for i, home in enumerate(homes) if (home / ENROLMENT_FILE).exists()), 0)
    return homes[known], addresses[known]


def _directory_name(server_url: str) -> str:
    """A readable directory name, unique by a digest, and the same however the address is written."""
    parts = urlsplit(server_url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    place = f"{(parts.hostname or '').lower()}:{port}"
    readable = re.sub(r"[^a-z0-9]+", "-", place).strip("-")[:60]
    return f"{readable}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
