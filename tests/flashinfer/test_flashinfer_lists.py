"""What FlashInfer plans and what the device lists: the same pages, also behind undecided steps."""

from __future__ import annotations

import pytest
from flashinfer_scene import GROUP, WINDOW, Scene, plan_of

from kvfactory.steps.step import Step

LOCAL = {"local": {**WINDOW, "layers": "0-1"}}


def planned(scene: Scene, step: Step) -> tuple[list[int], list[int]]:
    """The plan's pages of each request, and those that the device lists."""
    scene.begin(step)
    _, sizes = scene.double.plans[-1]
    (table,) = step.tables.values()
    return sizes.kv_indptr.diff().tolist(), table.lists.indptr.diff().tolist()


def test_prefills_in_flight_are_planned_from_the_page_where_the_window_begins() -> None:
    """Without drafts all tokens of the open step stay, so the window has moved on for sure."""
    scene = Scene(plan_of(LOCAL))
    (sequence,) = scene.cache.open(1)
    scene.advance([sequence], [50])
    first = scene.cache.extend([sequence], 40)
    scene.check(first, 40)
    second = scene.cache.extend([sequence], 30)
    host, device = planned(scene, second)
    key, _ = scene.double.plans[-1]
    assert key.kernel == "fa3"  # carries lengths in its plan
    assert host == device == [-(-120 // 8) - (90 - 23) // 8]
    owned = int(second.host.tables["local"].first_page[0])
    assert owned == (50 - 23) // 8 < second.tables["local"].first_page.item()
    scene.check(second, 30)
    scene.cache.commit(first)
    scene.cache.commit(second)


@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_plans_behind_drafts_cover_every_outcome(accepted: int) -> None:
    scene = Scene(plan_of(LOCAL, engine={"draft_tokens": 3}))
    sequences = scene.cache.open(2)
    scene.advance(sequences, [61, 30])
    first = scene.cache.extend(sequences, 4)
    scene.check(first, 8)
    second = scene.cache.extend(sequences, 4)
    before = [planned(scene, second)]
    scene.cache.commit(first, [accepted, 4 - accepted])
    before.append(planned(scene, second))
    for host, device in before:
        assert all(a >= b for a, b in zip(host, device, strict=True))
    lengths = [61 + accepted + 4, 30 + 4 - accepted + 4]
    assert second.tables["local"].kv_lengths.tolist() == lengths
    scene.check(second, 8)


def test_full_tables_list_everything() -> None:
    scene = Scene(plan_of({"full": GROUP}))
    sequences = scene.cache.open(2)
    scene.advance(sequences, [61, 30])
    step = scene.cache.extend(sequences, [1, 3])
    assert planned(scene, step) == ([8, 5], [8, 5])
    scene.cache.commit(step)
