"""Replay: a real trace of request lengths through the books of a plan, in virtual time."""

from kvfactory.replay.load import Load, load_of, spec_for
from kvfactory.replay.record import Fill, Outcome, Times
from kvfactory.replay.simulate import Simulation
from kvfactory.replay.traces import Trace, read_trace

__all__ = [
    "Fill",
    "Load",
    "Outcome",
    "Simulation",
    "Times",
    "Trace",
    "load_of",
    "read_trace",
    "spec_for",
]
