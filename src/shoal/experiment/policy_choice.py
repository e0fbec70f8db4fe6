"""Which policy of a run is handed back: the best version that was evaluated, or the last one.

    best    the best of all evaluated versions; the last one is among them, because every run evaluates it at its end. If it has
            fewer episodes than the best so far it must be better by more than chance (roles/evaluator.py)
    last    the newest weights, however good they are

A run that was interrupted or killed has not evaluated its last version. It hands back the best one too, if at least two versions
were evaluated: the only one is that of the beginning, and then the last is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.errors import CheckpointError
from shoal.experiment.checkpoints import read_meta
from shoal.experiment.rundir import numbers
from shoal.telemetry.console import counted

__all__ = ["PolicyChoice", "PolicyName", "choose_policy", "policy_files"]

PolicyName = Literal["best", "last"]
SCORES = ("win_rate", "loss_rate", "exploitability")
EVALUATIONS = {"versions", "confirmed", *(f"{which}{what}" for which in ("best", "last")
                                          for what in ("_return", "_episodes", "_version", "/progress", "_win_rate", "_loss_rate",
                                                       "_exploitability"))}


@dataclass(frozen=True)
class PolicyChoice:
    """A policy of a checkpoint. None where something is not known: runs of earlier versions did not write it down."""

    name: PolicyName
    source: Literal["best", "last", "learner"]
    """Which arrays of the checkpoint hold its weights."""
    version: int | None = None
    env_steps: int | None = None
    eval_return: float | None = None
    eval_episodes: int = 0
    scores: Mapping[str, float] = field(default_factory=dict)
    """What matches found out about it, by SCORES."""
    trained: tuple[int, int] | None = None
    """Env steps and updates that the newest weights have learned from."""

    def sentence(self) -> str:
        trained = [f"version {self.version:,}" if self.version is not None else "",
                   f"after {self.env_steps:,} env steps" if self.env_steps is not None else ""]
        over = f" over {counted(self.eval_episodes, 'episode')}" if self.eval_episodes else ""
        known = [*(["as it was before training"] if self.version == 0 or self.trained == (0, 0) else trained),
                 f"evaluated {self.eval_return:,.2f}{over}" if self.eval_return is not None else "not evaluated"]
        return f"policy {self.name}: {', '.join(word for word in known if word)}"


def policy_files(folder: Path, scope: str = "") -> list[Path]:
    """The files of a checkpoint that belong to one policy: its roles' names begin with `scope`, or, empty, with none."""
    return [path for path in sorted(folder.glob("*.safetensors")) if path.name.startswith(scope) and (scope or _unscoped(path))]


def _unscoped(path: Path) -> bool:
    return "." not in path.name.removesuffix(".safetensors")


def choose_policy(folder: Path, wanted: PolicyName, scope: str = "") -> PolicyChoice:
    """The version of a checkpoint's policy that is wanted, or the last one where there is no choice."""
    found, counts = _evaluations(folder, scope)
    best_return = float(found.get("best_return", [math.nan])[0])
    compared = int(found.get("versions", [2])[0]) > 1 or bool(found.get("confirmed", [False])[0]) or "last_return" in found
    trained = None if counts is None else (int(counts[0]), int(counts[1]))
    if wanted == "best" and math.isfinite(best_return) and compared:
        return _evaluated("best", found, trained)
    if "last_return" in found:
        return _evaluated("last", found, trained)
    meta = numbers(read_meta(folder))
    version = int(meta["weights_version"]) if "weights_version" in meta else None
    return PolicyChoice("last", "learner", version, None if trained is None else trained[0], trained=trained)


def _evaluated(name: PolicyName, found: Mapping[str, np.ndarray], trained: tuple[int, int] | None) -> PolicyChoice:
    version, episodes = (found.get(f"{name}_{what}") for what in ("version", "episodes"))
    return PolicyChoice(name, name, None if version is None else int(version[0]), int(found[f"{name}/progress"][0]),
                        float(found[f"{name}_return"][0]), 0 if episodes is None else int(episodes[0]),
                        {score: float(found[f"{name}_{score}"][0]) for score in SCORES if f"{name}_{score}" in found}, trained)


def _evaluations(folder: Path, scope: str) -> tuple[dict[str, Any], Any]:
    """What the evaluator has written down, and the counts of a learner; weights are not read."""
    from safetensors import SafetensorError, safe_open

    found, counts = {}, None
    for path in policy_files(folder, scope):
        try:
            with safe_open(path, "numpy") as file:
                names = set(file.keys())
                if "best_return" in names:
                    found = {name: file.get_tensor(name) for name in EVALUATIONS & names}
                elif "counts" in names:
                    counts = file.get_tensor("counts")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
    return found, counts
