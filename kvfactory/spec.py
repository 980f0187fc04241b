"""What the user said: the one schema of a configuration, frozen and strict.

YAML and overrides arrive as a plain dict; ``Spec.parse`` validates it and reports every problem
at once. Rules that need plugins or span several groups belong to the planner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from kvfactory.errors import SpecError
from kvfactory.modelspec import (
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
    Name,
    NonNegative,
    Positive,
)
from kvfactory.problems import from_validation

__all__ = [
    "KV",
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
]

PowerOfTwo = Annotated[int, Field(ge=1, le=2**30)]
Share = Annotated[float, Field(gt=0, le=1)]

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _bytes(value: object) -> object:
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KiB|MiB|GiB|TiB)", value)
        if not found:
            raise ValueError(
                "bytes as an integer, or a number with KiB, MiB, GiB or TiB such as '64GiB'"
            )
        return int(float(found[1]) * _UNITS[found[2]])
    return value


Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1, le=2**60)]


# ---- plugins by name -----------------------------------------------------------------------


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

    @model_validator(mode="after")
    def _alignment(self) -> KV:
        if self.align_bytes & (self.align_bytes - 1):
            raise ValueError("align_bytes as a power of two")
        return self


class Memory(Frozen):
    """What backs the bytes, and how many there may be; without a budget the workload decides.

    By group: ``ratios`` are tables' shares of the budget, ``tokens`` stand in place of one.
    ``checkpoints`` are slots for int8 copies of recurrent states, which a prefix cache fills.
    """

    name: Name = "auto"
    options: dict[str, Any] = Field(default_factory=dict)
    budget: Bytes | None = None
    ratios: dict[Name, Share] = Field(default_factory=dict)
    tokens: dict[Name, Positive] = Field(default_factory=dict)
    checkpoints: Annotated[int, Field(ge=1, le=2**20)] | None = None


class Device(Frozen):
    """The target of the plan. ``auto`` must be resolved before planning."""

    name: Name = "cpu"
    type: Literal["auto", "cpu", "cuda"] = "cpu"
    sm: NonNegative = 0
    num_sms: NonNegative = 0
    memory_bytes: Bytes | None = None
    granule_bytes: Bytes = 2**21


class BackendChoice(Frozen):
    """Which kernels attend; ``auto`` picks per group."""

    name: Name = "auto"
    options: dict[str, Any] = Field(default_factory=dict)
    new_tokens: Literal["stored", "exact"] = "stored"
    prefill: Literal["auto", "paged", "ragged"] = "auto"
    accuracy: Literal["exact", "fast"] = "exact"
    deterministic: bool = False


class Engine(Frozen):
    """What the caller's loop does.

    ``max_requests`` is the number of rows of the device tables (null: as many as the plan
    admits), ``prefill_chunk_tokens`` the most prompt tokens in a step, ``steps_in_flight`` the
    steps open at once, ``draft_tokens`` the extra tokens a request may verify in a step, in a
    chain or, with ``draft_tree``, a tree.

    Recurrent states: ``state_tracking`` are further slots of each request, for states that a
    prefix cache wants (lazy: the second one when it is needed). ``state_replay`` keeps what drives
    the last tokens in a ring of ``replay_tokens``: of decodes, so that the state is written once
    a ring; or of drafts, in place of a snapshot per token, folded at every commit or when full.
    """

    max_requests: Annotated[int, Field(ge=1, le=2**20)] | None = None
    prefill_chunk_tokens: Annotated[int, Field(ge=1, le=2**24)] = 2048
    steps_in_flight: Annotated[int, Field(ge=1, le=8)] = 2
    draft_tokens: Annotated[int, Field(ge=0, le=1024)] = 0
    draft_tree: bool = False
    state_tracking: Literal["none", "one", "two", "lazy"] = "none"
    state_replay: Literal["none", "decode_ring", "verify_fold", "verify_ring"] = "none"
    replay_tokens: Annotated[int, Field(ge=1, le=1024)] = 16

    @property
    def tracking_slots(self) -> int:
        """Most tracking slots of a request."""
        return {"none": 0, "one": 1}.get(self.state_tracking, 2)

    @property
    def state_slots(self) -> int:
        """State slots that sizing gives a request: its own and tracking ones, of lazy ones one."""
        return 2 if self.state_tracking == "lazy" else 1 + self.tracking_slots


class Workload(Frozen):
    """``requests`` of ``tokens`` each, on average of ``mean_tokens`` if given; ``trace`` a file."""

    requests: Annotated[int, Field(ge=1, le=2**20)] = 8
    tokens: Annotated[int, Field(ge=1, le=2**26)] = 128
    mean_tokens: Annotated[int, Field(ge=1, le=2**26)] | None = None
    trace: str | None = None
    step_ms: Annotated[float, Field(gt=0)] = 30.0


class Spec(Frozen):
    """A whole configuration."""

    model: Model
    kv: KV = KV()
    memory: Memory = Memory()
    device: Device = Device()
    backend: BackendChoice = BackendChoice()
    engine: Engine = Engine()
    workload: Workload = Workload()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Spec:
        """Validate a plain dict (from YAML, JSON or code).

        Raises:
            SpecError: every malformed, missing or unknown key, each with its path and mend.
        """
        try:
            return cls.model_validate_json(json.dumps(data))
        except ValidationError as error:
            raise SpecError(*from_validation(error, cls)) from None
