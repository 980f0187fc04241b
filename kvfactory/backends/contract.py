"""The backend contract: what kernels need, what they cost, and one pure check of both.

A backend module imports neither torch nor its kernels at module level. ``needs`` is data; whether
a group meets it is decided here, with reasons. What only a call can tell, a runner refuses in
``check``, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvfactory.errors import Problem
from kvfactory.planning.cacheplan import (
    Attention,
    CachePlan,
    GroupPlan,
    Limits,
    Select,
)
from kvfactory.registry import Registry
from kvfactory.spec import IndexGroup, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from kvfactory.pools import Pool
    from kvfactory.steps.step import Step


@dataclass(frozen=True)
class Needs:
    """What a backend can serve; ``None`` means anything.

    ``features`` are names among those that ``features()`` gives. ``head_dims`` and ``quants``
    bound K and V, ``latent_dims`` (kv_lora_rank, qk_rope_head_dim) and ``latent_quants`` bound
    MLA. ``dtypes``: the compute types.
    ``contiguous_dim``: the innermost axis is dim, unsplit. ``equal_strides``: K and V views have
    the same type, shape and strides (MLA excepted). ``max_stride_elements`` bounds every stride but
    the layers', and all strides and offsets of data planes are multiples of ``align_bytes``.
    """

    device_types: frozenset[str]
    features: frozenset[str]
    min_sm: int = 0
    head_dims: frozenset[int] | None = None
    latent_dims: frozenset[tuple[int, int]] | None = None
    dtypes: frozenset[str] | None = None
    quants: frozenset[str] | None = None
    latent_quants: frozenset[str] | None = None
    contiguous_dim: bool = False
    equal_strides: bool = False
    max_stride_elements: int | None = None
    align_bytes: int = 1


class AttentionRunner(Protocol):
    """A backend bound to one group's pool; made at build, called every step."""

    @property
    def capturable(self) -> bool:
        """Whether ``attend`` only launches device work, so that a CUDA graph can hold it."""
        ...

    @property
    def takes_new(self) -> bool:
        """Whether ``attend`` wants the step's new K and V as they came, in ``AttendExtra``."""
        ...

    def prepare(self, step: Step) -> None:
        """Plan ``step`` on the host, before its first ``attend``; never waits for the device.

        Called for every step, and again whenever a graph's step is filled anew.
        """
        ...

    def begin(self, step: Step) -> None:
        """Device work that a step needs once, after ``prepare``; a graph holds it."""
        ...

    def check(self, step: Step, extra: AttendExtra) -> None:
        """Refuse what comes with ``attend`` in ``step``; called before K and V are written.

        Raises:
            SpecError: what this backend never takes.
            BooksError: what it does not take in such a step.
        """
        ...

    def attend(self, layer_index: int, q: Tensor, step: Step, extra: AttendExtra) -> Tensor:
        """Attention of ``q`` [tokens, q_heads, dim] over the pool: [tokens, q_heads, v_dim]."""
        ...


class SelectRunner(Protocol):
    """A backend bound to the pool of an index group; made at build, called every step."""

    def select(self, layer_index: int, q: Tensor, step: Step, weights: Tensor | None) -> Tensor:
        """Token positions int32 [tokens, width] that each new token attends to, -1 padded.

        ``q`` [tokens, index_heads, dim], ``weights`` float [tokens, index_heads] or None.
        """
        ...


@dataclass(frozen=True)
class AttendExtra:
    """What one call of attend adds to the group's constants.

    ``new_k`` / ``new_v`` are the step's unquantized tensors (for runners that take them), ``mask``
    bool [sum over requests of q * kv] replaces causality, ``sinks`` float [q_heads], ``select``
    int32 [tokens, topk] token positions, -1 padded.
    """

    new_k: Tensor | None = None
    new_v: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    select: Tensor | None = None


@dataclass(frozen=True)
class Resources:
    """What a backend is bound to: the plan, the pools by group, and its own planned bytes by use.

    ``workspace`` are uint8 views of the arena, zeroed.
    """

    plan: CachePlan
    pools: Mapping[str, Pool]
    workspace: Mapping[str, Tensor]


