"""Pools: one implementation of every operation over all planes, whatever the layout and format."""

from kvfactory.pools.image import PageImage
from kvfactory.pools.manifest import Manifest
from kvfactory.pools.ops import Keep, MakeOps, Ops
from kvfactory.pools.pool import PlaneBytes, Pool, Write
from kvfactory.pools.slices import Slicing
from kvfactory.pools.torch_ops import TorchOps
from kvfactory.pools.transfer import Copy, Region, copies
from kvfactory.pools.views import GroupViews, group_views

__all__ = [
    "Copy",
    "GroupViews",
    "Keep",
    "MakeOps",
    "Manifest",
    "Ops",
    "PageImage",
    "PlaneBytes",
    "Pool",
    "Region",
    "Slicing",
    "TorchOps",
    "Write",
    "copies",
    "group_views",
]
