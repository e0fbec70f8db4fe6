"""Several named policies in one run: who plays for whom, what each learns, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys

import gymnasium as gym
import numpy as np
import pytest

import shoal
from shoal.cli import main
from shoal.errors import ConfigError
from shoal.experiment.parse import parse_train
from shoal.experiment.prepare import prepare
from tests.experiment.seatings import by_turns, one

QUIET = {"console": {"mode": "none"}, "tensorboard": False, "runtime": "inline", "actors": 1}
GAME = "shoal/TicTacToe-v0"
HERE = "tests.experiment.seatings"


def train(folder, env=GAME, preset="a2c", **options):
    few = {"episodes": 8, "every_env_steps": 1000, "last_env_steps": 40}
    small = {"net": {"hidden": (16,)}, "algorithm": {"unroll": 8}}
    return shoal.train(preset, env, run_dir=str(folder), **{"max_env_steps": 600, "eval": few, **small, **QUIET, **options})


def digest(published):
    return hashlib.sha256(np.ascontiguousarray(published["params"])).hexdigest()


class DashedAgents:
    """Two agents whose names cannot be those of policies."""

    possible_agents = ("left-1", "right-1")

    def observation_space(self, agent):
        return gym.spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {}

    def step(self, actions):
        raise NotImplementedError("nobody plays here")

    def close(self):
        pass


@pytest.mark.parametrize(("options", "words"), [
    ({"policies": f"{HERE}:sometimes_nobody"}, "agent 'player_0' has no policy in episode 700: the mapping gave None"),
    ({"policies": {"walker": None, "rival": None}, "policy_of": lambda agent, _: "other"}, "and the policies are walker, rival"),
    ({"policies": f"{HERE}:long_names"}, "has a name of 300 bytes, and files are called like it"),
    ({"policies": "independent", "env": DashedAgents}, "calls it 'left-1', like the agent; give the name of a policy"),
    ({"policies": f"{HERE}:stranger", "names": ("walker",)}, "the policy 'stranger' in episode 3"),
    ({"policies": f"{HERE}:by_turns", "train": ("runner",)}, "--train names runner, which is not a policy of this run"),
    ({"policies": f"{HERE}:by_turns", "fixed": ("walker=random", "rival=random")}, "no policy learns"),
    ({"policies": f"{HERE}:by_turns", "fixed": ("rival",)}, "is not a name=value pair"),
    ({"policies": f"{HERE}:by_turns", "fixed": ("rival=nowhere",)}, "give random, the directory of a run"),
    ({"policies": f"{HERE}:by_turns", "train": ("rival",), "fixed": ("rival=random",)}, "contradict each other"),
    ({"policies": f"{HERE}:by_turns", "each": ("rival.seed=3",)}, "algorithm.* and net.* values"),
    ({"policies": {"walker": None, "runner": None}, "policy_of": one, "train": ("runner",)}, "plays for no agent in the first"),
    ({"policies": {"walker": None, "runner": None}, "policy_of": one}, "policy runner is to be trained, but plays for no agent"),
    ({"policies": {"walker": None, "runner": "random"}, "policy_of": one}, "policy runner is given, but plays for no agent"),
    ({"policies": "independant"}, "give shared, self-play, league, independent or module:function"),
    ({"policies": "independent", "until": "win_rate >= 0.9"}, "give --policies self-play"),
    ({"policies": "self-play", "train": ("main",)}, "speaks of one policy among several"),
    ({"policies": {"walker": 3}}, "give None, a dictionary of values"),
    ({"policies": {}}, "names no policy; name one, or leave it out"),
    ({"policies": "independent", "preset": "dqn", "algorithm": {}}, "it learns from replay tables"),
    ({"policies": "independent", "preset": "gala", "algorithm": {}}, "has one learner for all agents"),
    ({"policies": f"{HERE}:one", "env": "pettingzoo:mpe2.simple_speaker_listener_v4"}, "which have different spaces"),
    ({"policies": "shared", "env": "pettingzoo:mpe2.simple_speaker_listener_v4"}, "give each agent its own (--policies"),
])
def test_refused(options, words, tmp_path):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(").replace("*", r"\*")):
        train(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_the_first_is_the_one_named_first(tmp_path):
    """Whatever the mapping seats first: run.policy and the top of the summary are of the policy that the user named first."""
    run = train(tmp_path / "run", policies={"rival": None, "walker": None}, policy_of=by_turns)
    assert by_turns("player_0", 0) == "walker" and list(run.policies) == list(run.summary["policies"]) == ["rival", "walker"]
    assert run.policy is run.policies["rival"] and run.summary["eval_return"] == run.summary["policies"]["rival"]["eval_return"]


@pytest.mark.parametrize("options", [{"policies": {"walker": None}}, {"policies": {"walker": {"algorithm.lr": 1e-4}, "idle": None},
                                                                      "policy_of": one, "train": ["walker"]}])
def test_one_policy_is_plain(options, tmp_path):
    rate = {"algorithm": {"unroll": 8, "lr": 1e-4}} if "policy_of" in options else {}
    plain, named = train(tmp_path / "plain", **rate), train(tmp_path / "named", **options)
    assert digest(plain.published) == digest(named.published) and plain.summary["env_steps"] == named.summary["env_steps"]
    assert list(named.summary["policies"]) == list(named.policies) == ["walker"]
    assert named.summary["policies"]["walker"] | {"train_return": 0} == plain.summary["policies"]["main"] | {"train_return": 0}


@pytest.mark.parametrize("preset", ["ppo", "impala"])
def test_one_policy_costs_nothing(preset):
    """The graph is that of the plain program: the same roles with the same arguments, the same wires."""
    def drawn(*words):
        program = prepare(parse_train([preset, GAME, "--actors", "1", *words])).program()
        roles = {name: (node.role, sorted(node.arguments), node.least, node.most, node.compute_threads)
                 for name, node in program.nodes.items()}
        return roles, sorted(program.wires)

    plain = drawn()
    assert drawn("--names", "walker") == drawn("--policies", f"{HERE}:one") == plain
    assert drawn("--policies", f"{HERE}:by_turns") != plain


class Alone(gym.Env):
    """Five decisions; it sees how many are over."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t / 5, np.float32), float(action == self.t % 3), self.t == 5, False, {}


