"""Hugging Face configs: any ``config.json`` as the ``model`` of a spec, or a reason why not.

A new architecture is a ``Family`` in a module of ``families`` or behind an entry point of the
group ``kvfactory.families``.
"""

from kvfactory.huggingface.family import FAMILIES, Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.mapping import model_from_config, model_from_values

__all__ = ["FAMILIES", "Family", "Fields", "Geometry", "model_from_config", "model_from_values"]
