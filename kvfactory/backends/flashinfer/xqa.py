"""TensorRT-LLM's decode of one group: what it reads beyond page lists, and its launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvfactory.backends.flashinfer.calls import Lists, XqaCall
from kvfactory.backends.flashinfer.schedule import Launch
from kvfactory.backends.flashinfer.store import Layer
from kvfactory.backends.flashinfer.tails import clear_nans


@dataclass(frozen=True)
class Xqa:
    """The launch function of a group, with ``values`` e4m3 [layers, pages, slots, heads, dim]."""

    run: Callable[[XqaCall], None]
    semaphores: Tensor
    scratch: Tensor
    values: Tensor
    num_sms: int

    def begin(self, lists: Lists) -> None:
        """Once a step, before its first layer."""
        clear_nans(self.values, lists)

    def attend(self, launch: Launch, q: Tensor, layer: Layer, out: Tensor, scale: float) -> None:
        """Attention of ``q`` [batch, q_heads, dim] into ``out``, over one layer."""
        assert launch.tables is not None
        assert launch.lengths is not None
        self.run(
            XqaCall(
                q=q.contiguous(),
                k=layer.k,
                v=layer.v,
                out=out,
                tables=launch.tables,
                lengths=launch.lengths,
                semaphores=self.semaphores,
                scratch=self.scratch,
                scale=scale * layer.k_scale,
                v_scale=layer.v_scale,
                window_left=launch.window_left,
                num_sms=self.num_sms,
            )
        )
