"""What can be wrong in secure aggregation, each its own type; `str(error)` is one sentence and holds no secret.

```
SecAggError(ValueError)
├── BadKey             a public key that no honest client makes, or one that stands twice in a roster
├── BadShare           a share that was not sealed for its holder, is no number of the field, or not the committed one
├── BadSelfMask        a self mask that is not the committed one
├── MalformedMessage   bytes that are no message of the protocol, or not of this length
├── Disagreement       a coordinator that says different things, or what cannot be: there is nothing more to say to it
├── OutOfTurn          ours: a step that is not this client's to take now
├── TooFew             fewer clients than the floor or the threshold
├── CheatingDealer     a client whose shares are those it committed to, and do not make its secret
├── ForgedMessage      a message that its sender's identity key has not signed
├── BadSharing         ours: a threshold or points with which no secret can be shared or put together
└── NoSecret           shares that lie on no polynomial whose value at zero is a secret: one of them was changed
```
"""


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


class OutOfTurn(SecAggError):
    pass


class TooFew(SecAggError):
    pass


class CheatingDealer(SecAggError):
    """`dealer`: its index."""

    def __init__(self, message: str, dealer: int) -> None:
        super().__init__(message)
        self.dealer = dealer
