"""Which policy a run hands back: the best of all evaluated versions, the last included, or the last one."""

import json
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

import shoal
from shoal import cli
from shoal.experiment.checkpoints import Checkpoints, TensorFiles
from shoal.experiment.policy_choice import choose_policy
from shoal.roles.evaluator import Evaluated, Evaluator
from shoal.roles.parts import EvalPlan
from shoal.telemetry.outputs import read_lines
from tests.experiment.test_run import quick

SHORT = {"episodes": 4, "every_env_steps": 1_000_000}


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> shoal.Run:
    """A run that is much shorter than the time between two evaluations."""
    return quick("a2c", "CartPole-v1", tmp_path_factory.mktemp("short") / "run", max_env_steps=600, eval=SHORT)


def newest(run: shoal.Run):
    return max((run.directory / "checkpoints").iterdir())


def test_last_version_is_evaluated(short):
    """The last version of a short run is evaluated."""
    found = TensorFiles().load(newest(short) / "evaluator-0.safetensors")
    learned = TensorFiles().load(newest(short) / "trainer-0.safetensors")
    assert found["versions"].tolist() == [2] and found["last_version"][0] > 1
    np.testing.assert_array_equal(found["last/params"], learned["learn/params"])
    assert found["best_return"][0] == max(found["best_return"][0], found["last_return"][0])


def test_policy_of_the_summary(short):
    """The summary says which policy its return belongs to."""
    summary, best, last = (short.summary, *(choose_policy(newest(short), name) for name in ("best", "last")))
    assert summary == json.loads((short.directory / "summary.json").read_text())
    assert summary["policy"] == "best" and summary["policy_version"] == best.version == summary["eval_version"]
    assert (summary["eval_return"], summary["eval_episodes"]) == (pytest.approx(best.eval_return), best.eval_episodes)
    assert summary["policy_env_steps"] == best.env_steps and last.version > 1 and best.eval_return >= last.eval_return


def test_last_policy_on_request(tmp_path, short, capfd):
    learned = TensorFiles().load(newest(short) / "trainer-0.safetensors")["learn/params"]
    chosen = shoal.load(short.directory, policy="last")
    np.testing.assert_array_equal(chosen.published["params"], learned)
    assert chosen.choice.name == "last" and shoal.load(short.directory).choice.name == "best"
    trained = quick("a2c", "CartPole-v1", tmp_path / "run", max_env_steps=600, eval=SHORT, policy="last")
    assert trained.summary["policy"] == "last" and trained.choice == choose_policy(newest(trained), "last")
    assert trained.summary["policy_version"] == trained.choice.version > 1
    assert trained.summary["eval_return"] == pytest.approx(trained.choice.eval_return)
    assert shoal.load(trained.directory).choice.name == "last"  # as it was trained
    for command in (["eval", "--episodes", "2"], ["play"]):
        for name in ("best", "last"):
            assert cli.main([command[0], str(short.directory), *command[1:], "--policy", name]) == 0
            choice = choose_policy(newest(short), name)
            said = capfd.readouterr().out.splitlines()[0]
            assert said.startswith(f"policy {name}: version {choice.version}, after {choice.env_steps:,} env steps")


def test_last_policy_without_evals(tmp_path):
    run = quick("a2c", "CartPole-v1", tmp_path / "run", max_env_steps=300, eval={"enabled": False})
    summary = run.summary
    assert (summary["policy"], summary["eval_return"], summary["eval_episodes"]) == ("last", None, 0)
    assert summary["policy_version"] >= 1 and run.choice.source == "learner"
    assert run.policy.act(np.zeros(4)) in (0, 1)


