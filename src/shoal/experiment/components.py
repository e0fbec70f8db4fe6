"""Algorithms and architectures: by name, by import path (module:Class) or as Python objects.

    names on the command line, in presets and in config.json      ppo     my.module:MyAlgorithm
    arguments of shoal.train                                       a name, a class, an instance or a Config

A class of a script or a notebook cannot be imported by another process. It trains all the same (it travels with the roles, by
cloudpickle), and config.json records it as ?MyAlgorithm: such a run cannot be resumed.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from shoal import algorithms, architectures
from shoal.errors import ConfigError
from shoal.experiment.references import find, import_path
from shoal.experiment.suggestions import closest
from shoal.learning import Algorithm, Architecture
from shoal.nets.net_config import NetConfig
from shoal.options import Options

__all__ = ["Components", "Names", "algorithm_named", "architecture_named"]

UNKNOWN = "?"  # before the name of a class that cannot be imported


@dataclass(frozen=True)
class Names:
    """Which preset, algorithm and architecture."""

    algorithm: str
    architecture: str
    preset: str | None = None

    def title(self, algorithm: type[Algorithm], architecture: Architecture, between: str = " x ") -> str:
        """The preset, or the pair; what comes from outside by the name that its class declares."""
        if self.preset is not None:
            return Path(self.preset).stem if self.preset.endswith(".toml") else self.preset
        return between.join((_short(self.algorithm, algorithm.name, algorithms.ALGORITHMS),
                             _short(self.architecture, architecture.name, architectures.ARCHITECTURES)))


def _short(name: str, declared: str, registered: Collection[str]) -> str:
    """A registered name as it is; else the declared one, unless that is inherited from a registered class."""
    if name in registered:
        return name
    return name.rpartition(":")[2].lstrip(UNKNOWN) if declared in registered else declared


# ---------------------------------------------------------------------------------------------- by name
def algorithm_named(name: str) -> type[Algorithm]:
    """The class behind a registered name or an import path."""
    _importable("algorithm", name)
    if ":" in name:
        return _checked_algorithm(find(name), name)
    if name not in algorithms.ALGORITHMS:
        raise ConfigError(f"there is no algorithm {name!r}{closest(name, algorithms.ALGORITHMS, 'there are')}")
    return algorithms.named(name)


def architecture_named(name: str) -> Architecture:
    """The architecture behind a registered name or an import path."""
    _importable("architecture", name)
    if ":" in name:
        return _checked_architecture(find(name), name)
    if name not in architectures.ARCHITECTURES:
        raise ConfigError(f"there is no architecture {name!r}{closest(name, architectures.ARCHITECTURES, 'there are')}")
    return architectures.named(name)


def _importable(kind: str, name: str) -> None:
    if name.startswith(UNKNOWN):
        raise ConfigError(f"the {kind} {name[1:]} of this run was defined in a script or notebook and cannot be imported; put it "
                          "into a module (a .py file), and train again from there")


# ---------------------------------------------------------------------------------------------- as objects
@dataclass(frozen=True)
class Components:
    """The algorithm and the architecture themselves, and the values that came with them (of a Config, of an instance)."""

    names: Names
    algorithm: type[Algorithm]
    architecture: Architecture
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def named(cls, names: Names) -> Components:
        return cls(names, algorithm_named(names.algorithm), architecture_named(names.architecture))

    @classmethod
    def given(cls, algorithm: Any, architecture: Any) -> Components:
        """From names, classes, instances or Configs."""
        values: dict[str, Any] = {}
        learns = algorithm_named(algorithm) if isinstance(algorithm, str) else _algorithm_given(algorithm, values)
        draws = architecture_named(architecture) if isinstance(architecture, str) else _architecture_given(architecture, values)
        names = Names(algorithm if isinstance(algorithm, str) else _algorithm_name(learns),
                      architecture if isinstance(architecture, str) else _architecture_name(draws))
        return cls(names, learns, draws, values)


@runtime_checkable
class _HasNet(Protocol):
    net: NetConfig


@runtime_checkable
class _HasPlan(Protocol):
    """As shoal's own algorithms keep what they were made with."""

    plan: _HasNet


