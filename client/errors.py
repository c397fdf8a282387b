"""What can go wrong for a client, by whose fault it is and by what helps.

```
ClientError                       `str(error)` is one sentence that says what to do
├── CoordinatorRefused            a problem document that the same request would get again; has `kind` and `detail`
│   ├── Redirected                the model is at another address; for any other request an ordinary refusal
│   ├── AccessRefused             this client, key, token, name or clock is refused: a person must act
│   └── AssignmentClosed          the round no longer wants this work: check in again
├── CertificateRefused            this machine does not accept the certificate of a coordinator that it never reached
├── TryAgain                      the same request may succeed in a moment; `patiently` repeats it with back-off
│   ├── LinkFailed                the coordinator's link brought no model
│   ├── CoordinatorUnreachable    no answer, or one that broke off
│   ├── CoordinatorBusy           429, 5xx (such as a restart), or a nonce that a proxy's own retry has used
│   └── NotACoordinator           a page, which a proxy or a login page of the network has sent in its place
├── OutOfTime                     retried until the end of the window without success
├── CoordinatorMisbehaved         an answer that breaks the protocol: too large, wrong digest, not what was asked for
├── WorkRefused                   this client will not do or send this work, such as an update that is not finite
│   ├── AttemptRefused            it refuses only this attempt; the next may be different
│   │   ├── TooLittleDone         less of the work than a masked update must have; the coordinator gets no reason
│   │   └── StrangersInvited      clients that are not on the member list; the operator may have let them in by mistake
│   └── UnfitWork                 training failed or is not finite in a secure round; the coordinator gets no reason
├── Alarm                         a secure round in which a party lies or could reveal what must stay hidden
├── TrainingFailed                the site's own code failed
├── CannotGoOn                this process must end; one that is started again goes on with its work
│   ├── CoordinatorGone       it gave no usable answer for as long as this client was told to wait
│   └── RankFailed            the site's own code failed on some ranks of a silo, so they are no longer in step
├── TooManyFailures               in this run's secure rounds, over all restarts: a person must look
├── StateError                    the state directory is in use, or damaged
│   └── NotEnrolled               this client has no enrolment with the coordinator, and got no token for one
└── AppError                      a name such as `--app` does not name what it should
```
"""

from pydantic import ValidationError

from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.secagg.errors import BadKey, Disagreement, ForgedMessage, SecAggError, TooFew

TEXT_CHARS_MAX = 1000  # of a text that is shown
_PLACE_CHARS_MAX = 200
NO_REASON = "this client does not take part in this attempt"


class ClientError(Exception):
    """An error whose text is one sentence that says what to do. `public_reason`: the text that the coordinator sees."""

    default_public_reason = ""  # empty: the error's own text

    def __init__(self, what: str, public_reason: str = "") -> None:
        super().__init__(what)
        self.public_reason = public_reason or self.default_public_reason or what

    @property
    def is_final(self) -> bool:
        """Whether a client that is started again fails in the same way until a person acts."""
        return False


class CoordinatorRefused(ClientError):
    """The coordinator refused, finally. `kind`: the last part of the problem's `type`; `status`: the HTTP status;
    `tensors`: the run's rules, if the answer has them.
    """

    def __init__(self, kind: str, detail: str, status: int) -> None:
        super().__init__(f"the coordinator refused ({kind}): {detail}")
        self.kind, self.detail, self.status = kind, detail, status
        self.tensors: TensorRules | None = None


class Redirected(CoordinatorRefused):
    """`location` is unchecked. `is_secure`: whether the coordinator was asked over TLS; `host`: the coordinator's."""

    def __init__(self, kind: str, detail: str, status: int, location: str, is_secure: bool, host: str) -> None:
        super().__init__(kind, detail, status)
        self.location, self.is_secure, self.host = location, is_secure, host


class AccessRefused(CoordinatorRefused):
    @property
    def is_final(self) -> bool:
        return self.kind in _FINAL


class AssignmentClosed(CoordinatorRefused):
    pass


class CertificateRefused(ClientError):
    """A person must act. Once the coordinator has answered, a refused certificate is only `CoordinatorUnreachable`: the
    operator may renew it.
    """


class TryAgain(ClientError):
    """`retry_after_s`: the wait that the coordinator asked for, or 0.

    `has_other`: whether another of its addresses has not failed, so that no wait is needed.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0, has_other: bool = False) -> None:
        super().__init__(reason)
        self.retry_after_s, self.has_other = retry_after_s, has_other


class LinkFailed(TryAgain):
    """Its text is always the same: the coordinator may see it, and must not learn about this site's network."""

    def __init__(self) -> None:
        super().__init__("the coordinator's link to the model did not work; this client asks the coordinator again")


