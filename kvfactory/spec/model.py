"""The model in a spec: its groups of layers with their geometry, and a draft beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from kvfactory.kinds import KINDS

Positive = Annotated[int, Field(ge=1, le=2**40)]
NonNegative = Annotated[int, Field(ge=0, le=2**40)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.+-]*$")]
FloatType = Literal["bfloat16", "float16", "float32"]


class Frozen(BaseModel):
    """Base of every part: immutable, strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _set_form(value: object) -> str:
    return "text" if isinstance(value, str) else "list"


LayerSet = Annotated[
    Annotated[str, Tag("text")] | Annotated[tuple[int, ...], Tag("list")],
    Discriminator(_set_form),
]


class GroupBase(Frozen):
    """What all layer groups have: their layers, 0-indexed, as ``"0-35"``, ``"1::2"`` or a list."""

    layers: LayerSet


class AttentionGroup(GroupBase):
    """A group that attends over stored tokens."""

    kind: Literal["full", "swa", "chunked", "cross"]
    q_heads: Positive
    window_tokens: Positive | None = None
    chunk_tokens: Positive | None = None
    encoder_tokens: Positive | None = None
    tokens_per_entry: Positive = 1
    soft_cap: Annotated[float, Field(gt=0)] | None = None
    sinks: bool = False
    causal: bool = True

    @model_validator(mode="after")
    def _reach_matches_kind(self) -> AttentionGroup:
        fields = {name: kind.reach for name, kind in KINDS.items() if kind.reach}
        for kind, field in fields.items():
            given = self.__dict__[field] is not None
            if given and self.kind != kind:
                raise ValueError(f"no {field} for kind {self.kind}: it belongs to kind {kind}")
            if self.kind == kind and not given:
                raise ValueError(f"{field} for kind {kind}")
        return self


class GqaGroup(AttentionGroup):
    """Grouped-query attention: K [tokens, kv_heads, head_dim], V [tokens, kv_heads, v_head_dim].

    ``v_head_dim`` defaults to ``head_dim``; 0 stores K only, and V is K. ``scale`` multiplies the
    logits and defaults to head_dim ** -0.5.
    """

    geometry: Literal["gqa"] = "gqa"
    kv_heads: Positive
    head_dim: Positive
    v_head_dim: NonNegative | None = None
    scale: Annotated[float, Field(gt=0)] | None = None


class MlaGroup(AttentionGroup):
    """Multi-head latent attention: latent [tokens, kv_lora_rank] and rope key, V is the latent."""

    geometry: Literal["mla"]
    kv_lora_rank: Positive
    qk_rope_head_dim: NonNegative
    scale: Annotated[float, Field(gt=0)]


class LinearGroup(GroupBase):
    """Recurrent state, one slot a request: convolution windows and a recurrent tensor.

    ``conv`` lists [channels, taps - 1]; ``recurrent`` names the axes of the state in stored order,
    for instance ``{head: 32, key: 128, value: 128}``; of mamba1 they are channel and state.
    ``state_dtype`` is the recurrent type and ``conv_dtype`` the windows' (default: the model's).
    """

    kind: Literal["linear"]
    geometry: Literal["linear"] = "linear"
    conv: tuple[tuple[Positive, Positive], ...] = ()
    recurrent: dict[str, Positive] | None = None
    recurrence: Literal["mamba1", "mamba2", "gdn", "kda", "lightning", "none"]
    conv_window_first: bool = False
    conv_dtype: FloatType | None = None
    state_dtype: FloatType = "float32"

    @model_validator(mode="after")
    def _keeps_something(self) -> LinearGroup:
        if not self.conv and self.recurrent is None:
            raise ValueError("a conv or a recurrent state to keep")
        if (self.recurrence == "none") != (self.recurrent is None):
            raise ValueError("a recurrent shape exactly where recurrence is not 'none'")
        axes = ("channel", "state") if self.recurrence == "mamba1" else ("head", "key", "value")
        if self.recurrent is not None and sorted(self.recurrent) != list(axes):
            need = f"recurrent with the axes {', '.join(axes)} of recurrence {self.recurrence}"
            raise ValueError(need)
        return self


class IndexGroup(GroupBase):
    """Keys of a sparse indexer, in the page table of the group ``selects``.

    ``block_tokens`` is the unit that ``topk`` selects: 1 for tokens, more for blocks.
    """

    kind: Literal["sparse_index"]
    geometry: Literal["index"] = "index"
    selects: Name
    index_heads: Positive
    head_dim: Positive
    v_head_dim: NonNegative = 0
    topk: Positive
    block_tokens: Positive = 1
    tokens_per_entry: Positive = 1


def _geometry(value: Any) -> str | None:
    data = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    by_kind = {"linear": "linear", "sparse_index": "index"}
    return str(by_kind.get(str(data.get("kind")), data.get("geometry") or "gqa"))


Group = Annotated[
    Annotated[GqaGroup, Tag("gqa")]
    | Annotated[MlaGroup, Tag("mla")]
    | Annotated[LinearGroup, Tag("linear")]
    | Annotated[IndexGroup, Tag("index")],
    Discriminator(
        _geometry,
        custom_error_type="geometry",
        custom_error_message="Input should be geometry gqa or mla, or kind linear or sparse_index",
    ),
]


class DraftModel(Frozen):
    """A model that drafts for the target: the keys of ``Model``, and what it reads of the target.

    Its layer i is layer ``num_layers + i`` of the target for the cache, its group ``g`` is group
    ``draft_g``. ``reads`` lists [layer, target layer]: the layer keeps nothing and reads the cache
    of that layer; a draft without groups reads everything.
    """

    name: str = "draft"
    num_layers: Annotated[int, Field(ge=1, le=100_000)]
    dtype: FloatType | None = None
    max_context: Positive | None = None
    groups: dict[Name, Group] = {}
    aliases: tuple[tuple[NonNegative, NonNegative], ...] = ()
    reads: tuple[tuple[NonNegative, NonNegative], ...] = ()


class Model(Frozen):
    """Geometry of a model's cache; weights are none of our business.

    ``dtype`` is the compute type in which K and V arrive. ``aliases`` lists [layer, owner]: the
    layer keeps nothing and reads the cache of an earlier ``owner``.
    """

    name: str
    num_layers: Annotated[int, Field(ge=1, le=100_000)]
    dtype: FloatType = "bfloat16"
    max_context: Positive | None = None
    groups: Annotated[dict[Name, Group], Field(min_length=1)]
    aliases: tuple[tuple[NonNegative, NonNegative], ...] = ()
    draft: DraftModel | None = None