class Together:
    """Three of them, each an agent."""

    possible_agents = ("a", "b", "c")

    def observation_space(self, agent):
        return Alone.observation_space

    def action_space(self, agent):
        return Alone.action_space

    def reset(self, seed=None, options=None):
        self.envs, self.agents = {agent: Alone() for agent in self.possible_agents}, list(self.possible_agents)
        return {agent: env.reset()[0] for agent, env in self.envs.items()}, {}

    def step(self, actions):
        answers = {agent: self.envs[agent].step(action) for agent, action in actions.items()}
        seen, rewards, over, cut, infos = ({agent: answer[k] for agent, answer in answers.items()} for k in range(5))
        self.agents = [agent for agent in self.agents if not over[agent]]
        return seen, rewards, over, cut, infos

    def close(self):
        pass


@pytest.mark.parametrize("preset", ["ppo", "impala"])
def test_shared_is_one_agent(preset, tmp_path):
    """A policy that three agents of two environments share learns what one of six environments with one agent does."""
    shared = train(tmp_path / "shared", Together, preset, policies="shared", architecture={"envs_per_actor": 2})
    alone = train(tmp_path / "alone", Alone, preset, architecture={"envs_per_actor": 6})
    assert digest(shared.published) == digest(alone.published) and shared.summary["env_steps"] == alone.summary["env_steps"]
    assert shared.summary["learner_steps"] == alone.summary["learner_steps"] > 0


def test_independent(tmp_path, capsys):
    """Agents with different spaces; every policy has its own counts, checkpoint, evaluation; the run goes on from there."""
    env = "pettingzoo:mpe2.simple_speaker_listener_v4"
    run = train(tmp_path / "run", env, policies="independent", envs={"kwargs": {"max_cycles": 8}},
                **{"each": ("listener_0.net.hidden=(8,)",)})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["policies"]) == {"speaker_0", "listener_0"} == set(run.policies)
    shown = summary["policies"]["listener_0"]
    assert shown["env_steps"] >= 256 and shown["eval_return"] is not None and np.isfinite(shown["train_return"])
    assert summary["learner_steps"] == sum(policy["learner_steps"] for policy in summary["policies"].values())
    speaks, listens = run.published_by("speaker_0")["params"], run.published_by("listener_0")["params"]
    assert speaks.shape != listens.shape
    for name, policy in run.policies.items():
        prepared = run.prepared.policies[name]
        assert prepared.raw_action_space.contains(policy.act(prepared.raw_observation_space.sample()))
    again = shoal.resume(tmp_path / "run", max_env_steps=1200)
    assert again.summary["policies"]["speaker_0"]["env_steps"] > shown["env_steps"]
    assert main(["eval", str(tmp_path / "run"), "--policy", "listener_0:last", "--episodes", "4"]) == 0
    assert "listener_0: policy last" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run"), "--policy", "nobody"]) == 2
    assert "has no policy nobody; there are speaker_0, listener_0" in capsys.readouterr().err
    shots = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "losses" in next(shot for shot in reversed(shots) if shot["kind"] == "snapshot")["policies"]["speaker_0"]


