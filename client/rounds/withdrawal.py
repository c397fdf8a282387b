"""The last gate of what a client sends: once its site no longer allows the run, no request with content is signed.

`Shutdown.withdraw` raises `Interrupted` in the main thread, but that is not enough. Other threads send, too, and Python
drops an exception that is raised in a `__del__` or a callback, such as that of a data loader.
"""

from collections.abc import Mapping

from umbel.aggregation.trust.signatures import Target
from umbel.client.rounds.shutdown import Shutdown
from umbel.client.wire.transport import Authorize

_DECLINE = "/decline"


def while_allowed(authorize: Authorize, shutdown: Shutdown) -> Authorize:
    """Authorize requests as `authorize` does. Once the client was withdrawn, only GET requests and declines are
    authorized: any other request raises `Interrupted`.
    """

    def authorized(target: Target, digest: bytes) -> Mapping[str, str]:
        if target.method != "GET" and not target.path.endswith(_DECLINE):
            shutdown.require_allowed()
        return authorize(target, digest)

    return authorized
