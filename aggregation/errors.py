"""Every way a peer can be wrong, each its own type with its own name on the wire.

```
ProtocolViolation                 the peer's fault: answered with a problem document, changes nothing
├── UpdateRefused                 what was uploaded cannot be folded
│   ├── MalformedUpdate           bad magic, version, reserved bytes, or a header cut short
│   ├── LyingLength               a declared length differs from what the plan, or the body, says
│   ├── WrongLayout               the layout digest is not the model's
│   ├── WrongCodec                a codec the plan did not ask for
│   ├── NonFiniteUpdate           a NaN or an infinity
│   └── UpdateOutOfRange          a value outside the public grid
├── ReportRefused                 the numbers beside the update make no sense (counts, metrics)
└── SignatureRefused              unsigned, badly signed, too old, from the future, or replayed
    ├── MalformedSignature
    ├── BadSignature
    ├── StaleSignature
    └── ReplayedNonce
LayoutError(ValueError)           ours: a state dict that cannot be laid out, or two that differ
ModelOverflow(ValueError)         ours: a step that takes the model out of its numbers' range
```

`kind` is the last path segment of the problem document's `type` (RFC 9457); it never changes once published.
"""

from typing import ClassVar


class ProtocolViolation(Exception):
    """A peer's message that is refused; `str(error)` is one sentence that says what to do."""

    kind: ClassVar[str] = "protocol-violation"


class UpdateRefused(ProtocolViolation):
    kind = "update-refused"


class MalformedUpdate(UpdateRefused):
    kind = "malformed-update"


class LyingLength(UpdateRefused):
    kind = "lying-length"


class WrongLayout(UpdateRefused):
    kind = "wrong-layout"


class WrongCodec(UpdateRefused):
    kind = "wrong-codec"


class NonFiniteUpdate(UpdateRefused):
    kind = "non-finite-update"


class UpdateOutOfRange(UpdateRefused):
    kind = "update-out-of-range"


class ReportRefused(ProtocolViolation):
    kind = "report-refused"


class SignatureRefused(ProtocolViolation):
    kind = "signature-refused"


class MalformedSignature(SignatureRefused):
    kind = "malformed-signature"


class BadSignature(SignatureRefused):
    kind = "bad-signature"


class StaleSignature(SignatureRefused):
    kind = "stale-signature"


class ReplayedNonce(SignatureRefused):
    kind = "replayed-nonce"


class LayoutError(ValueError):
    """A state dict that cannot be laid out as one float32 vector, or that differs from the layout asked for."""


class ModelOverflow(ValueError):
    """A step that would leave the finite range of the model's numbers: there is no next model."""
