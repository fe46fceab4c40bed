"""The names that a model's code in transformers reads from its configuration, found in its source."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import cache_utils, masking_utils, modeling_rope_utils

#: What every language model calls.
_SHARED_MODULES = (masking_utils, cache_utils, modeling_rope_utils)


def names_read(model: nn.Module, part: Any, whole: Any) -> frozenset[str]:
    """Names that the classes and modules which run a part of the model read from its configuration."""
    inner = [m for m in model.modules() if type(getattr(m, "config", None)) is not type(whole)]
    roots = [m for m in inner if type(getattr(m, "config", None)) is type(part)]
    if part is whole:
        owned = {id(child) for m in inner if hasattr(m, "config") for child in m.modules()}
        classes = {type(m) for m in model.modules() if id(m) not in owned}
    else:
        classes = {type(child) for root in roots for child in root.modules()}
    names: set[str] = set()
    for cls in classes:
        for base in cls.__mro__:
            if base.__module__.startswith("transformers.models."):
                names |= _reads(base) | _module_reads(base.__module__)
    if part is whole.get_text_config():
        for module in _SHARED_MODULES:
            names |= _reads(module)
    return frozenset(names)


@lru_cache(maxsize=256)
def _reads(code: Any) -> frozenset[str]:
    return _names_read(ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(code)))))


@lru_cache(maxsize=32)
def _module_reads(name: str) -> frozenset[str]:
    """Names that the functions of a module read from a configuration."""
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return frozenset[str]().union(*(_names_read(ast.walk(function)) for function in functions))


def _names_read(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """``x`` of ``config.x``, ``self.config.x``, ``getattr(config, "x", ...)`` and ``hasattr(config, "x")``."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and _is_config(node.args[0]):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                names.add(name.value)
    return frozenset(names)


def _is_config(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("config", "layer_config", "decoder_config", "effective_config")
