"""Moves the generator of torch and of numpy's RandomState, the Mersenne Twister MT19937, far ahead in one step.

Its outputs are linear in its state: each output is the sum (XOR) of some of the 19,937 before it, always the same ones,
which `_SUM` lists. Any later output is therefore a sum of the next 19,937 as well. Which ones is the remainder of a
power of x by the polynomial whose terms are those of `_SUM`. Its computation takes 60 to 80 ms whatever the distance,
as long as 20 million outputs one by one.
"""

import functools
from typing import Final

import numpy
from numpy.typing import NDArray

# Outputs from which on the remainder is quicker.
JUMP_DRAWS: Final = 20_000_000

_WORDS: Final = 624  # of the state
_DEGREE: Final = 19_937
# Output n + 19,937 is the sum of the outputs n + e, for these e. (Derived from outputs, as the shortest linear
# recurrence of any bit of them. The tests compare with outputs that are drawn one by one.)
_SUM: Final = (
    0, 1189, 1416, 1585, 1643, 1870, 2493, 2773, 3000, 3227, 3454, 3681, 3908, 4135, 4362, 4753, 5661, 6337,
    6569, 7129, 7477, 7525, 7583, 7752, 7979, 8206, 9505, 9901, 9969, 10128, 10693, 10761, 10920, 11089, 11147,
    11157, 11215, 11321, 11374, 11384, 11485, 11611, 11712, 11717, 11838, 11881, 11944, 11997, 12277, 12335,
    12393, 12504, 12509, 12620, 12673, 12731, 12736, 12789, 12905, 12958, 12963, 13137, 13185, 13190, 13243,
    13301, 13412, 13528, 13533, 13639, 13697, 13760, 13813, 13866, 14093, 14151, 14209, 14320, 14325, 14436,
    14547, 14552, 14605, 14721, 14774, 14779, 14953, 15001, 15006, 15059, 15117, 15228, 15344, 15349, 15455,
    15513, 15576, 15629, 15682, 15909, 15967, 16025, 16136, 16141, 16252, 16363, 16368, 16421, 16537, 16590,
    16595, 16817, 16822, 16875, 16933, 17044, 17160, 17271, 17329, 17445, 17498, 17725, 17783, 17841, 17952,
    18068, 18179, 18237, 18406, 18633, 18691, 18860, 19087, 19314,
)  # fmt: skip
_BELOW: Final = (1 << _DEGREE) - 1


def skip_draws(generator: numpy.random.RandomState, draws: int) -> None:
    """Advance the generator by *draws* outputs of 32 bits."""
    if draws < JUMP_DRAWS:
        generator._bit_generator.random_raw(draws, output=False)
        return
    outputs = generator.randint(0, 2**32, size=_DEGREE + _WORDS, dtype=numpy.uint32)
    windows = numpy.lib.stride_tricks.sliding_window_view(outputs, _WORDS)[_terms(_power(draws))]
    later = numpy.bitwise_xor.reduce(windows, axis=0)
    generator.set_state(("MT19937", _untempered(later), 0, 0, 0.0))


@functools.lru_cache(maxsize=4)
def _power(exponent: int) -> int:
    """Return x to the power of *exponent*, modulo the generator's polynomial: a polynomial over GF(2), bit e for
    x^e."""
    steps = max(0, exponent.bit_length() - 14)
    power = 1 << (exponent >> steps)  # below x^16384
    for step in reversed(range(steps)):
        power = _remainder(_squared(power) << (exponent >> step & 1))
    return power


def _squared(polynomial: int) -> int:
    """Return the square: over GF(2) it has the same terms, at twice their exponents."""
    raw = polynomial.to_bytes(-(-_DEGREE // 8), "little")
    return int.from_bytes(_spread()[numpy.frombuffer(raw, numpy.uint8)].tobytes(), "little")


@functools.cache
def _spread() -> NDArray[numpy.uint16]:
    """Return for each byte its bits with a zero behind each: shape (256,), uint16 little-endian."""
    bits = numpy.unpackbits(numpy.arange(256, dtype=numpy.uint8)[:, None], axis=1, bitorder="little")
    spread: NDArray[numpy.uint16] = (bits.astype("<u2") << numpy.arange(0, 16, 2, dtype="<u2")).sum(1, dtype="<u2")
    return spread


def _remainder(polynomial: int) -> int:
    while high := polynomial >> _DEGREE:
        polynomial &= _BELOW
        for exponent in _SUM:
            polynomial ^= high << exponent
    return polynomial


def _terms(polynomial: int) -> NDArray[numpy.int64]:
    """Return the exponents of its terms: one dimension, int64."""
    raw = numpy.frombuffer(polynomial.to_bytes(-(-_DEGREE // 8), "little"), numpy.uint8)
    return numpy.flatnonzero(numpy.unpackbits(raw, bitorder="little"))


def _untempered(outputs: NDArray[numpy.uint32]) -> NDArray[numpy.uint32]:
    """Return the words of the state that have these outputs: shape (n,), uint32."""
    words = outputs ^ (outputs >> numpy.uint32(18))
    words ^= (words << numpy.uint32(15)) & numpy.uint32(0xEFC60000)
    found = words
    for _ in range(4):  # each round makes 7 more bits right
        found = words ^ ((found << numpy.uint32(7)) & numpy.uint32(0x9D2C5680))
    words = found
    for _ in range(2):  # 11 more bits
        found = words ^ (found >> numpy.uint32(11))
    return found
