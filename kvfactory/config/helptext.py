"""What ``--help`` prints: every choice of every folder, the words that keys take, the values."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from string import Template
from typing import TYPE_CHECKING

from pydantic import BaseModel

from kvfactory.spec import Spec

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra


def help_text(hydra: Hydra, overrides: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The template of ``config.yaml``, filled in.

    ``options`` are the choices of each config group. Hydra's own help would not look for them in
    folders of others.
    """
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    config = hydra.compose_config("config", list(overrides), run_mode=RunMode.RUN)
    told = {group: ", ".join(names) for group, names in sorted(options.items()) if names}
    return Template(config.hydra.help.template).substitute(
        CHOICES="\n".join(f"{group}: {names}" for group, names in told.items()),
        WORDS="\n".join(f"{key}: {', '.join(words)}" for key, words in _words()),
        CONFIG=OmegaConf.to_yaml(hydra.get_sanitized_cfg(config, "job")),
    )


def _words() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Keys of the sections that take one of a few words, with these."""
    for section, field in Spec.model_fields.items():
        part = field.annotation
        assert isinstance(part, type)
        assert issubclass(part, BaseModel)
        for key, inner in part.model_fields.items():
            if typing.get_origin(inner.annotation) is typing.Literal:
                yield f"{section}.{key}", typing.get_args(inner.annotation)
