"""Seats that take turns: their columns, and what GAE, V-trace and n-step returns make of them, against sums over all decisions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from shoal import envs
from shoal.algorithms.actor_critic.unroll_batch import UnrollBatch
from shoal.algorithms.records.transitions import Transitions
from shoal.algorithms.records.unroll import Unroll
from shoal.algorithms.records.windows import Windows
from shoal.envs.multi_agent import GroupEnv
from shoal.envs.pettingzoo_envs import TurnEnvs
from shoal.ops import returns
from shoal.roles.asked_seats import AskedSeats
from tests.envs.test_turns import AGENTS, Tavern, brute_force

T, GAMMA, LAMBDA = 4, 0.9, 0.8


class Counting:
    """A policy whose state counts the decisions of an episode; log-probabilities are a function of observation and action."""

    def __init__(self, actions=4):
        self.actions = actions

    def initial_state(self, seats):
        return {"count": torch.zeros(seats, 1)}

    def act(self, view, state, explore, rng):
        count = torch.where(torch.from_numpy(view.first)[:, None], torch.zeros(()), state["count"]) + 1
        action = torch.randint(self.actions, (len(view.first),), generator=rng).numpy()
        return action, {"count": count}, {"log_prob": log_mu(view.observation, action)}


def log_mu(seen, action):
    return -0.5 - np.float32(0.3) * np.cos(np.asarray(seen)[..., :3].sum(-1) + action).astype(np.float32)


def log_pi(seen, action):
    return -0.7 - 0.4 * np.sin(np.asarray(seen, np.float64)[..., :3].sum(-1) * 2 + action)


def value(seen):
    return np.sin(np.asarray(seen, np.float64) @ np.array([1.0, 0.7, 0.3]))


def decide(recorder, seats, version):
    action = seats.action[seats.rows]
    recorder.act(seats.rows, seats.view, seats.of_rows(seats.before), action, seats.of_rows(seats.extras), version)


def tavern(slots, lock_step=False, **options):
    """One tavern, its slots, and what really happened to each agent."""
    one = Tavern(alike=True)
    env = GroupEnv(TurnEnvs("tavern", [one]))
    record = Unroll(T, 3, env.observation_space, env.action_space, state={"count": (1,)}, final_rows=3 * T, **options)
    policy, rng = Counting(), torch.Generator().manual_seed(0)
    recorder, seats = record.columns(3), AskedSeats(policy.act, policy.initial_state(3))
    now, made = env.reset(seed=3), []
    for version in range(1, slots + 3):
        data = record.layout.empty()
        if lock_step:
            recorder.forget()
        recorder.begin(data)
        while not recorder.full:
            action = seats.act(recorder.view(now), now.acts, None, rng)
            decide(recorder, seats, version)
            now = env.step(action)
            recorder.settle(now, action)
        made.append(data)
    return record, made[:-2], brute_force(one.log)  # what follows the last decisions is known


def places(data, history):
    """Of each column: the agent, and the number of its first decision in the agent's history."""
    for column in range(data["action"].shape[1]):
        seen = data["observation"][0, column]
        agent = AGENTS[int(seen[2])]
        yield column, history[agent], next(i for i, row in enumerate(history[agent]) if np.array_equal(row[0], seen))


def after(rows, i):
    """V of what follows decision i, with discount: the true last observation of a truncated one, nothing of a terminated one."""
    _, _, _, discount, last, final = rows[i]
    if last:
        return discount * (0.0 if final is None else value(final))
    return value(rows[i + 1][0])


