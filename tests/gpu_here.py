"""The GPU of tests that carry the marker ``gpu``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def this_gpu() -> dict[str, Any]:
    """The ``device`` section of a spec for the first GPU."""
    card = torch.cuda.get_device_properties(0)
    sm = card.major * 10 + card.minor
    return {"name": "here", "type": "cuda", "sm": sm, "num_sms": card.multi_processor_count}


@contextmanager
def no_waiting() -> Iterator[None]:
    """Calls that wait for the device raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
