"""A config as a dict, written to disk and read back as the ``model`` of a spec."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfactory.errors import Problem, SpecError
from kvfactory.huggingface import model_from_config
from kvfactory.spec import Spec

Config = dict[str, Any]


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Config], Config]:
    """Map a config given as a dict; the result is what a spec accepts."""

    def mapped(config: Config) -> Config:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        model = model_from_config(path)
        Spec.parse({"model": model})
        return model

    return mapped


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[[Config | str], tuple[Problem, ...]]:
    """The problems of a config, a dict or the text of the file, that cannot be mapped."""

    def refused(config: Config | str) -> tuple[Problem, ...]:
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        with pytest.raises(SpecError) as caught:
            model_from_config(path)
        assert all(problem.path.startswith("model.path") for problem in caught.value.problems)
        return caught.value.problems

    return refused
