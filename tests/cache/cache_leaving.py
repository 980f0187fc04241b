"""Random histories in which tokens outlive their sequences.

They are held, saved, tracked, donated and kept, leave for the host and come back, and are handed
over to other sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from books_leaving import restore
from cache_machine import CacheMachine, Live
from cache_oracle import bits
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvfactory.books import Segment
from kvfactory.cache.retraction import CacheImage
from kvfactory.errors import BooksError, SpecError
from kvfactory.pools import copies


class LeavingMachine(CacheMachine):
    """All that a cache can do with a committed prefix."""

    # ---- prefixes ------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), how=st.sampled_from(["hold", "save", "retire"]))
    def own(self, which: int, how: str) -> None:
        if (live := self.idle(which)) is None or not live.life.tokens:
            return
        stop, states = len(live.life.tokens), self.cache.states
        save, handle = how == "save", live.handle
        operation: Callable[[], Segment] = {
            "hold": lambda: self.cache.hold(handle, stop),
            "save": lambda: states.checkpoint(handle, stop),
            "retire": lambda: states.retire(handle),
        }[how]
        self.flushed(live, operation)
        if how == "retire":
            segment = operation()
            self.live.remove(live)
        else:
            segment = self.attempt(
                lambda books: books.hold(handle, stop, checkpoint=save), operation
            )
        if segment is not None:
            life = self.oracle.saved(live.life) if save else live.life
            self.segments.append((segment, life))

    @precondition(lambda self: self.live and self.engine.get("state_tracking"))
    @rule(which=st.integers(0, 9), back=st.integers(0, 3))
    def track(self, which: int, back: int) -> None:
        """The state as it is; or one that the next step of a sequence will write."""
        waiting = [opened for opened in self.steps if not opened.launched]
        ahead = len(self.steps) == 1 and waiting and waiting[0].step.host.parents is None
        if ahead:
            opened = waiting[0]
            spots = [n for n, draft in enumerate(opened.drafts) if len(draft) > back]
            spots = [n for n in spots if opened.lives[n] in self.live]
            if spots:
                spot = self.pick(which, spots)
                live, draft = opened.lives[spot], opened.drafts[spot]
                life = live.life.then(draft[: back + 1])
                stop, handle = len(life.tokens), live.handle
                slots = self.attempt(
                    lambda books: books.track(handle, stop),
                    lambda: self.cache.states.track(handle, stop),
                )
                if slots is not None:
                    self.oracle.store_state(slots, life)
        elif (live := self.idle(which)) and live.life.tokens:
            handle = live.handle
            self.flushed(live, lambda: self.cache.states.track(handle))
            self.attempt(lambda books: books.track(handle), lambda: self.cache.states.track(handle))

    @precondition(lambda self: self.live and self.engine.get("state_tracking"))
    @rule(which=st.integers(0, 9), keep=st.booleans())
    def donate(self, which: int, keep: bool) -> None:
        live = self.idle(which)
        if live is None or self.cache.books.tracked(live.handle) <= live.life.since:
            return
        handle = live.handle
        first = self.cache.plan.table("local").lifetime.first_visible
        stop = self.cache.books.tracked(handle)
        gone = first(len(live.life.tokens)) // 4 > first(stop) // 4
        if gone:
            self.refused(lambda: self.cache.states.donate(handle), BooksError, "released")
            return
        if keep:
            segment = self.cache.states.retire(handle, tracked=True)
            self.live.remove(live)
        else:
            segment = self.attempt(
                lambda books: books.donate(handle), lambda: self.cache.states.donate(handle)
            )
        if segment is not None:
            assert segment.stop == stop
            self.segments.append((segment, live.life.part(stop)))

    @precondition(lambda self: self.segments)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        chosen = self.pick(which, self.segments)
        self.segments.remove(chosen)
        self.cache.release(chosen[0])
        self.refused(lambda: self.cache.release(chosen[0]), BooksError, "segment")

    # ---- images and transfers ------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(which=st.integers(1, 15))
    def offload(self, which: int) -> None:
        self.absorb()
        self.cache.states.copy_due()
        chosen = [live for n, live in enumerate(self.live) if which >> n & 1]
        handles = [live.handle for live in chosen]
        if handles:
            self.refused(lambda: self.cache.offload([*handles, handles[0]]), BooksError, "twice")
        if any(map(self.busy, chosen)):
            self.refused(lambda: self.cache.offload(handles), BooksError, "open")
            return
        raw = [self.oracle.raw(self.cache.books.view(handle)) for handle in handles]
        self.images.append((self.cache.offload(handles), [live.life for live in chosen], raw))
        self.live = [live for live in self.live if live not in chosen]

    @precondition(lambda self: self.images)
    @rule(which=st.integers(0, 9), again=st.sampled_from([False, False, True]))
    def load(self, which: int, again: bool) -> None:
        chosen = self.pick(which, self.images)
        image, lives, raw = chosen
        shapes = [(shape.tokens, shape.cross_tokens) for shape in image.sequences]
        assert shapes == [(len(life.tokens), 0) for life in lives]
        if any(tokens for tokens, _ in shapes):
            foreign = CacheImage(image.sequences, dict(list(image.pages.items())[1:]))
            self.refused(lambda: self.cache.load(foreign), SpecError, "groups")
        handles = self.attempt(lambda books: restore(books, shapes), lambda: self.cache.load(image))
        if handles is None:
            return
        if not again:
            self.images = [kept for kept in self.images if kept is not chosen]
        self.live += [Live(handle, life) for handle, life in zip(handles, lives, strict=True)]
        for handle, before in zip(handles, raw, strict=True):
            view = self.cache.books.view(handle)
            self.same(self.oracle.raw(view), before if view.stop else self.oracle.raw(view))

    def same(self, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert torch.equal(bits(got[key]), bits(value)), key

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def hand_over(self, which: int) -> None:
        """A transfer to a sequence of the same cache."""
        if (live := self.idle(which)) is None:
            self.refused(lambda: self.cache.regions(self.live[0].handle), BooksError)
            return
        tokens = len(live.life.tokens)
        handle = self.attempt(
            lambda books: restore(books, [(tokens, 0)]), lambda: self.cache.receive(tokens)
        )
        if handle is None:
            return
        ours, theirs = self.cache.regions(live.handle), self.cache.regions(handle)
        arena = self.cache._parts.arena
        assert ours.keys() == theirs.keys()
        for name, regions in ours.items():
            for source, target, size in copies(regions, theirs[name]):
                arena[target : target + size] = arena[source : source + size]
        if tokens:
            views = [self.cache.books.view(each) for each in (handle, live.handle)]
            self.same(*(self.oracle.raw(view, ring=False) for view in views))
        self.live.append(Live(handle, live.life))
