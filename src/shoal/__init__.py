"""shoal: distributed reinforcement learning. A few roles, joined by five kinds of wires.

    run = shoal.train("impala", "CartPole-v1", actors=2, until_return=475)
    run.policy.act(observation)

Names are imported when they are first used: `import shoal` costs nothing, and `shoal --help` never loads PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import log
    from shoal.coordination.population.priors import choice, loguniform, uniform
    from shoal.errors import (
        CheckpointError,
        ConfigError,
        EnvironmentError_,
        ProgramError,
        ReplayError,
        RoleFailed,
        ShoalError,
        WireError,
    )
    from shoal.experiment.run import Run, load, resume, train
    from shoal.telemetry.callbacks import Callback
    from shoal.tuning.command import tune
    from shoal.tuning.study import Study
    from shoal.tuning.trainable import trainable

__version__ = "0.1.0"

_WHERE = {
    "Callback": "shoal.telemetry.callbacks",
    "CheckpointError": "shoal.errors",
    "ConfigError": "shoal.errors",
    "EnvironmentError_": "shoal.errors",
    "ProgramError": "shoal.errors",
    "ReplayError": "shoal.errors",
    "RoleFailed": "shoal.errors",
    "Run": "shoal.experiment.run",
    "ShoalError": "shoal.errors",
    "Study": "shoal.tuning.study",
    "WireError": "shoal.errors",
    "choice": "shoal.coordination.population.priors",
    "load": "shoal.experiment.run",
    "loguniform": "shoal.coordination.population.priors",
    "resume": "shoal.experiment.run",
    "train": "shoal.experiment.run",
    "trainable": "shoal.tuning.trainable",
    "tune": "shoal.tuning.command",
    "uniform": "shoal.coordination.population.priors",
}

__all__ = ["Callback", "CheckpointError", "ConfigError", "EnvironmentError_", "ProgramError", "ReplayError", "RoleFailed", "Run",
           "ShoalError", "Study", "WireError", "__version__", "choice", "load", "log", "loguniform", "resume", "train",
           "trainable", "tune", "uniform"]


def __getattr__(name: str) -> Any:
    if name == "log":
        return import_module("shoal.log")
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
