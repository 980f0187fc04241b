"""Launching: one Triton function with everything baked but a few runtime arguments.

The functions are compiled from an explicit signature rather than from the arguments of a call, so
that ``build`` can compile all that a plan will launch, and a launch costs microseconds: no argument
is inspected, only the driver is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.compiler import ASTSource

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*u8",
}


def pointer(dtype: torch.dtype) -> str:
    """Triton's pointer type for tensors of ``dtype``."""
    return _POINTERS[dtype]


@dataclass(frozen=True)
class Argument:
    """A runtime argument: its Triton type (types for a tuple), aligned to 16 bytes or not."""

    type: str | tuple[str, ...]
    aligned: bool = False


class Kernel:
    """``function`` with ``baked`` bound; ``arguments`` describe the rest, in order.

    Baked parameters stand last in the function's signature. ``interpreted`` says whether Triton was
    told to interpret its functions when they were made. Fusing multiplications with additions
    is off: stored bytes must equal the specification's.
    """

    def __init__(
        self,
        function: Any,
        arguments: Mapping[str, Argument],
        baked: Mapping[str, Any],
        warps: int = 4,
        debug: bool = False,
    ) -> None:
        self.function, self.arguments, self.baked = function, arguments, baked
        self.options = {
            "num_warps": warps,
            "num_stages": 1,
            "enable_fp_fusion": False,
            "debug": debug,
        }
        self.interpreted = not isinstance(function, triton.JITFunction)
        self._padding = (None,) * len(baked)
        self._compiled: Any = None
        self._run: Any = None

    def source(self) -> ASTSource:
        """What the compiler takes; needs no GPU."""
        types = {name: argument.type for name, argument in self.arguments.items()}
        signature = types | dict.fromkeys(self.baked, "constexpr")
        return ASTSource(self.function, signature, dict(self.baked), self._alignments())

    def _alignments(self) -> dict[tuple[int, ...], list[list[Any]]]:
        found: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, argument in enumerate(self.arguments.values()):
            if not argument.aligned:
                continue
            many = isinstance(argument.type, tuple)
            paths = [(index, i) for i in range(len(argument.type))] if many else [(index,)]
            found |= {path: [["tt.divisibility", 16]] for path in paths}
        return found

    def compile(self) -> None:
        """Compile for the current device; several kernels may do so in threads."""
        if not self.interpreted and self._compiled is None:
            self._compiled = triton.compile(self.source(), options=self.options)

    def warm(self) -> None:
        """Compile for the current device and load, so that a launch in a graph can."""
        if self.interpreted or self._run is not None:
            return
        self.compile()
        compiled = self._compiled
        self._streams = triton.runtime.driver.active.get_current_stream
        self._device = triton.runtime.driver.active.get_current_device()
        self._run = compiled.run  # loads the module, which the next line needs
        self._fixed = (compiled.function, compiled.packed_metadata, None, None, None)

    def launch(self, programs: int, *values: Any) -> None:
        """Run ``programs`` programs on the current stream; nothing when there are none.

        ``values`` are tensors, numbers, or tuples of them, as ``arguments`` say. Where kernels are
        compiled an address does for a tensor.
        """
        if programs == 0:
            return
        if self.interpreted:
            self.function[(programs,)](*values, **self.baked)
            return
        if self._run is None:
            self.warm()
        stream = self._streams(self._device)
        raw = [_raw(value) for value in values]
        self._run(programs, 1, 1, stream, *self._fixed, *raw, *self._padding)


def _raw(value: Any) -> Any:
    """An address for a tensor: the driver then asks no questions about it."""
    if isinstance(value, int):
        return value
    return tuple([_raw(v) for v in value]) if isinstance(value, tuple) else value.data_ptr()
