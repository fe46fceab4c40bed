"""Reading a deployment file; every error names the file, the line and what would be right."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError

from epd_serve.config.gateway import GatewayConfig, SecretSource
from epd_serve.config.model_files import HubModel, beside
from epd_serve.config.schema import DEMO_MODEL, DeploymentConfig, devices_beside
from epd_serve.config.sections import ShapeConfig, overlay
from epd_serve.config.vllm import VllmConfig

Location = tuple[int | str, ...]
#: Keys whose values no error may show.
_SECRETS = frozenset({"api_key", "cluster_key", "join_key", "key", "hash"})
#: What pydantic puts into a location that stands in no file: a mapping's key, the member of a union.
_MEMBER = re.compile(
    r"\[key\]$|(constrained-)?(int|float|str|bool)$|(literal|function-|nullable|tuple|list|dict|is-)|lax-|[A-Z]\w+Config$"
)
#: Our words for pydantic's, by the beginnings of its types of errors.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number that is finite",
    "bool": "true or false",
    "string_too_short": "some text",
    "string_pattern": "text of the form {pattern}",
    "string": "text, in quotes if it looks like a number",
    "path": "a path",
    "none": "null",
    "greater_than_equal": "{ge:g} or more",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "{le:g} or less",
    "less_than": "a number below {lt:g}",
    "too_short": "{min_length} or more of them",
    "too_long": "{max_length} of them at most",
}
#: Options that earlier versions had, and what to do without them.
REMOVED = {
    "stealing": "no instance takes requests from the others' queue; leave it out",
    "steals": "no instance takes requests from the others' queue; leave it out, and write 2E-2PD for 2EPD-2PD",
    "feature_batch": "an encoder hands each feature over at once; leave it out",
    "feature_batch_ms": "an encoder hands each feature over at once; leave it out",
    "parallel_encode": "media of a request always go to several encoders at once; leave it out",
}


class ConfigError(ValueError):
    """A deployment file that cannot be used; one line of text per fault."""


def load_config(path: Path) -> DeploymentConfig:
    """Read and check a deployment file. Relative paths in it are taken relative to the file.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or breaks the schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        is_name = path.suffix not in (".yaml", ".yml") and HubModel.parse(str(path)) is not None
        is_model = (path / "config.json").is_file() or (is_name and not path.exists())
        hint = f"; a deployment file is read here, and a model is named by --model {path}" if is_model else ""
        raise ConfigError(f"{path}: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error
    config = parse_config(text, source=str(path))
    here = path.parent.resolve()
    changes: dict[str, Any] = {}
    try:
        if isinstance(config.model, ShapeConfig):
            pass
        elif config.model != DEMO_MODEL:
            changes["model"] = beside(config.model, here)
        if (measured := devices_beside(config.devices, here)) != config.devices:
            changes["devices"] = measured
        if config.generation_config not in ("auto", "off"):
            changes["generation_config"] = str(here / Path(config.generation_config).expanduser())
        if config.trace is not None:
            changes["trace"] = str(here / config.trace.expanduser())
        if isinstance(config.cluster_key, SecretSource) and config.cluster_key.file is not None:
            changes["cluster_key"] = {"file": str(here / config.cluster_key.file.expanduser())}
        if config.tls is not None:
            files = config.tls.model_dump().items()
            changes["tls"] = {name: str(here / file.expanduser()) for name, file in files}
        if gateway := _gateway_paths(config.gateway, here):
            changes["gateway"] = gateway
        if vllm := _vllm_paths(config.vllm, here):
            changes["vllm"] = vllm
    except RuntimeError as error:  # '~name' for a user that does not exist
        raise ConfigError(f"{path}: a path that starts with '~': {error}") from error
    return change_config(config, changes, source=str(path))


def parse_config(text: str, *, source: str = "deployment") -> DeploymentConfig:
    """Check the YAML of a deployment; ``source`` names it in errors. An empty text is the default deployment."""
    try:
        tree = YAML(typ="rt").load(text)
        values = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{line}: {error.problem or error.context}") from error
    except ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}:{number}: a control character; write text only") from error
    except (ValueError, RecursionError) as error:  # as for the date 2020-99-99, which ruamel passes on as it is
        raise ConfigError(f"{source}: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{source}:1: expected keys and values such as 'topology: E-P-D'")
    try:
        return DeploymentConfig.model_validate(values or {})
    except ValidationError as error:
        faults = sorted((_line(tree, location), text) for location, text in _explained(error))
        raise ConfigError("\n".join(f"{source}:{line}: {text}" for line, text in faults)) from error


def _gateway_paths(gateway: GatewayConfig, here: Path) -> dict[str, Any]:
    """The gateway's relative paths as changes that make them absolute."""
    changes: dict[str, Any] = {}
    if folders := gateway.media.allowed_file_dirs:
        changes["media"] = {"allowed_file_dirs": [str(here / folder.expanduser()) for folder in folders]}
    if isinstance(gateway.api_key, SecretSource) and gateway.api_key.file is not None:
        changes["api_key"] = {"file": str(here / gateway.api_key.file.expanduser())}
    for name in ("key", "join_key"):
        secret = getattr(gateway.admin, name)
        if isinstance(secret, SecretSource) and secret.file is not None:
            changes.setdefault("admin", {})[name] = {"file": str(here / secret.file.expanduser())}
    if gateway.access_log not in (None, "-"):
        changes["access_log"] = str(here / Path(gateway.access_log).expanduser())
    return changes


