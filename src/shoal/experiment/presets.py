"""Presets: TOML files inside the package (or your own: ./my_preset.toml), holding only what differs from the defaults, and where
each value comes from. Title and status may be left out; algorithm and architecture are names, or module:Class.

    title = "IMPALA (Espeholt et al. 2018)"     algorithm = "vtrace"     architecture = "actor_learner"
    status = "one line: what it has been seen to do"
    offline = true                              # it learns from a recording: shoal train PRESET DATA [--env ENV]

    [paper]                                     # values of the publication
    algorithm.gamma = 0.99
    [tuned]                                     # values found by trying
    actors = 2
    [env."CartPole-v1".tuned]                   # for one environment; the name may be a pattern: "ALE/*"
    algorithm.lr = 2e-3
    [env."ALE/*".large]                         # found by trying on 12 or more cores with a GPU (see sizing.py)
    architecture.batch_slots = 26
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.experiment.suggestions import closest

__all__ = ["Override", "Preset", "flatten", "load_preset", "preset_names"]

SOURCES = ("paper", "tuned", "large")
EXAMPLES = {"title": "My preset", "algorithm": "ppo", "architecture": "synchronous", "status": "untried"}


@dataclass(frozen=True)
class Override:
    """One value that differs from the default."""

    key: str  # dotted: algorithm.lr
    value: Any
    source: str  # "paper" | "tuned" | "large"
    env: str | None = None  # the environment it is for, or all


@dataclass(frozen=True)
class Preset:
    """A named pair of algorithm and architecture with its values."""

    name: str
    title: str
    algorithm: str
    architecture: str
    status: str
    overrides: tuple[Override, ...]
    offline: bool = False
    """Whether it learns from a recording, without actors."""

    def values(self, env: str, paper: bool = False) -> dict[str, Any]:
        """Dotted keys and values for an environment on a small machine; those for the environment win over those for all. With
        `paper` the publication's win over those that were found by trying."""
        chosen = [override for override in self._for(env) if override.source != "large"]
        if paper:
            chosen.sort(key=lambda override: override.source == "paper")
        return {override.key: override.value for override in chosen}

    def large_values(self, env: str) -> dict[str, Any]:
        """What differs on a large machine; nothing where the preset has no values for that."""
        return {override.key: override.value for override in self._for(env) if override.source == "large"}

    def _for(self, env: str) -> list[Override]:
        general = [override for override in self.overrides if override.env is None]
        return general + [one for one in self.overrides if one.env is not None and fnmatch.fnmatchcase(env, one.env)]


def preset_names() -> list[str]:
    folder = files("shoal") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str) -> Preset:
    """By name, or by the path of a TOML file."""
    if name.endswith(".toml"):
        return _load_file(name)
    names = preset_names()
    if name not in names:
        raise ConfigError(f"there is no preset {name!r}{closest(name, names, 'there are')} "
                          "(or a pair: --algorithm A --architecture B; or a file of your own: ./my_preset.toml)")
    text = (files("shoal") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_preset(name, tomllib.loads(text))


def _load_file(path: str) -> Preset:
    try:
        return parse_preset(path, tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"preset {path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"preset {path} is not a TOML file: {error}") from None


def parse_preset(name: str, table: Mapping[str, Any]) -> Preset:
    table = dict(table)
    heads = {key: table.pop(key, "") for key in ("title", "algorithm", "architecture", "status")}
    for key, value in heads.items():
        if not isinstance(value, str) or (not value and key in ("algorithm", "architecture")):
            raise ConfigError(f"preset {name} names no {key}; write a line such as {key} = {EXAMPLES[key]!r}")
    offline = table.pop("offline", False)
    if not isinstance(offline, bool):
        raise ConfigError(f"preset {name}: offline is {offline!r}; write offline = true where it learns from a recording")
    environments = table.pop("env", {})
    overrides = list(_overrides(name, table, None))
    for env, tables in _items(name, "env", environments):
        overrides += _overrides(name, dict(_items(name, f"env.{env!r}", tables)), env)
    return Preset(name=name, overrides=tuple(overrides), offline=offline, **heads)


def _items(name: str, key: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"preset {name}: {key} is {value!r}; it must be a table, such as [env.\"CartPole-v1\".tuned]")
    return list(value.items())


def _overrides(name: str, tables: Mapping[str, Any], env: str | None) -> Iterator[Override]:
    for source, values in tables.items():
        if source not in SOURCES or not isinstance(values, Mapping):
            raise ConfigError(f"preset {name}: {source} stands alone; put values under [paper], [tuned] or [large], such as "
                              "[tuned] with the line algorithm.lr = 1e-3 below it")
        for key, value in flatten(values):
            yield Override(key, value, source, env)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
