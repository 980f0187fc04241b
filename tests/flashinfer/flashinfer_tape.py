"""What a CUDA graph does, on the CPU: device work is recorded once and repeated without its host.

Every torch operation between fixed tensors is repeated into the tensors that it gave the first
time; what Python decided in between is not asked again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.paused:
            self.steps.append(lambda: _again(func, args, kwargs, result))
        return result

    def whole(self, work: Callable[[bool], None]) -> None:
        """Record ``work`` as one step; it is told whether it is repeated."""
        self.paused = True
        work(False)
        self.paused = False
        self.steps.append(lambda: work(True))


def _again(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if _tensor(x)}
    fresh = func(*args, **kwargs)
    for old, new in zip(tree_leaves(result), tree_leaves(fresh), strict=True):
        if _tensor(old) and old.untyped_storage().data_ptr() not in given:
            old.copy_(new)


def _tensor(x: object) -> bool:
    return isinstance(x, Tensor)


class TapeRecorder:
    """A graph's recorder; ``library`` is told where to record its launches."""

    captures = True

    def __init__(self, library: Any) -> None:
        self._library, self._tape, self._result = library, Tape(), None

    def record(self, work: Callable[[], Any]) -> None:
        work()
        with torch.no_grad(), self._tape:
            self._library.tape = self._tape
            self._result = work()
            self._library.tape = None

    def replay(self) -> Any:
        with torch.no_grad():
            for step in self._tape.steps:
                step()
        return self._result
