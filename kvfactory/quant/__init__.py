"""Number formats: one file per family; the registry finds them."""

from kvfactory.quant.codec import Codec, Constant, Logical, Options, Plane, Scheme
from kvfactory.quant.resolve import SCHEMES, resolve_codec

__all__ = ["SCHEMES", "Codec", "Constant", "Logical", "Options", "Plane", "Scheme", "resolve_codec"]
