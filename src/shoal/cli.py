"""The `shoal` command. Nothing heavy is imported before it is known what to do: `shoal --help` answers at once."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType

__all__ = ["main"]

HELP = """\
shoal: distributed reinforcement learning

  shoal train PRESET ENV [options]      train: shoal train impala CartPole-v1 --until-return 475
  shoal train PRESET DATA [--env ENV]   learn from a recording (bc, marwil, td3_bc, cql, iql); the
                                        simulator is optional
  shoal train --algorithm A --architecture B ENV [options]
                                        your own: ./my_preset.toml, --algorithm my.module:Mine
  shoal train --config FILE.toml [options]
                                        what a file says (made by shoal show ... --out FILE.toml)
  shoal resume RUN [options]            continue from the newest checkpoint; a folder of --seeds:
                                        with those that are not done
  shoal eval RUN [--episodes N]         mean return of fresh greedy episodes; all seeds of a folder
  shoal play RUN [--video FILE.mp4]     watch it play; FILE.gif too
  shoal watch [RUN]                     follow a run (or a folder of --seeds) from another terminal,
                                        or look at one that has ended
  shoal plot RUN ... --out curves.png   learning curves; runs that differ in their seed only are a
                                        mean with a band, all others lines of their own
  shoal league RUN                      payoff table, lineage and exploitability of a league
  shoal show PRESET [ENV] [options]     the graph of places, roles and wires, and the preset's
                                        values; --out FILE.toml keeps them
  shoal list                            presets, algorithms, architectures, and which pairs fit
  shoal runs [DIR]                      the runs under DIR (runs/)
  shoal clean [DIR]                     remove checkpoints that are not needed; the best and the
                                        last policy stay; asks first
  shoal set RUN NAME=VALUE ...          change values while it runs: shoal set RUN algorithm.lr=3e-4
  shoal stop|pause|unpause|checkpoint RUN
                                        end it with a checkpoint; hold it; continue; save it now
  shoal doctor [--env ID]               check this machine, or an environment's contract
  shoal replay serve|info|keys ...      the replay service
  shoal data record SOURCE ENV          record demonstrations by a run, a script, an untrained
                                        preset, or at random
  shoal data info PATH                  what is in a recording
  shoal data check PATH                 problems of a recording; a picture of returns and lengths
  shoal data evaluate RUN PATH          estimate from a recording what a run's policy is worth
  shoal data convert A B                convert a recording: to a folder, FILE.parquet, FILE.hdf5,
                                        FILE.npz, minari:my/dataset-v0
  shoal calibrate ENV [PRESET]          measure layouts for --actors auto once, and keep the result
                                        for this machine
  shoal plan PRESET ENV --actors 2000   what more actors, learners and machines would do, by
                                        measuring and simulating
  shoal tune PRESET ENV --vary NAME=RANGE ...
                                        search for values: PBT, random, grid, halving (ASHA)
  shoal tune resume|show STUDY          continue with a study; its members, values, ancestors
  shoal bench SUITE [--suite quick]     the unified benchmark: throughput, learning, scaling,
                                        faults, replay, ray
  shoal bench compare A B               two results: ratios, and which differences are noise

"""

TRAIN = """\
Options of train (all of them: shoal train PRESET ENV --help)
  --runtime local|inline|ray a process for each role; one thread, bit-exact for a seed; a Ray
                             cluster (local)
  --ray.address HOST:PORT    with --runtime ray: the cluster to join, or auto; without it one is
                             started here
  --actors N|auto            how many actors; auto follows the learner                        (auto)
  --cores N, --device cpu    use only part of this machine: N cores, no GPU                    (all)
  --values tuned|paper       which of a preset's values to use                               (tuned)
  --learners N               how many learners share the gradients                               (1)
  --seed S                   everything random derives from it                                   (0)
  --seeds N                  one run for each of N seeds, from --seed on: mean and interval;
                             --seeds-at-once K trains K of them side by side
  --until-return R           stop when an evaluation's mean return is R, confirmed by a second one
  --max-env-steps N          stop after N agent decisions
  --max-learner-steps N      stop after N updates
  --max-seconds S            stop after S seconds
  --demos PATH               learn from recorded episodes too; with --offline from nothing else
                             (algorithms with replay)
  --policies WORD            several agents: shared, self-play, independent, league or
                             module:function                                                (shared)
  --init-from RUN            begin with the weights of another run
  --trust                    runs that --fixed or --init-from name may import modules from outside
                             the installed environment
  --log.info KEY ...         log these numbers of the environments' info; --log.episodes writes
                             every episode to a CSV file
  --envs.restart-on-error N  restart an environment that raises, alone, instead of ending the run
  --run-dir DIR              where the run is written       (runs/<time>-<preset>-<env>-<seed>)
  --SECTION.FIELD VALUE      algorithm, architecture, net, replay, data, envs, eval, checkpoint,
                             gpu, faults, autoscale, console, log, league, ray
