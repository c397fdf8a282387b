"""A client's own public keys, to be compared and listed: one for each coordinator that it knows."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.trust.fingerprint import fingerprint
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.client.errors import StateError
from umbel.client.state.identity import Identity, load_or_make_key
from umbel.client.state.state_dir import ENROLMENT_FILE, KEY_FILE, EnrolledAs, home_of, locked

_ENROLMENT = TypeAdapter(EnrolledAs)


@dataclass(frozen=True, slots=True)
class OwnKey:
    """`client`, `server`: empty before the client has enrolled. `directory`: where the private key lies."""

    client: str
    server: str
    public_key: str
    fingerprint: str
    directory: str


def own_keys(state_dir: Path) -> list[OwnKey]:
    """Every key in a state directory. Raises `StateError` if there is none, or one is damaged."""
    found = [_own_key(path) for path in sorted(state_dir.glob(f"*/{KEY_FILE}"))]
    if not found:
        raise StateError(
            f"there is no client's key in {state_dir} yet: it is made at the first start, or now if you pass the "
            "coordinator's address (--server, or the variable UMBEL_SERVER)"
        )
    return found


def make_own_key(state_dir: Path, server: str) -> None:
    """Make this client's key for a coordinator, unless it is there: it can be listed before the client enrols."""
    with locked(state_dir):
        home, _ = home_of(state_dir, server)
        load_or_make_key(home / KEY_FILE)


def _own_key(path: Path) -> OwnKey:
    enrolment = path.with_name(ENROLMENT_FILE)
    try:
        known = _ENROLMENT.validate_json(enrolment.read_bytes()) if enrolment.exists() else None
    except ValidationError as error:
        raise StateError(f"{enrolment} is damaged; remove it and start again") from error
    client, server = (known.client, known.server) if known is not None else ("", "")
    key = Identity(client, load_or_make_key(path)).public_key
    return OwnKey(client, server, key, fingerprint(public_key_bytes(key)), str(path.parent))
