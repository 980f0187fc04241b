"""What a YAML file of others must not hold.

Files are scanned as tokens before any loader sees them: aliases can expand without end, keys that
begin with an underscore ask Hydra to import and call code, and YAML 1.1 reads ``off``, ``010`` and
``1:30`` as false, 8 and 90. Logging, callbacks and environment variables below ``hydra`` run code
without any such key, so of Hydra's own settings only the values to sweep over may be set.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_MISREAD = re.compile(r"[-+]?0[0-9_]+|[-+]?[0-9]+(:[0-9]+)+|(?i:y|n|yes|no|on|off)")
_NULL = ("", "~", "null", "Null", "NULL")
_HEADER = re.compile(r"\s*#\s*@.*hydra")
_SWEPT = "hydra.sweeper.params"


def names_hydra(text: str) -> bool:
    """Whether a key, a group, a package or an override is of Hydra's own settings."""
    return "hydra" in re.split(r"[^\w-]+", text.partition("=")[0])


def unsafe_yaml(file: Path, may_name_hydra: bool = True) -> str:
    """The first thing in a YAML file that must not reach a loader; empty if there is none.

    A file that cannot be read, or that is no file, is unsafe.
    """
    import yaml

    after_key, about_hydra = False, False
    try:
        if not file.is_file():
            return "something that is no file, or a link to nothing"
        text = file.read_text(encoding="utf-8")
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            found = _unsafe_token(token, after_key)
            if found:
                return f"{found} at line {token.start_mark.line + 1}"
            after_key = isinstance(token, yaml.KeyToken)
            about_hydra |= isinstance(token, yaml.ScalarToken) and "hydra" in token.value
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return " ".join(str(error).split())
    except OSError as error:
        return f"a file that cannot be read ({error.strerror})"
    if may_name_hydra:
        return ""
    if any(_HEADER.match(line) for line in text.splitlines()):
        return "the package hydra"
    return _about_hydra(text) if about_hydra else ""


def _unsafe_token(token: Any, is_key: bool) -> str:
    import yaml

    if isinstance(token, yaml.AliasToken | yaml.AnchorToken):
        return f"the reference {token.value!r}"
    if isinstance(token, yaml.TagToken):
        return f"the tag {token.value!r}"
    if isinstance(token, yaml.ScalarToken) and is_key and token.value.startswith("_"):
        return f"the key {token.value!r}"
    if is_key and (isinstance(token, yaml.ValueToken) or _is_null(token)):
        return "a key without a name"
    if isinstance(token, yaml.ScalarToken) and token.plain and _MISREAD.fullmatch(token.value):
        return f"{token.value!r} without quotes, which YAML reads as another value,"
    return ""


def _is_null(token: Any) -> bool:
    import yaml

    return isinstance(token, yaml.ScalarToken) and token.plain and token.value in _NULL


def _about_hydra(text: str) -> str:
    """What a file without references sets below ``hydra``, other than values to sweep over."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return ""  # Hydra says what is wrong
    except RecursionError:
        return "values nested without end"
    for key, value in _pairs(root):
        if key == "defaults":
            named = next((each for each in _scalars(value) if names_hydra(each)), "")
            if named:
                return f"{named!r} in defaults"
        elif names_hydra(key):
            found = _set_below(key, value)
            if found:
                return f"{found}, of which a file of others may set {_SWEPT} alone"
    return ""


def _set_below(path: str, node: Any) -> str:
    """The first key at or below ``path`` that is no plain value to sweep over."""
    import yaml

    if path == _SWEPT:
        for key, value in _pairs(node):
            plain = isinstance(value, yaml.ScalarNode) and "${" not in value.value
            if names_hydra(key) or not plain:
                return f"{path}.{key}"
        return "" if isinstance(node, yaml.MappingNode) else path
    if not _SWEPT.startswith(f"{path}.") or not isinstance(node, yaml.MappingNode):
        return path
    below = (_set_below(f"{path}.{key}", value) for key, value in _pairs(node))
    return next(filter(None, below), "")


def _pairs(node: Any) -> list[tuple[str, Any]]:
    """Keys and values of a mapping; none of anything else."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return []
    return [(str(key.value), value) for key, value in node.value]


def _scalars(node: Any) -> list[str]:
    """The words at and below a node."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return [str(node.value)]
    inner = [each for part in node.value for each in (part if isinstance(part, tuple) else [part])]
    return [word for each in inner for word in _scalars(each)]
