"""Agents that take turns: AEC environments against a plain loop over agent_iter(), and PettingZoo's own environments."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from gymnasium import spaces

from shoal import envs
from shoal.envs.pettingzoo_envs import TurnEnvs
from shoal.errors import ConfigError, EnvironmentError_
from tests.envs.seat_log import check_episodes, play

AGENTS = ("ann", "bob", "cid")
pettingzoo = pytest.importorskip("pettingzoo")


class Tavern(pettingzoo.AECEnv):
    """Agents act in random order, every action pays random rewards to everybody, agents die (or are truncated) at random, and cid
    enters late. The observation is (episode, move, agent); bob has another space. `log` is all that happened."""

    metadata = {"name": "tavern"}  # noqa: RUF012

    def __init__(self, alike=False):
        self.possible_agents, self.episode, self.log, self.alike = list(AGENTS), -1, [], alike

    def observation_space(self, agent):
        return spaces.Box(-9, 999, (4 if agent == "bob" and not self.alike else 3,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(5 if agent == "bob" and not self.alike else 4)

    def observe(self, agent):
        seen = np.array([self.episode, self.move, AGENTS.index(agent)], np.float32)
        return seen if agent != "bob" or self.alike else np.append(seen, np.float32(7))

    def reset(self, seed=None, options=None):
        if seed is not None or self.episode < 0:
            self.rng = np.random.default_rng(seed)
        self.episode, self.move, self.agents = self.episode + 1, 0, ["ann", "bob"]
        for name, value in (("rewards", 0), ("_cumulative_rewards", 0), ("terminations", False), ("truncations", False)):
            setattr(self, name, dict.fromkeys(self.agents, value))
        self.infos = {agent: {} for agent in self.agents}
        self._skip_agent_selection = None
        self.agent_selection = str(self.rng.choice(self.agents))
        self.log.append(("reset",))

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self.log.append(("act", agent, self.observe(agent), action))
        self._cumulative_rewards[agent] = 0
        self.move += 1
        if self.move == 4:
            self.agents.append("cid")
            for table, value in ((self.rewards, 0), (self._cumulative_rewards, 0), (self.terminations, False),
                                 (self.truncations, False)):
                table["cid"] = value
            self.infos["cid"] = {}
        self.rewards = {a: float(self.rng.integers(-3, 4)) for a in self.agents}
        self._accumulate_rewards()
        dead = {a: self.rng.random() < 0.1 for a in self.agents}
        for a in self.agents:
            (self.terminations if self.rng.random() < 0.5 else self.truncations)[a] |= bool(dead[a])
        self.log.append(("paid", dict(self.rewards), dict(self.terminations), dict(self.truncations),
                         {a: self.observe(a) for a in self.agents}))
        living = [a for a in self.agents if not dead[a]]
        if living:
            self.agent_selection = str(self.rng.choice(living))
        self._deads_step_first()

    def close(self): ...


def brute_force(log):
    """The decisions of every agent out of the whole history: (observation, action, summed reward, discount, last, final)."""
    rows = {agent: [] for agent in AGENTS}
    pending: dict = {}

    def close(agent, discount, last, final):
        seen, action, reward = pending.pop(agent)
        rows[agent].append((seen, action, reward, discount, last, final))

    for event in log:
        if event[0] == "act":
            _, agent, seen, action = event
            if agent in pending:
                close(agent, 1.0, False, None)
            pending[agent] = [seen, action, 0.0]
        elif event[0] == "paid":
            _, rewards, over, cut, seen = event
            for agent in list(pending):
                pending[agent][2] += rewards[agent]
                if over[agent] or cut[agent]:
                    close(agent, 0.0 if over[agent] else 1.0, True, None if over[agent] else seen[agent])
    return rows


@pytest.mark.parametrize("alike", [False, True])
def test_brute_force(alike):
    made = [Tavern(alike) for _ in range(3)]
    env = TurnEnvs("tavern", made)
    assert [group.agents for group in env.groups] == ([AGENTS] if alike else [("ann", "cid"), ("bob",)])
    rows, games = play(env, 400, seed=5)
    assert len(games) > 20
    truncated = 0
    for e, one in enumerate(made):
        want = brute_force(one.log)
        for agent in AGENTS:
            k, group = next((k, g) for k, g in enumerate(env.groups) if agent in g.agents)
            got = rows[k, e * len(group.agents) + group.agents.index(agent)]
            assert len(got) - len(want[agent]) in (0, 1)  # a decision is closed when the agent is asked again
            for (seen, action, reward, discount, last, final), (x, _, a, r, d, over, finally_, _) in zip(
                want[agent], got, strict=False
            ):
                np.testing.assert_array_equal(x, seen)
                assert (a, r, d, over) == (action, reward, discount, last)
                if final is not None:
                    truncated += 1
                    np.testing.assert_array_equal(finally_, final)
    assert truncated > 20


def test_returns_count_everything():
    """What a game's return counts, an agent that had not decided anything yet included."""
    one = Tavern()
    env = TurnEnvs("tavern", [one])
    _, games = play(env, 300, seed=2)
    totals, paid = [], dict.fromkeys(AGENTS, 0.0)
    for event in one.log[1:]:
        if event[0] == "reset":
            totals.append([paid[a] for a in AGENTS])
            paid = dict.fromkeys(AGENTS, 0.0)
        elif event[0] == "paid":
            for agent, reward in event[1].items():
                paid[agent] += reward
    np.testing.assert_allclose([game[1] for game in games], totals)


