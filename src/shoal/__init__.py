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
    "WireError": "shoal.errors",
    "load": "shoal.experiment.run",
    "resume": "shoal.experiment.run",
    "train": "shoal.experiment.run",
}

__all__ = ["Callback", "CheckpointError", "ConfigError", "EnvironmentError_", "ProgramError", "ReplayError", "RoleFailed", "Run",
           "ShoalError", "WireError", "__version__", "load", "log", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name == "log":
        return import_module("shoal.log")
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