@pytest.mark.parametrize("lock_step", [False, True])
def test_columns_are_the_seats_decisions(lock_step):
    _, slots, history = tavern(60, lock_step)
    seen = {agent: [] for agent in AGENTS}
    truncated = 0
    for version, data in enumerate(slots, 1):
        assert not lock_step or (data["weights_version"] == version).all()
        assert data["valid"].all() and (data["time"] > 0).all() and np.isfinite(data["time"]).all()
        for column, rows, i in places(data, history):
            seen[AGENTS[int(data["observation"][0, column, 2])]].append(i)
            begins = True if i == 0 else rows[i - 1][4]
            count = 0
            while i - count > 0 and not rows[i - count - 1][4]:
                count += 1
            assert data["first"][0, column] == begins
            if not begins:
                assert data["state"]["count"][column, 0] == count  # the state waits while others act
            for t in range(T):
                x, action, reward, discount, last, final = rows[i + t]
                np.testing.assert_array_equal(data["observation"][t, column], x)
                assert data["action"][t, column] == action and data["reward"][t, column] == reward
                assert data["discount"][t, column] == discount and data["last"][t, column] == last
                assert abs(data["extras"]["log_prob"][t, column] - log_mu(x, action)) < 1e-6
                assert data["truncated"][t, column] == (final is not None)
                if final is not None:
                    truncated += 1
                    np.testing.assert_array_equal(data["final_observation"][data["final_index"][t, column]], final)
                if not last:
                    np.testing.assert_array_equal(data["observation"][t + 1, column], rows[i + t + 1][0])
                assert data["first"][t + 1, column] == last
    assert truncated > 10
    for begins in seen.values():  # no decision is there twice, and none is left out, unless it was begun with older weights
        assert len(begins) > 10 and (np.diff(begins) >= T).all()
        assert lock_step or begins == list(range(0, T * len(begins), T))


def tensors(data, record):
    batch = UnrollBatch.of(data, record.seats, record.final_capacity)
    values = torch.from_numpy(value(data["observation"]))
    v_t = values[1:] if batch.finals is None else batch.finals.put(values[1:], torch.from_numpy(value(batch.finals.observation)))
    return batch, values[:-1], v_t


def traces(rows, i, t):
    """Decisions that a return of decision i + t reaches within its column: up to the end of its episode."""
    for k in range(t, T):
        yield i + k
        if rows[i + k][4]:
            return


def test_gae():
    record, slots, history = tavern(30)
    for data in slots:
        batch, v_tm1, v_t = tensors(data, record)
        got = returns.gae(batch.reward.double(), GAMMA * batch.discount.double(), v_tm1, v_t, LAMBDA, batch.keep.double())
        for column, rows, i in places(data, history):
            for t in range(T):
                want = sum((GAMMA * LAMBDA) ** n * (rows[k][2] + GAMMA * after(rows, k) - value(rows[k][0]))
                           for n, k in enumerate(traces(rows, i, t)))
                assert abs(got[t, column].item() - want) < 1e-9


def test_vtrace():
    record, slots, history = tavern(30)
    for data in slots:
        batch, v_tm1, v_t = tensors(data, record)
        rho = torch.from_numpy(log_pi(data["observation"][:-1], data["action"]) - data["extras"]["log_prob"].astype(np.float64))
        got = returns.vtrace(rho, batch.reward.double(), GAMMA * batch.discount.double(), v_tm1, v_t, keep_t=batch.keep.double())
        for column, rows, i in places(data, history):
            mu = data["extras"]["log_prob"][:, column].astype(np.float64)
            ratio = {i + t: np.exp(log_pi(rows[i + t][0], rows[i + t][1]) - mu[t]) for t in range(T)}
            vs = np.zeros(T)
            for t in range(T):
                total, weight = value(rows[i + t][0]), 1.0
                for k in traces(rows, i, t):
                    delta = min(1.0, ratio[k]) * (rows[k][2] + GAMMA * after(rows, k) - value(rows[k][0]))
                    total += weight * delta
                    weight *= GAMMA * min(1.0, ratio[k])
                vs[t] = total
                assert abs(got.vs[t, column].item() - total) < 1e-9
            for t in range(T):
                k = i + t
                follows = after(rows, k) if rows[k][4] or t == T - 1 else vs[t + 1]
                want = min(1.0, ratio[k]) * (rows[k][2] + GAMMA * follows - value(rows[k][0]))
                assert abs(got.pg_advantage[t, column].item() - want) < 1e-9