def test_faults():
    class Wrong(Tavern):
        def observe(self, agent):
            return np.array([np.nan, 0, 0], np.float32)

    env = TurnEnvs("tavern", [Wrong(alike=True)])
    with pytest.raises(EnvironmentError_, match=r"observation\[0\] is nan"):
        env.reset(seed=0)

    class Raises(Tavern):
        def step(self, action):
            raise RuntimeError("no beer")

    env = envs.make(lambda: Raises(alike=True), 2)
    env.reset(seed=0)
    with pytest.raises(EnvironmentError_, match=r"environment 0, .*at step 1: step\(\) raised RuntimeError: no beer"):
        env.step(np.zeros(6, int))
    with pytest.raises(ConfigError, match="'ann' and 'bob' have different spaces"):
        envs.make(Tavern, 1)
    assert envs.make_multi_agent(Tavern, 1).takes_turns


def test_pettingzoos_tic_tac_toe_is_ours():
    """The same moves give the same rows."""
    ours = envs.make_multi_agent("shoal/TicTacToe-v0", 2)
    theirs = envs.make_multi_agent("pettingzoo:pettingzoo.classic.tictactoe_v3", 2)
    assert theirs.takes_turns and theirs.agents == ("player_1", "player_2") and "take turns" in theirs.backend_reason
    a, b = ours.reset(seed=0), theirs.reset(seed=0)
    rng = np.random.default_rng(3)
    for t in range(60):
        one, two = a.groups[0], b.groups[0]
        for field in ("reward", "discount", "first", "last", "valid", "acts", "episode_return", "episode_length"):
            if field != "valid" or t:
                np.testing.assert_array_equal(getattr(one, field), getattr(two, field), err_msg=field)
        np.testing.assert_array_equal(one.action_mask[one.acts], two.action_mask[one.acts])
        board = two.observation[two.acts].transpose(0, 3, 1, 2).reshape(2, -1)
        np.testing.assert_array_equal(one.observation[one.acts], board)
        np.testing.assert_array_equal(a.returns, b.returns)
        action = (rng.random(one.action_mask.shape) * one.action_mask).argmax(1)
        a, b = ours.step([action]), theirs.step([action])


@pytest.mark.parametrize("module", ["pettingzoo.classic.connect_four_v3", "pettingzoo.classic.rps_v2", "mpe2.simple_spread_v3",
                                    "mpe2.simple_speaker_listener_v4", "mpe2.simple_tag_v3"])
def test_pettingzoo_modules(module):
    env = envs.make_multi_agent(f"pettingzoo:{module}", 2)
    rows, games = play(env, 130, seed=1)
    check_episodes(env, rows, games)
    assert games
    if module == "mpe2.simple_speaker_listener_v4":
        assert [group.agents for group in env.groups] == [("speaker_0",), ("listener_0",)]
        with pytest.raises(ConfigError, match="different spaces"):
            envs.make(f"pettingzoo:{module}", 1)
    env.close()


def test_plain_environment():
    env = envs.make_multi_agent("CartPole-v1", 3)
    assert env.agents == ("agent",) and not env.takes_turns
    rows, games = play(env, 100, seed=1)
    check_episodes(env, rows, games)
    assert len(games) > 5


@pytest.mark.parametrize("name", ["pettingzoo:pettingzoo.classic.tictactoe_v3", "pettingzoo:pettingzoo.classic.connect_four_v3",
                                  "shoal/TicTacToe-v0", "shoal/ConnectFour-v0", "shoal/Kuhn-v0", "shoal/RockPaperScissors-v0"])
def test_pettingzoos_own_test(name, capsys):
    from tests.envs.as_aec import AsAEC

    with warnings.catch_warnings():  # of what it finds unusual, and of its own old modules
        warnings.simplefilter("ignore")
        from pettingzoo.test import api_test

        api_test(AsAEC(lambda: envs.make_multi_agent(name, 1), name.rpartition(".")[2]), num_cycles=100)
    assert "Passed" in capsys.readouterr().out


def test_what_a_module_needs(tmp_path, monkeypatch):
    """An environment whose own needs are not installed names them: shoal's extra has PettingZoo, and not chess."""
    (tmp_path / "garden_games.py").write_text("import no_such_chess.engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="garden_games needs no_such_chess, which is not installed: pip install no_such_chess "):
        envs.make("pettingzoo:garden_games", 1)
    with pytest.raises(ConfigError, match=r"No module named 'pettingzoo\.classic\.nosuch_v3'; install it"):
        envs.make("pettingzoo:pettingzoo.classic.nosuch_v3", 1)
