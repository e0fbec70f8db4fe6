"""`shoal list`, `show`, `runs`, `doctor`, `replay`: the commands that look."""

from __future__ import annotations

import os
import string
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError

__all__ = ["doctor_command", "list_command", "replay_command", "runs_command", "show_command"]

WIDTH = 100  # of what is printed


def list_command(arguments: list[str]) -> int:
    from shoal import algorithms, architectures
    from shoal.experiment.compatibility import fits
    from shoal.experiment.presets import load_preset, preset_names
    from shoal.learning import Tolerance

    if arguments:
        raise ConfigError(f"shoal list takes no arguments, not {' '.join(arguments)}")
    write = sys.stdout.write
    write("presets, what each is for, and what it has been trained on (shoal show PRESET says more)\n")
    presets = {name: load_preset(name) for name in preset_names()}
    pairs = {name: f"{preset.algorithm} x {preset.architecture}" for name, preset in presets.items()}
    widths = max(map(len, presets)), max(map(len, pairs.values()))
    for name, preset in presets.items():
        write(_wrapped(f"  {name:<{widths[0]}}  {pairs[name]:<{widths[1]}}  ", preset.title))
        write(_wrapped(f"  {'':<{widths[0]}}  ", preset.status))
    known = {name: architectures.named(name) for name in architectures.ARCHITECTURES}
    letters = dict(zip(known, string.ascii_lowercase, strict=False))
    first = max(map(len, algorithms.ALGORITHMS)) + 2
    write("\nalgorithms, the architectures (a, b, ...) they run on, and what they tolerate (rep: replay)\n")
    write(f"  {'':<{first}}{''.join(f'{letter:<4}' for letter in letters.values())}tolerates\n")
    for name in algorithms.ALGORITHMS:
        cls = algorithms.named(name)
        yes = "rep" if cls.from_replay else "yes"
        cells = "".join(f"{yes if fits(cls, one, one.config_class()) else '-':<4}" for one in known.values())
        write(f"  {name:<{first}}{cells}{Tolerance.NAMES[cls.tolerates]}\n")
    write("\narchitectures, and why what they deliver needs that tolerance\n")
    for name, one in known.items():
        write(_wrapped(f"  {letters[name]}  {name:<{max(map(len, known))}}  ", one.delivers(one.config_class()).why))
    write("\nyour own: --algorithm my.module:MyAlgorithm, --architecture my.module:MyOne, ./my_preset.toml\n")
    return 0


def _wrapped(head: str, text: str) -> str:
    """A row whose last column goes on in lines of its own where it is long."""
    return "\n".join(textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head),
                                   break_on_hyphens=False)) + "\n"


def show_command(arguments: list[str]) -> int:
    from shoal.experiment.config_file import write_config
    from shoal.experiment.parse import parse_train, take_option
    from shoal.experiment.prepare import prepare
    from shoal.experiment.presets import load_preset
    from shoal.experiment.seeds import SeedOptions
    from shoal.experiment.sizing import kept_to, sizing_lines

    arguments = list(arguments)
    seeds = SeedOptions.taken(arguments)
    out = take_option(arguments, "--out", "the name of a file to write")
    if not any(word.partition("=")[0] == "--config" for word in arguments):
        arguments = _with_env(arguments)
    plan = parse_train(arguments)
    with kept_to(plan.experiment.cores):
        prepared = prepare(plan)
        if out is not None:
            write_config(plan, Path(out))
            sys.stdout.write(f"wrote {out}; train with it: shoal train --config {out}{f' {seeds.words()}' if seeds else ''}\n")
            return 0
        if seeds is not None:
            sys.stdout.write(f"{seeds.words()}: {seeds.count} runs like this one, with the seeds from {plan.experiment.seed} on\n")
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


def _with_env(arguments: list[str]) -> list[str]:
    """With CartPole-v1 where only a preset or a pair is given."""
    from shoal.experiment.parse import choose_names
    from shoal.experiment.presets import load_preset

    choice = choose_names(arguments)
    paired = bool(choice.algorithm or choice.architecture)
    if len(choice.positionals) == (0 if paired else 1) and not (choice.positionals and load_preset(choice.positionals[0]).offline):
        return [*choice.positionals, "CartPole-v1", *_pair(choice), *choice.rest]
    return arguments


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
    for row in rows:
        if "why" in row:
            sys.stdout.write(_wrapped("unreadable  ", row["why"]))
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
