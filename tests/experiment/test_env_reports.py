"""What environments report, and those that fail now and then: restarts of one alone, numbers of info by name, episode logs."""

import csv
import json
import re

import gymnasium as gym
import numpy as np
import pytest

import shoal
from shoal import RoleFailed
from shoal.envs import make, make_multi_agent
from shoal.envs.handling import Handling
from tests.experiment.test_first_hour import TINY


class Flaky(gym.Env):
    """Raises at every `every`-th step of all its instances; reports numbers in info; never terminates by itself before 10 steps."""

    observation_space, action_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32), gym.spaces.Discrete(2)
    made = steps = 0

    def __init__(self, every: int = 25, in_reset: bool = False) -> None:
        Flaky.made += 1
        self.number, self.every, self.in_reset = Flaky.made, every, in_reset

    def _seen(self):
        return np.array([self.number, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        if self.in_reset and Flaky.steps > 20:
            raise OSError("the simulator does not answer")
        self.t = 0
        return self._seen(), {}

    def step(self, action):
        Flaky.steps += 1
        if self.every and Flaky.steps % self.every == 0:
            raise OSError("the simulator has gone")
        self.t += 1
        info = {"speed": float(self.t), "note": "x"} if self.t % 2 else {}
        return self._seen(), 1.0, self.t == 10, False, info


@pytest.fixture(autouse=True)
def fresh():
    Flaky.made = Flaky.steps = 0


def test_one_environment_is_restarted_alone():
    env = make(Flaky, 3, handling=Handling(restart_on_error=2))
    env.reset(0)
    for _ in range(8):
        step = env.step(np.zeros(3, np.int64))
        assert not step.last.any() and not step.restarts
    step = env.step(np.zeros(3, np.int64))  # the 25th step is that of environment 0
    assert step.last.tolist() == step.truncated.tolist() == step.first.tolist() == [True, False, False]
    assert step.reward.tolist() == [0, 1, 1] and step.discount.tolist() == [1, 1, 1]
    assert step.final_rows.tolist() == [0] and step.final_observation.tolist() == [[1, 8]], "the last one that was seen"
    assert step.observation.tolist() == [[4, 0], [2, 9], [3, 9]], "a new one, the others go on"
    assert step.episode_return.tolist() == [8] and step.episode_length.tolist() == [9]
    assert "environment 0 raised OSError: the simulator has gone" in step.restarts[0]


def test_too_many_in_a_row_end_it():
    env = make(Flaky, 1, handling=Handling(restart_on_error=3), every=1)
    env.reset(0)
    for _ in range(3):
        env.step(np.zeros(1, np.int64))
    with pytest.raises(shoal.EnvironmentError_, match=r"gone.*restarted 3 times in a row"):
        env.step(np.zeros(1, np.int64))


def test_a_reset_that_raises():
    env = make(Flaky, 1, handling=Handling(restart_on_error=2), every=0, in_reset=True)
    env.reset(0)
    with pytest.raises(shoal.EnvironmentError_, match=r"does not answer.*restarted 2 times"):
        for _ in range(40):
            env.step(np.zeros(1, np.int64))


class FlakyPair:
    """A ParallelEnv of two agents, one of whose steps raises."""

    possible_agents = ("a", "b")

    def __init__(self, every=3) -> None:
        self.inner = Flaky(every=every)

    def observation_space(self, agent):
        return Flaky.observation_space

    def action_space(self, agent):
        return Flaky.action_space

    def reset(self, seed=None, options=None):
        seen, _ = self.inner.reset()
        self.agents = ["a", "b"]
        return dict.fromkeys(self.agents, seen), {}

    def step(self, actions):
        seen, reward, over, cut, _ = self.inner.step(0)
        both, self.agents = self.agents, [] if over else self.agents
        return (dict.fromkeys(both, seen), dict.fromkeys(both, reward), dict.fromkeys(both, over), dict.fromkeys(both, cut),
                {"a": {"speed": 2.0}})

    def close(self):
        pass


def test_games_are_restarted_too():
    env = make_multi_agent(FlakyPair, 1, handling=Handling(restart_on_error=1, info=("speed",)))
    env.reset(0)
    for _ in range(2):
        (step,) = env.step([np.zeros(2, np.int64)]).groups
        assert step.info["speed"][0] == 2 and np.isnan(step.info["speed"][1]) and not step.restarts
    found = env.step([np.zeros(2, np.int64)])
    (step,) = found.groups
    assert step.truncated.all() and step.first.all() and found.ended.tolist() == [0] and len(step.restarts) == 1
    assert step.final_observation.tolist() == [[1, 2], [1, 2]] and step.observation.tolist() == [[2, 0], [2, 0]]
    assert step.valid.all() and step.episode_return.tolist() == [2, 2]


@pytest.mark.parametrize("preset", ["a2c", "seed", "dqn"])
def test_a_run_outlives_its_environments(preset, tmp_path):
    """They are counted and told, and their numbers and episodes are logged."""
    small = {**TINY, "max_env_steps": 400, "replay.min_size": 50, "eval.enabled": False} if preset == "dqn" else \
        {**TINY, "max_env_steps": 400, "eval.enabled": False}
    run = shoal.train(preset, Flaky, run_dir=str(tmp_path / "run"), log={"info": ("speed",), "episodes": True},
                      **{**small, "envs.restart_on_error": 3})
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "snapshot"][-1]
    assert last["env_restarts"] > 5 and any("the simulator has gone" in row.get("text", "") for row in rows)
    assert run.summary["env_restarts"] == last["env_restarts"]
    assert 3 < last["info"]["speed"] < 7
    found = []
    for file in (run.directory / "episodes").glob("*.monitor.csv"):
        head, *lines = file.read_text().splitlines()
        assert json.loads(head[1:])["env_id"] == "Flaky" and lines[0] == "r,l,t,env,speed"
        found += csv.DictReader(lines)
    assert len(found) == run.summary["episodes"] and {row["env"] for row in found} <= set("0123456789")
    assert all(float(row["r"]) in (int(row["l"]), int(row["l"]) - 1) for row in found), "a restart costs one reward"
    assert all(not row["speed"] for row in found if row["l"] == "10" and row["r"] == "10"), "info is empty at even steps"


def test_default_is_strict(tmp_path):
    with pytest.raises((RoleFailed, shoal.EnvironmentError_), match=r"the simulator has gone; --envs.restart-on-error N"):
        shoal.train("a2c", Flaky, run_dir=str(tmp_path / "run"), **{**TINY, "eval.enabled": False})


def test_numbers_of_a_vector_environment(tmp_path):
    """gymnasium puts the info of an episode's last step elsewhere."""

    def several(num_envs):
        return gym.vector.SyncVectorEnv([lambda: Flaky(every=0)] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    env = make(several, 2, handling=Handling(info=("speed",)))
    env.reset(0)
    seen = [env.step(np.zeros(2, np.int64)).info["speed"].copy() for _ in range(11)]
    assert [row.tolist() for row in seen[::2]] == [[1, 1], [3, 3], [5, 5], [7, 7], [9, 9], [1, 1]] and np.isnan(seen[1]).all()
    env = make(several, 2, handling=Handling(info=("note",)))
    env.reset(0)
    step = env.step(np.zeros(2, np.int64))
    assert np.isnan(step.info["note"]).all() and step.info_unfit == {"note": "str"}, "text is no reason to stop"


def test_an_episode_log_goes_on(tmp_path):
    options = {**TINY, "eval.enabled": False, "log.episodes": True, "max_env_steps": 300}
    run = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), **options)
    (file,) = (run.directory / "episodes").iterdir()
    first = file.read_text()
    file.write_text(first + "12,1")  # killed in the middle of a line
    shoal.resume(run.directory, max_env_steps=600)
    assert file.read_text().startswith(first + "12,1\n") and file.read_text().count("r,l,t,env") == 1
    assert len(file.read_text().splitlines()) > len(first.splitlines()) + 1


