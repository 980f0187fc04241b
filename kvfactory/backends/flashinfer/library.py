"""All calls of FlashInfer, in the order of its compiled functions (0.6: ``csrc/*_binding.cu``).

The wrapper classes of FlashInfer keep 8 MiB of their own a piece and plan in Python over device
tensors. The functions underneath take the workspaces as arguments, so that these lie in the arena,
and lengths from the host, so that planning never waits. They change between minor versions:
``installed`` refuses those that this file was not written for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from kvfactory.backends.flashinfer.calls import Call, Library, Lists, Module, Sizes, Space, XqaCall
from kvfactory.backends.flashinfer.choose import ModuleKey
from kvfactory.backends.flashinfer.latent import RunFields, fields_of
from kvfactory.errors import BuildError, Problem
from kvfactory.quant.numerics import torch_dtype

VERSIONS = ("0.6.13", "0.7")
"""The first version that is known to fit, and the first that is not."""

NHD = 0
NON_CAUSAL, CAUSAL, CUSTOM = 0, 1, 2


def installed() -> Library:
    """FlashInfer as installed here.

    Raises:
        BuildError: it is missing, or of another version than this file calls.
    """
    fix = 'pip install "kvfactory[cuda]", or backend=torch'
    wanted = f"the package flashinfer-python from {VERSIONS[0]} on, below {VERSIONS[1]}"
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        raise BuildError(Problem("backend flashinfer", "none here", wanted, fix)) from None
    if not _parts(VERSIONS[0]) <= _parts(found) < _parts(VERSIONS[1]):
        raise BuildError(Problem("backend flashinfer", f"version {found}", wanted, fix))
    return FlashInfer()


def _parts(text: str) -> tuple[int, ...]:
    numbers = text.split("+")[0].split("rc")[0].split(".post")[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())


class FlashInfer:
    """The library itself, its modules loaded once each."""

    def __init__(self) -> None:
        self._loaded: dict[ModuleKey, Any] = {}

    def load(self, keys: Iterable[ModuleKey]) -> None:
        """Compile or load all of ``keys``, side by side."""
        from flashinfer import jit

        missing = [key for key in keys if key not in self._loaded]
        specs = [_specification(key) for key in missing]
        jit.build_jit_specs(specs)
        for key, spec in zip(missing, specs, strict=True):
            self._loaded[key] = spec.load(spec.get_library_path())

    def module(self, key: ModuleKey) -> Module:
        """The module of a key that is not ``xqa``."""
        self.load([key])
        functions = self._loaded[key]
        if key.kernel.startswith("mla"):
            return LatentModule(functions)
        if key.kernel == "cuda_cores":
            return CudaCoreModule(functions, key)
        return PagedModule(functions, key.kernel == "fa3")

    def xqa(self, key: ModuleKey) -> Callable[[XqaCall], None]:
        """The launch function of an ``xqa`` key."""
        self.load([key])
        return _xqa(self._loaded[key].xqa_wrapper)


def _specification(key: ModuleKey) -> Any:
    """What FlashInfer compiles for ``key``; dtypes of output and indices follow ours."""
    from flashinfer import jit
    from flashinfer.jit.xqa import gen_xqa_module

    q, kv, ids = torch_dtype(key.q_dtype), torch_dtype(key.kv_dtype), torch.int32
    if key.kernel == "xqa":
        return gen_xqa_module(q, kv, key.page_tokens, key.dim, key.group, key.window, q)
    if key.kernel.startswith("mla"):
        backend = key.kernel.removeprefix("mla_")
        return jit.gen_batch_mla_module(backend, q, kv, q, ids, key.dim, key.v_dim, False)
    no_rope = 0
    common = (q, kv, q, ids, key.dim, key.v_dim, no_rope, key.window, key.soft_cap)
    if key.kernel == "cuda_cores":
        return jit.gen_batch_decode_module(*common)
    return jit.gen_batch_prefill_module(key.kernel, *common, False)


@dataclass(frozen=True)
class PagedModule:
    """``fa2`` and ``fa3``: any number of query rows a request, over pages or ragged."""

    functions: Any
    fa3: bool

    def plan(self, space: Space, sizes: Sizes) -> Any:
        """The schedule over query tiles and, in fa2, parts of the keys."""
        batch = len(sizes.kv_tokens)
        arguments = (
            *space,
            *(sizes.q_indptr, sizes.kv_indptr, sizes.kv_tokens, sizes.rows, batch),
            *(sizes.q_heads, sizes.kv_heads, sizes.page_tokens, sizes.graph),
            *(sizes.dim, sizes.v_dim, sizes.causal, sizes.window_left),
        )
        fixed_split = -1
        fa2 = () if self.fa3 else (fixed_split, not sizes.split, sizes.idle_blocks)
        return self.functions.plan(*arguments, *fa2)

    def splits(self, info: Any) -> bool:
        """As fa2 says at the end of its schedule (PrefillPlanInfo); fa3 has no such schedules."""
        return self.fa3 or bool(info[-1])

    def runs(self, space: Space, info: Any) -> RunFields | None:
        """None: fa2 reads lengths from page lists, and fa3 plans are for one step."""
        return None

    def run(self, space: Space, info: Any, call: Call, lists: Lists | None) -> None:
        """Launch over pages, or without ``lists`` over ragged K and V with q's indptr."""
        mode = CUSTOM if call.mask is not None else CAUSAL if call.causal else NON_CAUSAL
        head = (space.floats, space.ints, info, call.q, call.k, call.v, call.q_indptr)
        overlap = call.overlap and overlaps(call.q)
        tail = (call.out, call.lse, mode, NHD, call.window_left, overlap, *self._extra(call))
        if lists is None:
            self.functions.ragged_run(*head, call.q_indptr, *tail)
        else:
            self.functions.paged_run(*head, lists.indptr, lists.indices, lists.last_page, *tail)

    def _extra(self, call: Call) -> tuple[Any, ...]:
        if self.fa3:
            no_items, no_scale = (None, None, None), None
            return (*no_items, no_scale, call.soft_cap, call.scale, 1.0, 0)
        no_alibi, no_items, no_block_scales = None, (None, None, None), (None, None)
        masked = (call.mask, call.mask_indptr, no_alibi, *no_items, *no_block_scales)
        return (*masked, call.soft_cap, call.scale, 1.0, 1e-4, 0)


