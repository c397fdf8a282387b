"""The terms of a run that a site saw when it decided to take part, and what it refuses because of them. Pure."""

from dataclasses import dataclass

from umbel.aggregation.messages import OpenRun
from umbel.aggregation.plans.masks import SecurePlan
from umbel.client.errors import WorkRefused


@dataclass(frozen=True, slots=True)
class DecidedTerms:
    """How much a run hides of a site's updates. The site refuses a round that hides less."""

    is_secure: bool  # updates are masked
    minimum: int  # the fewest clients in a sum; without masks it protects nothing, and is not checked
    is_private: bool  # clients add noise

    @classmethod
    def of(cls, run: OpenRun) -> "DecidedTerms":
        """The terms that the coordinator lists for this run."""
        return cls(run.is_secure, run.minimum, run.is_private)

    def check_plain(self) -> None:
        """Raise `WorkRefused` for a round without masks, if the run was listed with them."""
        if self.is_secure:
            raise WorkRefused(
                "the coordinator listed this run as one with secure aggregation, and this round would show the "
                "coordinator the update: ask the operator why"
            )

    def check_secure(self, plan: SecurePlan) -> None:
        """Raise `WorkRefused` for a round whose sums may be over fewer clients than listed, or that lacks the noise."""
        if not self.is_secure:
            return
        if plan.minimum < self.minimum:
            raise WorkRefused(
                f"the coordinator listed this run as one with sums of at least {self.minimum} clients, and a sum of "
                f"this round may have only {plan.minimum}: ask the operator why"
            )
        if self.is_private and not plan.is_private:
            raise WorkRefused(
                "the coordinator listed this run as one whose clients add noise, and this round has no noise: ask the "
                "operator why"
            )
