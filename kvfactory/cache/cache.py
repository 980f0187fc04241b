"""The cache: books, pools and attention behind one front, for an engine's loop.

Every call that changes the books is all or nothing. Device work goes to the caller's current
stream; the loop itself reads nothing back from the device; offload and load do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kvfactory.backends import AttendExtra, AttentionRunner
from kvfactory.books import Accepted, Committed, Segment
from kvfactory.books import Sequence as SequenceId
from kvfactory.cache.arguments import check_step
from kvfactory.cache.gate import Gate, Gates
from kvfactory.cache.graphs import Graph, check_graph, graph_shape, made_graph
from kvfactory.cache.handover import receive, regions
from kvfactory.cache.layerwork import LayerWork
from kvfactory.cache.parts import Parts
from kvfactory.cache.retraction import CacheImage, load, offload
from kvfactory.cache.routing import known_layer
from kvfactory.cache.stepwork import StepWork
from kvfactory.planning.cacheplan import GroupPlan
from kvfactory.pools import Pool, Region
from kvfactory.states import StateStore, StateViews
from kvfactory.steps.foreign import ForeignBatch, Ids
from kvfactory.steps.step import Step


class Cache:
    """A model's whole cache; made by ``kvfactory.build``.

    ``plan`` is the plan it was built from, ``books`` the host's truth about who owns what,
    ``states`` what a prefix cache and replay rings do with recurrent states.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._gates = Gates()
        self._work = LayerWork(parts, self._gates)
        self._graphs = 0
        self.plan = parts.plan
        self.books = parts.books
        self.states = StateStore(parts.plan, parts.pools, parts.books)
        self._steps = StepWork(parts, self.states, self._gates)

    def __repr__(self) -> str:
        free = ", ".join(f"{path} {room.free}" for path, room in self.books.capacity().items())
        return f"Cache({self.plan.spec.model.name}, {self.plan.bytes:,} B; free: {free})"

    # ---- sequences ---------------------------------------------------------------------------

    def open(
        self,
        count: int = 1,
        prefix: Sequence[Segment] = (),
        cross_tokens: Sequence[int] = (),
    ) -> list[SequenceId]:
        """``count`` new sequences, each beginning with the tokens of ``prefix``.

        ``prefix`` is a chain of segments that adjoin from position 0; ``cross_tokens`` the
        encoder lengths, one per sequence, of models with cross attention.

        Raises:
            OutOfPages: too few request rows, state slots or encoder pages; nothing was taken.
            BooksError: segments that are released or do not adjoin; encoder tokens that do not fit.
        """
        return self.books.open(count, prefix, cross_tokens)

    def fork(self, sequence: SequenceId, count: int) -> list[SequenceId]:
        """``count`` sequences with the committed history of ``sequence``, sharing its pages.

        Raises:
            OutOfPages: too few request rows or state slots; nothing was taken.
            BooksError: a stale handle, counts on their way, encoder tokens not yet written, a ring
                that is not flushed, or states that an open step or a closed ``gate`` has.
        """
        self.states.check_flushed(sequence)
        self._steps.check_states("fork", sequence)
        return self.books.fork(sequence, count)

    def close(self, sequences: Sequence[SequenceId]) -> None:
        """Return everything that ``sequences`` own.

        Raises:
            BooksError: a stale or foreign handle; nothing is closed then.
        """
        self.books.close(sequences)

    def hold(self, sequence: SequenceId, tokens: int) -> Segment:
        """A committed prefix of ``sequence``, up to ``tokens``, owned outside of it.

        Raises:
            OutOfPages: too few state slots; nothing was taken.
            BooksError: as ``Books.hold``, a ring that is not flushed, or states as in ``fork``.
        """
        self.states.check_flushed(sequence)
        self._steps.check_states("hold", sequence)
        return self.books.hold(sequence, tokens)

    def release(self, segment: Segment) -> None:
        """Return the pages and state slots of ``segment``.

        Raises:
            BooksError: it was released before, or is none of this cache.
        """
        self.books.release(segment)

    def offload(self, sequences: Sequence[SequenceId]) -> CacheImage:
        """The pages, states and rings of ``sequences``, in host memory; they are closed then.

        Tracked states are not carried. Waits for the device.

        Raises:
            BooksError: a stale handle, a step in flight, or encoder tokens and no others; nothing
                is closed then.
        """
        self.states.copy_due()
        return offload(self._parts, sequences)

    def load(self, image: CacheImage) -> list[SequenceId]:
        """The sequences of ``image``, open again with their pages, states and rings, in its order.

        Pages that they shared are copies of their own then; tracked states are not carried.

        Raises:
            OutOfPages: too few pages, slots or rows for all of them; nothing was taken.
            BooksError: a sequence that is longer than a row of this cache; nothing was taken.
            SpecError: an image of a cache with other groups, formats, page sizes or constants.
        """
        return load(self._parts, self.states, image)

    def regions(
        self, sequence: SequenceId, share: tuple[int, int] | None = None
    ) -> Mapping[str, tuple[Region, ...]]:
        """Where everything that ``sequence`` keeps lies, by group: what a transfer sends, or fills.

        Copied in order to the regions of as long a sequence that another cache received, they
        reproduce every byte, if the pools' manifests agree (``pool(layer)[0].manifest()``). Rings
        are folded into their states before. ``share`` (part, parts): of unequal tensor-parallel
        sizes, that part of the heads and channels; (0, 1) on the side that has fewer of them.

        Raises:
            BooksError: a stale handle or a step in flight.
            SpecError: heads that cannot be shared so.
        """
        return regions(self._parts, self.states, sequence, share)

    def receive(self, tokens: int, cross_tokens: int = 0) -> SequenceId:
        """A sequence of ``tokens`` whose contents a transfer brings to its ``regions``.

        Its replay rings are empty. It may be extended at once behind a ``gate``.

        Raises:
            OutOfPages: too few pages, slots or rows; nothing was taken.
            BooksError: more tokens than a sequence may have, or ``cross_tokens`` and no others.
        """
        return receive(self._parts, self.states, tokens, cross_tokens)

    def reset(self) -> None:
        """Forget all sequences, segments and gates; generations go on, old handles stay invalid."""
        self._gates.clear()
        self.books.reset()
        self._parts.buffers.clear()

    # ---- steps -------------------------------------------------------------------------------

    def extend(
        self,
        sequences: Sequence[SequenceId],
        new_tokens: int | Sequence[int] | Tensor,
        parents: Sequence[int] | Tensor | None = None,
    ) -> Step:
        """Slots for ``new_tokens`` more tokens of each sequence, in every table, or in none.

        ``parents`` int [tokens] makes the new tokens of each sequence a draft tree: index of the
        parent among the sequence's new tokens, -1 for the root's. Both are on the host.

        Raises:
            OutOfPages: the tables that are short; nothing was taken.
            BooksError: stale sequences, too many new tokens or open steps, malformed trees, or
                shared pages or states to copy that a closed ``gate`` still awaits.
            SpecError: a draft tree where a group keeps one entry for several tokens; or a tensor
                on the device.
            BuildError: ``memory=meta``, which stores no steps.
        """
        if parents is not None:
            self._work.check_tree()
        return self._steps.extend(sequences, new_tokens, parents)

    def step(
        self,
        tables: Mapping[str, Ids],
        before: Ids,
        after: Ids,
        *,
        rows: Ids | None = None,
        states: Mapping[str, Ids] | None = None,
        cross_tokens: Ids = (),
    ) -> Step:
        """A step of an engine that schedules and allocates itself, from its own ids.

        ``tables`` by name: page ids int [batch, pages]; ``before`` and ``after`` int [batch] are
        the tokens of each request without and with the new ones. The rest: see ``ForeignBatch``.
        There is nothing to commit; what the ids own is the engine's business.

        Raises:
            BooksError: ids outside of their tables, or books that hold something meanwhile.
            SpecError: missing tables, wrong shapes, or more than a step may have.
            BuildError: as ``extend``.
        """
        batch = ForeignBatch(before, after, tables, rows, states or {}, cross_tokens)
        return self._steps.foreign(batch)

    def commit(self, step: Step, accepted: Accepted | Tensor = None) -> Committed:
        """Make the accepted tokens of the oldest open step permanent and return the rest's pages.

        ``accepted``: None for all, counts int [batch] on the host or the device, or for a draft
        tree the accepted path of node indices per sequence; its rows move to the front.

        Raises:
            BooksError: a step that is not the oldest open one, impossible counts, tokens that
                recurrent states cannot forget, or, of an earlier step, ids outside a pool that
                kernels met; nothing was written for those.
        """
        return self._steps.commit(step, accepted)

    # ---- graphs ------------------------------------------------------------------------------

    def graph(self, batch: int, tokens: int = 1, total: int | None = None) -> Graph:
        """A graph for steps of up to ``batch`` requests with ``tokens`` new tokens each.

        With ``total`` the requests have any numbers of tokens, together up to ``total``: whole
        prefills. Smaller steps are padded on the sink. On a GPU whose backends only launch device
        work it is a CUDA graph; elsewhere replays call the captured function.

        Raises:
            SpecError: more requests or tokens than planned.
            BooksError: what is no number.
        """
        shape = graph_shape(self.plan, batch, tokens, total)
        self._graphs += 1
        return made_graph(self._parts, self._gates, shape, self._graphs - 1)

    def fill(self, graph: Graph, step: Step) -> None:
        """Make ``step`` the next replay's of ``graph``.

        Raises:
            SpecError: a step that the graph's shape does not hold, or no graph of this cache.
            BooksError: a step as in ``attend``; or lengths that are not decided yet, where the
                backend's plan carries them.
        """
        check_graph(graph, self._parts.buffers)
        check_step(step, self._parts.buffers)
        graph.fill(step)

    # ---- attention ---------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        step: Step,
        *,
        group: str = "",
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        select: Tensor | None = None,
    ) -> Tensor:
        """Write K and V of the step's new tokens, then attend over all that the layer sees.

        ``q`` [tokens, q_heads, head_dim]; ``k`` [tokens, kv_heads, head_dim] and ``v`` [tokens,
        kv_heads, v_head_dim]; out [tokens, q_heads, v_head_dim] in q's dtype. MLA: q [tokens,
        q_heads, kv_lora_rank + qk_rope_head_dim], already absorbed, k the latent [tokens,
        kv_lora_rank], v the rope key [tokens, qk_rope_head_dim]; out [tokens, q_heads,
        kv_lora_rank]. ``k = v = None`` only reads. ``group`` names the spec's group where a layer
        attends in two (self and cross). ``mask``, ``sinks`` and ``select``: see ``AttendExtra``.

        Raises:
            SpecError: a layer that attends in no or several groups, tensors of a wrong shape or
                type, or what the backend does not take; nothing is written then.
            BooksError: a step of another cache, or one whose place a later step has taken; or as
                ``write``; or a mask that the backend does not take in such a step.
            BuildError: memory that stores nothing, or a ``gate`` whose load failed.
        """
        route = self._work.router.attention(layer, group)
        extra = AttendExtra(mask=mask, sinks=sinks, select=select)
        self._work.check_attend(route, q, (k, v), step, extra)
        if k is not None:
            self._work.write(layer, step, {"k": k, "v": v}, group)
        return self._work.attend(route, q, step, (k, v), extra)

    def select(
        self,
        layer: int,
        q_index: Tensor,
        k_index: Tensor | None,
        step: Step,
        *,
        weights: Tensor | None = None,
        v_index: Tensor | None = None,
    ) -> Tensor:
        """Write the index keys of the step's new entries, then select what each token attends to.

        ``q_index`` [tokens, index_heads, head_dim], ``k_index`` [entries, head_dim], ``v_index``
        [entries, v_head_dim] where the group keeps index values, ``weights`` float [tokens,
        index_heads]. Out: token positions int32 [tokens, width], ascending, -1 padded, for
        ``attend(select=)`` of this layer and of later ones without index keys. ``k_index = None``
        only reads: the keys were given to ``write``.

        Raises:
            SpecError: a layer without index keys, or tensors of a wrong shape or type.
            BooksError: a step as in ``attend``; or as ``write``.
            BuildError: as ``attend``.
        """
        route = self._work.router.index(layer)
        self._work.check_select(route, q_index, step, weights)
        if k_index is not None:
            self._work.write(layer, step, {"index_k": k_index, "index_v": v_index}, "")
        return self._work.select(route, q_index, step, weights)

    def write(self, layer: int, step: Step, *, group: str = "", **rows: Tensor | None) -> None:
        """Write several groups of ``layer`` at once, or nothing: K and V, and index keys.

        ``k=`` and ``v=`` as for ``attend``, ``index_k=`` and ``index_v=`` as for ``select``, which
        then have None for them; ``group`` names the attention group where there are two. Of
        groups with ``tokens_per_entry`` one row for each entry that the step completes.

        Raises:
            SpecError: an unknown name, a layer without such a group, or tensors of a wrong shape.
            BooksError: a step as in ``attend``; or, of groups with ``tokens_per_entry``, a step
                behind drafts that were undecided.
            BuildError: memory that stores nothing, or a ``gate`` whose load failed.
        """
        self._work.write(layer, step, rows, group)

    def gate(
        self, layers: Sequence[int] | None = None, sequences: Sequence[SequenceId] | None = None
    ) -> Gate:
        """A closed gate before ``layers`` (None: all), for a load that arrives layer by layer.

        ``attend``, ``select``, ``write`` and ``state`` of a layer wait until ``gate.open(layer)``.
        Meanwhile nothing is copied that the load fills: the pages and states of ``sequences``, of
        any where that is None.

        Raises:
            SpecError: a layer that keeps nothing.
            BooksError: a stale handle or a step in flight of ``sequences``.
        """
        return self._work.gate(layers, sequences)

    def state(self, layer: int, step: Step, group: str = "") -> StateViews:
        """The recurrent states of ``layer`` for the step's kernels: see ``StateViews``.

        Raises:
            SpecError: a layer of no or several recurrent groups.
            BooksError: a step as in ``attend``.
            BuildError: a ``gate`` whose load failed.
        """
        route = self._work.router.recurrence(layer, group)
        check_step(step, self._parts.buffers)
        self._work.pass_gates(route)
        return self.states.views(route.group, route.index, step)

    # ---- lower doors -------------------------------------------------------------------------

    def pool(self, layer: int, group: str = "") -> tuple[Pool, int]:
        """The pool that keeps ``layer`` and the layer's index in it; ``group`` where it has two.

        Raises:
            SpecError: a layer of no or several groups.
        """
        route = self._work.router.storage(layer, group)
        return self._parts.pools[route.group.name], route.index

    def backend(self, layer: int, group: str = "") -> AttentionRunner:
        """The backend that attends for ``layer``, by its index in the pool; it writes nothing.

        Raises:
            SpecError: a layer that attends in no or several groups.
            BuildError: memory that stores nothing.
        """
        return self._work.runner(self._work.router.attention(layer, group).group)

    def selector_of(self, layer: int) -> int | None:
        """The layer whose selection ``layer`` attends over, itself included; None for no layer."""
        return self._work.router.selector_of(layer)

    def groups(self, layer: int) -> tuple[GroupPlan, ...]:
        """The groups that ``layer`` keeps or reads something in."""
        return tuple(group for group, _ in self.plan.owners.get(known_layer(layer), ()))
