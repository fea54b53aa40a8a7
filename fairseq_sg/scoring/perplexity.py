"""Perplexity from a cross entropy in bits."""

from __future__ import annotations

import math


def perplexity(bits: float) -> float:
    """2 to the cross entropy; infinity where float64 ends."""
    return math.inf if bits >= 1024 else 2**bits
