"""A round that goes well, step by step, for one client: what it is told, and what it answers."""

from dataclasses import dataclass

from tests.aggregation.secagg.attacks.adversary import advertised, masked
from tests.aggregation.secagg.federation import Federation
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.messages import ShareKeys, encode_agreements, encode_indices

VICTIM = 0
STEPS = ("share", "hear", "sign_input", "agree", "reveal")


@dataclass
class Told:
    """What a coordinator tells the victim in a round that goes well, and what it answers."""

    federation: Federation
    said: dict[str, bytes]
    answers: dict[str, object]

    @property
    def victim(self) -> SecureClient:
        return self.federation.clients[VICTIM]


def told(until: str = "reveal") -> Told:
    """A round of five in which the victim has taken every step up to this one."""
    federation = advertised(5)
    federation.share(without=[VICTIM])
    victim, said, answers = federation.clients[VICTIM], dict[str, bytes](), dict[str, object]()

    def say(step: str, data: bytes) -> bool:
        said[step] = data
        answers[step] = getattr(victim, step)(data)
        return step == until

    if say("share", federation.roster):
        return Told(federation, said, answers)
    message = answers["share"]
    assert isinstance(message, bytes)
    federation.dealt[VICTIM] = ShareKeys.decode(message, VICTIM, federation.session.neighbours(VICTIM))
    for index in range(1, 5):
        federation.clients[index].hear(federation.inbox(index))
        masked(federation.clients[index])
    federation.inputs = (0, 1, 2, 3, 4)
    if say("hear", federation.inbox(VICTIM)) or say("sign_input", bytes(32)):
        return Told(federation, said, answers)
    if say("agree", encode_indices(federation.inputs)):
        return Told(federation, said, answers)
    federation.agree()
    say("reveal", encode_agreements(federation.agreed))
    return Told(federation, said, answers)
