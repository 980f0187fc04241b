"""Draft models: further layers of the target, with groups of their own geometry.

Layer i of the draft becomes model layer ``num_layers + i`` and its group ``g`` becomes ``draft_g``.
From there on nothing knows a draft: its groups are sized with the target's, share page tables and
state slots where lifetime and page size are equal, and layers that read the target's cache are
aliases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvfactory.errors import KVFactoryError, PlanError, Problem
from kvfactory.spec import DraftModel, Group, IndexGroup, LayerSet, Model, Recipe, Spec
from kvfactory.spec.layers import parse_layers

PREFIX = "draft_"


def with_draft(spec: Spec) -> Spec:
    """``spec`` with the draft's layers and groups among the model's; as it is where there is none.

    Sets of layers become lists, so that "not 3::4" and -1 still mean the target's layers.

    Raises:
        PlanError: a draft of another dtype, a name that the model has, or malformed layers.
    """
    draft, model = spec.model.draft, spec.model
    if draft is None:
        return spec
    wrong = list(_problems(model, draft))
    try:
        groups = _shifted(model.groups, model.num_layers, 0, "model.groups")
        groups |= _renamed(_shifted(draft.groups, draft.num_layers, model.num_layers, _PATH))
        recipes = {
            name: _recipe(recipe, model.num_layers, f"kv.recipes.{name}.layers")
            for name, recipe in spec.kv.recipes.items()
        }
    except KVFactoryError as error:
        wrong += error.problems
    if wrong:
        raise PlanError(*wrong)
    own = tuple((a + model.num_layers, b + model.num_layers) for a, b in draft.aliases)
    reads = tuple((a + model.num_layers, b) for a, b in draft.reads)
    whole = model.model_copy(
        update={
            "num_layers": model.num_layers + draft.num_layers,
            "groups": groups,
            "aliases": (*model.aliases, *own, *reads),
            "draft": None,
        }
    )
    return spec.model_copy(
        update={"model": whole, "kv": spec.kv.model_copy(update={"recipes": recipes})}
    )


_PATH = "model.draft.groups"


def _problems(model: Model, draft: DraftModel) -> Iterator[Problem]:
    if draft.dtype not in (None, model.dtype):
        fix = f"model.draft.dtype={model.dtype}"
        yield Problem("model.draft.dtype", str(draft.dtype), f"the target's {model.dtype}", fix)
    for name in draft.groups:
        if PREFIX + name in model.groups:
            yield Problem(f"{_PATH}.{name}", f"group {PREFIX}{name}", "a name that is free")
    for path, pairs, owners in (
        ("model.draft.aliases", draft.aliases, draft.num_layers),
        ("model.draft.reads", draft.reads, model.num_layers),
    ):
        for layer, owner in pairs:
            if layer >= draft.num_layers or owner >= owners:
                need = f"layers below {draft.num_layers} and {owners}"
                yield Problem(path, f"[{layer}, {owner}]", need)


def _shifted(groups: Mapping[str, Group], num_layers: int, by: int, path: str) -> dict[str, Group]:
    return {
        name: group.model_copy(
            update={"layers": _moved(group.layers, num_layers, by, f"{path}.{name}.layers")}
        )
        for name, group in groups.items()
    }


def _moved(layers: LayerSet, num_layers: int, by: int, path: str) -> tuple[int, ...]:
    found = parse_layers(layers, num_layers, path)
    return tuple(layer + by for layer in found)


def _recipe(recipe: Recipe, num_layers: int, path: str) -> Recipe:
    return recipe.model_copy(update={"layers": _moved(recipe.layers, num_layers, 0, path)})


def _renamed(groups: Mapping[str, Group]) -> dict[str, Group]:
    found = {}
    for name, group in groups.items():
        if isinstance(group, IndexGroup):
            group = group.model_copy(update={"selects": PREFIX + group.selects})
        found[PREFIX + name] = group
    return found
