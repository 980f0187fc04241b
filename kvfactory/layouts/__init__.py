"""Layouts: where each plane's element lives, as patterns of named axes."""

from kvfactory.layouts.pattern import Layout, Pattern
from kvfactory.layouts.placement import (
    Extents,
    Placement,
    Strided,
    axis_name,
    place,
    placement_problems,
)
from kvfactory.layouts.resolve import LAYOUTS, layout_name, resolve_layout

__all__ = [
    "LAYOUTS",
    "Extents",
    "Layout",
    "Pattern",
    "Placement",
    "Strided",
    "axis_name",
    "layout_name",
    "place",
    "placement_problems",
    "resolve_layout",
]