class CoordinatorUnreachable(TryAgain):
    pass


class CoordinatorBusy(TryAgain):
    """`is_down`: this replica cannot answer (5xx), and another might."""

    def __init__(self, reason: str, retry_after_s: float = 0.0, is_down: bool = False) -> None:
        super().__init__(reason, retry_after_s)
        self.is_down = is_down


class NotACoordinator(TryAgain):
    """`host`: that was asked, with its port; `page`: what came. Another address may lead to the coordinator."""

    is_down = True

    def __init__(self, host: str, page: str) -> None:
        super().__init__(
            f"the answer from {host} is not from an umbel coordinator ({page}, which a proxy or a login page of the "
            "network may have sent)"
        )


class OutOfTime(ClientError):
    pass


class CoordinatorMisbehaved(ClientError):
    pass


class WorkRefused(ClientError):
    pass


class BudgetSpent(WorkRefused):
    """A private round that would exceed this site's budget. The refusal may reveal something of rounds with others."""


class AttemptRefused(WorkRefused):
    """An attempt that this client declines or leaves. It is no failure: the client continues."""


class StrangersInvited(AttemptRefused):
    """The coordinator sees no name, because it may have invented the stranger."""

    default_public_reason = "the cohort has clients that are not on the member list"


class TooLittleDone(AttemptRefused):
    """The coordinator sees no reason, because the amount of work may depend on the site's data."""

    default_public_reason = NO_REASON


class UnfitWork(WorkRefused):
    """The coordinator sees no reason, because it depends on the site's data. Covered private rounds never raise it."""

    default_public_reason = NO_REASON


class Alarm(ClientError):
    """The coordinator sees no number and no name, because it may be the one that lies."""

    def __init__(self, what: str, public_reason: str) -> None:
        super().__init__(what, public_reason)


class TrainingFailed(ClientError):
    pass


def error_of_site(error: ClientError) -> BaseException | None:
    """The error that the site's own code raised, or None. The site's log shows its traceback."""
    failed = error.__cause__ if isinstance(error, UnfitWork) else error
    return failed.__cause__ if isinstance(failed, TrainingFailed) else None


class CannotGoOn(ClientError):
    pass


class CoordinatorGone(CannotGoOn):
    """`cause`: why the last request got no usable answer."""

    def __init__(self, silent_s: float, cause: str) -> None:
        super().__init__(
            f"the coordinator has given no usable answer for {silent_s:g} s, so this client ends, as it was told to. "
            f"The last request failed: {cause.rstrip('.')}. Start the client again to go on. What it has done in a "
            "plain round is kept"
        )


class RankFailed(CannotGoOn):
    """In a plain round the client declines with the public reason."""


class TooManyFailures(ClientError):
    pass


class StateError(ClientError):
    pass


class NotEnrolled(StateError):
    @property
    def is_final(self) -> bool:
        return True


class AppError(ClientError):
    pass


_FINAL = {
    "client-removed",
    "unbound-name",
    "not-a-member",
    "unknown-token",
    "expired-token",
    "token-used",
    "token-mismatch",
    "name-taken",
    "key-taken",
}
# A signature is refused for a wrong key, but also while a clock is wrong, or while a proxy in front of the coordinator
# rewrites requests. Then all sites are refused, and none of them should have to start its client by hand afterwards.
_ACCESS = {*_FINAL, "malformed-signature", "bad-signature", "stale-signature", "admin-key-refused"}
_CLOSED = {"assignment-closed", "unknown-assignment"}
_ALARMS: tuple[tuple[type[SecAggError], str], ...] = (
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
    """The alarm for an error of the secure protocol. The site's log has the details; the coordinator sees the kind."""
    public_reason = next((words for kind, words in _ALARMS if isinstance(error, kind)), _OTHERWISE)
    return Alarm(f"{public_reason}: {error}. {_SILENT}", f"{public_reason}. {_SILENT}")


def first_finding(error: ValidationError, whole: str) -> str:
    """The first error, with its field, or with `whole` if no field is at fault.

    Pydantic's own text would quote the input. The name of an unknown field comes from a peer, so it is made printable.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    where = printable(".".join(map(str, first["loc"]))[:_PLACE_CHARS_MAX])
    return f"{where or whole}: {first['msg'].removeprefix('Value error, ')}"


def printable(text: str) -> str:
    """A peer's text, safe to show: cut at `TEXT_CHARS_MAX`, and no escape sequence reaches a terminal or a log."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:TEXT_CHARS_MAX])
