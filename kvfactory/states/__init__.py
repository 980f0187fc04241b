"""Recurrent states on the device: views, copies, snapshots and replay rings."""

from kvfactory.states.landing import DeviceCounts
from kvfactory.states.rings import Ring
from kvfactory.states.store import StateStore
from kvfactory.states.views import StateViews

__all__ = ["DeviceCounts", "Ring", "StateStore", "StateViews"]
