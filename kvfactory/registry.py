"""One generic registry: built-ins found in a package, third parties by entry point, by name only.

A built-in plugin is an object in the ``PLUGINS`` tuple of a module of the registry's package, so a
new one is a new file. Entry points are loaded lazily, one name at a time. Built-ins win over third
parties; two third parties with one name are refused.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
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
    built-ins, ``group`` the entry-point group of third parties, ``kind`` the class or runtime
    protocol of its plugins.
    """

    def __init__(self, axis: str, package: str, group: str, kind: type[object]) -> None:
        self.axis, self.package, self.group, self.kind = axis, package, group, kind
        self._loaded: dict[str, T] = {}
        self._failed: dict[str, tuple[Problem, ...]] = {}

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

    def faults(self, path: str) -> dict[str, tuple[Problem, ...]]:
        """What is wrong with third-party plugins that cannot be used; loads all of them."""
        found: dict[str, tuple[Problem, ...]] = {}
        for name in self._foreign:
            try:
                self.get(name, path)
            except SpecError as error:
                found[name] = error.problems
        return found

    def working(self) -> tuple[str, ...]:
        """Names of the plugins that can be used, sorted; loads all of them."""
        broken = self.faults(self.axis)
        return tuple(name for name in self.names() if name not in broken)

    def origin(self, name: str) -> str:
        """``built-in`` or the distribution that brings the plugin."""
        if name in self._builtin:
            return BUILT_IN
        return ", ".join(_owner(entry) for entry in self._foreign.get(name, ()))

    def get(self, name: str, path: str) -> T:
        """The plugin called ``name``; ``path`` is the config key that asked.

        Raises:
            SpecError: unknown name, two third parties with that name, or a plugin that fails to
                load or is none.
        """
        if name in self._builtin:
            return self._builtin[name]
        if name in self._failed:
            raise SpecError(*(replace(each, path=path) for each in self._failed[name]))
        if name not in self._loaded:
            try:
                self._loaded[name] = self._load(name, path)
            except SpecError as error:
                if name in self._foreign:
                    self._failed[name] = error.problems
                raise
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
        fix = f"mend or uninstall {_owner(entries[0])}"
        try:
            plugin: T = entries[0].load()
            fits = isinstance(plugin, self.kind) and not isinstance(plugin, type)
            named = plugin.name if fits else ""
        except (Exception, SystemExit) as error:  # a broken package is the user's bad input
            got = f"{name!r}, which fails to load: {type(error).__name__}: {error}"
            raise SpecError(Problem(path, got, f"a working {self.axis} plugin", fix)) from error
        if not fits:
            got = f"{name!r}, which is {plugin!r:.80}"
            raise SpecError(Problem(path, got, f"an object of {self.kind.__name__}", fix))
        if named != name:
            got = f"{name!r}, which calls itself {named!r:.80}"
            raise SpecError(Problem(path, got, "one name in both places", fix))
        return plugin


def _plural(word: str) -> str:
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value
