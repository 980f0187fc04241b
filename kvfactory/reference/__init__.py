"""The oracle: attention, sparse selection and recurrences in plain torch, right before fast.

Importing this package imports torch; the ``torch`` backend does so when it binds.
"""

from kvfactory.reference.attention import Oracle
from kvfactory.reference.conv import causal_conv
from kvfactory.reference.dense import dense_attention, visible_keys
from kvfactory.reference.drives import gated_delta, kimi_delta, lightning, mamba1, mamba2
from kvfactory.reference.recurrence import Drive, chunk, scan
from kvfactory.reference.select import Rule, Selected, Selector, choose, rule_of

__all__ = [
    "Drive",
    "Oracle",
    "Rule",
    "Selected",
    "Selector",
    "causal_conv",
    "choose",
    "chunk",
    "dense_attention",
    "gated_delta",
    "kimi_delta",
    "lightning",
    "mamba1",
    "mamba2",
    "rule_of",
    "scan",
    "visible_keys",
]
