"""Fourier attention (Cao 2021), O = (LN(Q) LN(K)ᵀ) V / n · 1/√d_head: Galerkin attention's sum with other norms."""

from __future__ import annotations

from helpers.attention_cases import ROLES, Case
from helpers.attention_kinds import galerkin

CASES = [
    *(Case("fourier", role) for role in ROLES),
    *(Case("fourier", role, {"fourier_scale": "none"}) for role in ROLES),
    *(Case("fourier", role, position="rotary") for role in ("encoder", "decoder")),
]

reference = galerkin.reference
