"""The errors of secure aggregation. `str(error)` is one sentence, without secrets.

```
SecAggError(ValueError)
├── BadKey             a public key that no honest client makes, or that a roster has twice
├── BadShare           a share that was not sealed for its holder, is not in the field, or is not the committed one
├── BadSelfMask        a self mask that is not the committed one
├── MalformedMessage   bytes that are not a message of the protocol, or have another length
├── Disagreement       a coordinator that contradicts itself: the client sends it nothing more
├── ChangedMessage     a client's second, different message of one kind in one attempt
├── OutOfTurn          our own fault: a step at the wrong time
├── TooFew             fewer clients than the floor or the threshold
├── CheatingDealer     clients whose committed shares do not make their secrets
├── ForgedMessage      a message without its sender's signature
├── BadSharing         our own fault: a threshold or points with which no secret can be shared
└── NoSecret           shares that make no secret: one of them was changed
```
"""

from collections.abc import Mapping

from umbel.aggregation.phrases import some


class SecAggError(ValueError):
    """A violation of the protocol in a secure round."""


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
    """Clients that dealt wrong shares. `dealers`: their names, by index."""

    words = "dealt wrong shares: they match the commitments, but do not make the secret"

    def __init__(self, dealers: Mapping[int, str]) -> None:
        have = "has" if len(dealers) == 1 else "have"
        super().__init__(f"{some(list(dealers.values()))} {have} {self.words}")
        self.dealers = dict(dealers)
