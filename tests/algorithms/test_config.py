"""What cannot work is refused before anything starts, with a sentence that names the value and the fix."""

import subprocess
import sys
from dataclasses import fields, replace

import gymnasium as gym
import numpy as np
import pytest

from shoal import algorithms
from shoal.algorithms import a2c, ppo, vtrace
from shoal.core import Progress, Tolerance
from shoal.envs import EnvSpec
from shoal.errors import ConfigError
from shoal.nets import NetConfig

BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
TWO = gym.spaces.Discrete(2)


def spec(observation=BOX, action=TWO):
    return EnvSpec("Some-v0", observation, action, 500, 1, 1, False, "loop", "", 0)


@pytest.mark.parametrize("bad, words", [
    (vtrace.Config(lr=-1.0), "lr=-1.0"),
    (vtrace.Config(unroll=0), "unroll=0"),
    (vtrace.Config(behaviour_mix=1.5), "behaviour_mix=1.5"),
    (vtrace.Config(rho_bar=0.5, c_bar=1.0), "rho_bar=0.5.*c_bar=1.0.*set c_bar=0.5"),
    (vtrace.Config(reduction="sum"), "reduction.*grad_norm=0.5.*40"),
    (ppo.Config(gamma=float("nan")), "gamma=nan"),
    (ppo.Config(minibatches=0), "minibatches=0"),
    (ppo.Config(value_clip=0.0), "value_clip=0.0"),
    (a2c.Config(lambda_=-0.1), "lambda_=-0.1"),
    (a2c.Config(entropy=-1.0), "entropy=-1.0"),
])  # fmt: skip
def test_numbers_out_of_range(bad, words):
    with pytest.raises(ConfigError, match=words):
        algorithms.make(bad, spec(), NetConfig(), 4)


def test_spaces_that_do_not_fit():
    for action in (gym.spaces.Dict({"a": gym.spaces.Discrete(2)}), gym.spaces.Box(0, 9, (1,), np.int32)):
        with pytest.raises(ConfigError, match=r"ppo cannot act in Some-v0.*wrap"):
            algorithms.make("ppo", spec(action=action), NetConfig(), 4)
    with pytest.raises(ConfigError, match=r"behaviour_mix=0.3.*behaviour_mix=0"):
        algorithms.make(vtrace.Config(behaviour_mix=0.3), spec(action=BOX), NetConfig(), 4)
    with pytest.raises(ConfigError, match="seats=0"):
        algorithms.make("ppo", spec(), NetConfig(), 0)


def test_pixels_are_not_normalised():
    """They are scaled by the net; a preset that normalises serves images too."""
    image = gym.spaces.Box(0, 255, (1, 10, 10), np.uint8)
    made = algorithms.make(ppo.Config(normalise_observations=True), spec(image), NetConfig(), 4)
    assert "observation_moments" not in made.record.layout.fields and made.published_layout().fields["norm"] == {}


def test_names():
    with pytest.raises(ConfigError, match=r"no algorithm 'dqnn'.*a2c, ppo, vtrace"):
        algorithms.make("dqnn", spec(), NetConfig(), 4)
    with pytest.raises(ConfigError, match="NetConfig is no algorithm's Config"):
        algorithms.make(NetConfig(), spec(), NetConfig(), 4)
    nets = {"r2d2": NetConfig(recurrent="lstm")}
    made = {name: algorithms.make(name, spec(), nets.get(name, NetConfig()), 4) for name in algorithms.ALGORITHMS}
    assert {name: one.name for name, one in made.items()} == {name: name for name in made}
    assert made["a2c"].tolerates == Tolerance.LAG and made["vtrace"].tolerates == Tolerance.REPLAY
    assert made["ppo"].tolerates == Tolerance.BOUNDED_REUSE
    assert (made["ppo"].explore(0, 1, 4, Progress()) == 0).all()


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_field_is_explained(name):
    import inspect

    config = algorithms.named(name)[0]
    source = inspect.getsource(config)
    assert len(fields(config)) <= 30
    for field in fields(config):
        line = source.index(f"    {field.name}: ")
        assert source[line:].split("\n")[1].strip().startswith('"""'), field.name
    replace(config(), gamma=0.5).validate()


def test_listing_the_names_imports_no_torch():
    code = "import sys, shoal.algorithms; assert 'torch' not in sys.modules; print(*shoal.algorithms.ALGORITHMS)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[:3] == ["a2c", "ppo", "vtrace"]