def _net_of(algorithm: Algorithm) -> NetConfig | None:
    holder = algorithm.plan if isinstance(algorithm, _HasPlan) else algorithm
    return holder.net if isinstance(holder, _HasNet) and isinstance(holder.net, NetConfig) else None


def _algorithm_given(thing: Any, values: dict[str, Any]) -> type[Algorithm]:
    """An instance is built again for the environment and the seats of the run, from its class, its config and its net."""
    if isinstance(thing, type):
        return _checked_algorithm(thing, thing.__name__)
    if isinstance(thing, Algorithm):
        values["algorithm"] = _values(thing.config)
        if (net := _net_of(thing)) is not None:
            values["net"] = _values(net)
        return _checked_algorithm(type(thing), type(thing).__name__)
    values["algorithm"] = _values(thing)
    for name in algorithms.ALGORITHMS:
        algorithms.named(name)  # imported, so that it is among the subclasses
    found: type[Algorithm] = _of_config(Algorithm, thing, "algorithm")
    return found


def _architecture_given(thing: Any, values: dict[str, Any]) -> Architecture:
    if isinstance(thing, type | Architecture):
        return _checked_architecture(thing, thing.__name__ if isinstance(thing, type) else type(thing).__name__)
    values["architecture"] = _values(thing)
    for name in architectures.ARCHITECTURES:
        architectures.named(name)
    found: type[Architecture] = _of_config(Architecture, thing, "architecture")
    return found()


def _values(config: Any) -> dict[str, Any]:
    return {entry.name: getattr(config, entry.name) for entry in fields(config)} if is_dataclass(config) else {}


def _of_config(base: type, config: Any, kind: str) -> Any:
    """The one class whose config_class it is."""
    found: list[Any] = [one for one in _below(base) if vars(one).get("config_class") is type(config)]
    if len(found) != 1:
        raise ConfigError(f"{kind}={config!r} is not possible: give a name (`shoal list` shows them), a subclass of "
                          f"shoal.learning.{base.__name__}, an instance of it, or its Config")
    return found[0]


def _below(base: type) -> Iterator[type]:
    below: list[type] = base.__subclasses__()
    for one in below:
        yield one
        yield from _below(one)


def _algorithm_name(algorithm: type[Algorithm]) -> str:
    known = algorithm.name in algorithms.ALGORITHMS and algorithms.named(algorithm.name) is algorithm
    return algorithm.name if known else import_path(algorithm) or f"{UNKNOWN}{algorithm.__name__}"


def _architecture_name(architecture: Architecture) -> str:
    known = architecture.name in architectures.ARCHITECTURES and type(architectures.named(architecture.name)) is type(architecture)
    return architecture.name if known else import_path(type(architecture)) or f"{UNKNOWN}{type(architecture).__name__}"


# ---------------------------------------------------------------------------------------------- whether they are whole
def _checked_algorithm(thing: Any, name: str) -> type[Algorithm]:
    if not (isinstance(thing, type) and issubclass(thing, Algorithm)):
        raise ConfigError(f"{name} is not an algorithm: write a subclass of shoal.learning.Algorithm")
    _check_declared(thing, name, ("name", "config_class", "tolerates"))
    return thing


def _checked_architecture(thing: Any, name: str) -> Architecture:
    made = isinstance(thing, Architecture)
    kind = type(thing) if made else thing
    if not (isinstance(kind, type) and issubclass(kind, Architecture)):
        raise ConfigError(f"{name} is not an architecture: write a subclass of shoal.learning.Architecture")
    _check_declared(kind, name, ("name", "config_class"))
    return thing if made else kind()


def _check_declared(kind: type, name: str, declared: tuple[str, ...]) -> None:
    abstract: frozenset[str] = vars(kind)["__abstractmethods__"]  # as every ABC has them
    missing = [*(word for word in declared if word not in dir(kind)), *sorted(abstract)]
    if missing:
        base = "Algorithm" if issubclass(kind, Algorithm) else "Architecture"
        raise ConfigError(f"{name} lacks {', '.join(missing)}; shoal.learning.{base} says what each is")
    config = inspect.getattr_static(kind, "config_class")
    if not (isinstance(config, type) and issubclass(config, Options) and is_dataclass(config)):
        raise ConfigError(f"{name}.config_class must be a frozen dataclass that derives from shoal.options.Options")
