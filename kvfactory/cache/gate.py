"""A gate before each layer: readers wait until what is still being loaded has arrived."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from kvfactory.errors import BuildError, Problem, SpecError


class Gate:
    """Layers that open one by one, as a load from elsewhere completes; made by ``Cache.gate``.

    The loader calls ``open(layer)`` behind the last write of that layer, in its own stream and
    thread; ``attend``, ``select`` and ``state`` wait for the layer whose cache they read: on a GPU
    their stream for the loader's, the host only until the loader has come that far.
    """

    def __init__(self, layers: Iterable[int], device: torch.device) -> None:
        self._closed = {layer: threading.Event() for layer in layers}
        self._cuda = device.type == "cuda"
        self._arrivals: dict[int, torch.cuda.Event] = {}
        self._failure: str | None = None

    @property
    def done(self) -> bool:
        """Whether every layer is open and what was loaded has arrived."""
        opened = all(event.is_set() for event in self._closed.values())
        arrivals = self._arrivals.values()
        return opened and all(bool(event.query()) for event in arrivals)  # type: ignore[no-untyped-call]

    def open(self, layer: int) -> None:
        """Let readers of ``layer`` pass, once the current stream has come this far.

        Raises:
            SpecError: a layer that is none of the gate's.
        """
        if layer not in self._closed:
            known = ", ".join(str(each) for each in self._closed)
            raise SpecError(Problem("open(layer)", repr(layer), f"a layer of the gate: {known}"))
        if self._cuda:
            self._arrivals[layer] = arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
        self._closed[layer].set()

    def fail(self, reason: str) -> None:
        """Make all readers raise, those that wait included: the load will not complete."""
        self._failure = reason
        for event in self._closed.values():
            event.set()

    def wait(self, layer: int) -> None:
        """Return, in the order of the current stream, when ``layer`` is open; at once if it is none
        of the gate's.

        Raises:
            BuildError: the load failed.
        """
        closed = self._closed.get(layer)
        if closed is None:
            return
        closed.wait()
        if self._failure is not None:
            raise BuildError(Problem(f"layer {layer}", self._failure, "a load that completes"))
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._arrivals[layer])
