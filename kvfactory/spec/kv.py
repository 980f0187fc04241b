"""What the ``kv`` section says: layouts, number formats and exceptions, plugins by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from kvfactory.spec.model import Frozen, LayerSet, Name, Positive

PowerOfTwo = Annotated[int, Field(ge=1, le=2**30)]


class Plugin(Frozen):
    """A plugin by name, with options that the plugin itself validates."""

    name: Name
    options: dict[str, Any] = Field(default_factory=dict)


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


PluginRef = Annotated[Plugin, BeforeValidator(_named)]


class LayoutFamilies(Frozen):
    """One pattern or catalog name per plane family; v and scale default to k's."""

    k: str
    v: str | None = None
    scale: str | None = None


def _families(value: object) -> object:
    return {"k": value} if isinstance(value, str) else value


LayoutRef = Annotated[LayoutFamilies, BeforeValidator(_families)]


class Layouts(Frozen):
    """A layout per granularity of pool."""

    tokens: LayoutRef | None = None
    index: LayoutRef | None = None
    state: LayoutRef | None = None

    def of(self, granularity: str) -> LayoutFamilies | None:
        """The layout of ``granularity``: tokens, index or state."""
        found: LayoutFamilies | None = dict(self)[granularity]
        return found


def _layouts(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, Mapping) and "k" in value):
        both = [key for key in Layouts.model_fields if key in value]
        if both and not isinstance(value, str):
            raise ValueError(f"k, v and scale, or {', '.join(both)} with a layout each, not both")
        return {"tokens": value, "index": value}
    return value


LayoutPolicy = Annotated[Layouts, BeforeValidator(_layouts)]


class Quants(Frozen):
    """A number format per role. ``every`` (from ``kv.quant=NAME``) sets all roles it fits."""

    k: PluginRef | None = None
    v: PluginRef | None = None
    latent: PluginRef | None = None
    rope: PluginRef | None = None
    index_k: PluginRef | None = None
    index_v: PluginRef | None = None
    state: PluginRef | None = None
    every: PluginRef | None = None

    def of(self, role: str) -> Plugin | None:
        """The format of ``role`` by name, without ``every``."""
        found: Plugin | None = dict(self)[role]
        return found


def _quants(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, Mapping) and "name" in value):
        return {"every": value}
    return value


QuantPolicy = Annotated[Quants, BeforeValidator(_quants)]


# ---- storage -------------------------------------------------------------------------------


class GroupPolicy(Frozen):
    """Storage of one group where it differs from the preset."""

    quant: QuantPolicy = Quants()
    layout: LayoutPolicy = Layouts()
    page_tokens: Positive | None = None


class Recipe(Frozen):
    """Formats for some layers only; negative layers count from the end of the model."""

    layers: LayerSet
    quant: QuantPolicy = Quants()


class KV(Frozen):
    """How tensors become bytes: pages, layouts, number formats, and exceptions to them.

    ``align_bytes`` rounds every plane's start and every shared stride up; 1 keeps natural
    alignment. ``constants`` is the path of a calibration file.
    """

    page_tokens: Positive = 16
    align_bytes: PowerOfTwo = 1
    quant: QuantPolicy = Quants()
    layout: LayoutPolicy = Layouts()
    groups: dict[Name, GroupPolicy] = Field(default_factory=dict)
    recipes: dict[Name, Recipe] = Field(default_factory=dict)
    constants: str | None = None

    @field_validator("align_bytes")
    @classmethod
    def _alignment(cls, align_bytes: int) -> int:
        if align_bytes & (align_bytes - 1):
            raise ValueError("a power of two")
        return align_bytes
