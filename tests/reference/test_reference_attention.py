"""The oracle against naive loops in float64, one feature at a time and together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_scenes import Scene, Turn, make_scene
from torch import Tensor

from kvfactory.backends import AttendExtra
from kvfactory.errors import BooksError
from kvfactory.reference import Oracle, dense_attention, visible_keys

MIXED = [(0, 9), (13, 1), (6, 5), (3, 0), (0, 1)]

GQA: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 8}


def check(scene: Scene, naive: tuple[Tensor, Tensor] | None = None, **extra: Tensor) -> None:
    want, want_lse = naive or scene.naive(sinks=extra.get("sinks"))
    out, lse = scene.oracle().attend_lse(1, scene.q, scene.step, AttendExtra(**extra))
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (4, 2), (6, 1), (5, 5)])
def test_head_ratios_and_pages(q_heads: int, kv_heads: int, page_tokens: int) -> None:
    check(
        make_scene(MIXED, q_heads=q_heads, kv_heads=kv_heads, head_dim=8, page_tokens=page_tokens)
    )


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(12, 8), (8, 12), (8, 0)])
def test_keys_and_values_of_other_widths(head_dim: int, v_head_dim: int) -> None:
    check(make_scene(MIXED, kv_heads=2, head_dim=head_dim, v_head_dim=v_head_dim))


@pytest.mark.parametrize("rope", [4, 0])
def test_latent(rope: int) -> None:
    mla = {"geometry": "mla", "kv_lora_rank": 8, "qk_rope_head_dim": rope, "scale": 0.3}
    check(make_scene(MIXED, **mla))


@pytest.mark.parametrize("window_tokens", [1, 3, 4, 5, 8, 100])
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_window_counts_the_query(window_tokens: int, page_tokens: int) -> None:
    prefixes = [max(0, window_tokens + d) for d in (-2, -1, 0, 1)]
    requests = [(9, 3), *((p, n) for p in prefixes if p < 50 for n in (1, 6))]
    group = GQA | {"kind": "swa", "window_tokens": window_tokens}
    check(make_scene(requests, page_tokens=page_tokens, **group))


@pytest.mark.parametrize("chunk_tokens", [3, 4, 8])
def test_chunks(chunk_tokens: int) -> None:
    requests = [(chunk_tokens + d, n) for d in (-1, 0, 1) for n in (1, 7)]
    check(make_scene([*requests, (0, 9)], **GQA, kind="chunked", chunk_tokens=chunk_tokens))


def test_soft_cap_and_sinks() -> None:
    scene = make_scene(MIXED, **GQA, soft_cap=1.5, sinks=True)
    check(scene, sinks=torch.tensor([-1.0, 0.0, 2.0, 30.0]))


def test_sinks_on_a_window_with_a_scale() -> None:
    scene = make_scene(MIXED, **GQA, kind="swa", window_tokens=5, sinks=True, scale=2.0)
    check(scene, sinks=torch.randn(4))


def test_non_causal() -> None:
    check(make_scene(MIXED, **GQA, causal=False))
    check(make_scene(MIXED, **GQA, causal=False, kind="chunked", chunk_tokens=4))


def test_cross_reads_all_of_the_encoder() -> None:
    scene = make_scene([(7, 0), (11, 0)], **GQA, kind="cross", encoder_tokens=16, pads=False)
    first, second = scene.turns
    turns = [
        Turn(2, 3, 7, slice(0, 3), first.tensors),
        Turn(40, 1, 11, slice(3, 4), second.tensors),
    ]
    arrays = scene.step.arrays._replace(
        q_indptr=torch.tensor([0, 3, 4]),
        prefix=torch.tensor([2, 40]),
        positions=torch.tensor([2, 3, 4, 40]),
    )
    step = replace(scene.step, make=lambda: arrays)
    q = torch.randn(4, 4, 8).double()
    scene = Scene(scene.group, scene.store, step, q, turns)
    check(scene, scene.naive(lambda turn, number, entry: True))
    new_k = torch.randn(4, 2, 8)
    check(scene, scene.naive(lambda *_: True), new_k=new_k, new_v=new_k)


@pytest.mark.parametrize("kind", [{}, {"kind": "swa", "window_tokens": 4}])
def test_mask_replaces_causality_and_windows_hold(kind: dict[str, Any]) -> None:
    scene = make_scene([(5, 4), (0, 3)], **GQA, **kind)
    sizes = [1, 4 * 9, 3 * 3, 0]
    mask = torch.rand(sum(sizes)) < 0.6
    masks = dict(zip([(5, 4), (0, 3)], mask.split(sizes)[1:3], strict=True))

    def sees(turn: Turn, number: int, entry: int) -> bool:
        window = scene.work.window_tokens
        near = window is None or entry > turn.prefix + number - window
        mine = masks[turn.prefix, turn.new]
        return near and bool(mine[number * turn.kv_tokens + entry])

    check(scene, scene.naive(sees), mask=mask)


def test_select() -> None:
    scene = make_scene([(20, 3), (0, 6)], **GQA)
    select = torch.full((len(scene.q), 5), -1, dtype=torch.int32)
    for turn in scene.turns:
        for number in range(turn.new):
            ids = torch.randperm(turn.kv_tokens)[:4]
            select[turn.rows.start + number, : len(ids)] = ids

    def sees(turn: Turn, number: int, entry: int) -> bool:
        chosen = select[turn.rows.start + number].tolist()
        return scene.rule(turn, number, entry) and entry in chosen

    check(scene, scene.naive(sees), select=select)


@pytest.mark.parametrize("extra", [{}, {"kind": "swa", "window_tokens": 9}])
def test_entries_of_several_tokens(extra: dict[str, Any]) -> None:
    requests = [(0, 11), (3, 1), (2, 1), (13, 6), (0, 2), (15, 1)]
    check(make_scene(requests, **GQA, **extra, tokens_per_entry=4, page_tokens=8))


def test_select_names_tokens_of_entries() -> None:
    scene = make_scene([(20, 1)], **GQA, tokens_per_entry=4, page_tokens=8, pads=False)
    select = torch.tensor([[5, 8, 9, 20, -1]], dtype=torch.int32)
    check(scene, scene.naive(lambda turn, number, entry: entry in (1, 2)), select=select)


@pytest.mark.parametrize(
    ("group", "names"),
    [
        (GQA, ("k", "v")),
        (GQA | {"v_head_dim": 0}, ("k",)),
        (GQA | {"kind": "swa", "window_tokens": 3}, ("k", "v")),
        (GQA | {"tokens_per_entry": 2}, ("k", "v")),
        (
            {"geometry": "mla", "kv_lora_rank": 8, "qk_rope_head_dim": 4, "scale": 0.3},
            ("latent", "rope"),
        ),
    ],
)
def test_exact_new_tokens(group: dict[str, Any], names: tuple[str, ...]) -> None:
    """The step's own tokens as given; what is stored of them is not looked at."""
    scene = make_scene(MIXED, **group)
    per_entry = scene.group.tokens_per_entry
    given: dict[str, list[Tensor]] = {name: [] for name in names}
    pads = 1 if per_entry == 1 else 0
    turns = []
    for turn in scene.turns:
        tensors = dict(turn.tensors)
        start = turn.prefix // per_entry
        for name in names:
            old = tensors[name]
            new = torch.randn(len(old) - start, *old.shape[1:])
            tensors[name] = torch.cat([old[:start], new])
            given[name].append(new)
        turns.append(Turn(turn.prefix, turn.new, turn.kv_tokens, turn.rows, tensors))
    flat = {
        name: torch.cat([torch.randn(pads, *rows[0].shape[1:]), *rows, rows[0][:pads]])
        for name, rows in given.items()
    }
    if "latent" in flat:
        flat = {name: x.squeeze(1) for name, x in flat.items()}
    scene = Scene(scene.group, scene.store, scene.step, scene.q, turns)
    new = dict(zip(("new_k", "new_v"), flat.values(), strict=False))
    check(scene, scene.naive(), **new)


