"""`--actors auto` during a run: the rule alone against a pipeline on paper, then a real run."""

import itertools
import json
import math
import time

import gymnasium as gym
import numpy as np
import pytest

import shoal
from shoal.coordination.autoscale import HEADROOM, PATIENCE, AutoscaleConfig, LoadWindow, Rule
from shoal.errors import ConfigError
from shoal.experiment import auto_layout as layouts
from shoal.experiment.prepare import plan_from_json, plan_to_json, prepare
from shoal.experiment.run import plan_of
from shoal.telemetry.outputs import read_lines


# ---------------------------------------------------------------------------------------------- the rule
class Pipeline:
    """Actors of a rate, cores that saturate, a learner of a demand: what a window would show (a fluid, with noise)."""

    def __init__(self, demand, rate, *, cores=math.inf, noise=0.0, queue=20.0, seed=0):
        self.demand, self.rate, self.cores, self.noise = demand, rate, cores, noise
        self.lag_per_actor, self.rng = 0.0, np.random.default_rng(seed)

    def window(self, actors):
        capacity = self.rate * min(actors, self.cores) * (1 + self.noise * self.rng.standard_normal())
        demand = self.demand * (1 + self.noise * self.rng.standard_normal())
        supply = min(capacity, demand)
        blocked, idle = 1 - supply / capacity, 1 - supply / demand
        return LoadWindow(actors, supply, idle, blocked, 1.0 if blocked > 0.05 else 0.5, lag=self.lag_per_actor * actors)

    def needed(self):
        return math.ceil(self.demand / self.rate)


def drive(rule, pipeline, actors, windows):
    """The number of actors after each window; a change is followed by a window that is not steady."""
    path = [actors]
    for _ in range(windows):
        decision = rule.hear(pipeline.window(path[-1]))
        if decision.actors != path[-1]:
            assert decision.reason
            held = rule.hear(LoadWindow(decision.actors, 0.0, 1.0, 0.0, 0.0, steady=False))
            assert held.actors == decision.actors
        path.append(decision.actors)
    return path


def reversals(path):
    steps = [b - a for a, b in itertools.pairwise(path) if b != a]
    return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))


def test_from_one_to_the_needed_number():
    """specs: a learner of 10,240 frames/s, actors of 900, then of 450: 12, then 23."""
    rule, pipeline = Rule(1, 64), Pipeline(10_240, 900)
    path = drive(rule, pipeline, 1, 8)
    assert path[:5] == [1, 2, 4, 8, 12] and path[-1] == pipeline.needed() == 12
    pipeline.rate = 450
    path = drive(rule, pipeline, 12, 8)
    assert path[1] == 23 and path[-1] == pipeline.needed() == 23
    pipeline.rate = 900
    down = drive(rule, pipeline, 23, 60)
    assert 12 <= down[-1] <= 14 and reversals(down) == 0 and down[PATIENCE - 1] == 23 and down[PATIENCE] == 22


@pytest.mark.parametrize("needed", [1.0, 1.5, 2.3, 3.9, 5.5, 9.3, 12.0, 30.2])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_noise_does_not_make_it_oscillate(needed, noise):
    for seed in range(20):
        pipeline = Pipeline(100 * needed, 100, noise=noise, seed=seed)
        for start in (1, 8, 64):
            path = drive(Rule(1, 64), pipeline, start, 250)
            assert reversals(path) <= (1 if noise <= 0.01 else 3), path
            assert path[-1] >= needed * (1 - 0.02) - 0.5, path
            # not more than the headroom that it keeps asks for, and one
            assert path[-1] <= math.ceil(needed * (1 + HEADROOM)) + 1 + (needed * 2 * noise), path


def test_one_actor_too_many():
    """Wherever it goes down, one less still has headroom: so it does not go up from there."""
    for n in range(2, 65):
        for needed in np.linspace(0.2, n + 1, 97):
            rule, pipeline = Rule(1, 64), Pipeline(100 * needed, 100)
            path = drive(rule, pipeline, n, PATIENCE)
            if path[-1] < n:
                assert pipeline.window(path[-1]).idle == 0.0


def test_more_actors_than_cores():
    """More actors than cores are taken back and not tried again."""
    assert drive(Rule(1, 64), Pipeline(10_000, 100, cores=3), 1, 50)[:8] == [1, 2, 4, 8, 8, 8, 4, 4]  # half of 4 was worth it
    rule, pipeline = Rule(1, 64), Pipeline(10_000, 100, cores=2)
    path = drive(rule, pipeline, 1, 50)
    assert path[:7] == [1, 2, 4, 4, 4, 2, 2] and set(path[5:]) == {2}
    assert drive(rule, pipeline, 2, 1000).count(4) == PATIENCE * 4  # tried again after 60, 120, 240, 480 windows
    decision = rule.hear(pipeline.window(2))
    assert decision.actors == 2 and "the cores are used up" in decision.reason and decision.hindrance
    pipeline.rate, pipeline.cores = 20, math.inf  # another environment: what was learned does not hold any more
    assert drive(rule, pipeline, 2, 20)[-1] == 64


