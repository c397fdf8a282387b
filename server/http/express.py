"""Addresses that are asked thousands of times a second are answered before the framework is asked.

FastAPI matches routes one after the other, wraps each call in two exit stacks and looks at the environment for its
telemetry: for a check-in that costs as much as all the rest. The same functions are routes of
the application, where OpenAPI finds them; here they are looked up by method and path.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from umbel.aggregation.errors import ProtocolViolation
from umbel.server.http.limits import BodyLimits, Cap, cap_at
from umbel.server.problems import Refused, answer_to, no_database, unexpected
from umbel.server.store.outage import DatabaseAway

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class ExpressAPI(FastAPI):
    """FastAPI with a shorter way to some of its routes, given by `take_express`."""

    _express: Mapping[tuple[str, str], BodyLimits]

    def take_express(self, handlers: Mapping[tuple[str, str], Handler], caps: Sequence[Cap]) -> None:
        """Answer these methods and paths directly, with the same caps on bodies as everywhere."""
        self._express = {
            (method, path): BodyLimits(_Direct(handler), [cap_at(path, caps)])
            for (method, path), handler in handlers.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = self._express.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if direct is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await direct(scope, receive, send)


class _Direct:
    """One handler as an application, which answers its own errors."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._handler(request)
        except (Refused, ProtocolViolation, ClientDisconnect) as error:
            response = answer_to(request, error)
        except DatabaseAway as error:
            response = await no_database(request, error)
        except Exception as error:
            response = await unexpected(request, error)
        await response(scope, receive, send)