def test_a_fixed_run_that_imports_a_users_module(tmp_path, capsys, monkeypatch):
    """`shoal train` asks for --trust and takes it; so does what is done with its run later."""
    (tmp_path / "strange_seats.py").write_text("from tests.experiment.seatings import by_turns\n\n\ndef seated(agent, episode):\n"
                                               "    return by_turns(agent, episode)\n")
    monkeypatch.syspath_prepend(tmp_path)
    rival, run = tmp_path / "rival", tmp_path / "run"
    train(rival, policies="strange_seats:seated", fixed=("rival=random",))
    words = ["train", "a2c", GAME, "--policies", f"{HERE}:by_turns", "--fixed", f"rival={rival}:walker", "--runtime", "inline",
             "--run-dir", str(run), "--max-env-steps", "600", "--eval.episodes", "4", "--console.mode", "none", "--no-tensorboard"]

    def ends(*arguments):
        monkeypatch.delitem(sys.modules, "strange_seats", raising=False)
        code = main([*arguments])
        said = capsys.readouterr()
        assert (code == 2) == ("strange_seats" in said.err and "add --trust if you trust it" in said.err)
        return code, said.out

    assert ends(*words)[0] == 2 and not run.exists()
    code, said = ends(*words, "--trust")
    assert code == 0 and f"shoal play {run} --trust" in said and "trust" not in json.loads((run / "config.json").read_text())
    assert ends("eval", str(run), "--trust", "--episodes", "4")[0] == 0
    assert ends("resume", str(run), "--trust", "--max-env-steps", "2000")[0] == 0
    monkeypatch.delitem(sys.modules, "strange_seats")
    seats = {"policies": f"{HERE}:by_turns", "fixed": (f"rival={rival}",)}
    with pytest.raises(ConfigError, match="strange_seats"):
        train(tmp_path / "python", **seats)
    assert train(tmp_path / "python", **seats, trust=True).summary["env_steps"] >= 600


def test_fixed_policies(tmp_path, capsys, monkeypatch):
    """Only the walker learns: against random play, a script, the policy of the first run, and an untrained one."""
    rival = train(tmp_path / "rival", policies={"walker": None, "rival": "random"}, policy_of=by_turns)
    assert list(rival.summary["policies"]) == ["walker"] and list(rival.policies) == ["walker"]
    assert rival.summary["policies"]["walker"]["env_steps"] < rival.summary["env_steps"]
    for fixed in (f"{HERE}:first_legal", f"{tmp_path / 'rival'}:walker"):
        run = train(tmp_path / fixed.rpartition(":")[2], policies=f"{HERE}:by_turns", fixed=(f"rival={fixed}",))
        assert list(run.summary["policies"]) == ["walker"] and run.summary["policies"]["walker"]["learner_steps"] > 0
    half = train(tmp_path / "half", policies={"walker": None, "rival": None}, policy_of=by_turns, train=["walker"])
    assert list(half.policies) == ["walker"]
    with pytest.raises(ConfigError, match="has no policy main; there are walker"):
        train(tmp_path / "no", policies=f"{HERE}:by_turns", fixed=(f"rival={tmp_path / 'rival'}:main",))
    assert main(["eval", str(tmp_path / "rival"), "--against", f"{HERE}:first_legal", "--episodes", "4", "--trust"]) == 0
    assert "first_legal: return" in capsys.readouterr().out
    assert main(["play", str(tmp_path / "half"), "--trust", "--against", f"{tmp_path / 'rival'}:walker"]) == 0
    assert "game 1: player_0" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("words\n" + "".join(f"{cell}\n" for cell in range(9)) * 4))
    assert main(["play", str(tmp_path / "half"), "--trust", "--against", "human"]) == 0
    said = capsys.readouterr().out
    assert "your action (" in said and "; the run was player_0" in said and ". ." in said
    boards = re.findall(r"(?:[.xo] [.xo] [.xo]\n){3}", said)
    assert all(board.count("x") - board.count("o") == number % 2 for number, board in enumerate(boards[:5])), "the first has x"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["play", str(tmp_path / "half"), "--trust", "--against", "human"]) == 2
    assert "the input has ended" in capsys.readouterr().err
    assert main(["play", str(tmp_path / "half"), "--trust", "--video", "games.gif"]) == 2
    assert "leave --video out" in capsys.readouterr().err


@pytest.mark.parametrize("runtime", ["inline", "local"])
def test_a_name_that_comes_later(runtime, tmp_path, capsys):
    """It ends the run with a sentence. An actor that died of it would be started again, and go on with the first episodes."""
    words = ["train", "a2c", "shoal/RockPaperScissors-v0", "--policies", f"{HERE}:ghost_later", "--max-env-steps", "200000",
             "--runtime", runtime, "--actors", "1", "--no-tensorboard", "--console.mode", "none", "--no-eval.enabled"]
    assert main([*words, "--run-dir", str(tmp_path / "run")]) == 3
    said = capsys.readouterr().err
    assert "the policy 'ghost' in episode 12" in said and "name only policies that the run has" in said and "Traceback" not in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["restarts"] == 0


def test_same_seed_gives_the_same_weights(tmp_path):
    runs = [train(tmp_path / name, preset="impala", policies="independent") for name in ("one", "two")]
    for name in ("player_0", "player_1"):
        assert digest(runs[0].published_by(name)) == digest(runs[1].published_by(name))
