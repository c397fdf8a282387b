"""Base-2 logarithms made of products, so that every machine gets the same bits. Libraries differ in the last ones."""

import math

_DIGITS = 40


def ceil_log2(value: float) -> int:
    """The least integer not below log2(value), for a finite value above zero."""
    mantissa, exponent = _halved(value)
    return exponent - (mantissa == 0.5)


def log2(value: float) -> float:
    """log2(value) of a finite value above zero, to 2^-40: squared, a number has twice the logarithm."""
    mantissa, exponent = _halved(value)
    mantissa, digits = 2 * mantissa, exponent - 1
    for _ in range(_DIGITS):
        mantissa *= mantissa
        digits *= 2
        if mantissa >= 2:
            mantissa, digits = mantissa / 2, digits + 1
    return math.ldexp(digits, -_DIGITS)


def _halved(value: float) -> tuple[float, int]:
    """m and e of m 2^e, with 1/2 <= m < 1."""
    if not 0 < value < math.inf:
        raise ValueError(f"only a finite value above zero has a logarithm, not {value!r}")
    return math.frexp(value)
