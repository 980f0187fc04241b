"""What backs the bytes of the arena: one plugin per memory, found by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvfactory.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Memory(Protocol):
    """A source of device bytes. ``device_types`` are the targets it can serve."""

    @property
    def stores(self) -> bool:
        """Whether it backs what groups keep; where not, their capacity is counted only."""
        ...

    @property
    def name(self) -> str:
        """The name in configs."""
        ...

    @property
    def device_types(self) -> frozenset[str]:
        """Device types whose kernels can read these bytes."""
        ...

    def allocate(self, num_bytes: int, device: str) -> Tensor:
        """A zeroed uint8 tensor of exactly ``num_bytes``, aligned to 256 bytes."""
        ...


@dataclass(frozen=True)
class TorchMemory:
    """Memory from torch's own allocators: ``place`` is a torch device, empty for the target's."""

    name: str
    device_types: frozenset[str]
    place: str = ""
    pinned: bool = False
    stores: bool = True

    def allocate(self, num_bytes: int, device: str) -> Tensor:
        """A zeroed uint8 tensor of ``num_bytes`` on ``place`` or ``device``."""
        import torch

        return torch.zeros(
            num_bytes, dtype=torch.uint8, device=self.place or device, pin_memory=self.pinned
        )


PLUGINS = (
    TorchMemory("cuda", frozenset({"cuda"})),
    TorchMemory("cpu", frozenset({"cpu"}), place="cpu"),
    TorchMemory("pinned", frozenset({"cuda"}), place="cpu", pinned=True),
    TorchMemory("meta", frozenset({"cpu", "cuda"}), place="meta"),
    TorchMemory("null", frozenset({"cpu", "cuda"}), stores=False),
)

MEMORIES: Registry[Memory] = Registry("memory", "kvfactory.memory", "kvfactory.memories", Memory)
