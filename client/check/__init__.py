"""Checks of a site's own client before it takes part in a run, for tests and for `umbel client check`."""

from umbel.client.check.check import check_client
from umbel.client.findings import ClientCheck, ClientFinding

__all__ = ["ClientCheck", "ClientFinding", "check_client"]
