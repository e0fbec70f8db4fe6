"""Experiments in TOML files: `shoal show ppo CartPole-v1 --out mine.toml`, `shoal train --config mine.toml`.

    preset = "ppo"                      # or [algorithm] name = "ppo" and [architecture] name = "synchronous"
    env = "CartPole-v1"                 # an id, or module:callable
    max_env_steps = 100_000
    [algorithm]
    lr = 1e-3

What a file leaves out is as the preset has it. A file that `shoal show` wrote has every value, so that it means the same with any
later preset and on any machine. TOML knows no null: "none" stands for a value that is not set.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.envs.recorded_env import RecordedEnv
from shoal.errors import ConfigError
from shoal.experiment.components import Names
from shoal.experiment.config import Plan, default_plan, offline_data
from shoal.experiment.presets import Preset, flatten, load_preset
from shoal.experiment.references import EnvRef, import_path
from shoal.experiment.values import json_values

__all__ = ["ConfigFile", "read_config", "write_config"]


@dataclass(frozen=True)
class ConfigFile:
    """What a file says."""

    path: str
    names: Names
    preset: Preset | None
    env: EnvRef | None
    values: Mapping[str, Any]
    """By dotted keys."""

    def plan(self, env: EnvRef | None = None, overrides: Mapping[str, Any] | None = None) -> Plan:
        """The plan, with another environment and other values where they are given."""
        values: dict[str, Any] = {**self.values, **(overrides or {})}
        chosen = env or self.env
        if chosen is None and values.get("offline") and values.get("demos"):
            chosen, _ = offline_data(str(values["demos"]), None)
        if chosen is None:
            raise ConfigError(f'{self.path} names no environment; add a line such as env = "CartPole-v1"')
        try:
            return default_plan(self.names, chosen, self.preset, values)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None


def read_config(path: str | Path) -> ConfigFile:
    where = str(path)
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {where} cannot be read: {error.strerror or error}; `shoal show PRESET ENV --out FILE` writes "
                          "one") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {where} is not a TOML file: {error}") from None
    preset_name, env = table.pop("preset", None), table.pop("env", None)
    table.pop("shoal", None)  # the version that wrote it
    names = {}
    for section in ("algorithm", "architecture"):
        if isinstance(table.get(section), dict):
            names[section] = table[section].pop("name", None)
    preset = None if preset_name is None else load_preset(str(preset_name))
    algorithm = names.get("algorithm") or (preset.algorithm if preset is not None else None)
    architecture = names.get("architecture") or (preset.architecture if preset is not None else None)
    if not algorithm or not architecture:
        raise ConfigError(f'--config {where} does not say what to train; add a line such as preset = "ppo", or a name to '
                          "[algorithm] and [architecture]")
    if preset is not None and (algorithm, architecture) != (preset.algorithm, preset.architecture):
        raise ConfigError(f"--config {where}: preset {preset.name} is {preset.algorithm} x {preset.architecture}, not {algorithm} "
                          f"x {architecture}; leave out one of them")
    if env is not None and not isinstance(env, str):
        raise ConfigError(f'--config {where}: env is {env!r}; give an id or module:callable, such as env = "CartPole-v1"')
    return ConfigFile(where, Names(algorithm, architecture, None if preset is None else preset.name), preset,
                      None if env is None else EnvRef.named(env), dict(flatten(table)))


def write_config(plan: Plan, path: Path) -> None:
    """All values of a plan as a file that `read_config` reads again; never over another file."""
    from shoal import __version__

    values = json_values(plan.experiment)
    heads: dict[str, Any] = {"shoal": __version__, "preset": plan.names.preset, "env": _env_word(plan)}
    for section in ("algorithm", "architecture"):
        values[section] = {"name": getattr(plan.names, section), **values[section]}
    preset = None if plan.names.preset is None else load_preset(plan.names.preset)
    meant = {key for key in _not_none(plan)} | {override.key for override in (preset.overrides if preset else ())}
    top = {**{name: value for name, value in heads.items() if value is not None},
           **{name: value for name, value in values.items() if not isinstance(value, dict)}}
    lines = list(_lines(top, "", meant))
    for name, section in values.items():
        if isinstance(section, dict):
            lines += ["", *_tables(section, name, meant)]
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except FileExistsError:
        raise ConfigError(f"--out {path} exists already; remove it, or give another name") from None


def _env_word(plan: Plan) -> str | None:
    target = plan.env.target
    if isinstance(target, str):
        return target
    if isinstance(target, RecordedEnv):
        return None  # the recording says what it is
    word = import_path(target)
    if word is None:
        raise ConfigError(f"the environment {plan.env.name} cannot be imported by its name, and a file can only name it; put it "
                          "into a module of its own")
    return word


def _not_none(plan: Plan) -> Iterator[str]:
    """Values whose default is something: where they are not set, a file must say so."""
    plain = default_plan(dataclasses.replace(plan.names, preset=None), plan.env, None).experiment
    yield from _set_keys(json_values(plain), "")


def _set_keys(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _set_keys(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}"


def _tables(section: Mapping[str, Any], name: str, meant: set[str]) -> Iterator[str]:
    yield f"[{name}]"
    yield from _lines({key: value for key, value in section.items() if not isinstance(value, Mapping)}, f"{name}.", meant)
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield ""
            yield from _tables(value, f"{name}.{key}", meant)


def _lines(values: Mapping[str, Any], prefix: str, meant: set[str]) -> Iterator[str]:
    for name, value in values.items():
        if value is not None:
            yield f"{name} = {_written(value)}"
        elif f"{prefix}{name}" in meant:
            yield f'{name} = "none"'


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_written(item) for item in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