@pytest.mark.parametrize("n", [1, 2, 3])
def test_n_step_returns(n):
    record, slots, history = tavern(20)
    for data in slots:
        batch, _, v_t = tensors(data, record)
        got = returns.n_step_returns(batch.reward.double(), GAMMA * batch.discount.double(), v_t, n, batch.keep.double())
        for column, rows, i in places(data, history):
            for t in range(T):
                reach = list(traces(rows, i, t))[:n]
                want = sum(GAMMA**m * rows[k][2] for m, k in enumerate(reach)) + GAMMA ** len(reach) * after(rows, reach[-1])
                assert abs(got[t, column].item() - want) < 1e-9


def played(record, env):
    """The items of 300 steps and their priorities. The environment goes on after them, so that what follows the last decisions is
    known."""
    policy, rng = Counting(), torch.Generator().manual_seed(1)
    recorder, seats = record.recorder(), AskedSeats(policy.act, policy.initial_state(3))
    now = env.reset(seed=4)
    recorder.begin(now)
    for _ in range(300):
        action = seats.act(recorder.view(now), now.acts, None, rng)
        now = env.step(action)
        recorder.write(action, seats.before, seats.extras, now, 1)
    items, priority = record.layout.joined(recorder.ready).empty(), np.zeros(recorder.ready)
    recorder.take(items, priority)
    for _ in range(60):
        now = env.step(seats.act(recorder.view(now), now.acts, None, rng))
    return items, priority


@pytest.mark.parametrize("n", [1, 3])
def test_transitions(n):
    """Items of replay tables: R and D of n decisions of the seat's own."""
    one = Tavern(alike=True)
    env = GroupEnv(TurnEnvs("tavern", [one]))
    record = Transitions(3, env.observation_space, env.action_space, gamma=GAMMA, n_step=n)
    items, _ = played(record, env)
    history, found = brute_force(one.log), 0
    for x, a, reward, discount, following in zip(
        *(items[name] for name in ("observation", "action", "reward", "discount", "next_observation")), strict=True
    ):
        rows = history[AGENTS[int(x[2])]]
        i = next(k for k, row in enumerate(rows) if np.array_equal(row[0], x))
        reach = [i]
        while len(reach) < n and not rows[reach[-1]][4]:
            reach.append(reach[-1] + 1)
        _, _, _, d, last, final = rows[reach[-1]]
        assert a == rows[i][1]
        assert abs(reward - sum(GAMMA**m * rows[k][2] for m, k in enumerate(reach))) < 1e-5
        assert abs(discount - GAMMA ** len(reach) * d) < 1e-6
        if d:
            np.testing.assert_array_equal(following, final if last else rows[reach[-1] + 1][0])
        found += 1
    assert found > 250


def test_windows():
    """Windows of a seat's own decisions: what it saw, did and earned, with the state and the previous step that it had then."""
    one = Tavern(alike=True)
    env = GroupEnv(TurnEnvs("tavern", [one]))
    record = Windows(seats=3, observation_space=env.observation_space, action_space=env.action_space, gamma=GAMMA, burn_in=1,
                     length=3, stride=2, eta=0.9, state={"count": (1,)}, previous=True)
    items, priority = played(record, env)
    history, steps = brute_force(one.log), 0
    for k in range(len(priority)):
        made = np.flatnonzero(items["valid"][k])
        begin = items["observation"][k, made[0]]
        rows = history[AGENTS[int(begin[2])]]
        i = next(j for j, row in enumerate(rows) if np.array_equal(row[0], begin))
        number = 0  # of the decision in its episode
        while i - number > 0 and not rows[i - number - 1][4]:
            number += 1
        if made[0] == 0:
            assert items["state"]["count"][k, 0] == number  # zero at the beginning of an episode
        for t in made:
            x, a, reward, discount, last, _ = rows[i]
            np.testing.assert_array_equal(items["observation"][k, t], x)
            assert items["first"][k, t] == (number == 0)
            assert (items["action"][k, t], items["reward"][k, t], items["discount"][k, t]) == (a, reward, discount)
            before = (0, 0.0) if number == 0 else (rows[i - 1][1], rows[i - 1][2])
            assert (items["prev_action"][k, t], items["prev_reward"][k, t]) == before
            if not last and t + 1 < items["observation"].shape[1]:
                np.testing.assert_array_equal(items["observation"][k, t + 1], rows[i + 1][0])
            i, number, steps = i + 1, number + 1, steps + 1
    assert steps > 300


