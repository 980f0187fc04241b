"""What a pool refuses, before a byte is touched: shapes, types and names. Ids: see ``ids``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfactory.errors import BooksError, BuildError, Problem, SpecError, did_you_mean
from kvfactory.pools.ids import INTEGERS, flat_ids, sent
from kvfactory.pools.ops import Keep
from kvfactory.pools.views import GroupViews

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Entries:
    """Where a call writes: flat ``slots`` int64 [n], which of them count, the caller's shape."""

    slots: Tensor
    keep: Keep | None
    shape: tuple[int, ...]


def storage(views: GroupViews) -> None:
    """Raises: BuildError: the arena is on ``meta``, so capacity is counted but nothing stored."""
    if views.arena.is_meta:
        path = f"pool of group {views.group.name}"
        need = "memory with storage to read or write"
        got = "memory=meta or null, which store nothing"
        raise BuildError(Problem(path, got, need, "memory=auto"))


def layer(views: GroupViews, layer_index: int) -> int:
    """``layer_index``, an index in the group.

    Raises:
        BooksError: it is no number, negative or beyond the group's layers.
    """
    count = len(views.group.layers)
    if type(layer_index) is not int or not 0 <= layer_index < count:
        need = f"an index in group {views.group.name}, 0 to {count - 1}"
        raise BooksError(Problem("layer_index", repr(layer_index), need))
    return layer_index


def entries(
    views: GroupViews, slots: Tensor, mask: Tensor | None, counts: Tensor | None
) -> Entries:
    """The targets of a write: ``slots`` [n] or [rows, width], with at most one of mask and counts.

    Raises:
        SpecError: wrong shapes or types of slots, mask or counts.
        BooksError: a slot that counts and is not in the pool.
    """
    tensors(slots=slots)
    tensors(**{n: x for n, x in (("mask", mask), ("counts", counts)) if x is not None})
    wrong = [*mask_problems(slots.shape, mask), *_counts_problems(slots, counts)]
    if mask is not None and counts is not None:
        wrong.append(Problem("mask, counts", "both", "at most one of them"))
    if wrong:
        raise SpecError(*wrong)
    device = views.arena.device
    keep = None
    if mask is not None:
        keep = Keep(mask=sent(mask.reshape(-1), device))
    if counts is not None:
        keep = Keep(counts=sent(counts, device), width=slots.shape[1])
        mask = Keep(counts=counts, width=slots.shape[1]).as_mask()
    return Entries(flat_ids(views, slots, "slots", mask), keep, tuple(slots.shape))


def tensors(**given: Tensor) -> None:
    """Refuse what is no tensor, or a sparse one.

    Raises:
        SpecError: all such arguments, by name.
    """
    wrong = [problem for name, value in given.items() if (problem := tensor_problem(name, value))]
    if wrong:
        raise SpecError(*wrong)


def tensor_problem(name: str, value: object) -> Problem | None:
    """What is wrong if ``value`` is no tensor whose elements lie at strides."""
    if not isinstance(value, Tensor):
        return Problem(name, f"a {type(value).__name__}", "a tensor")
    if value.layout != torch.strided:
        got = str(value.layout).removeprefix("torch.")
        return Problem(name, f"a {got} tensor", "a dense one", f"{name}.to_dense()")
    return None


def mask_problems(shape: Sequence[int], mask: Tensor | None) -> tuple[Problem, ...]:
    """What is wrong with ``mask`` for ids of ``shape``."""
    if mask is None or (mask.dtype == torch.bool and tuple(mask.shape) == tuple(shape)):
        return ()
    return (Problem("mask", f"{mask.dtype} {list(mask.shape)}", f"bool {list(shape)}"),)


def _counts_problems(slots: Tensor, counts: Tensor | None) -> Iterator[Problem]:
    if counts is None:
        return
    if slots.dim() != 2:
        yield Problem("slots", f"shape {list(slots.shape)}", "[rows, width] with counts")
    elif counts.dtype not in INTEGERS or counts.shape != slots.shape[:1]:
        got = f"{counts.dtype} {list(counts.shape)}"
        yield Problem("counts", got, f"int32 or int64 [{slots.shape[0]}], one a row of slots")
    elif counts.is_cpu and counts.numel() and (counts.min() < 0 or counts.max() > slots.shape[1]):
        got = f"{int(counts.min())} to {int(counts.max())}"
        yield Problem("counts", got, f"0 to {slots.shape[1]}, the width of slots")


