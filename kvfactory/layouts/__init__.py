"""Layouts: where each plane's element lives, as patterns of named axes."""

from kvfactory.layouts.pattern import Layout, Pattern
from kvfactory.layouts.placement import Extents, Placement, Strided, place, placement_problems
from kvfactory.layouts.resolve import LAYOUTS, resolve_layout

__all__ = [
    "LAYOUTS",
    "Extents",
    "Layout",
    "Pattern",
    "Placement",
    "Strided",
    "place",
    "placement_problems",
    "resolve_layout",
]
