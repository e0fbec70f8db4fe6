"""`shoal list`, `show`, `runs`, `doctor`, `replay`: the commands that look."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError

__all__ = ["doctor_command", "list_command", "replay_command", "runs_command", "show_command"]


def list_command(arguments: list[str]) -> int:
    from shoal import algorithms, architectures
    from shoal.experiment.compatibility import fits
    from shoal.experiment.presets import load_preset, preset_names
    from shoal.learning import Tolerance

    if arguments:
        raise ConfigError(f"shoal list takes no arguments, not {' '.join(arguments)}")
    write = sys.stdout.write
    write("presets\n")
    presets = {name: load_preset(name) for name in preset_names()}
    pairs = {name: f"{preset.algorithm} x {preset.architecture}" for name, preset in presets.items()}
    widths = max(map(len, presets)), max(map(len, pairs.values()))
    for name, preset in presets.items():
        write(f"  {name:<{widths[0]}}  {pairs[name]:<{widths[1]}}  {preset.title}; {preset.status}\n")
    write("\nalgorithms (what they tolerate) x architectures (what they deliver)\n")
    known = {name: architectures.named(name) for name in architectures.ARCHITECTURES}
    first, width = max(map(len, algorithms.ALGORITHMS)) + 2, max(map(len, known)) + 2
    write(f"  {'':<{first}}{''.join(f'{name:<{width}}' for name in known)}tolerates\n")
    for name in algorithms.ALGORITHMS:
        cls = algorithms.named(name)
        yes = "replay" if cls.from_replay else "yes"
        cells = "".join(f"{yes if fits(cls, one, one.config_class()) else '-':<{width}}" for one in known.values())
        write(f"  {name:<{first}}{cells}{Tolerance.NAMES[cls.tolerates]}\n")
    for name, one in known.items():
        write(f"  {name}: {one.delivers(one.config_class()).why}\n")
    write("\nyour own: --algorithm my.module:MyAlgorithm, --architecture my.module:MyArchitecture, or a preset ./my_preset.toml\n")
    return 0


def show_command(arguments: list[str]) -> int:
    from shoal.experiment.parse import choose_names, parse_train
    from shoal.experiment.prepare import prepare
    from shoal.experiment.presets import load_preset
    from shoal.experiment.sizing import kept_to, sizing_lines

    choice = choose_names(arguments)
    paired = bool(choice.algorithm or choice.architecture)
    if len(choice.positionals) == (0 if paired else 1) and not (choice.positionals and load_preset(choice.positionals[0]).offline):
        arguments = [*choice.positionals, "CartPole-v1", *_pair(choice), *choice.rest]
    plan = parse_train(arguments)
    with kept_to(plan.experiment.cores):
        prepared = prepare(plan)
        sys.stdout.write("".join(f"{line}\n" for line in sizing_lines(plan)))
        sys.stdout.write(prepared.program().describe() + "\n")
    sys.stdout.write(f"\n{prepared.spec.backend_reason}\n")
    if plan.names.preset is not None:
        preset = load_preset(plan.names.preset)
        sys.stdout.write(f"\n{preset.title}\n{preset.status}\nits values, and where they come from\n")
        for override in preset.overrides:
            where = f"   for {override.env}" if override.env else ""
            sys.stdout.write(f"  {override.key:<32} {override.value!r:<12} {override.source}{where}\n")
    return 0


def _pair(choice: Any) -> list[str]:
    pair = (("--algorithm", choice.algorithm), ("--architecture", choice.architecture))
    return [word for name, value in pair if value for word in (name, value)]


def runs_command(arguments: list[str]) -> int:
    from shoal.experiment.rundir import RUNS, list_runs

    if len(arguments) > 1:
        raise ConfigError(f"shoal runs {' '.join(arguments)}: give one folder, or none")
    root = Path(arguments[0]) if arguments else RUNS
    if arguments and not root.is_dir():
        raise ConfigError(f"{root} is not a folder; give one that holds runs")
    rows = list_runs(root)
    if not rows:
        sys.stdout.write(f"no runs under {root}; start one with `shoal train impala CartPole-v1`\n")
        return 0
    columns = ("run", "preset", "env", "state", "env_steps", "env_steps_per_second", "seconds", "train_return", "eval_return")
    table = [columns, *(tuple(_cell(row.get(column)) for column in columns) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")
    return 0


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class Doctor:
    """Check this machine, or an environment."""

    env: str | None = None
    """The id of an environment to check."""
    kwargs: tuple[str, ...] = ()
    """Arguments of the environment, as name=value pairs."""


def doctor_command(arguments: list[str]) -> int:
    from shoal.experiment.parse import parse_options

    options = parse_options(Doctor, Doctor(), arguments, "shoal doctor")
    if options.env is None:
        return _machine()
    from shoal.envs import describe, diagnose
    from shoal.experiment.config import EnvsConfig
    from shoal.experiment.references import EnvRef

    kwargs = EnvsConfig(kwargs=options.kwargs).arguments()
    env = EnvRef.named(options.env).target
    describe(env, **kwargs)  # an unknown id or a bad argument is the user's mistake, not the environment's
    findings = diagnose(env, **kwargs)
    for finding in findings:
        advice = f" {finding.advice}" if finding.advice else ""
        sys.stdout.write(f"{finding.level:<8} {finding.check:<12} {finding.text}{advice}\n")
    errors = sum(finding.level == "error" for finding in findings)
    sys.stdout.write(f"\n{options.env}: {'healthy' if not errors else f'{errors} errors, see above'}\n")
    return 1 if errors else 0


def _machine() -> int:
    import platform
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    from shoal import __version__

    write = sys.stdout.write
    write(f"shoal {__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}\n")
    if sys.platform.startswith("linux"):
        write(f"cores     {len(os.sched_getaffinity(0))}\n")
        write(f"runtimes  inline, local{', ray' if find_spec('ray') else ''}\n")
    else:
        write("runtimes  inline (local needs Linux)\n")
    for name in ("torch", "numpy", "gymnasium", "numba", "ale-py", "envpool", "ray"):
        try:
            write(f"{name:<9} {version(name)}\n")
        except PackageNotFoundError:
            write(f"{name:<9} not installed\n")
    return 0


def replay_command(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in ("serve", "info", "keys"):
        raise ConfigError(f"shoal replay {' '.join(arguments)}: give `serve`, `info` or `keys`, then its options")
    from shoal.replay.service import replay_commands

    return int(getattr(replay_commands, f"{arguments[0]}_command")(arguments[1:]))