def test_draft_trees_measure_windows_by_depth() -> None:
    """Two branches after the prefix: storage order is not position, the mask says who sees whom."""
    scene = make_scene([(6, 4)], **GQA, kind="swa", window_tokens=3, pads=False)
    depth = torch.tensor([6, 7, 6, 7])
    tree = {0: {0}, 1: {0, 1}, 2: {2}, 3: {2, 3}}
    mask = torch.ones(4, 10, dtype=torch.bool)
    for number, path in tree.items():
        mask[number, 6:] = torch.tensor([other in path for other in range(4)])
    position = [*range(6), *depth.tolist()]

    def sees(turn: Turn, number: int, entry: int) -> bool:
        near = position[entry] > position[6 + number] - 3
        return near and bool(mask[number, entry])

    arrays = scene.step.arrays._replace(positions=depth)
    scene.step = replace(scene.step, make=lambda: arrays)
    check(scene, scene.naive(sees), mask=mask.flatten())


# ---- edges -----------------------------------------------------------------------------------


def test_nothing_to_do() -> None:
    scene = make_scene([(4, 0), (0, 0)], **GQA, pads=False)
    out = scene.oracle().attend(1, scene.q, scene.step, AttendExtra())
    assert out.shape == (0, 4, 8)


def test_padding_is_zero_and_has_no_mass() -> None:
    scene = make_scene([(4, 2)], **GQA)
    out, lse = scene.oracle().attend_lse(1, scene.q, scene.step, AttendExtra())
    for row in (0, 3):
        assert not out[row].any()
        assert torch.isneginf(lse[row]).all()
    assert torch.isfinite(out).all()


def test_a_longer_q_than_the_step_is_padding() -> None:
    scene = make_scene([(4, 2)], **GQA, pads=False)
    q = torch.cat([scene.q, torch.full_like(scene.q, torch.nan)])
    out = scene.oracle().attend(1, q, scene.step, AttendExtra())
    assert torch.equal(out[:2], scene.attend())
    assert not out[2:].any()


