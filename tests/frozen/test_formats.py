"""What is written, sent and stored has the frozen form: files, messages, tables, the document of the API."""

import pytest

from tests.frozen.formats import OBJECTS, TEXTS
from tests.frozen.kept import FOLDER, frozen, pretty

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", OBJECTS)
def test_a_format_has_the_frozen_fields_types_and_defaults(name: str) -> None:
    """Compared as text, a field a line, so that a failure shows the line."""
    assert pretty(OBJECTS[name]()).splitlines() == pretty(frozen(name)).splitlines()


@pytest.mark.parametrize("name", TEXTS)
def test_the_database_has_the_frozen_tables(name: str) -> None:
    assert TEXTS[name]().splitlines() == (FOLDER / name).read_text().splitlines()
