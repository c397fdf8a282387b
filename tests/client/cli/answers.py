"""A coordinator's admin answers, made by hand, and an operator that gets them: for what the command line prints."""

from collections.abc import Mapping, Sequence

import httpx
from pydantic import TypeAdapter

from umbel.client import Operator


def operator_that_hears(answers: Mapping[str, Sequence[object] | object], asked: list[str] | None = None) -> Operator:
    """`answers`: by `METHOD /path`; a list's members one after another, an exception is raised."""
    queues = {key: list(value) if isinstance(value, list) else [value] for key, value in answers.items()}

    def handle(request: httpx.Request) -> httpx.Response:
        key = f"{request.method} {request.url.path.removeprefix('/v1/admin')}"
        if asked is not None:
            asked.append(key)
        answer = queues[key].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(200, content=iter([TypeAdapter(type(answer)).dump_json(answer)]))

    return Operator("https://coordinator.test", "secret", httpx.MockTransport(handle))
