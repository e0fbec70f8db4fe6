"""What cannot work is refused before anything starts, with a sentence that names the value and the fix."""

import subprocess
import sys
from dataclasses import dataclass, fields, replace

import gymnasium as gym
import numpy as np
import pytest

from shoal import algorithms
from shoal.acting import Progress
from shoal.algorithms import a2c, ppo, vtrace
from shoal.envs import EnvSpec
from shoal.errors import ConfigError
from shoal.learning import Tolerance
from shoal.nets import NetConfig
from shoal.options import Options
from tests.algorithms import loop, replay_loop
from tests.algorithms.toys import toy_env, toy_spec


@dataclass(frozen=True)
class Other(Options):
    """Of no algorithm."""


BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
TWO = gym.spaces.Discrete(2)
CONTINUOUS = ("ddpg", "td3", "qtopt", "td3_bc")  # which act in no other space
UNDISCOUNTED = ("bc", "es")  # which learn no values
GRADIENT_FREE = ("es",)
PIXELS = ("curl",)  # which learn from nothing else
IMAGE = gym.spaces.Box(0, 255, (1, 12, 12), np.uint8)


def spec(observation=BOX, action=TWO):
    return EnvSpec("Some-v0", observation, action, 500, 1, 1, False, "loop", "", 0)


@pytest.mark.parametrize("bad, words", [
    (vtrace.Config(lr=-1.0), r"--algorithm.lr is -1.0; it must be above 0 \(the default is 0.001\)"),
    (vtrace.Config(unroll=0), "--algorithm.unroll is 0; it must be at least 1"),
    (vtrace.Config(behaviour_mix=1.5), "behaviour-mix is 1.5; it must be at least 0 and at most 1"),
    (vtrace.Config(rho_bar=0.5, c_bar=1.0), "rho-bar 0.5.*c-bar 1.0.*set --algorithm.c-bar 0.5"),
    (vtrace.Config(reduction="sum"), "reduction.*grad-norm 0.5.*40"),
    (ppo.Config(gamma=float("nan")), "gamma is nan"),
    (ppo.Config(minibatches=0), "minibatches is 0"),
    (ppo.Config(value_clip=0.0), "value-clip is 0.0; it must be above 0"),
    (a2c.Config(lambda_=-0.1), "--algorithm.lambda is -0.1"),
    (a2c.Config(entropy=-1.0), "entropy is -1.0; it must be at least 0"),
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
    with pytest.raises(ConfigError, match="Other is not the Config of an algorithm"):
        algorithms.make(Other(), spec(), NetConfig(), 4)
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'nowhere'"):
        algorithms.named("nowhere.at_all:Mine")
    with pytest.raises(ConfigError, match=r"the module shoal\.learning has no Mine"):
        algorithms.named("shoal.learning:Mine")
    with pytest.raises(ConfigError, match="has Progress, which is not a subclass"):
        algorithms.named("shoal.acting:Progress")
    assert algorithms.named("shoal.algorithms.ppo:PPO") is algorithms.named("ppo") is ppo.PPO
    nets = {"r2d2": NetConfig(recurrent="lstm")}
    made = {name: algorithms.make(name, spec(IMAGE if name in PIXELS else BOX, BOX if name in CONTINUOUS else TWO),
                                  nets.get(name, NetConfig()), 4) for name in algorithms.ALGORITHMS}
    assert {name: one.name for name, one in made.items()} == {name: name for name in made}
    assert made["a2c"].tolerates == Tolerance.LAG and made["vtrace"].tolerates == Tolerance.REPLAY
    assert made["ppo"].tolerates == Tolerance.BOUNDED_REUSE
    assert (made["ppo"].explore(0, 1, 4, Progress()) == 0).all()


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_field_is_explained(name):
    import inspect

    config = algorithms.named(name).config_class
    assert len(fields(config)) <= 32
    declared = [inspect.getsource(cls) for cls in config.__mro__ if cls.__module__.startswith("shoal.algorithms")]
    for field in fields(config):
        lines = [source[source.index(f"    {field.name}: ") :] for source in declared if f"    {field.name}: " in source]
        assert any(line.split("\n")[1].strip().startswith('"""') for line in lines), field.name  # the help looks at bases too
    inner = [field.name for field in fields(config) if isinstance(getattr(config(), field.name), Options)]
    own = "gamma" in {field.name for field in fields(config)}
    assert own is not (bool(inner) or name in UNDISCOUNTED), "of its own, or of what it is made of"
    if name not in UNDISCOUNTED:
        replace(config(), **({name: replace(getattr(config(), name), gamma=0.5) for name in inner} or {"gamma": 0.5})).validate()


def test_listing_the_names_imports_no_torch():
    code = "import sys, shoal.algorithms; assert 'torch' not in sys.modules; print(*shoal.algorithms.ALGORITHMS)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[:3] == ["a2c", "ppo", "vtrace"]


NETS = {"r2d2": NetConfig(hidden=(8,), recurrent="lstm", lstm_size=4)}


@pytest.mark.parametrize("name", [name for name in algorithms.ALGORITHMS if name not in GRADIENT_FREE])
def test_gradients_report_what_is_declared(name):
    toy = {"actions": "box"} if name in CONTINUOUS else {"observations": "image"} if name in PIXELS else {}
    algorithm = algorithms.make(name, toy_spec(**toy), NETS.get(name, NetConfig(hidden=(8,))), 2)
    learn = algorithm.learn(0)
    if algorithm.from_replay:
        actor = replay_loop.Actor(algorithm, toy_env(2, **toy))
        actor.play(60)
        batch = replay_loop.batch_of(actor.items()[0])
    else:
        batch = loop.Actor(algorithm, toy_env(2), 0).unroll()
    minibatch = next(iter(learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0))))
    metrics = {metric for phase in learn.phases for metric in learn.gradients(minibatch, phase)[1]}
    diagnosed = {"delta_q_first", "delta_q_last", "returns_clipped"}  # with options that are off here
    assert metrics == {metric.name for metric in algorithm.metrics} - diagnosed
