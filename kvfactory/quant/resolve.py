"""From a config value to a codec with its options bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvfactory.errors import SpecError
from kvfactory.quant.codec import Codec, Scheme
from kvfactory.registry import Registry
from kvfactory.spec.validation import from_validation

SCHEMES: Registry[Scheme] = Registry("quant", "kvfactory.quant", "kvfactory.quants", Scheme)


def resolve_codec(name: str, options: Mapping[str, Any], path: str) -> Codec:
    """The codec ``name`` with ``options`` validated by its own schema.

    Raises:
        SpecError: unknown scheme or option, or an option of the wrong type; paths begin with
            ``path``.
    """
    scheme = SCHEMES.get(name, path)
    try:
        bound = scheme.options.model_validate(dict(options))
    except ValidationError as error:
        raise SpecError(*from_validation(error, scheme.options, f"{path}.options")) from None
    return scheme.make(bound)
