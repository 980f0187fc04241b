"""Recurrent states on the device: views, copies, snapshots, replay rings, and a reference flow."""

from kvfactory.states.flow import LinearInputs, LinearLayer
from kvfactory.states.landing import DeviceCounts
from kvfactory.states.rings import Ring
from kvfactory.states.store import StateStore
from kvfactory.states.views import StateViews

__all__ = ["DeviceCounts", "LinearInputs", "LinearLayer", "Ring", "StateStore", "StateViews"]
