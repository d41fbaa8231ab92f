"""MXFP4 in exact rational arithmetic, written from the definitions and sharing no code with the engine."""

from __future__ import annotations

from fractions import Fraction

MAGNITUDES = (
    Fraction(0),
    Fraction(1, 2),
    Fraction(1),
    Fraction(3, 2),
    Fraction(2),
    Fraction(3),
    Fraction(4),
    Fraction(6),
)


def floor_log2(value: Fraction) -> int:
    """Return the largest e with 2^e <= value."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if Fraction(2) ** e <= value else e - 1


def bumps(n: Fraction) -> dict[str, bool]:
    """Return which modes double the scale of a block whose amax is n units, 4 <= n < 8."""
    assert 4 <= n < 8
    return {
        "floor": False,
        "ceil": n > 4,
        "rceil": n > 6,
        "even": n >= 7,
        "midmax": n > 7,
        "uos": n >= Fraction(29, 4),
        "uos6": n >= 6,
    }


def scale_codes(amax: Fraction) -> dict[str, int]:
    """Return the E8M0 code of every mode for a finite amax."""
    if amax == 0:
        return dict.fromkeys(bumps(Fraction(4)), 0)
    e = floor_log2(amax)
    return {mode: min(max(e - 2 + bump + 127, 0), 252) for mode, bump in bumps(amax / Fraction(2) ** (e - 2)).items()}


def scale(code: int) -> Fraction:
    """Return the value of a finite scale code."""
    return Fraction(2) ** (code - 127)


def round_nearest(q: Fraction) -> int:
    """Return the code 0..7 nearest to q >= 0, ties to the even code, above 6 the largest."""
    best = min(range(8), key=lambda code: (abs(MAGNITUDES[code] - q), code % 2))
    return best if q < 6 else 7


def neighbours(q: Fraction) -> tuple[Fraction, Fraction]:
    """Return the E2M1 values around 0 <= q < 6: the largest not above it and the next one."""
    low = max(code for code in range(8) if MAGNITUDES[code] <= q)
    return MAGNITUDES[low], MAGNITUDES[low + 1]


def goes_up(q: Fraction, r: int) -> bool:
    """Tell whether stochastic rounding of 0 <= q < 6 takes the upper neighbour for the noise r in 0..65535.

    Below 1 iff the distance exceeds (r + 1/2) / 2^16. From 1 on, the mantissa (22 bits after the first) plus
    r * 2^6 + 32 must carry, that is reach the cell's width.
    """
    low, high = neighbours(q)
    t = (q - low) / (high - low)
    if q < 1:
        return Fraction(2 * r + 1, 2) < t * 65536
    return t * 2**22 + 64 * r + 32 >= 2**22
