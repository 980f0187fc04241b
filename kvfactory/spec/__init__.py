"""The specification: what the user said, frozen and strict, from one plain dict."""

from kvfactory.spec.kv import KV, GroupPolicy, LayoutFamilies, Layouts, Plugin, Quants, Recipe
from kvfactory.spec.layers import parse_layers
from kvfactory.spec.model import (
    AttentionGroup,
    DraftModel,
    FloatType,
    Frozen,
    GqaGroup,
    Group,
    GroupBase,
    IndexGroup,
    LayerSet,
    LinearGroup,
    MlaGroup,
    Model,
)
from kvfactory.spec.root import MOST_REQUESTS, BackendChoice, Device, Engine, Memory, Spec, Workload

__all__ = [
    "KV",
    "MOST_REQUESTS",
    "AttentionGroup",
    "BackendChoice",
    "Device",
    "DraftModel",
    "Engine",
    "FloatType",
    "Frozen",
    "GqaGroup",
    "Group",
    "GroupBase",
    "GroupPolicy",
    "IndexGroup",
    "LayerSet",
    "LayoutFamilies",
    "Layouts",
    "LinearGroup",
    "Memory",
    "MlaGroup",
    "Model",
    "Plugin",
    "Quants",
    "Recipe",
    "Spec",
    "Workload",
    "parse_layers",
]
