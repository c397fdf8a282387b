"""What can be wrong in secure aggregation, each its own type; `str(error)` is one sentence and holds no secret.

```
SecAggError(ValueError)
├── BadKey             a public key that no honest client makes, or one that stands twice in a roster
├── BadShare           a share that was not sealed for its holder, is no number of the field, or not the committed one
├── BadSelfMask        a self mask that is not the committed one
├── MalformedMessage   bytes that are no message of the protocol, or not of this length
├── Disagreement       a coordinator that says different things, or what cannot be: there is nothing more to say to it
├── ChangedMessage     a client's message after another one of the same kind: in one attempt it says one thing only
├── OutOfTurn          ours: a step that is not this client's to take now
├── TooFew             fewer clients than the floor or the threshold
├── CheatingDealer     clients whose shares are those they committed to, and do not make their secrets
├── ForgedMessage      a message that its sender's identity key has not signed
├── BadSharing         ours: a threshold or points with which no secret can be shared or put together
└── NoSecret           shares that lie on no polynomial whose value at zero is a secret: one of them was changed
```
"""

from collections.abc import Mapping

from umbel.aggregation.phrases import some


class SecAggError(ValueError):
    """Something in a secure round is not as the protocol has it."""


class BadKey(SecAggError):
    pass


class BadShare(SecAggError):
    pass


class BadSelfMask(SecAggError):
    pass


class ForgedMessage(SecAggError):
    pass


class BadSharing(SecAggError):
    pass


class NoSecret(SecAggError):
    pass


class MalformedMessage(SecAggError):
    pass


class Disagreement(SecAggError):
    pass


class ChangedMessage(SecAggError):
    pass


class OutOfTurn(SecAggError):
    pass


class TooFew(SecAggError):
    pass


class CheatingDealer(SecAggError):
    """`dealers`: the name of each, by its index; `words`: what each has done."""

    words = "dealt wrong shares: they are those that were committed to, and do not make the secret"

    def __init__(self, dealers: Mapping[int, str]) -> None:
        have = "has" if len(dealers) == 1 else "have"
        super().__init__(f"{some(list(dealers.values()))} {have} {self.words}")
        self.dealers = dict(dealers)