@runtime_checkable
class Attending(Protocol):
    """A family of kernels without any that select.

    ``rank`` orders ``backend=auto``: the highest that serves wins.
    """

    @property
    def name(self) -> str:
        """The name in configs."""
        ...

    @property
    def rank(self) -> int:
        """Preference under ``auto``."""
        ...

    def needs(self, spec: Spec) -> Needs:
        """What it can serve with the device and the backend options of ``spec``. Pure."""
        ...

    def workspace(
        self, groups: Sequence[GroupPlan], limits: Limits, spec: Spec
    ) -> Mapping[str, int]:
        """Bytes it keeps beyond the pools for the ``groups`` that it serves, by use. Pure."""
        ...

    def kernels(self, group: GroupPlan, spec: Spec) -> Mapping[str, str]:
        """Use (decode, prefill ...) -> the kernel that serves it in ``group``, and why. Pure."""
        ...

    def bind(
        self, groups: Sequence[GroupPlan], resources: Resources
    ) -> Mapping[str, AttentionRunner]:
        """A runner per group name, for the attention ``groups`` that it serves.

        Raises:
            BuildError: a library that it calls is missing here.
        """
        ...


class Backend(Attending, Protocol):
    """A family of kernels; ``selectors`` is called for index groups that it serves alone."""

    def selectors(
        self, groups: Sequence[GroupPlan], resources: Resources
    ) -> Mapping[str, SelectRunner]:
        """A runner per group name, for the index ``groups`` that it serves."""
        ...


BACKENDS: Registry[Backend] = Registry(
    "backend", "kvfactory.backends", "kvfactory.backends", Attending
)


def ranked(names: Iterable[str]) -> list[Backend]:
    """The backends of ``names``, the highest rank first."""
    return sorted((BACKENDS.get(name, "backend.name") for name in names), key=lambda b: -b.rank)


def refusals(name: str, needs: Needs, group: GroupPlan, spec: Spec) -> tuple[Problem, ...]:
    """Why the backend ``name`` with ``needs`` cannot serve ``group``; empty when it can."""
    path, device = f"backend {name} for group {group.name}", spec.device
    wrong: list[Problem] = []
    if device.type not in needs.device_types:
        kinds = " or ".join(sorted(needs.device_types))
        wrong.append(Problem(path, f"device {device.name} of type {device.type}", f"type {kinds}"))
    elif device.sm < needs.min_sm:
        wrong.append(Problem(path, f"compute capability {device.sm}", f"at least {needs.min_sm}"))
    missing = sorted(features(group, spec) - needs.features)
    if missing:
        wrong.append(
            Problem(path, f"a group with {', '.join(missing)}", "a backend that serves it")
        )
    return (*wrong, *_storage_refusals(needs, group, path))


def features(group: GroupPlan, spec: Spec) -> frozenset[str]:
    """The features, in the words of ``Needs``, that serving ``group`` takes."""
    work = group.work
    if isinstance(work, Select):
        return frozenset({"select"})
    assert isinstance(work, Attention)
    constants = {table for tensor in group.tensors for table in tensor.constants}
    centers = {table.tensor for table in constants if table.name == "center"}
    choice, latent = spec.backend, work.geometry == "mla"
    lossy = not stored_exactly(group)
    exact = lossy and choice.new_tokens == "exact"
    asked: Mapping[str, Any] = {
        "window": work.window_tokens,
        "chunk": work.chunk_tokens,
        "soft_cap": work.soft_cap,
        "sinks": work.sinks,
        "non_causal": not work.causal,
        "cross": group.kind == "cross",
        "mla": latent,
        "mla_window": latent and work.window_tokens,
        "mla_soft_cap": latent and work.soft_cap,
        "mla_exact": latent and exact,
        "k_only": work.geometry == "gqa" and not group.has("v"),
        "unequal_head_dims": not latent and len({t.logical.axes for t in group.tensors}) > 1,
        "entries": group.tokens_per_entry > 1,
        "selected": group.group in _selected(spec),
        "center": centers,
        "center_with_soft_cap": work.soft_cap and "k" in centers,
        "scale_per_head": any(table.name == "scale" and table.shape for table in constants),
        "exact": exact,
        "ragged_of_stored": choice.prefill == "ragged" and lossy and not exact,
        "deterministic": choice.deterministic,
        "deterministic_ragged": choice.deterministic and (exact or choice.prefill == "ragged"),
    }
    return frozenset(name for name, value in asked.items() if value)


