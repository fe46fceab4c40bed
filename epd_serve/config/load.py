"""Read a deployment file; every error names the file, the key and, if it is in the file, the line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from epd_serve.config.faults import Location, faults_of
from epd_serve.config.schema import DeploymentConfig
from epd_serve.config.sections import overlay


class ConfigError(ValueError):
    """Invalid deployment file; the message has a line per fault."""


def load_config(path: Path) -> DeploymentConfig:
    """Read and check a deployment file. Paths in it are relative to the file.

    Raises:
        ConfigError: the file is unreadable, not YAML, or violates the schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file in UTF-8"
        raise ConfigError(f"{path}: {reason}") from error
    return parse_config(text, source=str(path), directory=path.parent.resolve())


def parse_config(text: str, *, source: str = "deployment", directory: Path | None = None) -> DeploymentConfig:
    """Parse and check the YAML of a deployment. Empty text means the default deployment.

    Args:
        source: name of the text in errors.
        directory: base of relative paths; None: leave them relative.
    """
    try:
        values = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as error:  # ValueError: the date 2020-99-99
        raise ConfigError(f"{source}: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{source}:1: expected keys and values such as 'topology: E-P-D'")
    try:
        return DeploymentConfig.model_validate(values or {}, context={"directory": directory})
    except ValidationError as error:
        tree = YAML().load(text)
        raise ConfigError(_lines(error, values, lambda location: f"{source}:{_line(tree, location)}")) from error


def change_config(
    config: DeploymentConfig, changes: Mapping[str, Any], *, source: str = "command line"
) -> DeploymentConfig:
    """Return a deployment with some keys changed, as in ``{"topology": "EPD", "gateway": {"port": 0}}``.

    Raises ConfigError if the result violates the schema; ``source``: origin of the changes, for errors.
    """
    values = overlay(config.model_dump(exclude_unset=True), changes)
    try:
        return DeploymentConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_lines(error, values, lambda location: source)) from error


def _lines(error: ValidationError, values: Any, place: Callable[[Location], str]) -> str:
    faults = faults_of(error, values, DeploymentConfig)
    return "\n".join(
        ": ".join(filter(None, (place(key), ".".join(map(str, key)), fault))) for key, fault in faults.items()
    )


def _line(tree: Any, location: tuple[int | str, ...]) -> int:
    """Return the 1-based line of the deepest part of ``location`` present in the file."""
    line = 1
    for part in location:
        if isinstance(tree, CommentedMap) and part in tree:
            line = (tree.lc.data or {}).get(part, [line - 1])[0] + 1  # a key merged by '<<' has none
        elif isinstance(tree, CommentedSeq) and isinstance(part, int) and part < len(tree):
            line = tree.lc.item(part)[0] + 1
        else:
            break
        tree = tree[part]
    return line
