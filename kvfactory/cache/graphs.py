"""CUDA graphs of steps: fixed addresses, padded on the sink, refilled before every replay.

Where nothing can be captured (a CPU, or a backend that reads lengths back), a graph keeps the
function and calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from kvfactory.backends import AttentionRunner
from kvfactory.books import StepRecord
from kvfactory.books.ids import count_of
from kvfactory.cache.gate import Gates
from kvfactory.cache.parts import Parts, check_storage
from kvfactory.errors import BooksError, Problem, SpecError
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.steps.buffers import StepBuffers
from kvfactory.steps.padding import blank_record, padded
from kvfactory.steps.step import GraphShape, Step

Work = Callable[[], Any]


class Recorder(Protocol):
    """Keeps a function's device work, or the function itself."""

    @property
    def captures(self) -> bool:
        """Whether replays skip the host's part."""
        ...

    def record(self, work: Work) -> None:
        """Keep ``work``."""
        ...

    def replay(self) -> Any:
        """Run it again over new contents at the same addresses; the result of ``work``."""
        ...


class CudaRecorder:
    """A CUDA graph."""

    captures = True

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._result: Any = None

    def record(self, work: Work) -> None:
        """Capture what ``work`` launches, after it ran once to compile and to warm up."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            self._result = work()

    def replay(self) -> Any:
        """Launch it."""
        self._graph.replay()
        return self._result


class CallRecorder:
    """The function itself."""

    captures = False

    def __init__(self) -> None:
        self._work: Work | None = None

    def record(self, work: Work) -> None:
        """Keep ``work``."""
        self._work = work

    def replay(self) -> Any:
        """Call it."""
        if self._work is None:
            raise BooksError(Problem("replay()", "nothing captured", "capture(run) before it"))
        return self._work()


class Graph:
    """One call for steps of a fixed shape; made by ``Cache.graph``.

    ``step`` has the fixed addresses: give ``capture`` a function of it, and its other inputs fixed
    memory too. Then, for each step, ``Cache.fill`` and ``replay``.
    """

    def __init__(
        self,
        place: GraphPlace,
        shape: GraphShape,
        runners: Iterable[AttentionRunner],
        recorder: Recorder,
    ) -> None:
        self.shape = shape
        self._place, self._runners = place, tuple(runners)
        self._recorder = recorder
        self._source: StepRecord | None = None
        self.step = self._fill(place.blank)

    @property
    def captured(self) -> bool:
        """Whether replays are launches of a CUDA graph, not calls."""
        return self._recorder.captures

    def capture(self, run: Callable[[Step], Any]) -> None:
        """Keep ``run(step)`` for replays. It runs once or twice here, on padding alone.

        Raises:
            SpecError: ``run`` is no function.
        """
        if not callable(run):
            raise SpecError(
                Problem("capture(run)", f"a {type(run).__name__}", "a function of a step")
            )
        self.step = self._fill(self._place.blank)

        def work() -> Any:
            for runner in self._runners:
                runner.prepare(self.step)
            for runner in self._runners:
                runner.begin(self.step)
            return run(self.step)

        with self._place.gates.ignored():
            self._recorder.record(work)

    def fill(self, step: Step) -> None:
        """Make ``step`` the next replay's; padded up to the graph's shape.

        Raises:
            SpecError: a step that the shape does not hold; the last one stays filled in then.
        """
        self.step = self._fill(step.host)

    def replay(self) -> Any:
        """Run for the step that was filled in last: what the captured function returned.

        The result of a CUDA graph is the same memory every time. Such a graph runs when all layers
        behind a ``gate`` are open; a captured function waits where it reads.

        Raises:
            BooksError: another step or shape was filled in since, by another graph, or one that the
                backend refused.
            BuildError: a ``gate`` whose load failed.
        """
        if self._source is None or not self._place.buffers.filled_by(self._source, self.shape):
            got, need = "arrays of another graph's step", "fill before every replay"
            raise BooksError(Problem("replay()", got, need, "cache.fill(graph, step)"))
        if self.captured:
            self._place.gates.wait(self._place.layers)
        return self._recorder.replay()

    def _fill(self, record: StepRecord) -> Step:
        place = self._place
        padding = padded(record, self.shape, place.page_tokens)
        self._source = None
        step = place.buffers.fill_graph(padding, self.shape, place.number, record)
        for runner in self._runners:
            runner.prepare(step)
        self._source = record
        return step

    def belongs_to(self, buffers: StepBuffers) -> bool:
        """Whether ``buffers`` are where its steps are filled in."""
        return self._place.buffers is buffers


class GraphPlace:
    """Where a cache's graph number ``number`` takes its arrays from."""

    def __init__(self, plan: CachePlan, buffers: StepBuffers, number: int, gates: Gates) -> None:
        self.buffers, self.number, self.gates = buffers, number, gates
        self.layers = tuple(dict.fromkeys(layer for g in plan.groups for layer in g.layers))
        self.blank = blank_record(plan)
        self.page_tokens = {
            t.name: t.page_tokens for t in plan.tables if t.lifetime.name != "encoder"
        }


def made_graph(parts: Parts, gates: Gates, shape: GraphShape, number: int) -> Graph:
    """Graph ``number`` of a cache: a CUDA graph where its backends can be captured."""
    check_storage(parts)
    place = GraphPlace(parts.plan, parts.buffers, number, gates)
    runners = parts.runners.values()
    captures = parts.arena.is_cuda and all(runner.capturable for runner in runners)
    return Graph(place, shape, runners, CudaRecorder() if captures else CallRecorder())


def check_graph(graph: Graph, buffers: StepBuffers) -> None:
    """Refuse what is no graph, or one of another cache than that of ``buffers``.

    Raises:
        SpecError: which of both.
    """
    got = "one of another cache" if isinstance(graph, Graph) else f"a {type(graph).__name__}"
    if not isinstance(graph, Graph) or not graph.belongs_to(buffers):
        raise SpecError(Problem("fill(graph)", got, "what graph() of this cache returned"))


def graph_shape(plan: CachePlan, batch: int, tokens: int, total: int | None) -> GraphShape:
    """The shape of a graph of ``batch`` requests; see ``Cache.graph``.

    Raises:
        SpecError: more than a step of the plan can have, or nothing.
        BooksError: what is no number.
    """
    limits = plan.limits
    batch, tokens = count_of(batch, "graph(batch=)"), count_of(tokens, "graph(tokens=)")
    rows = batch * tokens if total is None else count_of(total, "graph(total=)")
    wrong: list[Problem] = []
    if not 1 <= batch <= limits.max_requests:
        need = f"1 to {limits.max_requests}, as planned"
        fix = f"engine.max_requests={batch}" if batch else ""
        wrong.append(Problem("graph(batch=)", str(batch), need, fix))
    if not 1 <= rows <= limits.step_tokens:
        need = f"1 to {limits.step_tokens} new tokens in all, as planned"
        fix = f"engine.prefill_chunk_tokens={rows}" if rows else ""
        wrong.append(Problem("graph(tokens=)", str(rows), need, fix))
    if wrong:
        raise SpecError(*wrong)
    return GraphShape(batch, rows, tokens if total is None else 0)