def test_slow_learner_on_full_cores():
    """Cores stay used up while the learner is slow for a while."""
    rule, pipeline = Rule(1, 64), Pipeline(10_000, 100, cores=2)
    drive(rule, pipeline, 1, 20)
    pipeline.demand = 120  # actors are blocked 40 % of the time: each could do what it did
    assert set(drive(rule, pipeline, 2, 2 * PATIENCE)) == {2}
    pipeline.demand = 10_000
    assert set(drive(rule, pipeline, 2, 10)) == {2}


def test_gain_of_an_increase():
    """An increase cannot bring more than the learner lacked."""
    rule = Rule(1, 64)
    assert [rule.hear(LoadWindow(6, 600.0, 0.05, 0.0, 0.5)).actors for _ in range(2)] == [6, 7]
    assert all(rule.hear(LoadWindow(7, 620.0, 0.03, 0.12, 0.5)).actors >= 7 for _ in range(2 * PATIENCE))


def test_decrease_that_was_taken_back():
    """A decrease that had to be taken back is not tried again."""
    full, starved = (lambda n: LoadWindow(n, 100.0, 0.0, 0.4, 1.0)), (lambda n: LoadWindow(n, 100.0, 0.12, 0.0, 0.2))
    rule = Rule(1, 8)
    assert [rule.hear(full(5)).actors for _ in range(PATIENCE)][-1] == 4
    assert rule.hear(starved(4)).actors == 5
    assert {rule.hear(full(5)).actors for _ in range(2)} == {5}
    needs_as_much = LoadWindow(5, 100.0, 0.0, 0.29, 1.0)
    assert {rule.hear(needs_as_much).actors for _ in range(10 * PATIENCE)} == {5}
    assert 4 in {rule.hear(LoadWindow(5, 50.0, 0.0, 0.7, 1.0)).actors for _ in range(2 * PATIENCE)}  # the learner needs fewer now


def test_environment_that_slows_down():
    """An environment that slows down while an increase is judged is not taken for full cores."""
    rule, pipeline = Rule(1, 64), Pipeline(1000, 100)
    path = drive(rule, pipeline, 1, 3)
    assert path[-1] == 8
    pipeline.rate = 40
    assert drive(rule, pipeline, 8, 30)[-1] == pipeline.needed() == 25


def test_it_holds_without_a_clear_view():
    """It changes nothing where a number is missing, or where actors came or went."""
    starved = LoadWindow(4, 100.0, 0.9, 0.0, 0.0)
    full = LoadWindow(4, 100.0, 0.0, 0.9, 1.0)
    for broken in ({"steady": False}, {"supply": math.nan}, {"idle": math.nan}, {"blocked": math.nan}, {"occupied": math.nan},
                   {"supply": 0.0}):
        for window in (starved, full):
            rule = Rule(1, 8)
            for _ in range(2 * PATIENCE):
                assert rule.hear(LoadWindow(**{**vars(window), **broken})).actors == 4
    rule = Rule(1, 8)
    assert {rule.hear(LoadWindow(4, 100.0, 0.0, 0.9, 0.3)).actors for _ in range(2 * PATIENCE)} == {4}  # the queue is not full
    rule = Rule(1, 8)
    for window in [full] * (PATIENCE - 1) + [LoadWindow(4, 100.0, 0.0, 0.9, 1.0, steady=False)] + [full] * (PATIENCE - 1):
        assert rule.hear(window).actors == 4  # not on end
    assert rule.hear(full).actors == 3


def test_bounds_and_what_is_said_at_them():
    most = Rule(1, 4)
    assert drive(most, Pipeline(1000, 100), 1, 10)[-1] == 4
    assert "--autoscale.most" in most.hear(Pipeline(1000, 100).window(4)).reason
    assert drive(Rule(2, 4), Pipeline(10, 100), 4, 30)[-1] == 2
    assert Rule(1, 64).hear(LoadWindow(4, 100.0, 0.5, 0.0, 0.0, room=1.0)).actors == 5
    full = Rule(1, 64).hear(LoadWindow(4, 100.0, 0.5, 0.0, 0.0, room=0.0))
    assert full.actors == 4 and "there is no room for more" in full.reason


def test_small_and_long_waits():
    """A small wait must last and a long one need not."""
    slight, long = LoadWindow(10, 100.0, 0.05, 0.0, 0.3), LoadWindow(10, 100.0, 0.3, 0.0, 0.3)
    rule = Rule(1, 64)
    assert [rule.hear(slight).actors for _ in range(2)] == [10, 11]
    assert Rule(1, 64).hear(long).actors == 15


def test_both_sides_wait():
    """Where actors and learner wait for each other, slots are missing, not actors."""
    rule = Rule(1, 64)
    for _ in range(5):
        decision = rule.hear(LoadWindow(4, 100.0, 0.2, 0.5, 0.9))
        assert decision.actors == 4 and "--architecture.slots-per-actor" in decision.reason


