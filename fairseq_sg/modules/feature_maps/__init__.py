"""Feature maps φ of linear attention, chosen by ``--feature-map``; ``base`` has the interface of a map."""

from __future__ import annotations

from typing import Any

from fairseq_sg.modules.feature_maps.base import FEATURE_MAP_REGISTRY, FeatureMap, register_feature_map
from fairseq_sg.modules.feature_maps.cosformer import CosformerFeatureMap
from fairseq_sg.modules.feature_maps.dpfp import DPFPFeatureMap
from fairseq_sg.modules.feature_maps.elementwise import (
    EluFeatureMap,
    ExpFeatureMap,
    IdentityFeatureMap,
    ReluFeatureMap,
)
from fairseq_sg.modules.feature_maps.hedgehog import HedgehogFeatureMap
from fairseq_sg.modules.feature_maps.mlp import MLPFeatureMap
from fairseq_sg.modules.feature_maps.performer import PerformerFeatureMap
from fairseq_sg.modules.feature_maps.rebased import RebasedFeatureMap
from fairseq_sg.modules.feature_maps.squared import SquaredFeatureMap
from fairseq_sg.modules.feature_maps.t2r import T2RFeatureMap
from fairseq_sg.modules.feature_maps.taylor import TaylorFeatureMap


def build_feature_map(name: str, head_dim: int, **options: Any) -> FeatureMap:
    """The map ``name`` for heads of width ``head_dim``. Raises UsageError for an unknown name or a wrong option."""
    return FEATURE_MAP_REGISTRY.find(name)(head_dim, **options)
