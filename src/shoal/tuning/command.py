"""`shoal tune`, `shoal tune resume`, `shoal tune show`, and `shoal.tune` in Python."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from shoal.coordination.population.exploit import EXPLOIT_RULES, ExploitRule
from shoal.coordination.population.priors import Prior
from shoal.errors import ConfigError
from shoal.experiment.lock import alone
from shoal.experiment.references import check_trust
from shoal.telemetry.outputs import say
from shoal.tuning.checks import checked, env_word
from shoal.tuning.coordinator import StudyCoordinator
from shoal.tuning.member_run import value_words
from shoal.tuning.report import table, write_report
from shoal.tuning.searches import SEARCH_RULES, SearchRule
from shoal.tuning.study import Study, StudySettings

__all__ = ["tune", "tune_command"]

USAGE = "shoal tune PRESET ENV --vary NAME=RANGE ... [--every-env-steps N] [--max-env-steps M] [options of shoal train]"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; usage: {USAGE}")


def tune_command(arguments: list[str]) -> int:
    if arguments[:1] in (["resume"], ["show"]):
        trust, words = "--trust" in arguments, [word for word in arguments if word != "--trust"]
        if len(words) != 2:
            raise ConfigError(f"shoal tune {arguments[0]} STUDY: give the folder of one study")
        study = Study.open(Path(words[1]), trust)
        if arguments[0] == "show":
            return _show(study)
        for line in check_trust(study.modules(), trust):
            say(line)
        return _go(study)
    known, rest = _parser().parse_known_args(arguments)
    pairs = [(name.replace("-", "_"), equals, text) for name, equals, text in (word.partition("=") for word in known.vary)]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--vary {name} has no range; write for instance {name}=loguniform(1e-4,1e-2)")
        if sum(name == other for other, _, _ in pairs) > 1:
            raise ConfigError(f"--vary {name} is given twice; give one range")
    given = {name: value for name, value in vars(known).items() if name not in ("preset", "env", "vary", "study")}
    settings = checked(known.preset, known.env, {name: text for name, _, text in pairs}, rest, **given)
    return _go(_created(known.study, settings))


def _parser() -> Parser:
    parser = Parser(prog="shoal tune", usage=USAGE, description="Train many runs of one preset, and search for its values.",
                    allow_abbrev=False)  # --until is an option of shoal train
    parser.add_argument("preset")
    parser.add_argument("env")
    parser.add_argument("--vary", action="append", default=[], metavar="NAME=RANGE",
                        help="a value to search, such as algorithm.lr=loguniform(1e-4,1e-2); may be given several times")
    parser.add_argument("--search", choices=SEARCH_RULES, default="population",
                        help="population: worse members copy better ones; random, grid: nobody does; halving: the best "
                             "continue (ASHA)")
    parser.add_argument("--population", type=int, help="how many runs train (default 8; a grid has as many as it has points)")
    parser.add_argument("--every-env-steps", type=int, help="agent decisions after which a member is compared with others; with "
                                                            "halving the length of the first rung (default: a tenth of "
                                                            "--max-env-steps; 20,000 without it)")
    parser.add_argument("--max-env-steps", type=int, help="agent decisions of each member (default: ten intervals, unless "
                                                          "--until-return is given)")
    parser.add_argument("--until-return", type=float, help="stop when a member reaches this return")
    parser.add_argument("--exploit", choices=EXPLOIT_RULES, help="population: who copies whom (default truncation)")
    parser.add_argument("--resample", type=float,
                        help="population: probability of drawing a new value instead of perturbing it (default 0)")
    parser.add_argument("--points", type=int, help="grid: values of each range (default 3)")
    parser.add_argument("--reduction", type=int,
                        help="halving: one of this many continues, for this many times as long (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the study; members get the seeds that follow (default 0)")
    parser.add_argument("--workers", type=int, help="members that train at the same time (default: one per core)")
    parser.add_argument("--cluster", help="let members train on a Ray cluster: its HOST:PORT, auto, or local to start one here")
    parser.add_argument("--study", help="folder of the study (default: studies/<time>-<preset>-<env>)")
    return parser


def tune(preset: str, env: str | Callable[..., Any], *, vary: Mapping[str, Prior], every_env_steps: int | None = None,
         max_env_steps: int | None = None, until_return: float | None = None, search: SearchRule = "population",
         population: int | None = None, exploit: ExploitRule | None = None, resample: float | None = None,
         points: int | None = None, reduction: int | None = None, seed: int = 0, workers: int | None = None,
         cluster: str | None = None, study: str | Path | None = None, **overrides: Any) -> Study:
    """Train a population and return the study: `study.best.policy.act(observation)`. Members are programs of their own, so `env` is
    an id, module:callable, or a class or function of a module. Everything else overrides a value of all members."""
    settings = checked(preset, env_word(env), {name: str(prior) for name, prior in vary.items()}, value_words(overrides),
                       every_env_steps=every_env_steps, max_env_steps=max_env_steps, until_return=until_return, search=search,
                       population=population, exploit=exploit, resample=resample, points=points, reduction=reduction, seed=seed,
                       workers=workers, cluster=cluster)
    found = _created(study, settings)
    with alone(found.path):
        StudyCoordinator(found, lambda line: None).run()
    return found


def _created(given: str | Path | None, settings: StudySettings) -> Study:
    """In the folder that was given, or studies/<time>-<preset>-<env>."""
    if given is not None:
        return Study.create(Path(given), settings)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(settings.preset).stem}-{settings.env.replace('/', '_').replace(':', '_')}"
    return Study.create_default(Path("studies") / name, settings)


def _go(study: Study) -> int:
    with alone(study.path, "members write checkpoints and end"):
        say(f"study {study.path}: {study.settings.population} members")
        try:
            with terminable():
                StudyCoordinator(study, say).run()
        except KeyboardInterrupt:
            say(f"stopped by hand; every member continues from its newest checkpoint with `shoal tune resume {study.path}`")
            return 130
    return _show(study)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, and a terminal that is closed, are like Ctrl-C. Under nohup the terminal is not heard."""
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in heard:
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def _show(study: Study) -> int:
    write_report(study)
    sys.stdout.write(f"{table(study)}plots: {study.path / 'report.html'}\n")
    return 0
