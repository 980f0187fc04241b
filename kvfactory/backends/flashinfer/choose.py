"""Which FlashInfer kernels serve a group, and why. Pure rules; nothing is imported to answer.

``fa2`` runs on tensor cores of sm80 and later, ``fa3`` on Hopper's, ``cuda_cores`` is the decode
kernel for small groups of query heads, ``xqa`` TensorRT-LLM's decode in 8-bit arithmetic. The rules
restate what the kernels themselves demand (FlashInfer 0.6: ``utils.is_fa3_backend_supported``,
``jit/xqa.py``, ``include/flashinfer/utils.cuh``) and what they were measured to be good at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvfactory.backends.contract import features, stored_exactly
from kvfactory.planning.cacheplan import Attention, GroupPlan
from kvfactory.spec import Spec

KernelName = Literal["fa2", "fa3", "cuda_cores", "xqa", "mla_fa2", "mla_fa3"]

HOPPER_SM = 90
XQA_SMS = frozenset({90, 100, 103, 120, 121})
XQA_PAGES = frozenset({16, 32, 64, 128})
XQA_GROUPS = frozenset({1, 2, 4, 8, 16})
CUDA_CORE_GROUPS = frozenset({1, 2, 3})
TENSOR_CORE_GROUP = 4
FULL = -1
"""``window_left`` of attention without a window."""


@dataclass(frozen=True)
class Shape:
    """What a host plan depends on; groups with equal shapes share their plans.

    ``window_left`` is FlashInfer's: the keys before the query's own, -1 for all. ``latent`` makes
    it MLA, whose ``dim`` is the latent's and ``rope_dim`` the rope key's, 0 without. ``kv_dtype``
    is what the kernels read.
    """

    table: str
    page_tokens: int
    q_heads: int
    kv_heads: int
    dim: int
    v_dim: int
    rope_dim: int
    latent: bool
    window_left: int
    soft_cap: float
    causal: bool
    q_dtype: str
    kv_dtype: str

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q_heads // self.kv_heads

    @property
    def eight_bit(self) -> bool:
        """Whether keys and values are read in 8 bits."""
        return self.kv_dtype.startswith("float8")

    def with_q_type(self) -> Shape:
        """The same over keys and values in the compute type."""
        return replace(self, kv_dtype=self.q_dtype)


def shape_of(group: GroupPlan, direct: bool) -> Shape:
    """The shape of ``group``; without ``direct`` kernels read a copy in the compute type."""
    work, first = group.work, group.tensors[0]
    assert isinstance(work, Attention)
    last = group.tensors[-1].logical
    latent = work.geometry == "mla"
    q_dtype, dim = first.logical.dtype, first.logical.extent("dim")
    return Shape(
        table=group.table,
        page_tokens=group.page_slots,
        q_heads=work.q_heads,
        kv_heads=1 if latent else first.logical.extent("head"),
        dim=dim,
        v_dim=dim if latent else last.extent("dim"),
        rope_dim=last.extent("dim") if latent and len(group.tensors) > 1 else 0,
        latent=latent,
        window_left=FULL if work.window_tokens is None else work.window_tokens - 1,
        soft_cap=work.soft_cap or 0.0,
        causal=work.causal,
        q_dtype=q_dtype,
        kv_dtype=first.planes[0].dtype if direct else q_dtype,
    )


@dataclass(frozen=True)
class Kernel:
    """A kernel family and the reason it was taken."""

    name: KernelName
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class Kernels:
    """The kernels of a group.

    ``decode`` serves steps of one token a request and ``prefill`` all others. With ``merged``,
    ``new`` attends over new tokens as they came, ``prefix`` over the pages before them, and the
    two are merged by their log-sum-exp. ``general`` takes custom masks and lengths that the host
    does not know exactly.
    """

    decode: Kernel
    prefill: Kernel
    new: Kernel
    prefix: Kernel
    general: Kernel
    merged: bool

    def names(self) -> frozenset[KernelName]:
        """The kernel families in use."""
        return self.over_pages() | ({self.new.name} if self.merged else set())

    def over_pages(self) -> frozenset[KernelName]:
        """Those that read stored keys and values."""
        used = [self.decode, self.prefill, self.general, *([self.prefix] if self.merged else [])]
        return frozenset(kernel.name for kernel in used)

    def described(self) -> dict[str, str]:
        """Use -> kernel and reason, for people."""
        found = {"decode": str(self.decode)}
        if not self.merged:
            return found | {"prefill": str(self.prefill)}
        return found | {"new tokens": str(self.new), "paged prefix": str(self.prefix)}


def choose_kernels(group: GroupPlan, shape: Shape, spec: Spec) -> Kernels:
    """The kernels for ``group`` in ``shape`` with the device and backend choice of ``spec``."""
    if shape.latent:
        return _latent(spec)
    merged = merges(group, spec)
    general = Kernel("fa2", "takes any mask, and lengths only the device knows")
    prefill = _prefill(shape, spec)
    return Kernels(
        decode=_decode(group, shape, spec, merged),
        prefill=prefill,
        new=_prefill(shape.with_q_type(), spec),
        prefix=_prefix(shape, spec),
        general=general,
        merged=merged,
    )


def merges(group: GroupPlan, spec: Spec) -> bool:
    """Whether new tokens are attended as they came, apart from the paged prefix."""
    choice = spec.backend
    if group.kind == "cross" or group.has("latent"):
        return False
    if "exact" in features(group, spec):
        return True
    return choice.prefill == "ragged" and stored_exactly(group)


def _latent(spec: Spec) -> Kernels:
    if spec.device.sm == HOPPER_SM and not spec.backend.deterministic:
        kernel = Kernel("mla_fa3", "latent attention on Hopper's own instructions")
    else:
        kernel = Kernel("mla_fa2", f"latent attention on sm{spec.device.sm}")
    return Kernels(kernel, kernel, kernel, kernel, kernel, merged=False)


def _prefill(shape: Shape, spec: Spec) -> Kernel:
    sm = spec.device.sm
    if sm != HOPPER_SM:
        return Kernel("fa2", f"sm{sm} is not Hopper (sm90), which fa3 is for")
    if spec.backend.deterministic:
        return Kernel("fa2", "deterministic: fa2 serves decode and prefill with one arithmetic")
    if shape.eight_bit:
        return Kernel("fa2", "16-bit queries over 8-bit K/V; fa3 wants both in 8 bits")
    return Kernel("fa3", "Hopper (sm90) and 16-bit K/V")


def _prefix(shape: Shape, spec: Spec) -> Kernel:
    whole = _prefill(shape, spec)
    if whole.name == "fa3" and shape.window_left != FULL:
        return Kernel("fa2", "a window that ends inside the prefix may need a mask")
    return whole


def _decode(group: GroupPlan, shape: Shape, spec: Spec, merged: bool) -> Kernel:
    if merged and not stored_exactly(group):
        return Kernel("fa2", "new_tokens=exact: the stored prefix is merged with the new token")
    if spec.backend.deterministic:
        return Kernel("fa2", "deterministic: never split over keys")
    no_xqa = _xqa_misses(group, shape, spec)
    if not no_xqa:
        return Kernel("xqa", "accuracy=fast: 8-bit K/V in 8-bit arithmetic")
    why_not = f" (not xqa: {no_xqa})" if spec.backend.accuracy == "fast" else ""
    if shape.eight_bit:
        return Kernel("fa2", f"8-bit K/V is converted for the tensor cores{why_not}")
    if shape.group not in CUDA_CORE_GROUPS:
        why = f"{shape.group} query heads a key head, {TENSOR_CORE_GROUP} or more fill tensor cores"
        return Kernel("fa2", why + why_not)
    why = f"{shape.group} query heads a key head, below {TENSOR_CORE_GROUP}"
    return Kernel("cuda_cores", why + why_not)


def _xqa_misses(group: GroupPlan, shape: Shape, spec: Spec) -> str:
    """The first reason why XQA cannot serve; empty when it can."""
    assert isinstance(group.work, Attention)
    checks = (
        (spec.backend.accuracy != "fast", "accuracy=exact"),
        (shape.kv_dtype != "float8_e4m3fn", f"K/V read as {shape.kv_dtype}, not float8_e4m3fn"),
        (spec.device.sm not in XQA_SMS, f"sm{spec.device.sm}"),
        (shape.page_tokens not in XQA_PAGES, f"pages of {shape.page_tokens}, not 16 to 128"),
        (shape.group not in XQA_GROUPS, f"{shape.group} query heads a key head"),
        (shape.dim != shape.v_dim, "unequal head dims"),
        (bool(shape.soft_cap), "a soft cap"),
        (group.work.sinks, "sinks"),
        (not shape.causal, "not causal"),
    )
    return next((reason for wrong, reason in checks if wrong), "")


# ---- compiled modules ------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleKey:
    """What FlashInfer compiles a module for; everything else is an argument at run time.

    ``page_tokens`` and ``group`` are 0 but for ``xqa``.
    """

    kernel: KernelName
    q_dtype: str
    kv_dtype: str
    dim: int
    v_dim: int
    window: bool
    soft_cap: bool
    page_tokens: int = 0
    group: int = 0


def module_key(name: KernelName, shape: Shape) -> ModuleKey:
    """The module of kernel ``name`` for ``shape``."""
    xqa, latent = name == "xqa", name.startswith("mla")
    return ModuleKey(
        kernel=name,
        q_dtype=shape.q_dtype,
        kv_dtype=shape.kv_dtype,
        dim=shape.dim,
        v_dim=shape.rope_dim if latent else shape.v_dim,
        window=shape.window_left != FULL and not latent,
        soft_cap=bool(shape.soft_cap),
        page_tokens=shape.page_tokens if xqa else 0,
        group=shape.group if xqa else 0,
    )


def module_keys(shape: Shape, kernels: Kernels) -> frozenset[ModuleKey]:
    """Every module that ``kernels`` may launch."""
    wanted = {module_key(name, shape) for name in kernels.over_pages()}
    if kernels.merged:
        wanted.add(module_key(kernels.new.name, shape.with_q_type()))
    return frozenset(wanted)
