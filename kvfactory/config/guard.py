"""What Hydra may act on in a sweep: code that it or an installed plugin of it names, nothing else.

Hydra calls what ``callbacks``, ``job_logging``, ``hydra_logging``, ``launcher`` and ``sweeper``
name, in keys such as ``()`` and ``class``. Each configuration is compared with one that is made
of the same choices of Hydra's own groups, without values and without folders of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from kvfactory.config.foreign import names_hydra
from kvfactory.errors import Problem, SpecError

_FIXED = ("callbacks", "job_logging", "hydra_logging")
_PLUGINS = ("launcher", "sweeper")
_PLAIN = "a plain value: an override names no code, choices such as hydra/launcher=NAME do"


class GuardedLoader(ConfigLoaderImpl):
    """Hydra's loader of configurations, each checked before anything in it is used."""

    def load_configuration(self, *args: Any, **kwargs: Any) -> DictConfig:
        """What Hydra composes.

        Raises:
            SpecError: it names code that no file of Hydra's or of ours does.
        """
        config = super().load_configuration(*args, **kwargs)
        choices = [
            f"{group}={name}"
            for group, name in config.hydra.runtime.choices.items()
            if group.startswith("hydra/") and name is not None
        ]
        run_mode = kwargs["run_mode"] if "run_mode" in kwargs else args[2]
        plain = super().load_configuration("config", choices, run_mode)
        problems = tuple(_problems(_section(config), _section(plain)))
        if problems:
            raise SpecError(*problems)
        return config


def _section(config: DictConfig) -> dict[str, Any]:
    """The part ``hydra``, references as they are written."""
    section = OmegaConf.to_container(config.hydra, resolve=False)
    assert isinstance(section, dict)
    return {str(key): value for key, value in section.items()}


def _problems(found: Mapping[str, Any], plain: Mapping[str, Any]) -> Iterator[Problem]:
    for key in _FIXED:
        if found.get(key) != plain.get(key):
            need = "what Hydra ships: a config runs no code"
            yield Problem(f"hydra.{key}", "values of another origin", need)
    yield from _values(found)
    for key in _PLUGINS:
        yield from _code(found.get(key), plain.get(key), f"hydra.{key}")
    sweeper = found.get("sweeper")
    params = sweeper.get("params") if isinstance(sweeper, Mapping) else None
    for key, value in params.items() if isinstance(params, Mapping) else ():
        if names_hydra(f"{key}={value}"):
            got = f"values of {key}"
            yield Problem("hydra.sweeper.params", got, "keys of the schema to sweep over")


def _values(found: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that Hydra asserts, rather than refuses."""
    for key in _PLUGINS:
        if not isinstance(found.get(key), Mapping):
            yield Problem(f"hydra.{key}", repr(found.get(key)), f"a choice: hydra/{key}=basic")
    verbose = found.get("verbose")
    if not isinstance(verbose, bool | str | list):
        yield Problem("hydra.verbose", repr(verbose), "true, false, or loggers: a name or a list")
    sweeper = found.get("sweeper")
    batch = sweeper.get("max_batch_size") if isinstance(sweeper, Mapping) else None
    if isinstance(batch, int) and batch < 1:
        yield Problem("hydra.sweeper.max_batch_size", str(batch), "null, or 1 and more")


def _code(found: Any, plain: Any, path: str) -> Iterator[Problem]:
    """Keys that begin with an underscore, and references, where ``found`` is not ``plain``."""
    if found == plain:
        return
    if isinstance(found, Mapping):
        below = plain if isinstance(plain, Mapping) else {}
        for key, inner in found.items():
            here = f"{path}.{key}"
            if str(key).startswith("_") and (key not in below or inner != below[key]):
                yield Problem(here, "a key that begins with an underscore", _PLAIN)
            else:
                yield from _code(inner, below.get(key), here)
    elif isinstance(found, list):
        for index, inner in enumerate(found):
            yield from _code(inner, None, f"{path}.{index}")
    elif isinstance(found, str) and "${" in found:
        yield Problem(path, repr(found), _PLAIN)