def _vllm_paths(vllm: VllmConfig, here: Path) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if isinstance(vllm.python, dict):
        changes["python"] = {role: str(here / path.expanduser()) for role, path in vllm.python.items()}
    elif vllm.python is not None:
        changes["python"] = str(here / vllm.python.expanduser())
    return changes


def change_config(
    config: DeploymentConfig, changes: Mapping[str, Any], *, source: str = "command line"
) -> DeploymentConfig:
    """A deployment with some keys changed, as in ``{"topology": "EPD", "gateway": {"port": 0}}``.

    Raises ConfigError where the result breaks the schema; ``source`` says where the changes came from.
    """
    try:
        return DeploymentConfig.model_validate(overlay(config.model_dump(exclude_unset=True), changes))
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {text}" for _, text in _explained(error))) from error


def _line(tree: CommentedMap | CommentedSeq | None, location: Location) -> int:
    """The 1-based line of the deepest part of ``location`` that the file holds."""
    line = 1
    node: Any = tree
    for part in location:
        if isinstance(node, CommentedMap) and part in node:
            # A key that came by '<<' has no line of its own in this mapping.
            place = (node.lc.data or {}).get(part)
            line = place[0] + 1 if place else line
        elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
            line = node.lc.item(part)[0] + 1
        else:
            break
        node = node[part]
    return line


def _explained(error: ValidationError) -> Iterator[tuple[Location, str]]:
    """Location and sentence of each fault; one for all that the members of a union say of a value."""
    faults: dict[Location, list[ErrorDetails]] = {}
    for fault in error.errors():
        location = tuple(part for part in fault["loc"] if not (isinstance(part, str) and _MEMBER.match(part)))
        faults.setdefault(location, []).append(fault)
    for location, same in faults.items():
        if not location:  # of the whole file: the sentence begins with the option, if it is one option's
            yield from map(_located, dict.fromkeys(_problem(fault, location) for fault in same))
            continue
        where = ".".join(map(str, location))
        worded = [words for fault in same if (words := _words(fault)) is not None]
        if len(same) > 1 and len(worded) == len(same):
            yield location, f"{where}: write {' or '.join(dict.fromkeys(worded))}{_not(same[0], location)}"
            continue
        for problem in dict.fromkeys(_problem(fault, location) for fault in same):
            yield location, f"{where}: {problem}"


def _located(sentence: str) -> tuple[Location, str]:
    """The sentence, and the location of the option that it begins with: () for none."""
    name, colon, _ = sentence.partition(":")
    known = colon and name in {*DeploymentConfig.model_fields, *_all_paths(DeploymentConfig)}
    return (tuple(name.split(".")) if known else ()), sentence


def _problem(fault: ErrorDetails, location: Location) -> str:
    kind = fault["type"]
    if kind == "extra_forbidden":
        return _unknown_key(str(location[-1]), location[:-1])
    if kind == "value_error":
        return fault["msg"].removeprefix("Value error, ")
    if kind == "missing":
        return "this key is missing"
    if kind == "literal_error":
        return f"{fault['input']!r} is not possible here; write {_words(fault)}"
    if fault["input"] is None:
        return "write a value, or leave the key out"
    if kind in ("tuple_type", "list_type"):
        return f"expected a list, as in [{fault['input']}]"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected keys and values below this{_not(fault, location)}"
    words = _words(fault)
    return "this cannot be used" if words is None else f"write {words}{_not(fault, location)}"


def _not(fault: ErrorDetails, location: Location) -> str:
    """The value that was given, unless it is a secret."""
    return "" if _SECRETS.intersection(location[-1:]) else f", not {fault['input']!r}"


def _words(fault: ErrorDetails) -> str | None:
    """Our words for what pydantic expects; None where it says more than that."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    words = next((words for name, words in _WORDS.items() if kind.startswith(name)), None)
    return None if words is None else words.format(**context)


def _unknown_key(key: str, parent: Location) -> str:
    """Suggest the key that was meant: one spelt alike in the same place, the same one elsewhere, or any."""
    if why := REMOVED.get(key):
        return f"this option was removed: {why}"
    known = list(_keys_at(parent))
    if alike := difflib.get_close_matches(key, known, n=1):
        return f"unknown key; did you mean {alike[0]!r}?"
    if elsewhere := [path for path in _all_paths(DeploymentConfig) if path.rsplit(".", 1)[-1] == key]:
        return f"unknown key here; it belongs at {' or '.join(elsewhere)}"
    return f"unknown key; known here: {', '.join(known)}"


def _keys_at(location: Location) -> Sequence[str]:
    """The keys that the schema has at a location inside a deployment file."""
    model: Any = DeploymentConfig
    for part in location:
        if get_origin(model) in (dict, tuple):
            model = get_args(model)[1 if get_origin(model) is dict else 0]
        else:
            model = model.model_fields[part].annotation
        members = [one for one in get_args(model) if hasattr(one, "model_fields")]
        model = members[0] if get_origin(model) in (Union, types.UnionType) and members else model
    return list(model.model_fields)


def _all_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _all_paths(field.annotation, f"{prefix}{name}.")