class Lottery(gym.Env):
    """Episodes of one step, whose return is luck: about 10, with a deviation of 3."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), self.np_random.normal(10, 3), True, False, {}


def test_a_lucky_last_episode_is_not_the_best(tmp_path):
    """The last evaluation has one episode here, those before it fifty."""
    run = quick("a2c", Lottery, tmp_path / "run", max_env_steps=400, seed=5,
                eval={"episodes": 50, "every_env_steps": 100, "last_env_steps": 1})
    best, last = (choose_policy(newest(run), name) for name in ("best", "last"))
    assert last.eval_return > best.eval_return and (last.eval_episodes, best.eval_episodes) == (1, 50)
    assert (run.summary["policy"], run.summary["policy_version"], run.summary["eval_episodes"]) == ("best", best.version, 50)
    told = [row["text"] for row in read_lines(run.directory / "metrics.jsonl") if "by more than chance" in row.get("text", "")]
    assert told and f"with {last.eval_return:,.2f} over 1 episode, is not above version {best.version:,}" in told[0]


@pytest.mark.parametrize(("gain", "episodes", "versions", "better"), [
    (0.0, 100, 5, True), (-0.1, 100, 5, False),     # as many episodes: the higher return, and the newer one if they are equal
    (0.0, 4, 5, False), (8.3, 4, 5, False),         # 1.645 standard errors of 4 against 100 episodes with a deviation of 10: 8.39
    (8.5, 4, 5, True), (8.5, 1, 5, False), (16.6, 1, 5, True),
    (0.1, 1, 1, True), (-0.1, 1, 1, False),         # only the beginning was evaluated before: a short run
])
def test_fewer_episodes_must_be_better_by_more_than_chance(gain, episodes, versions, better):
    evaluator = Evaluator.__new__(Evaluator)
    evaluator.plan, evaluator.tree, evaluator.versions, told = EvalPlan(), None, versions, []
    evaluator.me = SimpleNamespace(note=told.append)
    best = Evaluated({"return": 50.0}, 100, 3, {}, 10.0)
    assert evaluator._better(Evaluated({"return": 50.0 + gain}, episodes, 9, {}, 0.0), best) == better
    assert bool(told) == (gain >= 0 and not better)


@pytest.mark.parametrize(("versions", "better"), [(1, True), (2, False)])
def test_an_untrained_net_is_not_the_least_exploitable(versions, better):
    """In rock-paper-scissors it plays nearly uniformly, which nothing exploits: no run would hand back what it has learned."""
    evaluator = Evaluator.__new__(Evaluator)
    evaluator.plan, evaluator.tree, evaluator.versions = EvalPlan(), object(), versions
    before, found = ({"return": 0.0, "exploitability": value} for value in (0.002, 0.03))
    assert evaluator._better(Evaluated(found, 100, 9, {}), Evaluated(before, 100, 1, {})) == better


def checkpoint(folder, **arrays):
    """A checkpoint of a learner after 900 env steps, and of an evaluator that has written down these arrays."""
    checkpoints = Checkpoints(folder)
    writing = checkpoints.begin(1)
    TensorFiles().save(writing / "learner-0.safetensors", {"counts": np.array([900, 30])})
    evaluated = {name.replace("__", "/"): np.array(value) for name, value in arrays.items()}
    TensorFiles().save(writing / "evaluator-0.safetensors", evaluated)
    return checkpoints.commit(writing, {"env_steps": 900, "weights_version": 31})


BEST = {"best_return": [7.0], "best_version": [4], "best_episodes": [100], "best__progress": [120.0, 4.0, 0.0]}
LAST = {"last_return": [5.0], "last_version": [31], "last_episodes": [3], "last__progress": [900.0, 30.0, 0.0]}


@pytest.mark.parametrize(("arrays", "wanted", "expected"), [
    ({**BEST, **LAST, "versions": [2]}, "best", ("best", "best", 4, 120, 7.0, 100)),
    ({**BEST, **LAST, "versions": [2]}, "last", ("last", "last", 31, 900, 5.0, 3)),
    ({**BEST, "versions": [2]}, "best", ("best", "best", 4, 120, 7.0, 100)),            # interrupted: the last is not evaluated
    ({**BEST, "versions": [2]}, "last", ("last", "learner", 31, 900, None, 0)),
    ({**BEST, "versions": [1], "confirmed": [False]}, "best", ("last", "learner", 31, 900, None, 0)),  # that of the first update
    ({**BEST, "versions": [1], "confirmed": [True]}, "best", ("best", "best", 4, 120, 7.0, 100)),      # stopped by its return
    ({**BEST, "best_return": [-np.inf], "versions": [0]}, "best", ("last", "learner", 31, 900, None, 0)),
    ({"best_return": [7.0], "best__progress": [120.0, 4.0, 0.0]}, "best", ("best", "best", None, 120, 7.0, 0)),  # an older shoal's
])
def test_what_a_checkpoint_offers(tmp_path, arrays, wanted, expected):
    choice = choose_policy(checkpoint(tmp_path, **arrays), wanted)
    assert (choice.name, choice.source, choice.version, choice.env_steps, choice.eval_return, choice.eval_episodes) == expected


def test_a_run_of_an_older_shoal_still_loads(tmp_path):
    """Its summary has no policy, its config no option of that name, its evaluator no versions."""
    run = quick("a2c", "CartPole-v1", tmp_path / "run", max_env_steps=300, eval=SHORT)
    folder = newest(run)
    state = TensorFiles().load(folder / "evaluator-0.safetensors")
    kept = {name: array for name, array in state.items() if name == "best_return" or name.startswith("best/")}
    checkpoints = Checkpoints(folder.parent)
    writing = checkpoints.begin(9)
    TensorFiles().save(writing / "evaluator-0.safetensors", kept)
    checkpoints.amend(writing)
    for file, dropped in (("config.json", ("policy",)), ("summary.json", ("policy", "policy_version", "policy_env_steps"))):
        values = json.loads((run.directory / file).read_text())
        (run.directory / file).write_text(json.dumps({name: value for name, value in values.items() if name not in dropped}))
    old = shoal.load(run.directory)
    assert old.choice.source == "best" and old.choice.version is None
    np.testing.assert_array_equal(old.published["params"], kept["best/params"])
    assert shoal.resume(run.directory, max_env_steps=700).summary["policy"] == "best"
