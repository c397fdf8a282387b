"""Write the frozen files anew: `python -m tests.frozen.write`, or `... NAME` for one of them. No test runs this.

What is frozen changes only with a format, or where a promise is taken back on purpose. The commit says which.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.frozen.archive import ARCHIVE, pack, unpacked
from tests.frozen.formats import OBJECTS, TEXTS
from tests.frozen.kept import FOLDER, frozen, pretty
from tests.frozen.over_http import STAGES, Stage, played
from tests.frozen.simulated import PLAYS, made_by
from tests.frozen.stored_clients import facts_in, leave_all, take_up_sender, take_up_trainer
from tests.frozen.stored_coordinator import COMES_OF_IT, stop_in_the_midst

KEPT_UPDATES = ("low rank",)  # of these plays, whose last bits a library decides


def models() -> dict[str, Any]:
    """Every play's hashes. What is kept of updates is not made again."""
    kept = frozen("updates.json")
    over_http = {name: _played(stage, kept.get(name, {}))[0] for name, stage in STAGES.items()}
    return {"simulated": {name: made_by(play)[0] for name, play in PLAYS.items()}, "over_http": over_http}


def updates() -> dict[str, Any]:
    """Updates as they were sent, base64, by assignment."""
    return {name: _played(STAGES[name], None)[1] for name in KEPT_UPDATES}


def stored_runs() -> dict[str, Any]:
    """What comes of the coordinator's runs that are kept in the archive, and of the clients' work."""
    found: dict[str, Any] = {}
    for name, goes_on in COMES_OF_IT.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = asyncio.run(goes_on(unpacked(Path(folder))))
    with tempfile.TemporaryDirectory() as folder:
        kept, clients = facts_in(unpacked(Path(folder))), Path(folder, "clients")
        found["sender"] = take_up_sender(clients / "sender", kept["sender"])
        found["trainer"] = take_up_trainer(clients / "trainer", kept["trainer"]).updates
    return found


def archive() -> None:
    """State directories as today's code leaves them. What was kept before is lost, and was to be opened for ever."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(stop_in_the_midst(Path(folder)))
        leave_all(Path(folder))
        pack(Path(folder))


def _played(stage: Stage, kept: Mapping[str, str] | None) -> tuple[dict[str, Any], dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        hashes, _, sent = asyncio.run(played(stage, Path(folder, "coordinator"), kept))
    return hashes, sent


JSON_FILES: Mapping[str, Callable[[], object]] = {
    "updates.json": updates,
    "models.json": models,
    **OBJECTS,
    "stored_runs.json": stored_runs,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of a frozen file; by default, all but {ARCHIVE.name}"
    )
    chosen = parser.parse_args().names or [*JSON_FILES, *TEXTS]
    if ARCHIVE.name in chosen:
        archive()
        chosen.remove(ARCHIVE.name)
    for name in chosen:
        text = TEXTS[name]() if name in TEXTS else pretty(JSON_FILES[name]())
        (FOLDER / name).write_text(text)
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
