"""Environments that differ from actor to actor: everywhere the i-th actor has the i-th value, evaluators the plain one."""

import numpy as np
import pytest

from shoal.algorithms import vtrace
from shoal.architectures import ARCHITECTURES, named
from shoal.errors import ConfigError
from shoal.roles.parts import EnvSource
from tests.architectures.graphs import train


def test_values_in_turns():
    """Values are taken in turns and leave the rest alone."""
    source = EnvSource("shoal/Catch-v0", kwargs={"rows": 6}, varied={"ball_column": (0, 3)})
    assert [dict(source.of(k).kwargs) for k in range(3)] == [{"rows": 6, "ball_column": column} for column in (0, 3, 0)]
    assert source.of(1).of(0).kwargs["ball_column"] == 3  # decided once
    assert dict(source.kwargs) == {"rows": 6}
    plain = EnvSource("shoal/Catch-v0")
    assert plain.of(4) is plain


def test_architecture_without_actors(tmp_path):
    """An architecture without actors refuses them."""
    with pytest.raises(ConfigError, match="vary from actor to actor"):
        train(tmp_path, "a2c", "device", EnvSource("shoal/Catch-v0", varied={"ball_column": (0, 3)}), "inline", updates=1)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES
                                          if name != "device" and named(name).takes_unrolls])
def test_every_actor_has_its_own(architecture, tmp_path, monkeypatch):
    made = []
    make = EnvSource.make

    def noting(self, num_envs):
        env = make(self, num_envs)
        made.append((self.kwargs.get("ball_column"), env))
        return env

    monkeypatch.setattr(EnvSource, "make", noting)
    source = EnvSource("shoal/Catch-v0", varied={"ball_column": (0, 3)})
    run = train(tmp_path, vtrace.Config(unroll=4), architecture, source, "inline", actors=2, updates=3)
    columns = [column for column, _ in made if column is not None]
    groups = 2 if architecture == "central_inference" else 1
    assert run.reason == "counted" and sorted(columns) == sorted([0, 3] * groups)
    for column, env in made:
        if column is not None:
            first = np.asarray(env.reset(1).observation).reshape(-1, 10, 5)
            assert (first[:, 0].argmax(1) == column).all()
