"""Routing: from a model layer id to the group that keeps it and the layer's index in there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvfactory.errors import Problem, SpecError
from kvfactory.planning.cacheplan import Attention, CachePlan, GroupPlan, Recurrence, Select
from kvfactory.spec.layers import layer_set


@dataclass(frozen=True)
class Route:
    """Where a layer is kept. ``alias`` when it reads an earlier layer's cache."""

    layer: int
    group: GroupPlan
    index: int
    alias: bool

    def check_writable(self, given: int) -> None:
        """Refuse to write an alias, or another number of tensors than the group stores.

        Raises:
            SpecError: with the mend.
        """
        stored = len(self.group.tensors)
        if self.alias:
            need = "nothing to write: the layer reads the cache of an earlier one"
            raise SpecError(Problem(f"layer {self.layer}", f"{given} tensors to write", need))
        if given != stored:
            names = " and ".join(tensor.name for tensor in self.group.tensors)
            need = f"{stored} ({names}, group {self.group.name})"
            raise SpecError(Problem(f"layer {self.layer}", f"{given} tensors to write", need))


class Router:
    """All routes of a plan, found once."""

    def __init__(self, plan: CachePlan) -> None:
        owners = dict(plan.spec.model.aliases)
        self._num_layers = plan.spec.model.num_layers
        self._routes = {
            layer: [Route(layer, group, index, layer in owners) for group, index in entries]
            for layer, entries in plan.owners.items()
        }

    def attention(self, layer: int, group: str) -> Route:
        """The route of ``layer`` among groups that attend.

        Raises:
            SpecError: none, or several and no ``group`` to tell them apart.
        """
        return self._only(layer, group, "an attention group", Attention)

    def index(self, layer: int) -> Route:
        """The route of ``layer`` among groups that select, of which it has one at most.

        Raises:
            SpecError: none: the layer uses the selection of the layer that ``selector_of`` names.
        """
        return self._only(layer, "", "a sparse_index group", Select)

    def selector_of(self, layer: int) -> int | None:
        """The layer whose selection ``layer`` attends over: itself or the last one before it with
        index keys for its group; None where it attends over everything.
        """
        mine = {route.group.group for route in self._routes.get(known_layer(layer), [])}
        for owner in range(layer, -1, -1):
            for route in self._routes.get(owner, []):
                work = route.group.work
                if isinstance(work, Select) and work.selects in mine and not route.alias:
                    return owner
        return None

    def recurrence(self, layer: int, group: str) -> Route:
        """The route of ``layer`` among groups of recurrent states.

        Raises:
            SpecError: as ``attention``.
        """
        return self._only(layer, group, "a linear group", Recurrence)

    def storage(self, layer: int, group: str) -> Route:
        """The route of ``layer`` among all groups."""
        return self._only(layer, group, "a group", object)

    def _only(self, layer: int, group: str, kind: str, work: type) -> Route:
        """The only route of ``layer`` in groups of ``work``, which ``kind`` names in refusals."""

        def fits(route: Route) -> bool:
            return isinstance(route.group.work, work) and group in ("", route.group.group)

        mine = self._routes.get(known_layer(layer), [])
        routes = [route for route in mine if fits(route)]
        if len(routes) == 1:
            return routes[0]
        if routes:
            raise SpecError(Problem("layer", f"{layer} alone", f"group=, one of {_names(routes)}"))
        if layer not in range(self._num_layers):
            raise SpecError(Problem("layer", repr(layer), f"0 to {self._num_layers - 1}"))
        asked = f", group {group!r}" if group else ""
        got = f"{layer}{asked}, which is in {_names(mine) or 'no group'}"
        others = {at for at, found in self._routes.items() if any(map(fits, found))}
        raise SpecError(Problem("layer", got, f"a layer of {kind}{self._where(others, group)}"))

    def _where(self, layers: set[int], group: str) -> str:
        """Which layers would do."""
        if not layers:
            return "; this model has none" + (" of that name" if group else "")
        return f": {str(layer_set(layers, self._num_layers)).strip('[]')}"


def known_layer(layer: int) -> int:
    """``layer``, if it is a number.

    Raises:
        SpecError: it is none.
    """
    if not isinstance(layer, int | np.integer):
        raise SpecError(Problem("layer", repr(layer)[:80], "a model layer id"))
    return int(layer)


def _names(routes: Iterable[Route]) -> str:
    return ", ".join(dict.fromkeys(route.group.group for route in routes))
