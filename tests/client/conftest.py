"""What tests of more than one file of clients ask for by name."""

import pytest

from umbel.client import LocalPlan


@pytest.fixture
def no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a site's training ends, that was for want of time."""
    monkeypatch.setattr(LocalPlan, "seconds_left", property(lambda plan: 0.0))
