"""The frozen files, and how a fact is written so that equal facts have equal texts."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbel.aggregation.canonical import later_fields
from umbel.aggregation.run.records import ClientRecord, RoundRecord

FOLDER = Path(__file__).parent
EPSILON_DIGITS = 6  # of what a private run has cost: logarithms decide the last ones, and each machine has its own


def frozen(name: str) -> Any:
    """What a frozen JSON file holds."""
    return json.loads((FOLDER / name).read_text())


def pretty(value: object) -> str:
    """The text of a frozen JSON file."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def digest(value: object) -> str:
    """The SHA-256 of a JSON value in one spelling. Floats are written with the shortest digits that read back."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def of_every_machine(record: Mapping[str, Any], *, has_bytes: bool) -> dict[str, Any]:
    """A round's record without what a library decides, or chance, and without fields that the format has gained since
    while they have their defaults, as canonical JSON leaves them out.

    `has_bytes`: whether the lengths of what was sent are in it. What Zstandard writes may be longer in another release,
    and a coordinator counts what was fetched a moment later, which may be after the round's end.
    """
    found = json.loads(json.dumps(record))
    if found["epsilon"] is not None:
        found["epsilon"] = float(f"{found['epsilon']:.{EPSILON_DIGITS}g}")
    if not has_bytes:
        for one in (found, *found["clients"]):
            del one["bytes_up"], one["bytes_down"]
    for kind, one in ((RoundRecord, found), *((ClientRecord, client) for client in found["clients"])):
        for key, default in later_fields(kind):
            if one[key] == json.loads(json.dumps(default)):
                del one[key]
    return dict(found)
