"""What roles read of an algorithm is checked before anything starts: an outside one may have forgotten it."""

from dataclasses import dataclass
from functools import cached_property

import pytest

import shoal
from shoal.algorithms import a2c, dqn
from shoal.algorithms.records.transitions import Transitions
from shoal.algorithms.records.unroll import Unroll
from shoal.errors import ConfigError
from shoal.slots import Layout

QUIET = {"console.mode": "none", "tensorboard": False, "runtime": "inline"}


def without(layout: Layout, *names: str) -> Layout:
    return Layout({name: field for name, field in layout.fields.items() if name not in names})


def lacking(algorithm: type, record: type, *names: str) -> type:
    """An algorithm whose record lacks some fields."""

    @dataclass(frozen=True)
    class Bare(record):
        @cached_property
        def layout(self):
            return without(super().layout, *names)

    class Lacking(algorithm):
        @cached_property
        def record(self):
            whole = super().record
            return Bare(**{name: getattr(whole, name) for name in whole.__dataclass_fields__})

    return Lacking


class Misnamed(a2c.A2C):
    """Says that it learns from replay, and has a record of unrolls."""

    from_replay = True


class Silent(a2c.A2C):
    """Does not publish how far it is."""

    def published_layout(self):
        return without(super().published_layout(), "progress")


@pytest.mark.parametrize(("algorithm", "architecture", "words"), [
    (Misnamed, "actor_learner", r"Misnamed\.from_replay is True, but its record is a Unroll; .* has an ItemRecord"),
    (lacking(a2c.A2C, Unroll, "valid", "time"), "synchronous", r"Lacking\.record\.layout has no field valid and no field time"),
    (lacking(dqn.DQN, Transitions, "weights_version"), "actor_learner", r"Lacking\.record\.layout has no field weights_version;"),
    (Silent, "synchronous", r"Silent\.published_layout\(\) has no field progress; roles read it"),
])
def test_incomplete_algorithm(algorithm, architecture, words, tmp_path):
    """An algorithm that lacks what roles read is refused."""
    with pytest.raises(ConfigError, match=words):
        shoal.train(algorithm=algorithm, architecture=architecture, env="CartPole-v1", max_env_steps=100,
                    run_dir=str(tmp_path / "run"), **QUIET)
    assert not (tmp_path / "run").exists()
