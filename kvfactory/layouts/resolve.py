"""From a config value, a catalog name or a pattern per family, to a layout."""

from __future__ import annotations

from kvfactory.errors import SpecError
from kvfactory.layouts.pattern import Layout
from kvfactory.registry import Registry

LAYOUTS: Registry[Layout] = Registry("layout", "kvfactory.layouts", "kvfactory.layouts", Layout)


def resolve_layout(k: str, v: str | None, scale: str | None, path: str) -> Layout:
    """The layout whose families are given by name or pattern; v and scale default to k's layout.

    Raises:
        SpecError: an unknown name or a malformed pattern; paths begin with ``path``.
    """
    base = _one(k, path)
    others = {fam: text for fam, text in (("v", v), ("scale", scale)) if text is not None}
    if others:
        texts = {fam: _one(text, f"{path}.{fam}").text(fam) for fam, text in others.items()}
        base = Layout("custom", base.k, texts.get("v", base.v), texts.get("scale", base.scale))
    wrong = base.problems(path)
    if wrong:
        raise SpecError(*wrong)
    return base


def layout_name(pattern: str) -> str:
    """The catalog's name of ``pattern`` for K, empty for one that is not in it."""
    known = [LAYOUTS.get(name, "layout") for name in LAYOUTS.working()]
    same = sorted((each for each in known if each.k == pattern), key=lambda each: bool(each.scale))
    return same[0].name if same else ""


def _one(text: str, path: str) -> Layout:
    """A value with ``plane`` in it is a pattern, else the name of a layout."""
    return Layout("custom", text) if "plane" in text.split() else LAYOUTS.get(text, path)