def test_a_broken_entry_poisons_only_those_who_see_it() -> None:
    scene = make_scene([(0, 8)], **GQA, pads=False)
    page = int(scene.step.tables[scene.group.table].pages[1, 1])
    clean = scene.attend()
    scene.store.tensors["v"][1, page * 4 + 1, 0] = torch.nan
    out = scene.attend()
    assert torch.equal(out[:5], clean[:5])
    assert torch.isnan(out[5:, :2]).all()
    assert torch.equal(out[5:, 2:], clean[5:, 2:])


def test_released_pages_are_refused() -> None:
    scene = make_scene([(9, 2)], **GQA, pads=False)
    table = scene.step.tables[scene.group.table]
    table.first_page[0] = 1
    with pytest.raises(BooksError, match="released"):
        scene.attend()
    table.first_page[0] = 0
    table.pages[1, 1] = 0
    with pytest.raises(BooksError, match="released"):
        scene.attend()


def test_blocks_of_queries_join() -> None:
    """More queries than a block holds, and the same in steps of uneven chunks."""
    group = GQA | {"kind": "swa", "window_tokens": 40, "page_tokens": 16}
    scene = make_scene([(70, 300)], **group, pads=False)
    turn = scene.turns[0]
    at, keys = torch.arange(70, 370), torch.arange(370)
    seen = visible_keys(scene.work, at, keys)
    want = dense_attention(scene.q, turn.k.double(), turn.v.double(), seen, scene.work)
    torch.testing.assert_close(scene.attend(), want, rtol=1e-10, atol=1e-10)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over several disjoint sets of keys as one: output and LSE."""
    outs = torch.stack([out for out, _ in parts])
    sums = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(sums, 0)
    return (outs * (sums - total).exp()[..., None]).sum(0), total


def test_parts_merge_to_the_whole() -> None:
    """Any split of the keys, a part that sees nothing included; the sinks count once."""
    scene = make_scene([(5, 4), (0, 3)], **GQA, pads=False, sinks=True)
    sinks = torch.randn(4)
    half = torch.rand(45) < 0.5
    sizes = [(4, 9), (3, 3)]
    causal = torch.cat([torch.ones(n, kv).tril(kv - n).bool().flatten() for n, kv in sizes])
    masks = [causal & half, causal & ~half, torch.zeros(45, dtype=torch.bool)]
    parts = []
    for number, mask in enumerate(masks):
        extra = AttendExtra(mask=mask, sinks=None if number else sinks)
        parts.append(scene.oracle().attend_lse(1, scene.q, scene.step, extra))
    out, lse = merge(parts)
    want, want_lse = scene.naive(sinks=sinks)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)


def test_dtype_of_q_comes_back() -> None:
    scene = make_scene([(6, 2)], **GQA, pads=False)
    want = scene.attend()
    q = scene.q.bfloat16()
    out, lse = Oracle(scene.group, scene.store).attend_lse(1, q, scene.step, AttendExtra())
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)


def test_inputs_are_not_changed() -> None:
    scene = make_scene([(6, 2)], **GQA, soft_cap=2.0, sinks=True)
    sinks, q = torch.randn(4), scene.q.clone()
    before = sinks.clone()
    scene.attend(sinks=sinks)
    assert torch.equal(sinks, before)
    assert torch.equal(scene.q, q)


# ---- the dense reference ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "group",
    [
        GQA,
        GQA | {"kind": "swa", "window_tokens": 5, "soft_cap": 2.0},
        GQA | {"kind": "chunked", "chunk_tokens": 4, "v_head_dim": 0},
        GQA | {"causal": False},
        GQA | {"tokens_per_entry": 2},
        {"geometry": "mla", "kv_lora_rank": 8, "qk_rope_head_dim": 4, "scale": 0.3},
    ],
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_dense_equals_naive(group: dict[str, Any], with_sinks: bool) -> None:
    scene = make_scene([(6, 7), (0, 3)], **group, pads=False)
    sinks = torch.randn(4) if with_sinks else None
    want, _ = scene.naive(sinks=sinks)
    per_entry = scene.group.tokens_per_entry
    for turn in scene.turns:
        at = torch.arange(turn.prefix, turn.prefix + turn.new)
        ends = (torch.arange(len(turn.k)) + 1) * per_entry - 1
        seen = visible_keys(scene.work, at, ends)
        out = dense_attention(
            scene.q[turn.rows], turn.k.double(), turn.v.double(), seen, scene.work, sinks
        )
        torch.testing.assert_close(out, want[turn.rows], rtol=1e-10, atol=1e-10)


def test_dense_select() -> None:
    scene = make_scene([(6, 3)], **GQA, pads=False)
    select = torch.tensor([[0, 5, -1], [7, 2, 1], [3, -1, -1]], dtype=torch.int32)
    seen = visible_keys(scene.work, torch.arange(6, 9), torch.arange(9), select)
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0, 5], [1, 2, 7], [3]]
    none = visible_keys(scene.work, torch.arange(0), torch.arange(9), select[:0])
    assert none.shape == (0, 9)
