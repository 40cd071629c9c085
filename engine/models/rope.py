"""Rotary positions: how far the angles of each pair of a head turn, and the scalings that stretch them.

A scaling is one divisor for each pair, fixed when the model is loaded: keys that are cached stay right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """theta: the base of the frequencies. divisors: what each pair's frequency is divided by; None: nothing. magnitude:
    rotated queries and keys are this much longer (YaRN)."""

    theta: float
    divisors: tuple[float, ...] | None = None
    magnitude: float = 1.0

    def inv_freq(self, head_dim: int) -> npt.NDArray[np.float64]:
        """Rotary frequencies, [head_dim / 2], in radians per position (RoFormer, arXiv 2104.09864)."""
        freqs = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        return freqs if self.divisors is None else freqs / np.asarray(self.divisors)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rope:
        divisors = data["divisors"]
        return cls(data["theta"], None if divisors is None else tuple(divisors), data["magnitude"])


def scaled_rope(kind: str, options: Mapping[str, Any], head_dim: int, theta: float, context: int) -> Rope:
    """The rotary positions of a scaling by the names of Hugging Face's rope_parameters.

    context: max_position_embeddings. Raises ModelError for a kind that is not known, KeyError for a missing option,
    ValueError, TypeError or ArithmeticError for one that makes no sense.
    """
    match kind:
        case "default" | "dynamic":
            # Dynamic NTK changes the angles only beyond the trained context, where this engine never goes.
            return Rope(theta)
        case "linear":
            return Rope(theta, _mixed([0.0] * (head_dim // 2), float(options["factor"])))
        case "llama3":
            return _llama3(options, head_dim, theta, context)
        case "yarn":
            return _yarn(options, head_dim, theta, context)
    raise ModelError(f"the rope scaling {kind!r} is not supported (these are: {', '.join(ROPE_TYPES)})")


def _llama3(options: Mapping[str, Any], head_dim: int, theta: float, context: int) -> Rope:
    """Llama 3.1: short waves stay, long ones are interpolated, and in between the two are mixed."""
    factor, low, high = (float(options[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(options.get("original_max_position_embeddings") or context)
    wavelengths = [2 * math.pi * theta ** (2 * pair / head_dim) for pair in range(head_dim // 2)]
    kept = [_between(0.0, (trained / wavelength - low) / (high - low), 1.0) for wavelength in wavelengths]
    return Rope(theta, _mixed(kept, factor))


def _yarn(options: Mapping[str, Any], head_dim: int, theta: float, context: int) -> Rope:
    """YaRN (arXiv 2309.00071): as above, by how often a pair turns within the trained context; and longer vectors."""
    trained = float(options.get("original_max_position_embeddings") or context)
    given = options.get("factor")
    factor = context / trained if given is None else float(given)
    fast, slow = float(options.get("beta_fast") or 32), float(options.get("beta_slow") or 1)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(fast), pair_that_turns(slow)
    if options.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    kept = [1.0 - _between(0.0, (pair - first) / width, 1.0) for pair in range(head_dim // 2)]
    magnitude = options.get("attention_factor")
    if magnitude is None:
        mscale, over_all = options.get("mscale"), options.get("mscale_all_dim")
        if mscale and over_all:
            magnitude = _growth(factor, float(mscale)) / _growth(factor, float(over_all))
        else:
            magnitude = _growth(factor, 1.0)
    return Rope(theta, _mixed(kept, factor), float(magnitude))


def _mixed(kept: list[float], factor: float) -> tuple[float, ...]:
    """Divisors for frequencies of which the share `kept` stays and the rest is divided by `factor`."""
    if factor <= 0:
        raise ValueError(f"a rope factor must be positive, not {factor}")
    return tuple(1.0 / ((1.0 - share) / factor + share) for share in kept)


def _growth(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _between(low: float, value: float, high: float) -> float:
    return min(high, max(low, value))