def test_lag_limit():
    """The lag limit holds it back and takes one away."""
    rule, pipeline = Rule(1, 64, max_lag=6.0), Pipeline(1000, 100)
    pipeline.lag_per_actor = 1.0
    path = drive(rule, pipeline, 1, 40)
    assert path[:4] == [1, 2, 4, 8] and path[-1] == 6 and reversals(path) == 1
    assert "the limit is 6" in rule.hear(LoadWindow(7, 700.0, 0.3, 0.0, 0.5, lag=7.0)).reason


# ---------------------------------------------------------------------------------------------- the configuration
def auto(**overrides):
    preset = overrides.pop("preset", "impala")
    return plan_of(preset, "CartPole-v1", None, None, {"actors": "auto", **overrides})


def test_number_does_not_move_and_auto_does():
    said = []
    fixed = layouts.laid_out(plan_of("impala", "CartPole-v1", None, None, {"actors": 3}), said.append).experiment
    assert not fixed.moving and not said
    plan = layouts.laid_out(auto(**{"autoscale.start": 1, "autoscale.most": 6}), said.append)
    assert plan.experiment.moving and said == ["the number of actors follows the learner: 1 at first, 1 to 6"]
    prepared = prepare(plan)
    node = prepared.program().nodes["actor"]
    assert (node.least, node.start, node.most) == (1, 1, 6)
    again = plan_from_json(json.loads(json.dumps(plan_to_json(prepared.plan))), "config.json")  # as a resumed run reads it
    again.validate()
    assert again.experiment.moving and layouts.laid_out(again, said.append) is again


def test_one_process_has_nothing_to_scale(monkeypatch):
    """One process has nothing to scale and says so."""
    from shoal.coordination.calibration import ActorLayout, Trial

    monkeypatch.setattr("shoal.coordination.calibrate", lambda *_: [Trial(ActorLayout(1, 16, True, 1), 1.0)])
    said = []
    experiment = layouts.laid_out(auto(**{"autoscale.most": 9}), said.append).experiment
    assert said[-1] == "the number of actors stays 1: all actors live in their learner's process"
    assert not experiment.moving
    experiment.validate()


@pytest.mark.parametrize(("preset", "overrides", "match"), [
    ("gala", {"autoscale.most": 4}, "--autoscale.most has no use here: --architecture gossip has a fixed number of actors"),
    ("apex", {"autoscale.start": 2}, "--autoscale.start has no use here: --algorithm dqn learns from a replay table"),
    ("impala", {"autoscale.start": 2, "runtime": "inline"}, "--runtime inline runs all roles in one thread"),
    ("impala", {"autoscale.start": 2, "architecture.lockstep": True}, "lockstep every update takes one unroll of each actor"),
])
def test_where_it_cannot_move_it_is_refused(preset, overrides, match):
    with pytest.raises(ConfigError, match=match):
        layouts.laid_out(auto(preset=preset, **overrides), lambda line: None)


@pytest.mark.parametrize(("values", "match"), [
    ({"start": 0}, "start is 0"), ({"most": 0}, "most is 0"), ({"start": 3, "most": 2}, "start 3 is more than"),
    ({"every_seconds": 0.0}, "every-seconds is 0"), ({"every_seconds": math.nan}, "every-seconds is nan"),
    ({"max_lag": 0.0}, "max-lag is 0"),
])
def test_values_that_make_no_sense(values, match):
    with pytest.raises(ConfigError, match=match):
        AutoscaleConfig(**values).validate()


@pytest.mark.parametrize("given", [{"autoscale.start": 2}, {"autoscale.most": 8}, {"autoscale.start": 2, "autoscale.most": 8}])
def test_a_number_and_bounds_clash(given):
    with pytest.raises(ConfigError, match="--actors 3 is a fixed number, but --autoscale"):
        prepare(plan_of("impala", "CartPole-v1", None, None, {"actors": 3, **given}))


# ---------------------------------------------------------------------------------------------- a real run
class Slow(gym.Env):
    """Every step sleeps, so that one actor can never be enough, whatever else the machine does."""

    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        time.sleep(0.005)
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_real_run_adds_actors(tmp_path):
    """A real run adds actors and writes down why."""
    run = shoal.train("impala", Slow, actors="auto", max_seconds=60.0, max_env_steps=1600, run_dir=str(tmp_path / "run"),
                      **{"autoscale.start": 1, "autoscale.most": 3, "autoscale.every_seconds": 0.2, "eval.enabled": False,
                         "architecture.envs_per_actor": 1, "architecture.batch_slots": 1, "algorithm.unroll": 4,
                         "console.mode": "none", "tensorboard": False})
    rows = read_lines(run.directory / "metrics.jsonl")
    events = [row["text"] for row in rows if row.get("event") == "autoscale"]
    assert events and events[0].startswith("1 -> 2 actors: learners waited ")
    assert run.summary["slots"]["conserved"] and run.summary["restarts"] == 0 and run.summary["error"] is None
    assert max(row["roles"]["actor"]["instances"] for row in rows if row.get("kind") == "snapshot" and "actor" in row["roles"]) > 1
