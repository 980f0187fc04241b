"""Accepted counts that are still on the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceCounts:
    """``counts`` int [batch] on a GPU, whose copy to the host starts here; see ``PendingCounts``.

    The copy runs in the order of the current stream, and nobody waits for it.
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self._landed = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        self._landed.copy_(counts, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def poll(self) -> NDArray[np.int64] | None:
        """The counts int64 [batch] once they are on the host, before that None."""
        if not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        return self._landed.numpy().astype(np.int64)
