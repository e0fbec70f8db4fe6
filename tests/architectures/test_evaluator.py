"""Evaluations, one step of the environments at a time: what counts, and when they stop."""

import numpy as np
import torch

from shoal.algorithms import a2c
from shoal.envs import make
from shoal.roles import evaluator as module
from shoal.roles.episodes import EpisodePlay
from shoal.roles.parts import EnvSource, EvalPlan
from tests.architectures.graphs import Weights, draw, go
from tests.experiment.toys import Endless, Gift


class Idle:
    """A policy of zeros, and a record that shows it nothing."""

    def initial_state(self, seats):
        return None

    def act(self, view, state, explore, rng):
        return np.zeros(view, int), None, {}

    def viewer(self, seats):
        self.seats = seats
        return self

    def of(self, step, previous):
        return self.seats


class Lengths(Gift):
    """Episodes of 3, 6, 9, ... steps."""

    count = 0

    def reset(self, *, seed=None, options=None):
        self.count += 1
        observation, info = super().reset(seed=seed)
        self.left = 3 * self.count
        return observation, info


def played(env, rows, episodes, **bounds):
    made = make(env, rows)
    play = EpisodePlay(Idle(), Idle(), made, episodes, 1, torch.Generator(), **bounds)
    while not play.over:
        play.step()
    made.close()
    return play


def test_what_has_begun_is_played_to_its_end():
    """Else short episodes would count more often than long ones."""
    assert played(Lengths, 1, 100, env_steps=10).lengths.tolist() == [3, 6, 9]
    assert played(Lengths, 1, 100, env_steps=9).lengths.tolist() == [3, 6]  # the third has not begun
    assert played(Lengths, 2, 100, env_steps=8).lengths.tolist() == [3, 3, 6, 6]
    assert played(Lengths, 1, 2, env_steps=1000).lengths.tolist() == [3, 6]
    assert played(Lengths, 1, 100, env_steps=1).returns.tolist() == [3.0]


def test_episode_without_an_end():
    """An episode without an end is cut off and counted as it is."""
    play = played(Endless, 2, 5, max_episode_steps=7)
    assert play.lengths.tolist() == [7, 7] and play.returns.tolist() == [7.0, 7.0] and play.unfinished == 2
    play = played(Lengths, 1, 5, max_episode_steps=10)
    assert play.lengths.tolist() == [3, 6, 9, 10] and play.unfinished == 1  # a row that was cut off plays no other one


class Evaluations(Weights):
    """Ends after this many evaluations."""

    def __init__(self, count):
        super().__init__(lambda control: control.total("evaluations") >= count)
        self.returns = set()

    def tick(self, control):
        super().tick(control)
        if control.total("evaluations"):
            self.returns.add(control.snapshot()["evaluator-0"]["eval_return"])


def test_evaluation_in_several_processes(tmp_path, monkeypatch):
    """From the second evaluation on, where cores are free; inline has none."""
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.0)
    made = []

    class Split(module.SplitEnv):
        def __init__(self, make, num_envs, processes):
            made.append((num_envs, processes))
            super().__init__(make, num_envs, processes)

    monkeypatch.setattr(module, "SplitEnv", Split)
    for cores, expected in ((3, [(4, 3)]), (1, [])):
        made.clear()
        plan = EvalPlan(episodes=4, every_env_steps=1, free_cores=cores)
        program, _ = draw(a2c.Config(unroll=5), "synchronous", EnvSource(Gift), eval=plan)
        watch = go(program, "inline", tmp_path, Evaluations(4))
        assert made == expected and watch.returns == {2.0}
