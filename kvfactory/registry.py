"""One generic registry: built-ins found in a package, third parties by entry point, by name only.

A built-in plugin is an object in the ``PLUGINS`` tuple of a module of the registry's package, so a
new one is a new file. Entry points are loaded lazily, one name at a time. Built-ins win over third
parties; two third parties with one name are refused.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from kvfactory.errors import Problem, SpecError, did_you_mean


class Named(Protocol):
    """What every plugin has: the name by which configs refer to it."""

    @property
    def name(self) -> str:
        """The name in configs."""
        ...


T = TypeVar("T", bound=Named)

BUILT_IN = "built-in"


class Registry(Generic[T]):
    """The plugins of one axis.

    ``axis`` is the config word (``quant``), ``package`` the module or package that holds the
    built-ins, ``group`` the entry-point group of third parties.
    """

    def __init__(self, axis: str, package: str, group: str) -> None:
        self.axis, self.package, self.group = axis, package, group
        self._loaded: dict[str, T] = {}

    @cached_property
    def _builtin(self) -> dict[str, T]:
        root = importlib.import_module(self.package)
        modules = [root]
        for info in pkgutil.iter_modules(getattr(root, "__path__", ())):
            modules.append(importlib.import_module(f"{self.package}.{info.name}"))
        found: dict[str, T] = {}
        for module in modules:
            for plugin in vars(module).get("PLUGINS", ()):
                assert plugin.name not in found, f"two built-in {self.axis}s named {plugin.name}"
                found[plugin.name] = plugin
        return found

    @cached_property
    def _foreign(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self.group):
            found.setdefault(entry.name, []).append(entry)
        return found

    def names(self) -> tuple[str, ...]:
        """Every known name, sorted; third-party plugins are not loaded for this."""
        return tuple(sorted({*self._builtin, *self._foreign}))

    def origin(self, name: str) -> str:
        """``built-in`` or the distribution that brings the plugin."""
        if name in self._builtin:
            return BUILT_IN
        return ", ".join(_owner(entry) for entry in self._foreign.get(name, ()))

    def get(self, name: str, path: str) -> T:
        """The plugin called ``name``; ``path`` is the config key that asked.

        Raises:
            SpecError: unknown name, two third parties with that name, or a plugin that fails to
                load.
        """
        if name in self._builtin:
            return self._builtin[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(name, path)
        return self._loaded[name]

    def _load(self, name: str, path: str) -> T:
        entries = self._foreign.get(name, [])
        if not entries:
            close = did_you_mean(name, self.names())
            raise SpecError(
                Problem(
                    path,
                    repr(name),
                    f"one of the {_plural(self.axis)} {', '.join(self.names())}",
                    f"{path}={close}" if close else "",
                )
            )
        if len(entries) > 1:
            owners = " and ".join(sorted(_owner(entry) for entry in entries))
            raise SpecError(
                Problem(
                    path, repr(name), f"one {self.axis} of that name", f"uninstall one of {owners}"
                )
            )
        try:
            plugin: T = entries[0].load()
        except Exception as error:  # a broken third-party package is the user's bad input
            raise SpecError(
                Problem(
                    path,
                    f"{name!r}, which fails to load: {type(error).__name__}: {error}",
                    f"a working {self.axis} plugin",
                    f"mend or uninstall {_owner(entries[0])}",
                )
            ) from error
        return plugin


def _plural(word: str) -> str:
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value