"""

CODES = """
Exit codes: 0 done, 1 `shoal data check` found something, 2 an argument or a setting is wrong,
3 a role kept failing, 130 stopped with Ctrl-C.
"""

COMMANDS = {
    **dict.fromkeys(("train", "resume", "eval", "play"), "shoal.experiment.run_commands"),
    **dict.fromkeys(("show", "list", "runs", "doctor", "replay"), "shoal.experiment.inspect_commands"),
    "league": "shoal.experiment.league_command",
    "watch": "shoal.experiment.watching",
    "plot": "shoal.experiment.plotting",
    "clean": "shoal.experiment.cleaning",
    **dict.fromkeys(("set", "stop", "pause", "unpause", "checkpoint"), "shoal.experiment.control_commands"),
    "calibrate": "shoal.experiment.auto_layout",
    "data": "shoal.experiment.data_commands",
    "tune": "shoal.tuning.command",
    "bench": "shoal.bench.command",
    "plan": "shoal.planning.command",
}
"""Command -> the module with its function COMMAND_command(arguments)."""
BRIEF = {("set",), ("stop",), ("pause",), ("unpause",), ("checkpoint",), ("calibrate",), ("list",), ("runs",), ("league",),
         ("show",), ("replay",), ("data",), ("data", "info"), ("data", "check"), ("data", "convert"), ("bench", "compare"),
         ("tune", "resume"), ("tune", "show")}
"""What has no options of its own: its lines of HELP say all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Without arguments this process is the command, and hears Ctrl-C as one."""
    if arguments is None:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the exit code stands by then: nothing may change it
        signal.signal(signal.SIGINT, _interrupted)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(f"{HELP}{TRAIN}{CODES}")
        return 0
    if words[0] in ("-V", "--version", "version"):
        from shoal import __version__

        sys.stdout.write(f"shoal {__version__}\n")
        return 0
    code = _guarded(words[0], words[1:])
    if arguments is None:
        _skip_ending(code)
    return code


def _skip_ending(code: int) -> None:
    """End at once after a Ray cluster that is gone was left: Ray's threads may hang in Python's own ending or crash it (SIGSEGV),
    and the exit code would be lost."""
    if "shoal.runtime.ray.ray_config" not in sys.modules:
        return
    from shoal.runtime.ray.ray_config import abandoned

    if abandoned.is_set():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """The first Ctrl-C unwinds the command; a second one ends the process with the same exit code, wherever it is."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    raise KeyboardInterrupt


def _guarded(command: str, rest: list[str]) -> int:
    """Errors that shoal raises on purpose become one sentence and an exit code."""
    from shoal.errors import CheckpointError, ConfigError, EnvironmentError_, RoleFailed, ShoalError

    try:
        return _run(command, rest)
    except RoleFailed as error:
        sys.stderr.write(f"shoal: the run failed: {error}\n")
        return 3
    except (ConfigError, CheckpointError, EnvironmentError_) as error:
        sys.stderr.write(f"shoal: {' '.join(str(error).split())}\n")
        return 2
    except ShoalError as error:
        sys.stderr.write(f"shoal: {type(error).__name__}: {error}\n")
        return 3
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone: `shoal list | head`
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a file that may not be read or written
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        sys.stderr.write(f"shoal: {what}; make room, or give another place\n")
        return 2


def _run(command: str, rest: list[str]) -> int:
    from shoal.errors import ConfigError

    if command not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(command, COMMANDS, n=1)
        raise ConfigError(f"there is no command {command!r}; "
                          + (f"did you mean `shoal {near[0]}`?" if near else f"there are {', '.join(COMMANDS)}"))
    if command == "train" and rest in ([], ["-h"], ["--help"]):
        sys.stdout.write(f"{_lines_of(command)}\n{TRAIN}")
        return 0 if rest else 2
    if (command, *rest[:-1]) in BRIEF and rest[-1:] in (["-h"], ["--help"]):
        sys.stdout.write(_lines_of(command))
        return 0
    if os.getcwd() not in sys.path:  # modules of the user's own: environments, networks, algorithms; installed ones come first
        sys.path.append(os.getcwd())
    commands = import_module(COMMANDS[command])
    return int(getattr(commands, f"{command}_command")(rest))


def _lines_of(command: str) -> str:
    """What HELP says of one command."""
    entries = re.findall(r"^  shoal .*\n(?:   .*\n)*", HELP, re.MULTILINE)
    return "".join(entry for entry in entries if command in entry.split()[1].split("|"))


if __name__ == "__main__":
    sys.exit(main())
