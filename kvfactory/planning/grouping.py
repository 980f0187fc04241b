"""From the spec to draft groups: layers, tables, stored tensors; nothing is sized yet.

Every problem of the whole spec is collected before any is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfactory.errors import KVFactoryError, PlanError, Problem, did_you_mean
from kvfactory.kinds import KINDS, Lifetime
from kvfactory.planning.cacheplan import Annex, Attention, Recurrence, Select
from kvfactory.planning.geometry import logical_tensors, work
from kvfactory.planning.storage import Placed, Stored, arrange, choose_layout, store
from kvfactory.spec import (
    AttentionGroup,
    GqaGroup,
    Group,
    GroupPolicy,
    IndexGroup,
    LinearGroup,
    Spec,
)
from kvfactory.spec.layers import parse_layers


class TableKey(NamedTuple):
    """Groups with equal keys share a page table; states have pages of 0 tokens."""

    lifetime: Lifetime
    page_tokens: int


@dataclass(frozen=True)
class Draft:
    """A group before sizing; see ``GroupPlan`` for the fields."""

    name: str
    group: str
    kind: str
    layers: tuple[int, ...]
    key: TableKey
    page_slots: int
    tokens_per_entry: int
    stored: tuple[Stored, ...]
    placed: Placed
    work: Attention | Select | Recurrence | Annex


@dataclass
class Findings:
    """Problems that stop the plan, and notes on what a reader of the plan should know."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise a ``PlanError`` with everything found so far, if anything."""
        if self.problems:
            raise PlanError(*dict.fromkeys(self.problems))


def draft_groups(spec: Spec, findings: Findings) -> tuple[Draft, ...]:
    """The groups of ``spec``, split by recipe, in the spec's order.

    Raises:
        PlanError: all problems of layers, tables, quants and layouts together.
    """
    layers = _layers(spec, findings)
    findings.problems += _overlaps(spec, layers)
    findings.problems += _holes(spec, layers)
    findings.problems += _encoders(spec)
    findings.problems += _unknown_names(spec)
    recipes = _recipe_of_layer(spec, findings)
    findings.check()
    drafts = []
    for name, group in spec.model.groups.items():
        findings.problems += _group_problems(spec, name, group)
        for recipe, ids in _parts(layers[name], recipes):
            try:
                drafts.append(_draft(spec, name, recipe, ids))
            except KVFactoryError as error:
                findings.problems += error.problems
    findings.check()
    return tuple(drafts)


# ---- layers --------------------------------------------------------------------------------


def _layers(spec: Spec, findings: Findings) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, group in spec.model.groups.items():
        path = f"model.groups.{name}.layers"
        try:
            found[name] = parse_layers(group.layers, spec.model.num_layers, path)
        except KVFactoryError as error:
            findings.problems += error.problems
            found[name] = ()
    return found


