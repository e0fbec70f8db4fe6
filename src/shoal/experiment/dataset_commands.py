"""`shoal data convert` and `shoal data check`: recordings from one format to another, and what is wrong with them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from shoal import __version__
from shoal.errors import ConfigError
from shoal.experiment.parse import parse_command
from shoal.options import Options
from shoal.telemetry.console import counted
from shoal.telemetry.outputs import say

__all__ = ["check_command", "check_target", "convert", "convert_command"]

CHECK = "shoal data check PATH"


def convert_command(arguments: list[str]) -> int:
    if len(arguments) != 2 or any(word.startswith("-") for word in arguments):
        raise ConfigError("shoal data convert A B: give a recording and where to write it: a folder, FILE.parquet, FILE.hdf5, "
                          "FILE.npz or minari:my/dataset-v0")
    convert(*arguments)
    return 0


def check_target(target: str) -> None:
    """Raise a ConfigError unless a recording can be written there."""
    from shoal.offline.minari import MINARI
    from shoal.offline.minari_writer import check_new_minari
    from shoal.offline.step_table import SUFFIXES

    path = Path(target)
    if target.startswith(MINARI):
        check_new_minari(target.removeprefix(MINARI))
    elif path.exists():
        raise ConfigError(f"{target} exists already; give another name, or remove it first")
    elif path.suffix and path.suffix not in SUFFIXES:
        raise ConfigError(f"{target}: there is no format {path.suffix}; give a folder, {', '.join(SUFFIXES)} or minari:ID")


def convert(source: str, target: str) -> None:
    """Write a recording again in the format that the target's name says."""
    from shoal.offline import DemoWriter, open_demos
    from shoal.offline.minari import MINARI
    from shoal.offline.minari_writer import write_minari
    from shoal.offline.step_table import SUFFIXES, write_table

    demos, path = open_demos(source), Path(target)
    check_target(target)
    if target.startswith(MINARI):
        write_minari(demos, target.removeprefix(MINARI))
    elif path.suffix in SUFFIXES:
        write_table(demos, path)
    else:
        made = {"source": f"converted from {source}", "shoal": __version__, "date": time.strftime("%Y-%m-%d %H:%M")}
        with DemoWriter.create(path, demos.info, made) as writer:
            for episode in demos.episodes():
                writer.add(episode)
                writer.flush_if_due()
    info = demos.info
    say(f"{target}: {info.episodes:,} episodes, {info.steps:,} steps of {info.env or 'an unnamed environment'}, from {source}")


@dataclass(frozen=True)
class CheckOptions(Options):
    """Look at every episode of a recording, and say what is wrong."""

    picture: str | None = None
    """Draw how returns and lengths are spread, as FILE.html (with the findings) or FILE.png."""


def check_command(arguments: list[str]) -> int:
    """1 where something was found."""
    from shoal.offline import open_demos
    from shoal.offline.check_picture import check_picture_name, draw_picture
    from shoal.offline.checking import check_demos, histogram

    given, options = parse_command(CheckOptions, arguments, 1, CHECK)
    if len(given) != 1:
        raise ConfigError(f"{CHECK}: give one recording")
    picture = None if options.picture is None else Path(options.picture)
    if picture is not None:
        check_picture_name(picture)
    path = given[0]
    report = check_demos(open_demos(path), path)
    for name, values in (("return", report.returns), ("length", report.lengths)):
        say(f"{name} of {len(values):,} episodes")
        for line in histogram(values):
            say(line)
    for line in report.lines():
        say(line)
    count = sum(map(len, report.findings.values()))
    if picture is not None:
        draw_picture(report, picture, path)
        say(f"picture in {picture}")
    say(f"{path}: {counted(count, 'finding') + ', see above' if count else 'nothing found'}")
    return 0 if report.clean else 1
