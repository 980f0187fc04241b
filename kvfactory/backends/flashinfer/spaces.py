"""Workspaces of host plans: which bytes each plan writes, and staging that is not overwritten."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvfactory.backends.flashinfer.calls import Space


@dataclass
class Staging:
    """Pinned bytes that a plan fills and copies from; ready again once that copy has run."""

    pinned: Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the last copy out of these bytes has run."""
        if self.copied is not None:
            self.copied.synchronize()

    def mark(self) -> None:
        """A copy out of these bytes was issued."""
        if self.copied is not None:
            self.copied.record()


@dataclass
class PlanArea:
    """Device bytes of one plan at a time, with ``turns`` of staging.

    ``holder`` names what the bytes hold now, so that a plan of theirs can be used again; ``uses``
    counts the times that a plan was asked of it.
    """

    floats: Tensor
    ints: Tensor
    turns: list[Staging]
    holder: object = None
    uses: int = 0
    _turn: int = field(default=0)

    def next(self) -> tuple[Space, Staging]:
        """The space for the next plan, its staging free to write."""
        staging = self.turns[self._turn]
        self._turn = (self._turn + 1) % len(self.turns)
        staging.wait()
        return Space(self.floats, self.ints, staging.pinned), staging


def make_area(floats: Tensor, ints: Tensor, turns: int) -> PlanArea:
    """An area over the planned bytes ``ints``, with pinned staging on a GPU."""
    cuda = ints.is_cuda
    return PlanArea(
        floats,
        ints,
        [
            Staging(
                torch.zeros(ints.numel(), dtype=torch.uint8, pin_memory=cuda),
                torch.cuda.Event() if cuda else None,  # type: ignore[no-untyped-call]
            )
            for _ in range(turns)
        ],
    )
