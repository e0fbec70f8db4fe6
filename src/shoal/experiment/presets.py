"""Presets: TOML files inside the package, holding only what differs from the defaults, and where each value comes from.

    title = "IMPALA (Espeholt et al. 2018)"     algorithm = "vtrace"     architecture = "actor_learner"
    status = "one line: what it has been seen to do"

    [paper]                                     # values of the publication
    algorithm.gamma = 0.99
    [tuned]                                     # values found by trying
    actors = 2
    [env."CartPole-v1".tuned]                   # for one environment; the name may be a pattern: "ALE/*"
    algorithm.lr = 2e-3
"""

from __future__ import annotations

import difflib
import fnmatch
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from shoal.errors import ConfigError

__all__ = ["Override", "Preset", "closest", "load_preset", "preset_names"]

SOURCES = ("paper", "tuned")


def closest(word: str, known: Iterable[str], what: str) -> str:
    """`; did you mean X?` where something is near, else the list of what there is."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if not near:
        folded = {name.casefold(): name for name in known}
        near = [folded[name] for name in difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)]
    return f"; did you mean {near[0]}?" if near else f"; {what}: {', '.join(known)}"


@dataclass(frozen=True)
class Override:
    """One value that differs from the default."""

    key: str  # dotted: algorithm.lr
    value: Any
    source: str  # "paper" | "tuned"
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

    def values(self, env: str) -> dict[str, Any]:
        """Dotted keys and values for an environment; those for the environment win over those for all."""
        chosen = [o for o in self.overrides if o.env is None]
        chosen += [o for o in self.overrides if o.env is not None and fnmatch.fnmatchcase(env, o.env)]
        return {override.key: override.value for override in chosen}


def preset_names() -> list[str]:
    folder = files("shoal") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str) -> Preset:
    names = preset_names()
    if name not in names:
        raise ConfigError(f"there is no preset {name!r}{closest(name, names, 'there are')} "
                          "(or choose a pair: --algorithm A --architecture B)")
    text = (files("shoal") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_preset(name, tomllib.loads(text))


def parse_preset(name: str, table: Mapping[str, Any]) -> Preset:
    table = dict(table)
    heads = {key: table.pop(key, None) for key in ("title", "algorithm", "architecture", "status")}
    missing = [key for key, value in heads.items() if not isinstance(value, str)]
    if missing:
        raise ConfigError(f"preset {name} says nothing of {', '.join(missing)}")
    environments = table.pop("env", {})
    overrides = list(_overrides(name, table, None))
    for env, tables in environments.items():
        overrides += _overrides(name, tables, env)
    return Preset(name=name, overrides=tuple(overrides), **heads)


def _overrides(name: str, tables: Mapping[str, Any], env: str | None) -> Iterator[Override]:
    for source, values in tables.items():
        if source not in SOURCES:
            raise ConfigError(f"preset {name} has a table [{source}]; values stand under [paper] or [tuned]")
        for key, value in _flatten(values):
            yield Override(key, value, source, env)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
