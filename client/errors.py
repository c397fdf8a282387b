"""What can go wrong for a client, by whose fault it is and by what helps.

```
ClientError                       `str(error)` is one sentence that says what to do
├── CoordinatorRefused            a problem document that the same request would get again; has `kind` and `detail`
│   ├── Redirected                elsewhere: where a model lies; anywhere else, a refusal like any other
│   ├── AccessRefused             this client, key, token, name or clock is not welcome: a person must act
│   └── AssignmentClosed          the round no longer wants this work: check in again
├── TryAgain                      the same request may succeed in a moment; retried with back-off, rarely seen outside
│   ├── LinkFailed                where the coordinator sent us there is no model, or no way to it
│   ├── CoordinatorUnreachable    no answer, or one that broke off
│   └── CoordinatorBusy           429, 5xx (a restart, say), or a nonce that a proxy's own retry has used up
├── OutOfTime                     retried to the end of the window in vain
├── CoordinatorMisbehaved         an answer that breaks the protocol: too large, wrong digest, not what was asked for
├── WorkRefused                   this client will not do or send this work, such as an update that is not finite
│   ├── AttemptRefused            what it refuses is of this attempt alone; the next is another matter
│   │   ├── TooLittleDone         less of the work than a masked update must have; nothing else is told
│   │   └── StrangersInvited      clients that are not on the member list, whom the operator may have let in by mistake
│   └── UnfitWork                 its training failed in a secure round, or is not finite; nothing else is told
├── Alarm                         a secure round in which somebody lies, or lets out what must stay in
├── TrainingFailed                the site's own code failed, several times in a row
├── TooManyFailures               of this run's secure rounds, those before a restart too: a person must look
├── StateError                    the state directory is in use, or damaged
└── AppError                      `--app`, say, does not name what it should
```
"""

from pydantic import ValidationError

from umbel.aggregation.secagg.errors import BadKey, Disagreement, ForgedMessage, SecAggError, TooFew
from umbel.client.printable import printable

_PLACE_CHARS_MAX = 200
NO_REASON = "this client does not take part in this attempt"


class ClientError(Exception):
    """One sentence that says what to do."""

    @property
    def public_reason(self) -> str:
        """What the coordinator may hear of it."""
        return str(self)


class CoordinatorRefused(ClientError):
    """The coordinator said no, for good. `kind`: the last part of the problem's `type`; `status`: HTTP's."""

    def __init__(self, kind: str, detail: str, status: int) -> None:
        super().__init__(f"the coordinator refused ({kind}): {detail}")
        self.kind, self.detail, self.status = kind, detail, status


class Redirected(CoordinatorRefused):
    """`location`: as the coordinator gave it, not checked; `is_secure`: over TLS or not; `host`: the coordinator's."""

    def __init__(self, kind: str, detail: str, status: int, location: str, is_secure: bool, host: str) -> None:
        super().__init__(kind, detail, status)
        self.location, self.is_secure, self.host = location, is_secure, host


class AccessRefused(CoordinatorRefused):
    pass


class AssignmentClosed(CoordinatorRefused):
    pass


class TryAgain(ClientError):
    """`retry_after_s`: how long the coordinator asked us to wait, 0 if it did not say. `has_other`: it has another
    address that has not failed, so that there is nothing to wait for.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0, has_other: bool = False) -> None:
        super().__init__(reason)
        self.retry_after_s, self.has_other = retry_after_s, has_other


class LinkFailed(TryAgain):
    """Says the same whatever it was: a coordinator may get to read it, and is not to learn of our network."""

    def __init__(self) -> None:
        super().__init__("the coordinator's link to the model did not work; it is asked again")


class CoordinatorUnreachable(TryAgain):
    pass


class CoordinatorBusy(TryAgain):
    """`is_down`: this replica of it cannot answer (5xx), another might."""

    def __init__(self, reason: str, retry_after_s: float = 0.0, is_down: bool = False) -> None:
        super().__init__(reason, retry_after_s)
        self.is_down = is_down


class OutOfTime(ClientError):
    pass


class CoordinatorMisbehaved(ClientError):
    pass


class WorkRefused(ClientError):
    """`told`: what the coordinator hears in the place of a sentence that is none of its business."""

    def __init__(self, what: str, public_reason: str = "") -> None:
        super().__init__(what)
        self._public_reason = public_reason

    @property
    def public_reason(self) -> str:
        return self._public_reason or str(self)


class BudgetSpent(WorkRefused):
    """A private round for which a budget of this site has no room. The refusal says how this round's cost, which the
    coordinator chooses, compares with what is left, which may be other coordinators' affair.
    """


class AttemptRefused(WorkRefused):
    """An attempt that this client takes no part in, or no longer. It is no failure: the client goes on."""


class StrangersInvited(AttemptRefused):
    """`told`: no name, for whoever asks may have made the stranger up."""

    @property
    def public_reason(self) -> str:
        return "the cohort is not of the member list"


class TooLittleDone(AttemptRefused):
    """`told`: no reason, for how much of its work a site has done is nobody's business."""

    @property
    def public_reason(self) -> str:
        return NO_REASON


class UnfitWork(WorkRefused):
    """Its reason hangs on the site's data, so the coordinator hears none. Private rounds have no such refusal."""

    @property
    def public_reason(self) -> str:
        return NO_REASON


class Alarm(ClientError):
    """`told`: without a number or a name, for whoever asks may be the one who lies."""

    def __init__(self, what: str, public_reason: str) -> None:
        super().__init__(what)
        self._public_reason = public_reason

    @property
    def public_reason(self) -> str:
        return self._public_reason


class TrainingFailed(ClientError):
    pass


class TooManyFailures(ClientError):
    pass


class StateError(ClientError):
    pass


class AppError(ClientError):
    pass


_ACCESS = {
    "malformed-signature",
    "bad-signature",
    "stale-signature",
    "client-removed",
    "unbound-name",
    "not-a-member",
    "unknown-token",
    "expired-token",
    "token-used",
    "token-mismatch",
    "name-taken",
    "key-taken",
    "admin-key-refused",
}
_CLOSED = {"assignment-closed", "unknown-assignment"}
_TOLD: tuple[tuple[type[SecAggError], str], ...] = (
    (Disagreement, "the coordinator contradicts itself or states something impossible"),
    (ForgedMessage, "a message of this round is not signed by its stated sender"),
    (BadKey, "a key in this round is invalid or used twice"),
    (TooFew, "too few clients for this client to take part"),
)
_OTHERWISE = "a message of this round breaks the protocol"
_SILENT = "This client sends nothing more in this attempt"


def refusal_of(kind: str, detail: str, status: int) -> CoordinatorRefused:
    """The refusal of the right type for a problem's kind."""
    if kind in _ACCESS:
        return AccessRefused(kind, detail, status)
    return (AssignmentClosed if kind in _CLOSED else CoordinatorRefused)(kind, detail, status)


def alarm_of(error: SecAggError) -> Alarm:
    """The alarm that an error of the protocol is."""
    public_reason = next((words for kind, words in _TOLD if isinstance(error, kind)), _OTHERWISE)
    return Alarm(f"{public_reason}: {error}. {_SILENT}", f"{public_reason}. {_SILENT}")


def first_finding(error: ValidationError, whole: str) -> str:
    """What is wrong, naming the field, or `whole` where none is to blame. Pydantic's own text would quote the input,
    and an unknown field's name is a stranger's.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    where = printable(".".join(map(str, first["loc"]))[:_PLACE_CHARS_MAX])
    return f"{where or whole}: {first['msg'].removeprefix('Value error, ')}"
