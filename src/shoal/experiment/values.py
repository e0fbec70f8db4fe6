"""Puts plain values (of TOML, JSON or keyword arguments) into frozen dataclasses; a sentence for what does not fit."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shoal.errors import ConfigError
from shoal.experiment.references import import_path
from shoal.experiment.suggestions import closest, translated

__all__ = ["json_values", "keys", "value_of", "with_values"]

T = TypeVar("T")
MANY = 30  # more names than these are not listed in a sentence
SECTIONS = ("algorithm", "architecture", "net", "replay", "envs", "eval", "checkpoint")


def with_values(config: T, values: Mapping[str, Any], where: str) -> T:
    """A copy with `values` put in. Keys are dotted ("algorithm.lr") or nested ({"algorithm": {"lr": ...}})."""
    for key, value in values.items():
        config = _put(config, key.split("."), value, key, where)
    return config


def _put(config: Any, path: list[str], value: Any, key: str, where: str) -> Any:
    name, rest = path[0], path[1:]
    if name not in _fields(config):
        known = list(keys(config)) if _fields(config) else []
        inside = f"in {where}: " if where else ""
        raise ConfigError(f"{inside}there is no setting {key!r}{_meant(key.split('.')[-1], known, not where)}")
    current = getattr(config, name)
    if rest:
        return dataclasses.replace(config, **{name: _put(current, rest, value, key, where)})
    if _fields(current) and isinstance(value, Mapping):
        inner = {f"{key}.{k}": v for k, v in value.items()}
        for full, item in inner.items():
            current = _put(current, full[len(key) + 1 :].split("."), item, full, where)
        return dataclasses.replace(config, **{name: current})
    return dataclasses.replace(config, **{name: fit_type(_hint(config, name), value, key, where)})


def _meant(name: str, known: list[str], in_python: bool) -> str:
    sections = ("", *(f"{section}." for section in SECTIONS))
    ours = next((key for section in sections if (key := translated(name, [f"{section}{key}" for key in known]))), None)
    if ours is None:  # a name without its section
        ours = next((key for key in known if key.endswith(f".{name}")), None)
    if ours:
        section, _, rest = ours.rpartition(".")
        return f"; did you mean {ours}?" + (f' Give {section}={{"{rest}": ...}}' if section in SECTIONS and in_python else "")
    hint = closest(name, known, "there are")
    return hint if len(known) <= MANY or hint.startswith("; did you mean") else "; `shoal train PRESET ENV --help` lists them"


def _fields(config: Any) -> set[str]:
    return {entry.name for entry in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()


def _hint(config: Any, name: str) -> Any:
    hint = get_type_hints(type(config)).get(name, Any)
    return type(getattr(config, name)) if isinstance(hint, TypeVar) else hint


def fit_type(hint: Any, value: Any, key: str, where: str = "") -> Any:
    """The value as its field wants it: 1 for a float becomes 1.0, a list becomes a tuple; anything else is an error."""
    if key.rpartition(".")[2] == "module":
        if isinstance(value, type):
            return value  # a class of the user's own stands for its import path
        if not isinstance(value, str | None):
            raise ConfigError(f"{key} is a {type(value).__name__}: give a class of torch.nn.Module, of which each role makes its "
                              "own, or its name as module:Class")
    if callable(value) and key == "policies":
        return value  # and so does a mapping
    ok, fitted = _fits(hint, value)
    if not ok:
        raise ConfigError(f"{f'in {where}: ' if where else ''}{key}={value!r} is not possible: give {words(hint)}")
    return fitted


def _fits(hint: Any, value: Any) -> tuple[bool, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for option in arguments:
            ok, fitted = _fits(option, value)
            if ok:
                return True, fitted
        return False, None
    if origin is Literal:
        return value in arguments, value
    if origin is tuple:
        return _fits_tuple(arguments, value)
    if hint is Any or not isinstance(hint, type):
        return True, value
    if hint is type(None) and value == "none":  # TOML knows no null
        return True, None
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return True, float(value)
    if hint is int:
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
        return whole, int(value) if whole else None
    return isinstance(value, hint), value


def _fits_tuple(arguments: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if isinstance(value, Mapping) and arguments[:1] == (str,):  # name=value pairs
        return True, tuple(f"{name}={item!r}" for name, item in value.items())
    if not isinstance(value, list | tuple):
        return False, None
    inner = [_fits(arguments[0], item) for item in value]
    return all(ok for ok, _ in inner), tuple(item for _, item in inner)


def words(hint: Any) -> str:
    """A type in words, for an error message."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(words(option) for option in arguments)
    if origin is Literal:
        return " or ".join(repr(choice) if isinstance(choice, str) else str(choice) for choice in arguments)
    if origin is tuple:
        return f"one or more values, each {words(arguments[0])}"
    if hint is type(None):
        return "none"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))


def keys(config: Any, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a configuration."""
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from keys(value, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}"


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def json_values(config: Any) -> Any:
    """A configuration as JSON values. A class or a function becomes its import path, or ?Name if it cannot be imported."""
    if isinstance(config, type | FunctionType):
        return import_path(config) or f"?{config.__name__}"
    if dataclasses.is_dataclass(config):
        return {entry.name: json_values(getattr(config, entry.name)) for entry in dataclasses.fields(config)}
    return [json_values(item) for item in config] if isinstance(config, list | tuple) else config
