"""The written contracts between core and plugins: frozen, torch-free declarations."""

from hp_core.contracts.adapter import FlowRule, Init, LayoutRule, ModelAdapter, Replacement, Stack
from hp_core.contracts.checkpoint import CheckpointMapping, KeyRule
from hp_core.contracts.extension import Command, RecipeSection
from hp_core.contracts.family import FamilyRequest, ModuleFamily, ResolvedFamily, SelectorSpec, VariantRule
from hp_core.contracts.hooks import HP_API, hookimpl
from hp_core.contracts.inventory import Inventory, ModuleInfo, TensorInfo
from hp_core.contracts.kernel import Kernel
from hp_core.contracts.layout import LayoutContext
from hp_core.contracts.parallel import NativeParallelBindingRequest, ParallelBinding, ParallelModuleSpec
from hp_core.contracts.placement import FirstRank, HeadSlice, Layout, Partial, Placement, Replicate, Shard, View
from hp_core.contracts.plan import (
    BoundaryPlan,
    BufferPlan,
    BuildPlan,
    CollectivePlan,
    ParameterPlan,
    RecomputePlan,
    ReplacementPlan,
    UnitPlan,
)
from hp_core.contracts.problem import Problem
from hp_core.contracts.protocol import (
    AttentionMask,
    CPContext,
    DispatchedExperts,
    EPContext,
    KeyValue,
    Protocol,
    ProtocolChoice,
    SequencePartition,
)
from hp_core.contracts.scheme import PrecisionScheme
from hp_core.contracts.sharding import ModuleShardingSpec, Port
from hp_core.contracts.transform import AddScalar, Transform, Transpose, Unflatten

__all__ = [
    "HP_API",
    "AddScalar",
    "AttentionMask",
    "BoundaryPlan",
    "BufferPlan",
    "BuildPlan",
    "CPContext",
    "CheckpointMapping",
    "CollectivePlan",
    "Command",
    "DispatchedExperts",
    "EPContext",
    "FamilyRequest",
    "FirstRank",
    "FlowRule",
    "HeadSlice",
    "Init",
    "Inventory",
    "Kernel",
    "KeyRule",
    "KeyValue",
    "Layout",
    "LayoutContext",
    "LayoutRule",
    "ModelAdapter",
    "ModuleFamily",
    "ModuleInfo",
    "ModuleShardingSpec",
    "NativeParallelBindingRequest",
    "ParallelBinding",
    "ParallelModuleSpec",
    "ParameterPlan",
    "Partial",
    "Placement",
    "Port",
    "PrecisionScheme",
    "Problem",
    "Protocol",
    "ProtocolChoice",
    "RecipeSection",
    "RecomputePlan",
    "Replacement",
    "ReplacementPlan",
    "Replicate",
    "ResolvedFamily",
    "SelectorSpec",
    "SequencePartition",
    "Shard",
    "Stack",
    "TensorInfo",
    "Transform",
    "Transpose",
    "Unflatten",
    "UnitPlan",
    "VariantRule",
    "View",
    "hookimpl",
]