def _overlaps(spec: Spec, layers: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    """A layer attends in one group, apart from cross attention; it has one index group."""
    seen: dict[tuple[str, int], str] = {}
    for name, group in spec.model.groups.items():
        if isinstance(group, LinearGroup):
            continue
        family = group.kind if group.kind in ("cross", "sparse_index") else "self"
        clashes = [layer for layer in layers[name] if (family, layer) in seen]
        if clashes:
            other = seen[family, clashes[0]]
            got = f"layer {clashes[0]}, which group {other} has too"
            yield Problem(f"model.groups.{name}.layers", got, "layers that no other such group has")
        seen |= {(family, layer): name for layer in layers[name]}


def _holes(spec: Spec, layers: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    """Aliases point from a layer that keeps nothing to an earlier one that keeps tokens.

    A state is not read but advanced, which two layers cannot both do.
    """
    kept = {layer for ids in layers.values() for layer in ids}
    groups = spec.model.groups.items()
    advanced = {
        layer: name for name, g in groups if isinstance(g, LinearGroup) for layer in layers[name]
    }
    seen: dict[int, int] = {}
    for layer, owner in spec.model.aliases:
        path, got = "model.aliases", f"[{layer}, {owner}]"
        if seen.setdefault(layer, owner) != owner:
            yield Problem(path, f"{got} beside [{layer}, {seen[layer]}]", "one owner a layer")
        elif layer >= spec.model.num_layers:
            yield Problem(path, got, f"layers below model.num_layers={spec.model.num_layers}")
        elif owner >= layer:
            yield Problem(path, got, "an owner before the layer")
        elif owner not in kept:
            yield Problem(path, got, f"an owner with a cache: layer {owner} is in no group")
        elif layer in kept:
            yield Problem(path, got, f"a layer without a cache of its own: {layer} is in a group")
        elif owner in advanced:
            need = f"an owner without a state: layer {owner} advances one of group"
            yield Problem(path, got, f"{need} {advanced[owner]}")


def _encoders(spec: Spec) -> Iterator[Problem]:
    """A sequence has one encoder input, which all cross attention reads."""
    groups = spec.model.groups.items()
    lengths = {n: g.encoder_tokens for n, g in groups if isinstance(g, AttentionGroup)}
    first, *others = [(n, tokens) for n, tokens in lengths.items() if tokens] or [("", 0)]
    for name, tokens in others:
        if tokens != first[1]:
            path, need = f"model.groups.{name}.encoder_tokens", f"{first[1]}, as group {first[0]}"
            yield Problem(path, str(tokens), need, f"{path}={first[1]}")


def _unknown_names(spec: Spec) -> Iterator[Problem]:
    known = list(spec.model.groups)
    for name in spec.kv.groups:
        if name not in known:
            close = did_you_mean(name, known)
            fix = f"kv.groups.{close}" if close else ""
            yield Problem(
                f"kv.groups.{name}",
                "a group that the model lacks",
                f"one of {', '.join(known)}",
                fix,
            )


def _recipe_of_layer(spec: Spec, findings: Findings) -> dict[int, str]:
    found: dict[int, str] = {}
    for name, recipe in spec.kv.recipes.items():
        path = f"kv.recipes.{name}.layers"
        try:
            ids = parse_layers(recipe.layers, spec.model.num_layers, path)
        except KVFactoryError as error:
            findings.problems += error.problems
            continue
        for layer in ids:
            if layer in found:
                got = f"layer {layer}, which recipe {found[layer]} has too"
                findings.problems.append(Problem(path, got, "one recipe a layer"))
            found[layer] = name
    return found


def _parts(
    ids: tuple[int, ...], recipes: Mapping[int, str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Layers without a recipe first, then one part per recipe."""
    names = ["", *dict.fromkeys(recipes[layer] for layer in ids if layer in recipes)]
    for name in names:
        part = tuple(layer for layer in ids if recipes.get(layer, "") == name)
        if part:
            yield name, part


# ---- one group -----------------------------------------------------------------------------


def _draft(spec: Spec, name: str, recipe: str, ids: tuple[int, ...]) -> Draft:
    group = spec.model.groups[name]
    kind = KINDS[group.kind]
    policy = spec.kv.groups.get(name, GroupPolicy())
    quants = [(f"kv.groups.{name}.quant", policy.quant), ("kv.quant", spec.kv.quant)]
    if recipe:
        quants.insert(0, (f"kv.recipes.{recipe}.quant", spec.kv.recipes[recipe].quant))
    layouts = [(f"kv.groups.{name}.layout", policy.layout), ("kv.layout", spec.kv.layout)]
    key = _table_key(spec, name)
    per_entry = 1 if isinstance(group, LinearGroup) else group.tokens_per_entry
    page_slots = key.page_tokens // per_entry
    stored = tuple(store(logical, quants) for logical in logical_tensors(group, spec.model.dtype))
    path, layout = choose_layout(kind.granularity, layouts)
    placed = arrange(stored, layout, page_slots or None, path)
    return Draft(
        name=f"{name}.{recipe}" if recipe else name,
        group=name,
        kind=group.kind,
        layers=ids,
        key=key,
        page_slots=page_slots or 1,
        tokens_per_entry=per_entry,
        stored=stored,
        placed=placed,
        work=work(group),
    )


def _table_key(spec: Spec, name: str) -> TableKey:
    group = spec.model.groups[name]
    if isinstance(group, LinearGroup):
        return TableKey(Lifetime("state"), 0)
    own = spec.kv.groups.get(name, GroupPolicy()).page_tokens
    selected = spec.model.groups.get(group.selects) if isinstance(group, IndexGroup) else None
    if isinstance(group, IndexGroup) and isinstance(selected, AttentionGroup):
        owner = _table_key(spec, group.selects)
        return TableKey(owner.lifetime, own or owner.page_tokens)
    return TableKey(_lifetime(group), own or spec.kv.page_tokens)


def _lifetime(group: Group) -> Lifetime:
    kind = KINDS[group.kind]
    if not isinstance(group, AttentionGroup):
        return Lifetime(kind.lifetime)
    return Lifetime(kind.lifetime, group.__dict__[kind.reach] if kind.reach else 0)


def _group_problems(spec: Spec, name: str, group: Group) -> Iterator[Problem]:
    path = f"model.groups.{name}"
    if isinstance(group, LinearGroup):
        return
    key = _table_key(spec, name)
    if key.page_tokens % group.tokens_per_entry:
        need = f"a multiple of tokens_per_entry={group.tokens_per_entry} of group {name}"
        fix = f"kv.groups.{name}.page_tokens={group.tokens_per_entry * 16}"
        yield Problem("kv.page_tokens", str(key.page_tokens), need, fix)
    if isinstance(group, GqaGroup) and group.q_heads % group.kv_heads:
        need = f"a multiple of kv_heads={group.kv_heads}"
        yield Problem(f"{path}.q_heads", str(group.q_heads), need)
    if isinstance(group, IndexGroup):
        yield from _select_problems(spec, name, group, key)


def _select_problems(spec: Spec, name: str, group: IndexGroup, key: TableKey) -> Iterator[Problem]:
    owner = spec.model.groups.get(group.selects)
    if not isinstance(owner, AttentionGroup):
        known = [other for other, g in spec.model.groups.items() if isinstance(g, AttentionGroup)]
        close = did_you_mean(group.selects, known)
        fix = f"model.groups.{name}.selects={close}" if close else ""
        got = repr(group.selects)
        yield Problem(
            f"model.groups.{name}.selects", got, f"one of {', '.join(known) or 'none'}", fix
        )
    elif key != _table_key(spec, group.selects):
        need = f"the page_tokens of group {group.selects}, whose table it shares"
        yield Problem(f"kv.groups.{name}.page_tokens", str(key.page_tokens), need)