@dataclass(frozen=True)
class CudaCoreModule:
    """``cuda_cores``: one query row a request."""

    functions: Any
    key: ModuleKey

    def plan(self, space: Space, sizes: Sizes) -> Any:
        """The schedule over parts of the keys."""
        q, kv = (
            torch.empty(0, dtype=torch_dtype(t)) for t in (self.key.q_dtype, self.key.kv_dtype)
        )
        return self.functions.plan(
            *space,
            *(sizes.kv_indptr, len(sizes.kv_tokens), sizes.q_heads, sizes.kv_heads),
            *(sizes.page_tokens, sizes.graph, sizes.window_left, sizes.soft_cap),
            *(sizes.dim, sizes.v_dim, q, kv),
        )

    def splits(self, info: Any) -> bool:
        """As it says at the end of its schedule (DecodePlanInfo)."""
        return bool(info[-1])

    def runs(self, space: Space, info: Any) -> RunFields | None:
        """None: lengths are read from page lists."""
        return None

    def run(self, space: Space, info: Any, call: Call, lists: Lists | None) -> None:
        """Launch over pages."""
        assert lists is not None
        assert call.mask is None
        no_alibi = None
        self.functions.run(
            *(space.floats, space.ints, info, call.q, call.k, call.v),
            *(lists.indptr, lists.indices, lists.last_page, call.out, call.lse),
            *(NHD, call.window_left, call.overlap and overlaps(call.q)),
            *(no_alibi, call.soft_cap, call.scale, 1.0, 1e-4),
        )


@dataclass(frozen=True)
class LatentModule:
    """``mla``: ``k`` is the latent [pages, slots, 512], ``v`` the rope key; q has both."""

    functions: Any

    def plan(self, space: Space, sizes: Sizes) -> Any:
        """The schedule; it carries the lengths: see ``latent``."""
        return self.functions.plan(
            *space,
            *(sizes.q_indptr, sizes.kv_indptr, sizes.kv_tokens, sizes.q_heads),
            *(sizes.dim, sizes.causal),
        )

    def splits(self, info: Any) -> bool:
        """Its schedules are made for lengths."""
        return True

    def runs(self, space: Space, info: Any) -> RunFields | None:
        """Where ``plan`` has put them."""
        return fields_of(info, space.pinned)

    def run(self, space: Space, info: Any, call: Call, lists: Lists | None) -> None:
        """Launch over pages."""
        assert lists is not None
        assert call.mask is None
        latent = call.k.shape[-1]
        q_latent, q_rope = call.q[..., :latent], call.q[..., latent:]
        mode, natural = CAUSAL if call.causal else NON_CAUSAL, False
        self.functions.run(
            *(space.floats, space.ints, info, q_latent, q_rope, call.k, call.v),
            *(lists.indices, call.out, call.lse, mode, call.q.shape[1], call.k.shape[1]),
            *(call.scale, natural),
        )


def _xqa(launch: Any) -> Callable[[XqaCall], None]:
    def run(call: XqaCall) -> None:
        _, page_tokens, kv_heads, dim = call.k.shape
        q_scale = call.scale / call.v_scale * math.sqrt(dim)
        no_tensor, no_sinks, no_block_scales, no_mask = None, None, (None, None), None
        launch(
            *(call.k.dtype == torch.float8_e4m3fn and _major(call.q) == 9, call.num_sms, kv_heads),
            *(call.window_left + 1, q_scale, no_tensor, call.out.unsqueeze(1), 1.0),
            *(call.q.unsqueeze(1), no_sinks, call.k, call.v, *no_block_scales),
            *(call.tables, call.tables.shape[1] * page_tokens, call.lengths.unsqueeze(1)),
            *(len(call.q), call.v_scale, no_tensor, 1, no_mask),
            *(call.semaphores, call.scratch, overlaps(call.q)),
        )

    return run


def overlaps(q: Tensor) -> bool:
    """Whether the GPU has programmatic dependent launch: see ``Call``."""
    return _major(q) >= 9


_MAJORS: dict[torch.device, int] = {}


def _major(q: Tensor) -> int:
    if q.device not in _MAJORS:
        _MAJORS[q.device] = torch.cuda.get_device_capability(q.device)[0]
    return _MAJORS[q.device]