def move_problems(dst: Tensor, src: Tensor, mask: Tensor | None) -> tuple[Problem, ...]:
    """What is wrong with the shapes of a move."""
    wrong = list(mask_problems(dst.shape, mask))
    if dst.shape != src.shape:
        wrong.append(Problem("src_slots", f"shape {list(src.shape)}", f"{list(dst.shape)}"))
    return tuple(wrong)


def rows(
    views: GroupViews, given: Mapping[str, Tensor], shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """``given`` (tensor name -> float [*shape, *axes]) with leading dims flattened to [n].

    Raises:
        SpecError: missing or unknown names, wrong shapes, types or devices; all of them.
    """
    tensors(**given)
    wanted = views.tensor_shapes
    wrong = [*_name_problems(wanted, given, "tensor"), *_shape_problems(wanted, given, shape)]
    for name, value in given.items():
        if value.dtype not in FLOATS:
            need = "bfloat16, float16, float32 or float64"
            wrong.append(Problem(name, str(value.dtype), need, "write_encoded(...) for codes"))
        wrong += _device_problems(views, name, value)
    if wrong:
        raise SpecError(*wrong)
    if len(shape) == 1:
        return {name: given[name] for name in wanted}
    return {name: given[name].reshape(-1, *axes) for name, axes in wanted.items()}


def encoded(
    views: GroupViews, given: Mapping[str, Tensor], shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """``given`` (plane key -> [*shape, *plane] in its type) with leading dims flattened to [n].

    Raises:
        SpecError: missing or unknown planes, wrong shapes, types or devices; all of them.
    """
    tensors(**given)
    wanted = views.plane_shapes
    wrong = [*_name_problems(wanted, given, "plane"), *_shape_problems(wanted, given, shape)]
    for key, value in given.items():
        if key in wanted and value.dtype != views.planes[key].dtype:
            need = f"{views.planes[key].dtype}: bytes are stored as they are, never converted"
            wrong.append(Problem(key, str(value.dtype), need))
        wrong += _device_problems(views, key, value)
    if wrong:
        raise SpecError(*wrong)
    return {key: given[key].reshape(-1, *axes) for key, axes in wanted.items()}


def names(views: GroupViews, given: Sequence[str] | None) -> tuple[str, ...]:
    """The tensors to read: ``given``, or all of the group.

    Raises:
        SpecError: a name that the group lacks.
    """
    known = tuple(tensor.name for tensor in views.group.tensors)
    if given is None:
        return known
    wrong = [_unknown(name, known, "tensor") for name in given if name not in known]
    if wrong:
        raise SpecError(*wrong)
    return tuple(given)


def read_dtype(dtype: torch.dtype) -> torch.dtype:
    """``dtype``, a type to decode to.

    Raises:
        SpecError: it is no float of 16 bits or more.
    """
    if dtype not in FLOATS:
        raise SpecError(Problem("dtype", str(dtype), "bfloat16, float16, float32 or float64"))
    return dtype


def _name_problems(
    wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, Tensor], what: str
) -> Iterator[Problem]:
    for name in given:
        if name not in wanted:
            yield _unknown(name, tuple(wanted), what)
    for name, axes in wanted.items():
        if name not in given:
            yield Problem(name, "nothing", f"the {what} {name} [..., {', '.join(map(str, axes))}]")


def _unknown(name: str, known: Sequence[str], what: str) -> Problem:
    close = did_you_mean(name, known)
    return Problem(name, f"an unknown {what}", f"one of {', '.join(known)}", close)


def _shape_problems(
    wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, Tensor], shape: tuple[int, ...]
) -> Iterator[Problem]:
    for name, axes in wanted.items():
        if name in given and tuple(given[name].shape) != (*shape, *axes):
            yield Problem(name, f"shape {list(given[name].shape)}", f"{[*shape, *axes]}")


def _device_problems(views: GroupViews, name: str, value: Tensor) -> Iterator[Problem]:
    if value.device != views.arena.device:
        yield Problem(name, f"device {value.device}", f"the pool's, {views.arena.device}")
