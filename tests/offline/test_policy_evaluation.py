"""Off-policy evaluation: closed forms of a table of states, estimates by hand, intervals, warnings, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from shoal import cli
from shoal.offline import Episode, RecordingInfo
from shoal.offline.fitted_q import FittedQ, FittedQPlan
from shoal.offline.logged_steps import LoggedSteps, PolicyChoices
from shoal.offline.policy_evaluation import evaluate_policy
from shoal.ops.policy_value import doubly_robust, effective_size, importance

STATES, GAMMA = 4, 0.9
INFO = RecordingInfo("chain", gym.spaces.Box(0, 1, (STATES,), np.float32), gym.spaces.Discrete(2), kwargs={})
LEFT = np.array([0.3, 0.6, 0.5, 0.2])  # how likely the evaluated policy goes left, by state


class Chain:
    """States 0 to 3: right goes on and ends behind the last one with 1; left goes to state 0 and costs 0.1."""

    info = INFO

    def __init__(self, episodes, seed, likely=0.5):
        self.rng, self.likely = np.random.default_rng(seed), likely
        self.kept = [self.episode() for _ in range(episodes)]

    def episode(self):
        state, rows = 0, []
        while state < STATES and len(rows) < 40:
            left = self.rng.random() < self.likely
            rows.append((state, int(not left), -0.1 if left else float(state == STATES - 1)))
            state = 0 if left else state + 1
        states, actions, rewards = (np.array(column) for column in zip(*rows, strict=True))
        seen = np.concatenate([np.eye(STATES)[states], np.eye(STATES)[[state]] if state < STATES else np.zeros((1, STATES))])
        ends = np.arange(len(rows)) == len(rows) - 1
        log_prob = np.log(np.where(actions == 0, self.likely, 1 - self.likely)).astype(np.float32)
        return Episode(seen.astype(np.float32), actions, rewards.astype(np.float32), ends & (state == STATES),
                       ends & (state < STATES), log_prob=log_prob)

    def episodes(self, order=None, checked=True):
        return iter(self.kept)


def exact(left, gamma=GAMMA):
    """V [states] by a linear equation."""
    reward = left * -0.1 + (1 - left) * (np.arange(STATES) == STATES - 1)
    move = np.zeros((STATES, STATES))
    move[:, 0] += left
    move[np.arange(STATES - 1), np.arange(1, STATES)] += 1 - left[:-1]
    return np.linalg.solve(np.eye(STATES) - gamma * move, reward)


def choices(steps, left=LEFT):
    """Of the policy that goes left like this."""
    state = steps.observation.argmax(1)
    pairs = np.stack([left[state], 1 - left[state]], 1)
    return PolicyChoices(pairs.astype(np.float32), None, np.log(pairs[steps.here, steps.action]))


def test_fitted_q_of_a_table_is_exact():
    """To 1e-3: a linear net of one-hot states is a table, and all data are in each batch."""
    steps = LoggedSteps.of(Chain(60, 0))
    plan = FittedQPlan(GAMMA, updates=2_500, batch_size=10**9, lr=0.05, hidden=(), tau=0.2)
    fitted = FittedQ(steps, choices(steps), plan, np.ones((2, 60)))
    for _ in range(plan.updates):
        fitted.update()
    v = exact(LEFT)
    np.testing.assert_allclose(fitted.start_value(), v[0], atol=1e-3)
    q, values = fitted.values()
    alive = steps.observation.any(1)
    np.testing.assert_allclose(values[:, alive], np.tile(v[steps.observation.argmax(1)][alive], (2, 1)), atol=1e-3)
    state = steps.observation[steps.here].argmax(1)
    right = np.where(state == STATES - 1, 1.0, GAMMA * v[(state + 1) % STATES])
    np.testing.assert_allclose(q, np.tile(np.where(steps.action == 0, -0.1 + GAMMA * v[0], right), (2, 1)), atol=1e-3)


def test_importance_sampling_by_hand():
    """Two episodes of two steps: at the second one weights are 3/4 and 1/4, then 9/10 and 1/10."""
    ratio, reward = np.log([[3.0, 3.0], [1.0, 1.0]]), np.array([[1.0, 2.0], [5.0, 6.0]])
    expected = (0.75 * 1 + 0.25 * 5) + 0.5 * (0.9 * 2 + 0.1 * 6)
    assert importance(ratio, reward, 0.5, np.ones((1, 2))) == pytest.approx([expected])
    assert importance(ratio, reward, 0.5, np.array([[2, 0]])) == pytest.approx([1 + 0.5 * 2]), "a resample with one of them only"
    assert effective_size(ratio) == pytest.approx(10**2 / 82)
    q, v = np.array([[0.5, 1.0], [2.0, 3.0]]), np.array([[0.7, 0.9], [1.5, 2.5]])
    robust = (0.75 * 0.5 + 0.25 * 3 + (0.7 + 1.5) / 2) + 0.5 * (0.9 * 1 + 0.1 * 3 + 0.75 * 0.9 + 0.25 * 2.5)
    assert doubly_robust(ratio, reward, q, v, 0.5, np.ones((1, 2))) == pytest.approx([robust])
    none = np.zeros((2, 2))
    assert doubly_robust(ratio, reward, none, none, 0.5, np.ones((1, 2))) == pytest.approx([expected]), "without a critic"


def test_all_estimates_agree_with_the_truth():
    steps = LoggedSteps.of(Chain(400, 1))
    plan = FittedQPlan(GAMMA, updates=600, batch_size=512, lr=0.02, hidden=())
    found = evaluate_policy(steps, choices(steps), plan, bootstraps=6)
    truth = exact(LEFT)[0]
    assert [one.name for one in found.estimates] == ["fitted Q", "importance sampling", "doubly robust"] and not found.warnings
    for one in found.estimates:
        assert one.low < one.value < one.high and one.low - 0.05 < truth < one.high + 0.05, one
    own = choices(steps, np.full(STATES, 0.5))
    same = evaluate_policy(steps, own, FittedQPlan(GAMMA, updates=1, batch_size=8, hidden=()), bootstraps=2)
    assert same.effective == pytest.approx(400)
    (sampled,) = (one for one in same.estimates if one.name == "importance sampling")
    assert sampled.value == pytest.approx(same.recorded, abs=1e-6)


def test_small_samples_are_reported():
    steps = LoggedSteps.of(Chain(60, 2, likely=0.8))
    few = FittedQPlan(GAMMA, updates=1, batch_size=8, hidden=())
    found = evaluate_policy(steps, choices(steps, np.full(STATES, 0.01)), few, bootstraps=2)
    assert found.effective < 20 and f"effective sample size is {found.effective:.1f} of 60 episodes" in found.warnings[0]
    assert "too different" in found.warnings[0]
    own = evaluate_policy(few_steps := LoggedSteps.of(Chain(6, 2)), choices(few_steps, np.full(STATES, 0.5)), few, bootstraps=2)
    assert own.effective == pytest.approx(6) and "6.0 of 6 episodes: these are few" in own.warnings[0]
    steps.log_prob[5] = np.nan
    found = evaluate_policy(steps, choices(steps), few, bootstraps=2)
    assert [one.name for one in found.estimates] == ["fitted Q"] and "does not say how likely its actions were" in found.warnings[0]


def test_the_command(tmp_path, monkeypatch, capsys):
    """A recording of the run's own exploring policy is worth what it says; estimates are written as JSON."""
    monkeypatch.chdir(tmp_path)
    quiet = ["--runtime", "inline", "--console.mode", "none", "--no-tensorboard"]
    assert cli.main(["train", "dqn", "CartPole-v1", "--max-env-steps", "300", "--run-dir", "run", *quiet, "--no-eval.enabled"]) == 0
    assert cli.main(["data", "record", "run", "CartPole-v1", "--explore", "--episodes", "30", "--out", "logs"]) == 0
    words = ["data", "evaluate", "run", "logs", "--explore", "--updates", "20", "--bootstraps", "2", "--out", "value.json"]
    assert cli.main(words) == 0, capsys.readouterr().err
    found = json.loads(Path("value.json").read_text())
    assert found["effective"] == pytest.approx(30) and "effective sample size 30.0 of 30" in capsys.readouterr().out
    assert found["estimates"][1]["value"] == pytest.approx(found["recorded"], rel=1e-4)
    for wrong, sentence in ((["run"], "give a run directory"), (["gone", "logs"], "gone"), (["run", "gone"], "it does not exist"),
                            (["run", "logs", "--gamma", "2"], "gamma"), (["run", "logs", "--hidden", "0"], "--hidden 0")):
        assert cli.main(["data", "evaluate", *wrong]) == 2 and sentence in capsys.readouterr().err
