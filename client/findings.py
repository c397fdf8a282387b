"""What the checks of a client found, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

CheckVerdict: TypeAlias = Literal["pass", "warning", "wrong", "skipped"]


@dataclass(frozen=True, slots=True)
class ClientFinding:
    """What one check found."""

    check: str  # the name of the check, such as "determinism"
    verdict: CheckVerdict
    found: str  # one sentence
    advice: str = ""  # what to do; empty if there is nothing to do

    def __str__(self) -> str:
        return f"{self.check}: {self.verdict}: {self.found}" + (f". {self.advice}" if self.advice else "")


@dataclass(frozen=True, slots=True)
class ClientCheck:
    """All findings about one client, in the order of the checks."""

    findings: tuple[ClientFinding, ...]

    @property
    def wrong(self) -> tuple[ClientFinding, ...]:
        """What must be corrected: the client's loop would refuse it, or the model would suffer."""
        return self._with("wrong")

    @property
    def warnings(self) -> tuple[ClientFinding, ...]:
        """What works, and may surprise."""
        return self._with("warning")

    def verdict_of(self, check: str) -> CheckVerdict:
        """The worst verdict of this check. Raises `KeyError` if there is no such check."""
        verdicts: list[CheckVerdict] = [one.verdict for one in self.findings if one.check == check]
        if not verdicts:
            raise KeyError(f"no check has the name {check!r}; the checks are {', '.join(self.names)}")
        return worst(verdicts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.check for one in self.findings))

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))

    def _with(self, verdict: CheckVerdict) -> tuple[ClientFinding, ...]:
        return tuple(one for one in self.findings if one.verdict == verdict)


def worst(verdicts: Sequence[CheckVerdict]) -> CheckVerdict:
    """The worst of these verdicts, at least one."""
    order: tuple[CheckVerdict, ...] = ("skipped", "pass", "warning", "wrong")
    return max(verdicts, key=order.index)


def passed(check: str, found: str) -> ClientFinding:
    return ClientFinding(check, "pass", found)


def warned(check: str, found: str, advice: str) -> ClientFinding:
    return ClientFinding(check, "warning", found, advice)


def wrong(check: str, found: str, advice: str) -> ClientFinding:
    return ClientFinding(check, "wrong", found, advice)


def skipped(check: str, why: str) -> ClientFinding:
    return ClientFinding(check, "skipped", why)
