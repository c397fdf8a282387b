"""The keys that a client may enrol: no point of small order, no second spelling of a point."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.messages import Enrolment

P = (1 << 255) - 19
D = -121665 * pow(121666, -1, P) % P
ORDER_8 = (
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
)
SMALL_ORDER = [(1).to_bytes(32, "little"), (P - 1).to_bytes(32, "little"), bytes(32), *map(bytes.fromhex, ORDER_8)]


def with_sign(raw: bytes) -> bytes:
    return raw[:31] + bytes([raw[31] | 0x80])


def enrol(raw: bytes) -> Enrolment:
    return Enrolment("token", "ward-7", base64.b64encode(raw).decode())


def doubled(y: int) -> int:
    """The y of twice a point of edwards25519 (-x^2 + y^2 = 1 + d x^2 y^2), which does not depend on the sign of x."""
    x2 = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    return (y * y + x2) * pow(1 - D * x2 * y * y, -1, P) % P


@pytest.mark.parametrize("raw", [*SMALL_ORDER, *map(with_sign, SMALL_ORDER)], ids=bytes.hex)
def test_a_key_of_small_order_is_refused(raw: bytes) -> None:
    y = int.from_bytes(raw, "little") & ((1 << 255) - 1)
    assert doubled(doubled(doubled(y))) == 1, "the table holds points of small order"
    with pytest.raises(ValueError, match="no private key"):
        enrol(raw)


@pytest.mark.parametrize("y", [P, P + 1, P + 3, (1 << 255) - 1])
def test_a_second_spelling_of_a_point_is_refused(y: int) -> None:
    for raw in (y.to_bytes(32, "little"), with_sign(y.to_bytes(32, "little"))):
        with pytest.raises(ValueError, match="no private key"):
            enrol(raw)


@pytest.mark.parametrize("n_bytes", [0, 31, 33])
def test_a_key_of_another_length_is_refused(n_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"32 raw bytes of an Ed25519 key, not {n_bytes}"):
        enrol(bytes([9]) * n_bytes)


def test_a_key_that_was_made_is_taken() -> None:
    raw = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    assert enrol(raw).public_key_bytes == raw
