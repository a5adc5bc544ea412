"""Counter-based random numbers: a draw is a function of (seed, branch, position) and nothing else."""

from __future__ import annotations

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, branch: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53, equal on every machine.

    Each counter is absorbed by one round of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014; the finaliser is Stafford's mix 13).
    """
    state = 0
    for word in (seed, branch, position):
        state = _mix((state ^ (word & _MASK)) + _GAMMA)
    return (state >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
