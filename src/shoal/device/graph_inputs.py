"""What a recorded update was given: which recording fits it, and the same input with fixed memory in place of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch

__all__ = ["rebuilt", "shape_of"]


def shape_of(tree: Any, inputs: list[Any], kinds: tuple[type, ...]) -> Any:
    """What of a tree decides which kernels run. Parts of these `kinds` may change between calls: they are appended to `inputs`."""
    if isinstance(tree, kinds):
        inputs.append(tree)
        return (tree.shape, tree.dtype) if isinstance(tree, torch.Tensor) else float
    if type(tree) is dict or isinstance(tree, Mapping):  # a protocol takes longer to ask for than all else here
        return tuple([(name, shape_of(part, inputs, kinds)) for name, part in tree.items()])
    if isinstance(tree, tuple):
        return tuple([shape_of(part, inputs, kinds) for part in tree])
    kind: Any = type(tree)
    if names := _fields(kind):
        return kind, *[shape_of(getattr(tree, name), inputs, kinds) for name in names]
    return tree


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Of a dataclass."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def rebuilt(tree: Any, held: Iterator[Any], kinds: tuple[type, ...]) -> Any:
    """The same tree with the tensors of `held` in place of its inputs."""
    if isinstance(tree, kinds):
        return next(held)
    if isinstance(tree, Mapping):
        return {name: rebuilt(part, held, kinds) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(rebuilt(part, held, kinds) for part in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{field.name: rebuilt(getattr(tree, field.name), held, kinds) for field in fields(tree)})
    return tree
