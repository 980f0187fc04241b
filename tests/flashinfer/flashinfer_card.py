"""FlashInfer itself on a Hopper card, and the scenes of its tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from flashinfer_scene import GROUP, WINDOW, Scene, plan_of

from kvfactory.backends.flashinfer.calls import Library
from kvfactory.backends.flashinfer.choose import ModuleKey
from kvfactory.backends.flashinfer.library import installed
from kvfactory.errors import BuildError

Groups = dict[str, dict[str, Any]]

FULL = {**GROUP, "head_dim": 128}
LOCAL = {**WINDOW, "head_dim": 128}
HYBRID: Groups = {"full": FULL, "local": {**LOCAL, "layers": "2-3"}}
LONG = [(2000, 17, 90), (1, 1, 1), (70, 1, 33), (1, 1, 1)]
"""New tokens of three requests in each of four steps."""


def on_hopper(modules: Sequence[ModuleKey]) -> Library:
    """FlashInfer with ``modules`` compiled; skips where it or a Hopper card is missing."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")
    try:
        found = installed()
    except BuildError as error:
        pytest.skip(str(error))
    found.load(modules)
    return found


def scene_of(library: Library, groups: Groups, **options: Any) -> Scene:
    """A scene on the card, with room for 8 requests of 2,600 tokens unless told otherwise."""
    card = torch.cuda.get_device_properties(0)
    device = {"num_sms": card.multi_processor_count, **options.pop("device", {})}
    options = {"workload": {"requests": 4, "tokens": 2600}, "engine": {}, **options}
    options["engine"] = {"prefill_chunk_tokens": 4096, "max_requests": 8, **options["engine"]}
    return Scene(plan_of(groups, device=device, **options), library=library, device="cuda")
