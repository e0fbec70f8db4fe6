"""One exception tree. Whatever shoal raises on purpose is a ShoalError whose text says what to do next.

    ShoalError
    ├── ConfigError              a value the user gave does not make sense; the command line exits with 2
    ├── EnvironmentError_        an environment broke its contract (names the environment, the step and the value)
    ├── ProgramError             a graph is drawn wrongly
    │   ├── Deadlock             every role waits and nobody can make progress (inline runtime)
    │   └── UnknownMetric        a role or an algorithm measures something that nobody declared
    ├── WireError                a wire was used wrongly
    │   ├── Timeout              a deadline passed
    │   └── GroupChanged         a member of a group died or joined: discard this update and continue
    ├── RoleFailed               a role kept failing; the command line exits with 3
    ├── CheckpointError          a run directory or checkpoint cannot be read or written
    └── ReplayError              see shoal.replay
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Deadlock",
    "EnvironmentError_",
    "GroupChanged",
    "ProgramError",
    "ReplayError",
    "RoleFailed",
    "ShoalError",
    "Timeout",
    "UnknownMetric",
    "WireError",
]


class ShoalError(Exception):
    """Anything shoal raises on purpose."""


class ConfigError(ShoalError):
    """A value the user gave does not make sense. Names the value and the fix."""


class EnvironmentError_(ShoalError):
    """An environment broke its contract. Names the environment, the step and the value."""


class ProgramError(ShoalError):
    """A graph of roles and wires is drawn wrongly."""


class Deadlock(ProgramError):
    """Every role waits and none can be resumed."""


class UnknownMetric(ProgramError, KeyError):
    """A role or an algorithm measures something that nobody declared."""

    __str__ = Exception.__str__  # a KeyError quotes its text


class WireError(ShoalError):
    """A wire was used wrongly."""


class Timeout(WireError):
    """A deadline passed before the wire had an answer."""


class GroupChanged(WireError):
    """The members of a group changed during an operation: discard the update, call sync(), continue."""


class RoleFailed(ShoalError):
    """A role kept failing; carries its traceback and the path of its log."""


class CheckpointError(ShoalError):
    """A run directory or a checkpoint cannot be read or written."""


class ReplayError(ShoalError):
    """The root of shoal.replay's errors."""
