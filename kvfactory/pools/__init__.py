"""Pools: one implementation of every operation over all planes, whatever the layout and format."""

from kvfactory.pools.ops import Keep, MakeOps, Ops
from kvfactory.pools.views import GroupViews, group_views

__all__ = ["GroupViews", "Keep", "MakeOps", "Ops", "group_views"]
