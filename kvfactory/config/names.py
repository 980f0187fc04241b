"""Names that belong to Hydra."""

from __future__ import annotations

import re


def names_hydra(text: str) -> bool:
    """Whether a key, a group, a package or an override is of Hydra's own settings."""
    return "hydra" in re.split(r"[^\w-]+", text.partition("=")[0])
