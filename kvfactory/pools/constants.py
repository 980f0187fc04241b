"""Static values beside the pool: de-scales, global scales and centers, float32 tables per layer.

They are used on every write and every read, are never moved with slots, and are compared on
transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvfactory.calibration import Key
from kvfactory.errors import Problem, SpecError
from kvfactory.planning.cacheplan import ConstantPlan
from kvfactory.pools.views import GroupViews


def fill_defaults(views: GroupViews) -> None:
    """Every table gets its plan's default."""
    for tensor in views.group.tensors:
        for table in tensor.constants:
            views.constants[tensor.name][table.name].fill_(table.default)


def keys(views: GroupViews) -> frozenset[Key]:
    """Everything that can be set."""
    return frozenset(
        Key(layer, table.tensor, table.name)
        for layer in views.group.layers
        for table in _plans(views)
    )


def assign(views: GroupViews, values: Mapping[Key, Any]) -> None:
    """Set ``values``: key (or an equal tuple) -> a number, array or tensor of the constant's shape.

    Raises:
        SpecError: keys that the group lacks, wrong shapes, values that are not finite in float32,
            or a scale that is not positive; all of them, and nothing is set.
    """
    plans = {(plan.tensor, plan.name): plan for plan in _plans(views)}
    known = keys(views)
    ready: list[tuple[Tensor, Tensor]] = []
    wrong: list[Problem] = []
    for key, value in values.items():
        layer, tensor, name = key
        path = str(Key(*key))
        if key not in known:
            names = ", ".join(f"{t}.{n}" for t, n in plans) or "none"
            layers = ", ".join(map(str, views.group.layers))
            need = f"constants {names} of layers {layers} (group {views.group.name})"
            wrong.append(Problem(path, "an unknown constant", need))
            continue
        table = views.constants[tensor][name][views.group.layers.index(layer)]
        given = torch.as_tensor(value).detach().to(torch.float32)
        wrong += _problems(plans[tensor, name], given, path)
        ready.append((table, given))
    if wrong:
        raise SpecError(*wrong)
    for table, given in ready:
        table.copy_(given)


def _plans(views: GroupViews) -> tuple[ConstantPlan, ...]:
    return tuple(table for tensor in views.group.tensors for table in tensor.constants)


def _problems(plan: ConstantPlan, given: Tensor, path: str) -> tuple[Problem, ...]:
    """A constant that defaults to a positive value divides, so it has to stay positive."""
    if tuple(given.shape) != plan.shape:
        return (Problem(path, f"shape {list(given.shape)}", f"{list(plan.shape)}"),)
    if not bool(given.isfinite().all()):
        return (Problem(path, "NaN or infinity", "finite float32 values"),)
    if plan.default > 0 and not bool((given > 0).all()):
        return (Problem(path, f"{float(given.min())}", "values above 0, since they divide"),)
    return ()
