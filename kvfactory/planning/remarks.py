"""Settings that a plan does not use, in words: nothing that was asked for is dropped silently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvfactory.kinds import KINDS
from kvfactory.planning.grouping import Draft
from kvfactory.spec import Layouts, Plugin, Quants, Spec


def remarks(spec: Spec, drafts: Sequence[Draft]) -> Iterator[str]:
    """A note for each format and layout that no group takes; ``drafts`` are without annexes.

    Presets name formats for models with and without latents alike. Those of the roles that this
    model lacks go without saying where its own roles have the same format, or the default.
    """
    yield from _unused("kv", spec.kv.quant, spec.kv.layout, drafts, "the model")
    for name, policy in spec.kv.groups.items():
        mine = [draft for draft in drafts if draft.group == name]
        path = f"kv.groups.{name}"
        yield from _unused(path, policy.quant, policy.layout, mine, f"group {name}")
    for name, recipe in spec.kv.recipes.items():
        mine = [draft for draft in drafts if draft.name == f"{draft.group}.{name}"]
        path, whose = f"kv.recipes.{name}", "its layers"
        yield from _unused(path, recipe.quant, Layouts(), mine, whose)
        if recipe.quant == Quants():
            yield f"{path} is unused: it names no quant"
    if spec.kv.constants is not None and not any(t.constants for d in drafts for t in d.stored):
        yield "kv.constants is unused: no number format of the model takes any"


def warnings(spec: Spec) -> Iterator[str]:
    """That the workload is beyond the model, where it is."""
    most = spec.model.max_context
    if most is not None and spec.workload.tokens > most:
        yield f"workload.tokens={spec.workload.tokens} is beyond model.max_context={most}"


def _unused(
    path: str, quants: Quants, layouts: Layouts, drafts: Sequence[Draft], whose: str
) -> Iterator[str]:
    stored = [tensor for draft in drafts for tensor in draft.stored]
    roles = {tensor.logical.role for tensor in stored}
    has = "has" if whose != "its layers" else "have"
    lacks = "lacks" if has == "has" else "lack"
    alike: list[Plugin | None] = [None]
    if path == "kv":
        alike += [Plugin(name="plain"), *map(quants.of, roles)]
    for role in Quants.model_fields:
        if role == "every" or role in roles or quants.of(role) in alike:
            continue
        yield f"{path}.quant.{role} is unused: {whose} {has} no {role}"
    if quants.every is not None and all(tensor.quant != quants.every for tensor in stored):
        yield f"{path}.quant={quants.every.name} is unused: {whose} {lacks} what it fits"
    kept = {KINDS[draft.kind].granularity for draft in drafts}
    for granularity in Layouts.model_fields:
        layout = layouts.of(granularity)
        if layout is None or granularity in kept:
            continue
        if granularity != "index" or layout != layouts.tokens:  # one name sets both
            yield f"{path}.layout.{granularity} is unused: {whose} {has} no {granularity}"
