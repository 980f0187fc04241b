"""A gate before each layer: who reads or writes it waits until what is being loaded is there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from kvfactory.books.ids import Int64
from kvfactory.errors import BuildError, Problem, SpecError


class Gate:
    """Layers that open one by one, as a load from elsewhere completes; made by ``Cache.gate``.

    The loader calls ``open(layer)`` behind the last write of that layer, in its own stream and
    thread; ``attend``, ``select``, ``write`` and ``state`` wait for the layer whose cache they
    touch: on a GPU their stream for the loader's, the host only until the loader has come that far.

    ``ids``, by table, are the pages and state slots that the load fills; None where any may be.
    """

    def __init__(
        self,
        layers: Iterable[int],
        device: torch.device,
        ids: Mapping[str, Int64] | None = None,
    ) -> None:
        self._closed = {layer: threading.Event() for layer in layers}
        self._cuda = device.type == "cuda"
        self._arrivals: dict[int, torch.cuda.Event] = {}
        self._failure: str | None = None
        self._dismissed = False
        self._ids = None if ids is None else {name: set(of.tolist()) for name, of in ids.items()}

    @property
    def done(self) -> bool:
        """Whether nobody has to wait: every layer is open and what was loaded has arrived, or the
        gate was dismissed.
        """
        if self._dismissed:
            return True
        opened = self._failure is None and all(event.is_set() for event in self._closed.values())
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
        """Make all readers raise, those that wait included, until ``dismiss``: the load will not
        complete.
        """
        self._failure = reason
        self._release()

    def dismiss(self) -> None:
        """Forget the gate: nobody waits for it or raises any more.

        Of a load that failed, once the sequences that it was for are closed.
        """
        self._dismissed = True
        self._release()

    def _release(self) -> None:
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
        if self._dismissed:
            return
        if self._failure is not None:
            fix = "close its sequences, then gate.dismiss()"
            raise BuildError(Problem(f"layer {layer}", self._failure, "a load that completes", fix))
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._arrivals[layer])

    def is_open(self, layer: int) -> bool:
        """Whether ``wait`` returns at once."""
        closed = self._closed.get(layer)
        return closed is None or (closed.is_set() and (self._failure is None or self._dismissed))

    def fills(self, table: str, ids: Int64) -> bool:
        """Whether the load may fill one of the pages or slots ``ids`` of ``table``."""
        if self._ids is None:
            return bool(len(ids))
        return not self._ids.get(table, set()).isdisjoint(ids.tolist())


class Gates:
    """The gates of a cache that somebody may still have to wait for."""

    def __init__(self) -> None:
        self._gates: list[Gate] = []
        self._ignored = False

    def __bool__(self) -> bool:
        return bool(self._gates)

    def add(self, gate: Gate) -> None:
        """One more."""
        self._gates.append(gate)

    def clear(self) -> None:
        """Dismiss all of them."""
        for gate in self._gates:
            gate.dismiss()
        self._gates.clear()

    def wait(self, layers: Iterable[int]) -> None:
        """Wait, in the order of the current stream, for what is still being loaded to ``layers``.

        Raises:
            BuildError: a load that failed.
        """
        if self._gates and not self._ignored:
            for gate in [gate for gate in self._gates if gate.done]:
                with suppress(ValueError):  # another thread was first; one may be adding a gate
                    self._gates.remove(gate)
            for layer in layers if self._gates else ():
                for gate in tuple(self._gates):
                    gate.wait(layer)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Nobody waits meanwhile: for work on padding alone."""
        self._ignored = True
        try:
            yield
        finally:
            self._ignored = False

    def order(self, layers: Iterable[int]) -> None:
        """Let the current stream wait for what was loaded to those of ``layers`` that are open."""
        for layer in layers if self._gates else ():
            for gate in self._gates:
                if gate.is_open(layer):
                    gate.wait(layer)

    def awaited(self, layers: Iterable[int], table: str, ids: Int64) -> bool:
        """Whether one of the pages or slots ``ids`` of ``table`` may still be filled in one of
        ``layers``.
        """
        return any(
            not gate.is_open(layer) and gate.fills(table, ids)
            for gate in self._gates
            for layer in layers
        )