@pytest.mark.parametrize("seats", [6])
def test_all_at_once_is_ordinary(seats):
    """Where every seat acts at every step, a slot is bit for bit the one that SlotRecorder writes."""
    env = envs.make("shoal/LureChain-v0", seats, length=6, max_episode_steps=2)
    record = Unroll(5, seats, env.observation_space, env.action_space, state={"count": (1,)}, previous=True, final_rows=30,
                    observation_moments=6, return_moments=True, gamma=0.9)
    policy = Counting(2)

    def ordinary():
        rng, recorder, state = torch.Generator().manual_seed(0), record.recorder(), policy.initial_state(seats)
        now = env.reset(seed=1)
        for version in range(1, 8):
            data = record.layout.empty()
            recorder.begin(data, now, state, version)
            for t in range(record.length):
                action, state, extras = policy.act(recorder.view(now), state, None, rng)
                now = env.step(action)
                recorder.write(t, action, extras, now, version)
            yield data

    def by_columns():
        rng, recorder, now = torch.Generator().manual_seed(0), record.columns(seats), env.reset(seed=1)
        asked = AskedSeats(policy.act, policy.initial_state(seats))
        for version in range(1, 8):
            data = record.layout.empty()
            recorder.begin(data)
            while not recorder.full:
                action = asked.act(recorder.view(now), np.ones(seats, bool), None, rng)
                decide(recorder, asked, version)
                now = env.step(action)
                recorder.settle(now, action)
            yield data

    for one, two in zip(list(ordinary()), list(by_columns()), strict=True):
        assert (one["final_index"] >= 0).any()
        for name in one:
            if name != "time":
                compare(one[name], two[name], name)


def compare(one, two, name):
    if isinstance(one, dict):
        for key in one:
            compare(one[key], two[key], f"{name}/{key}")
    elif name.startswith("final_observation") or name.startswith("final_action"):
        assert sorted(map(tuple, one.reshape(len(one), -1))) == sorted(map(tuple, two.reshape(len(two), -1)))
    elif name == "final_index":
        np.testing.assert_array_equal(one >= 0, two >= 0)
    else:
        np.testing.assert_array_equal(one, two, err_msg=name)


def test_more_seats_than_columns():
    """Columns that find no room wait for the next slot; nothing is lost."""
    env = envs.make("shoal/RockPaperScissors-v0", 4)
    record = Unroll(2, 3, env.observation_space, env.action_space, state={"count": (1,)})
    policy, rng = Counting(3), torch.Generator().manual_seed(0)
    recorder, seats, now, steps = record.columns(8), AskedSeats(policy.act, policy.initial_state(8)), env.reset(seed=1), 0
    rewards, made = [], []
    for _ in range(8):
        data = record.layout.empty()
        recorder.begin(data)
        while not recorder.full:
            action = seats.act(recorder.view(now), now.acts, None, rng)
            decide(recorder, seats, 1)
            now = env.step(action)
            recorder.settle(now, action)
            rewards.append(now.reward.copy())
            steps += 1
        made.append(data["reward"].copy())
    assert steps == 6  # 3 x 8 columns of 2 decisions
    want = np.concatenate([np.stack(rewards[i : i + 2]) for i in range(0, 6, 2)], 1)
    np.testing.assert_array_equal(np.concatenate(made, 1), want)
    assert isinstance(env.action_space, spaces.Discrete)