def stored_exactly(group: GroupPlan) -> bool:
    """Whether reading gives back the bits of the compute type that were written."""
    return all(t.quant == "plain" and not t.constants for t in group.tensors)


def _selected(spec: Spec) -> frozenset[str]:
    """Groups whose entries an index group selects."""
    groups = spec.model.groups.values()
    return frozenset(group.selects for group in groups if isinstance(group, IndexGroup))


def _storage_refusals(needs: Needs, group: GroupPlan, path: str) -> Iterable[Problem]:
    yield from _format_refusals(needs, group, path)
    if isinstance(group.work, Attention):
        yield from _dim_refusals(needs, group, path)
    yield from _place_refusals(needs, group, path)


def _format_refusals(needs: Needs, group: GroupPlan, path: str) -> Iterable[Problem]:
    quants = needs.latent_quants if group.has("latent") else needs.quants
    for tensor in group.tensors:
        if quants is not None and tensor.quant not in quants:
            yield Problem(path, f"{tensor.name} in {tensor.quant}", f"one of {_any(quants)}")
        if needs.dtypes is not None and tensor.logical.dtype not in needs.dtypes:
            got = f"{tensor.name} of type {tensor.logical.dtype}"
            yield Problem(path, got, f"one of {_any(needs.dtypes)}", "model.dtype=bfloat16")


def _dim_refusals(needs: Needs, group: GroupPlan, path: str) -> Iterable[Problem]:
    dims = tuple(tensor.logical.extent("dim") for tensor in group.tensors)
    if group.has("latent"):
        if needs.latent_dims is not None and dims not in needs.latent_dims:
            yield Problem(path, f"latent and rope of {dims}", f"one of {_any(needs.latent_dims)}")
    elif needs.head_dims is not None:
        for tensor, dim in zip(group.tensors, dims, strict=True):
            if dim not in needs.head_dims:
                got = f"{tensor.name} of {dim} elements a head"
                yield Problem(path, got, f"one of {_any(needs.head_dims)}")


def _place_refusals(needs: Needs, group: GroupPlan, path: str) -> Iterable[Problem]:
    data = [plane for plane in group.planes if plane.part == "data"]
    for plane in data:
        place = plane.place
        outer = place.strides[:-1]
        if needs.contiguous_dim and (
            place.axes[-1] != "dim" or place.strides[-1] != place.itemsize
        ):
            yield Problem(path, f"layout '{group.layout}'", "dim innermost and whole")
        limit, widest = needs.max_stride_elements, max(place.strides[1:], default=0)
        if limit is not None and widest // place.itemsize >= limit:
            got = f"strides of {plane.key} up to {widest} B"
            yield Problem(path, got, f"below {limit} elements")
        if any(at % needs.align_bytes for at in (place.offset, *outer)):
            got = f"strides of {plane.key} of {outer} B"
            fix = f"kv.align_bytes={needs.align_bytes}"
            yield Problem(path, got, f"multiples of {needs.align_bytes} B", fix)
    kinds = {(plane.dtype, plane.place.shape, plane.place.strides) for plane in data}
    if needs.equal_strides and len(kinds) > 1 and not group.has("latent"):
        got = f"unequal types, shapes or strides of {' and '.join(p.key for p in data)}"
        yield Problem(path, got, "equal ones", _one_quant(needs, group))


def _one_quant(needs: Needs, group: GroupPlan) -> str:
    """The override that gives all tensors of ``group`` one of its formats, if that is the mend."""
    names = list(dict.fromkeys(tensor.quant for tensor in group.tensors))
    served = [name for name in names if needs.quants is None or name in needs.quants]
    if len(names) == 1 or not served:
        return ""
    recipe = group.name.removeprefix(group.group).removeprefix(".")
    owner = f"kv.recipes.{recipe}" if recipe else f"kv.groups.{group.group}"
    return f"{owner}.quant={served[0]}"


def _any(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(values)))
