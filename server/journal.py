"""The coordinator's log for operators: one line for each event, in one format.

It has names, counts, reasons and hashes, but no secrets. Text from peers is shortened here, and `LineFormat` escapes
it. Any peer can cause refusals, so `Throttle` limits them.
"""

import logging
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType

from starlette.types import Scope

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.phrases import agreeing, counted
from umbel.aggregation.plans.round import RoundPlan, Task
from umbel.aggregation.run.records import Fate, RoundRecord

_log = logging.getLogger(__name__)
_refusals = logging.getLogger(f"{__name__}.refusals")
_THROTTLED = frozenset({_refusals.name, "uvicorn.error"})
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
TEXT_CHARS_MAX = 200
NAMES_MAX = 20


def begin(level: str) -> None:
    """Log to standard error, also what libraries log."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormat())
    handler.addFilter(Throttle())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class LineFormat(logging.Formatter):
    """`2026-01-31T12:00:00+0000 INFO umbel.server.journal: ...`; control characters are escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S%z")

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # logging's name
        """A traceback with indented lines, so that none looks like a line of the log."""
        return "\n".join(f"  | {_escaped(line)}" for line in super().formatException(ei).split("\n"))


class Throttle(logging.Filter):
    """Passes at most `lines_max` refusals in `window_s` seconds, so that no peer fills the disk; counts the others."""

    def __init__(self, lines_max: int = 20, window_s: float = 10.0) -> None:
        super().__init__()
        self._lines_max, self._window_s = lines_max, window_s
        self._began_at = 0.0
        self._passed = self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name not in _THROTTLED or record.levelno != logging.WARNING:
            return True
        if not 0 <= record.created - self._began_at < self._window_s:
            self._began_at, self._passed = record.created, 0
        if self._passed == self._lines_max:
            self._left_out += 1
            return False
        self._passed += 1
        if self._left_out:
            record.msg, record.args = (
                f"{record.getMessage()} ({self._left_out} warnings were left out before this one)",
                None,
            )
            self._left_out = 0
        return True


# --- what happens -----------------------------------------------------------------------------------------------------


def started(data: object, n_runs: int) -> None:
    _log.info("started on %s; runs: %d", data, n_runs)


def serving(url: str, admin_key: Path) -> None:
    _log.info("umbel coordinator at %s, admin key in %s", url, admin_key)


def signs_with(public_key: str) -> None:
    _log.info("audit bundles are signed with the key %s", public_key)


def admin_key_made(path: Path) -> None:
    """A warning, because an earlier key of this coordinator is no longer valid."""
    _log.warning(
        "created the admin key in %s; any earlier admin key is no longer valid; give it only to operators", path
    )


def listening(host: str) -> None:
    """Warn of a socket that is not on the loopback interface: its traffic can be read on the network."""
    if not ip_address(host.partition("%")[0]).is_loopback:
        _log.warning("plain HTTP on %s: others can read models, updates and the admin key; put TLS in front", host)


def stopped() -> None:
    _log.info("shut down; everything that was acknowledged is stored")


def was_away(away_s: float) -> None:
    _log.warning(
        "no coordinator could accept reports for %.0f s, because it was away or too slow; the windows of open rounds "
        "are extended by this time",
        away_s,
    )


def tokens_made(count: int, ttl_s: float, bound: str) -> None:
    """`bound`: what they bind, in words."""
    tokens, bind = counted(count, "enrolment token"), agreeing(count, "binds", "bind")
    _log.info("made %s, valid for %.0f s, that %s %s", tokens, ttl_s, bind, _shortened(bound) or "nothing")


def enrolled(client: str, labels: Mapping[str, str], bound: str) -> None:
    """`bound`: what its token has bound, in words."""
    words = _shortened(", ".join(f"{name}={value}" for name, value in sorted(labels.items())))
    _log.info(
        "client %s enrolled (labels: %s) by a token that binds %s",
        client,
        words or "none",
        _shortened(bound) or "nothing",
    )


def revoked(client: str) -> None:
    _log.info("client %s removed", client)


def run_created(run: str, rounds: int, model_sha256: str) -> None:
    _log.info("run %s created: %s from model %s", run, counted(rounds, "round"), model_sha256[:12])


def members_given(run: str, members: str) -> None:
    """`members`: the list, in words."""
    _log.info("run %s draws only clients of member list %s", run, members)


def run_over(run: str, status: RunStatus, reason: str) -> None:
    _log.info("run %s %s: %s", run, status.value, _shortened(reason))


def ordered(run: str, order: str, scope: Scope) -> None:
    """`order`: in words, with its reason."""
    _log.info("run %s: an operator at %s ordered: %s", run, _peer(scope), _shortened(order))


def round_opened(plan: RoundPlan, n_asked: int, why: str = "") -> None:
    """`why`: how an earlier attempt changed the choice of clients, in words."""
    which, how = _attempt(plan.run, plan.task, plan.number, plan.attempt), ""
    if plan.task.sends_updates:  # what is measured under masks has no codec
        how = f", updates as {plan.codec.words}"
    how += f"; {why}" if why else ""
    _log.info("%s opened: %s asked%s", which, counted(n_asked, "client"), how)


def round_ended(record: RoundRecord) -> None:
    """Only a committed attempt at training has a model."""
    lost = [client.client for client in record.clients if client.fate is Fate.LOST]
    made = record.model_sha256[:12] if record.model_sha256 and record.task.makes_model else "none"
    _log.info(
        "%s %s after %.1f s: %d of %s reported, %d of them with partial work; lost: %s; %s(%s)",
        _attempt(record.run, record.task, record.round, record.attempt),
        _ending(record),
        record.wall_s,
        record.reported,
        counted(record.selected, "client"),
        record.partial,
        _names(lost),
        f"model {made} " if record.task.makes_model else "",
        _shortened(record.reason),
    )


def refused(scope: Scope, kind: str, detail: str) -> None:
    """The sender is named only if its signature or the admin key was verified.

    `assignment-closed` is no warning, because a round asks more clients than it needs. Nor is `unknown-upload` for
    HEAD, because each restarted site asks whether a part of its update has arrived.
    """
    is_ordinary = kind == "assignment-closed" or (kind == "unknown-upload" and scope["method"] == "HEAD")
    level = logging.INFO if is_ordinary else logging.WARNING
    where = f"{scope['method'][:20]} {_shortened(scope['path'])}"
    _refusals.log(
        level, "refused %s from %s at %s: %s: %s", where, _sender(scope), _peer(scope), kind, _shortened(detail)
    )


def asked_again(scope: Scope, kind: str, detail: str) -> None:
    """A client's first request lacks what clients send only when the coordinator asks for it. It is no refusal."""
    where = f"{scope['method'][:20]} {_shortened(scope['path'])}"
    _log.debug("asked %s at %s to repeat %s: %s: %s", _sender(scope), _peer(scope), where, kind, _shortened(detail))


def _sender(scope: Scope) -> str:
    known = scope.get("state", {})
    return "an operator" if known.get("is_operator") else str(known.get("client", "an unverified sender"))


def _peer(scope: Scope) -> str:
    """The address of the peer, which may be a proxy."""
    return str((scope.get("client") or ("an unknown address",))[0])


def _attempt(run: str, task: Task, number: int, attempt: int) -> str:
    what = f"round {number}" if task.makes_model else f"{task.value} of round {number},"
    return f"run {run} {what} attempt {attempt}"


def _ending(record: RoundRecord) -> str:
    if not record.committed:
        return "abandoned"
    return "committed" if record.task.makes_model else "done"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more if names else "none"


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "…"


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
