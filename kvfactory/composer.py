"""From overrides to a Spec: Hydra composes, the schema judges, nothing global is left changed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvfactory.config.confdirs import ConfDir, conf_dirs
from kvfactory.config.devices import ask_driver, resolve
from kvfactory.config.overrides import Override, private_keys, quoted, refusals
from kvfactory.errors import Problem, SpecError
from kvfactory.spec import Spec

Probe = Callable[[str], dict[str, Any] | None]

_LOCK = threading.RLock()
_SEARCHPATH = "hydra.searchpath"
_POLICIES = ("quant", "layout")


@dataclass(frozen=True)
class Composed:
    """A validated configuration and what to do with it."""

    spec: Spec
    action: str
    output: str


@dataclass(frozen=True)
class Request:
    """Overrides that were checked on sight, the folders that they choose from, and the choices.

    ``options`` are the names of the files of each config group, in all folders.
    """

    overrides: tuple[Override, ...]
    dirs: tuple[ConfDir, ...]
    options: Mapping[str, tuple[str, ...]]

    def for_hydra(self, values: bool = True) -> list[str]:
        """The overrides as Hydra must get them, and the folders of others.

        Without ``values`` only choices of groups are left: what the files themselves say.
        """
        chosen = [each for each in self.overrides if values or not each.section]
        kept = [text for each in chosen for text in each.for_hydra()]
        folders = ",".join(_quoted(f"file://{found.path}") for found in self.dirs[1:])
        return [*kept, f"{_SEARCHPATH}=[{folders}]"] if folders else kept

    def about(self, text: str) -> Override | None:
        """The override that a message of Hydra quotes, the longest if it quotes several."""
        quoted = [each for each in self.overrides if f"'{each.key}'" in text or str(each) in text]
        return max(quoted, key=lambda each: len(each.key), default=None)

    def with_value(self, problem: Problem) -> Problem:
        """``problem`` with a mend that can be typed: a suggested key gets the given value."""
        given = next((each for each in self.overrides if each.key == problem.path), None)
        if not given or not problem.fix or "=" in problem.fix or given.value is None:
            return problem
        return replace(problem, fix=f"{problem.fix}={given.value}")


def compose(*overrides: str, conf: Path | None = None) -> Spec:
    """The Spec that ``python -m kvfactory`` would build from these overrides.

    ``conf`` is a folder to use in place of ours. ``device=auto`` is answered by the CUDA driver,
    without torch. Safe in threads and inside another Hydra application.

    Raises:
        SpecError: whatever Hydra or the schema refuses.
    """
    return load(overrides, lambda _: ask_driver(), conf).spec


def load(overrides: Sequence[str], probe: Probe, conf: Path | None = None) -> Composed:
    """A validated configuration with its action and output.

    ``probe`` is asked with the action when the device is ``auto``; see ``devices``.

    Raises:
        SpecError: whatever Hydra or the schema refuses, with all problems of a stage at once.
    """
    request = read(overrides, conf)
    data = _mapping(request, request.for_hydra(), strict=True)
    base = data
    if any(override.section for override in request.overrides):
        base = _mapping(request, request.for_hydra(values=False), strict=False)
    problems = [*private_keys(data), *_scalar_policies(base)]
    if problems:
        raise SpecError(*problems)
    action, output = str(data.pop("action", "run")), str(data.pop("output", "table"))
    data["model"] = _from_huggingface(data.get("model"), base.get("model"))
    try:
        spec = Spec.parse(data)
    except SpecError as error:
        raise SpecError(*(request.with_value(problem) for problem in error.problems)) from None
    if spec.device.type == "auto":
        spec = Spec.parse({**data, "device": resolve(data["device"], probe(action))})
    return Composed(spec, action, output)


def read(overrides: Sequence[str], conf: Path | None = None) -> Request:
    """Overrides split and checked on sight, before Hydra is imported.

    Raises:
        SpecError: every refusal at once.
    """
    wrong = [text for text in overrides if not isinstance(text, str)]
    if wrong:
        fix = 'compose("model=qwen3", "kv=fp8_hnd")'
        raise SpecError(Problem("overrides", repr(wrong[0]), "text, each as an argument", fix))
    parsed = [Override.parse(text) for text in overrides]
    named = [path for each in parsed if each.key == _SEARCHPATH for path in _paths(each)]
    dirs = conf_dirs(named, conf)
    options: dict[str, tuple[str, ...]] = {}
    for found in dirs:
        for group in found.groups():
            options[group] = tuple(sorted({*options.get(group, ()), *found.options(group)}))
    problems = refusals(parsed, options)
    if problems:
        raise SpecError(*problems)
    return Request(tuple(each for each in parsed if each.key != _SEARCHPATH), dirs, options)


def _paths(override: Override) -> list[str]:
    """Folders named by ``hydra.searchpath=[a,b]``."""
    value = (override.value or "").strip().removeprefix("[").removesuffix("]")
    return [part.strip().strip("'\"") for part in value.split(",") if part.strip()]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


# ---- Hydra ---------------------------------------------------------------------------------


def _mapping(request: Request, overrides: list[str], strict: bool) -> dict[str, Any]:
    """What Hydra composes, as plain data; ``strict`` resolves references and refuses ``???``."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    primary = str(request.dirs[0].path)
    with hydra_errors(request):
        with _LOCK, _isolated():
            with initialize_config_dir(primary, job_name="kvfactory", **version_base()):
                config = hydra_compose("config", overrides=overrides)
        data = OmegaConf.to_container(config, resolve=strict, throw_on_missing=strict)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