def several(num_envs=2, every=0):
    return gym.vector.SyncVectorEnv([lambda: Flaky(every=every)] * num_envs)


class NotedPair(FlakyPair):
    """With text in the info of one agent."""

    def step(self, actions):
        found = super().step(actions)[:-1]
        return *found, {"a": {"speed": 2.0, "note": "x"}}


class Whole(gym.vector.SyncVectorEnv):
    """A vector environment whose info has one text for all its environments."""

    def __init__(self, num_envs=2, every=0):
        super().__init__([lambda: Flaky(every=every)] * num_envs)

    def step(self, actions):
        *found, info = super().step(actions)
        return *found, {**info, "note": "x"}


@pytest.mark.parametrize(("env", "kind"), [(Flaky, "str"), (NotedPair, "str"), (several, "str"),
                                           (Whole, "str without a value for each environment")])
def test_text_under_a_key(env, kind, tmp_path):
    """It is told once, and the run goes on with the other keys."""
    run = shoal.train("a2c", env, run_dir=str(tmp_path / "run"), log={"info": ("speed", "note"), "episodes": True},
                      **{**TINY, "max_env_steps": 200, "eval.enabled": False, "envs.kwargs": ("every=0",)})
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    (told,) = [row["text"] for row in rows if "--log.info" in row.get("text", "")]
    assert told.endswith(f"--log.info note: info['note'] is a {kind}, not a number, so it is not logged; leave it out, or let the "
                         "environment give a number")
    last = [row for row in rows if row["kind"] == "snapshot"][-1]
    assert last["info"]["speed"] > 0 and last["info"].get("note") is None


@pytest.mark.parametrize("env", [Flaky, FlakyPair, several])
def test_a_key_that_no_info_has(env, tmp_path):
    """A typo in --log.info is told, with the keys that there are; once, and not for keys that came late."""
    run = shoal.train("a2c", env, run_dir=str(tmp_path / "run"), log={"info": ("speed", "sped")},
                      **{**TINY, "max_env_steps": 400, "eval.enabled": False, "envs.kwargs": ("every=0",)})
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    (told,) = [row["text"] for row in rows if "--log.info" in row.get("text", "")]
    assert re.match(r".*--log.info sped: no info has had it in the first [\d,]+ steps; its keys so far: (note, )?speed$", told)
