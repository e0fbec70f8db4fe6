"""`shoal set`, `stop`, `pause`, `unpause`, `checkpoint`: messages to a live run, through the mailbox in its directory."""

from __future__ import annotations

import ast
import sys
import time
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.experiment.live_values import changed_plan, live_keys
from shoal.experiment.lock import alone, holder
from shoal.experiment.mailbox import Mailbox
from shoal.experiment.prepare import plan_from_json, plan_to_json
from shoal.experiment.references import check_trust, modules_of
from shoal.experiment.rundir import RunDir

__all__ = ["checkpoint_command", "pause_command", "set_command", "stop_command", "unpause_command"]

PATIENCE_SECONDS = 120.0  # that a live run may take to answer
LOOK_SECONDS = 0.05
UNUSED = "CartPole-v1"  # in place of the environment, whose module need not be imported to know the values of a run


def set_command(arguments: list[str]) -> int:
    rundir, words = _run([word for word in arguments if word != "--trust"], "shoal set RUN NAME=VALUE ... [--trust]")
    config = rundir.config()
    check_trust(modules_of({**config, "env": {}}), "--trust" in arguments)
    plan = plan_from_json(config, str(rundir.config_file), UNUSED)
    if not words:
        raise ConfigError(f"shoal set {rundir.path} NAME=VALUE ...: what can change is {', '.join(live_keys(plan))}")
    values = dict(_pair(word, live_keys(plan)) for word in words)
    if holder(rundir.path) is None:
        changed = plan_to_json(changed_plan(plan, values, running=False), int(config.get("resumed", 0)))
        with alone(rundir.path):
            rundir.save_config({**changed, "env": config["env"]})
        sys.stdout.write(f"{rundir.path} is not running; it will continue with this when it is resumed\n")
        return 0
    changed_plan(plan, values)  # says what is wrong before anything is sent
    return _send(rundir, {"command": "set", "values": values})


def stop_command(arguments: list[str]) -> int:
    return _tell(arguments, "stop")


def pause_command(arguments: list[str]) -> int:
    return _tell(arguments, "pause")


def unpause_command(arguments: list[str]) -> int:
    return _tell(arguments, "unpause")


def checkpoint_command(arguments: list[str]) -> int:
    return _tell(arguments, "checkpoint")


def _tell(arguments: list[str], command: str) -> int:
    rundir, words = _run(arguments, f"shoal {command} RUN")
    if words:
        raise ConfigError(f"shoal {command} RUN: it has no options, and {' '.join(words)} was given")
    if holder(rundir.path) is None:
        raise ConfigError(f"{rundir.path} is not running, so there is nothing to {command}; `shoal runs` shows what is")
    return _send(rundir, {"command": command})


def _send(rundir: RunDir, content: dict[str, Any]) -> int:
    """Post a letter, and wait for the answer."""
    mailbox, until = Mailbox(rundir.path), time.monotonic() + PATIENCE_SECONDS
    name = mailbox.post(content)
    while (answer := mailbox.answer(name)) is None:
        gone = holder(rundir.path) is None
        if (gone or time.monotonic() > until) and mailbox.withdraw(name):
            why = "ended" if gone else f"has not answered within {PATIENCE_SECONDS:g} s"
            raise ConfigError(f"{rundir.path} {why}; nothing was changed")
        if gone and (answer := mailbox.answer(name)) is None:
            raise ConfigError(f"{rundir.path} ended before it answered; look into its metrics.jsonl, or resume it")
        if answer is not None:
            break
        time.sleep(LOOK_SECONDS)
    if answer["error"]:
        raise ConfigError(str(answer["error"]))
    sys.stdout.write(f"{answer['text']}\n")
    return 0


def _run(arguments: list[str], usage: str) -> tuple[RunDir, list[str]]:
    if not arguments or any(word in ("-h", "--help") for word in arguments):
        raise ConfigError(f"{usage}: give the directory of a live run; `shoal runs` lists them")
    return RunDir.open(Path(arguments[0])), arguments[1:]


def _pair(word: str, live: list[str]) -> tuple[str, Any]:
    name, equals, text = word.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    if not equals:
        meant = name if name in live else "algorithm.lr"
        raise ConfigError(f"{word} has no value; write NAME=VALUE, such as {meant}=0.001")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, None if text in ("none", "None") else text