@contextmanager
def _isolated() -> Iterator[None]:
    """Set Hydra's process-wide state aside and put it back; call it under the lock."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import JobRuntime

    saved, job = GlobalHydra.instance().hydra, dict(JobRuntime.instance().conf)
    GlobalHydra.instance().hydra = None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = saved
        for key, value in job.items():
            JobRuntime.instance().set(key, value)


def version_base() -> dict[str, str]:
    """Hydra 1.3 warns without a version base, 1.4 with one."""
    import hydra

    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


@contextmanager
def hydra_errors(request: Request) -> Iterator[None]:
    """Turn what Hydra and OmegaConf refuse into a ``SpecError`` about the user's own words."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise SpecError(_problem(error, request)) from None
    except KeyError as error:
        given = next((o for o in request.overrides if o.key == "hydra.job.env_copy"), None)
        if given is None:
            raise
        got, need = f"{given.value}: no variable {error}", "variables of this process"
        raise SpecError(Problem(given.key, got, need)) from None
    except RecursionError:
        raise SpecError(Problem("config", "values nested without end", "plain values")) from None
    except FileNotFoundError as error:
        if error.filename is not None:
            raise
        got, fix = "one that was removed", "cd to a folder that exists"
        raise SpecError(Problem("working directory", got, "a folder", fix)) from None


def _problem(error: Exception, request: Request) -> Problem:
    from hydra.errors import MissingConfigException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MissingMandatoryValue):
        path = str(error.full_key)
        return Problem(path, "nothing", "a value: the key is mandatory", f"{path}=...")
    if isinstance(error, MissingConfigException):
        known = ", ".join(error.options or ()) or "a file that exists"
        return Problem(str(error.missing_cfg_file), "no such file", f"one of {known}")
    if isinstance(error, OmegaConfBaseException):
        return Problem(str(error.full_key or "config"), said, "a value that resolves")
    override = request.about(said) or _parse_error(error)
    if override is None:
        return Problem("config", said, "overrides and files that compose")
    if said.startswith("Ambiguous value"):
        need = "one value, or -m to sweep over several"
        return Problem(override.key, str(override.value), need, f"-m {override}")
    told = said.split(" See http")[0].removeprefix("LexerNoViableAltException: ")
    got = f"{override}, which Hydra refuses: {told}"
    need = "an override in Hydra's grammar, with odd values in quotes"
    plain = override.value and not re.search(r"[]'\"[{}()\\]", override.value)
    return Problem(override.key, got, need, quoted(str(override)) if plain else "")


def _parse_error(error: Exception) -> Override | None:
    from hydra.errors import OverrideParseException

    if not isinstance(error, OverrideParseException):
        return None
    found = Override.parse(str(error.override))
    return Override("", found.key, found.value)


# ---- what only the composition can tell ----------------------------------------------------


def _scalar_policies(base: Mapping[str, Any]) -> Iterator[Problem]:
    """In YAML, quant and layout are mappings: a scalar would hide what other files say."""
    kv = base.get("kv")
    for path, policy in _policy_owners(kv if isinstance(kv, Mapping) else {}):
        for key in _POLICIES:
            value = policy.get(key, {})
            if not isinstance(value, Mapping):
                here = f"{path}.{key}"
                roles = "k, v, latent, ..." if key == "quant" else "tokens, index, state"
                role = "k" if key == "quant" else "tokens"
                need = f"a mapping ({roles}) in a YAML file"
                yield Problem(here, f"{value!r} in a file", need, f"{key}: {{{role}: {value}}}")


def _policy_owners(kv: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "kv", kv
    for section in ("groups", "recipes"):
        members = kv.get(section)
        for name, policy in members.items() if isinstance(members, Mapping) else ():
            if isinstance(policy, Mapping):
                yield f"kv.{section}.{name}", policy


def _from_huggingface(model: Any, base: Any) -> Any:
    """``model=hf model.path=FILE``: the geometry in the file, other overrides on top."""
    if not isinstance(base, Mapping) or "path" not in base or not isinstance(model, Mapping):
        return model
    from kvfactory.huggingface import model_from_config

    rest = {key: value for key, value in model.items() if key != "path"}
    return _merged(model_from_config(str(model["path"])), rest)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[key] = _merged(inner, value)
        else:
            merged[key] = value
    return merged
