"""The written contracts between core and plugins: frozen, torch-free declarations.

Names are imported on first use: a plugin's declarations load only the contracts that they use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_core.contracts.adapter import FlowRule, Init, LayoutRule, ModelAdapter, Replacement, Router, Stack
    from hp_core.contracts.checkpoint import CheckpointMapping, KeyRule
    from hp_core.contracts.extension import Command, RecipeSection
    from hp_core.contracts.family import FamilyContext, FamilyRequest, ModuleFamily, ResolvedFamily, SelectorSpec, VariantRule
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
        BuiltComponent,
        CollectivePlan,
        KernelPlan,
        OverrideChange,
        ParameterPlan,
        ProtocolPlan,
        RecomputePlan,
        ReplacementPlan,
        RouterPlan,
        SchemePlan,
        UnitPlan,
    )
    from hp_core.contracts.problem import Problem, indivisible
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
    from hp_core.contracts.traffic import Traffic
    from hp_core.contracts.transform import AddScalar, Join, Transform, Transpose, Unflatten

_MODULES = {  # module -> the names it brings
    "adapter": "FlowRule Init LayoutRule ModelAdapter Replacement Router Stack",
    "checkpoint": "CheckpointMapping KeyRule",
    "extension": "Command RecipeSection",
    "family": "FamilyContext FamilyRequest ModuleFamily ResolvedFamily SelectorSpec VariantRule",
    "hooks": "HP_API hookimpl",
    "inventory": "Inventory ModuleInfo TensorInfo",
    "kernel": "Kernel",
    "layout": "LayoutContext",
    "parallel": "NativeParallelBindingRequest ParallelBinding ParallelModuleSpec",
    "placement": "FirstRank HeadSlice Layout Partial Placement Replicate Shard View",
    "plan": "BoundaryPlan BufferPlan BuildPlan BuiltComponent CollectivePlan KernelPlan OverrideChange ParameterPlan "
    "ProtocolPlan RecomputePlan ReplacementPlan RouterPlan SchemePlan UnitPlan",
    "problem": "Problem indivisible",
    "protocol": "AttentionMask CPContext DispatchedExperts EPContext KeyValue Protocol ProtocolChoice SequencePartition",
    "scheme": "PrecisionScheme",
    "sharding": "ModuleShardingSpec Port",
    "traffic": "Traffic",
    "transform": "AddScalar Join Transform Transpose Unflatten",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Return a contract's type, importing its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'hp_core.contracts' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"hp_core.contracts.{_HOME[name]}"), name)
    globals()[name] = found
    return found


__all__ = [
    "HP_API",
    "AddScalar",
    "AttentionMask",
    "BoundaryPlan",
    "BufferPlan",
    "BuildPlan",
    "BuiltComponent",
    "CPContext",
    "CheckpointMapping",
    "CollectivePlan",
    "Command",
    "DispatchedExperts",
    "EPContext",
    "FamilyContext",
    "FamilyRequest",
    "FirstRank",
    "FlowRule",
    "HeadSlice",
    "Init",
    "Inventory",
    "Join",
    "Kernel",
    "KernelPlan",
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
    "OverrideChange",
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
    "ProtocolPlan",
    "RecipeSection",
    "RecomputePlan",
    "Replacement",
    "ReplacementPlan",
    "Replicate",
    "ResolvedFamily",
    "Router",
    "RouterPlan",
    "SchemePlan",
    "SelectorSpec",
    "SequencePartition",
    "Shard",
    "Stack",
    "TensorInfo",
    "Traffic",
    "Transform",
    "Transpose",
    "Unflatten",
    "UnitPlan",
    "VariantRule",
    "View",
    "hookimpl",
    "indivisible",
]
