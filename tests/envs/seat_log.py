"""Playing multi-agent environments at random, and what every seat's rows say then."""

from __future__ import annotations

import numpy as np

from shoal.envs.random_policy import RandomPolicy
from shoal.slots import map_tree


def play(env, steps, seed=0, choose=None):
    """Play at random; -> for each seat (group, row) the list of its closed decisions, and all (game, returns, length) that ended.

    A decision is (observation, mask, action, reward, discount, last, truncated, first). The rules of shoal.envs.multi_agent are
    checked on the way.
    """
    rng = np.random.default_rng(seed)
    policies = [RandomPolicy(group.action_space, rng) for group in env.groups]
    now = env.reset(seed=seed)
    open_: dict = {}
    rows: dict = {(k, row): [] for k, group in enumerate(env.groups) for row in range(group.num_seats)}
    games = []
    for _ in range(steps):
        actions = []
        for k, (group, step) in enumerate(zip(env.groups, now.groups, strict=True)):
            action = np.asarray(policies[k](step)) if choose is None else choose(k, step, rng)
            actions.append(action)
            for row in range(group.num_seats):
                seen = map_tree(lambda x, row=row: np.array(x[row]), step.observation)
                if step.acts[row]:
                    mask = None if step.action_mask is None else step.action_mask[row].copy()
                    open_[k, row] = (seen, mask, action[row].copy(), bool(step.first[row]))
                elif (k, row) in open_:  # a seat that waits keeps the observation of its last decision
                    np.testing.assert_array_equal(seen, open_[k, row][0])
        if env.takes_turns:
            asked = np.zeros(env.num_envs, int)
            for group, step in zip(env.groups, now.groups, strict=True):
                np.add.at(asked, group.env_id, step.acts)
            assert (asked == 1).all()
        now = env.step(actions)
        for k, step in enumerate(now.groups):
            assert not (step.last & ~step.valid).any() and not (step.reward[~step.valid]).any()
            finals = {row: map_tree(lambda x, i=i: np.array(x[i]), step.final_observation) for i, row in enumerate(step.final_rows)}
            assert sorted(finals) == np.flatnonzero(step.truncated).tolist()
            for row in np.flatnonzero(step.valid):
                seen, mask, action, first = open_.pop((k, int(row)))
                rows[k, int(row)].append((seen, mask, action, float(step.reward[row]), float(step.discount[row]),
                                          bool(step.last[row]), finals.get(row), first))
        games += [(int(e), r.copy(), int(n)) for e, r, n in zip(now.ended, now.returns, now.lengths, strict=True)]
    return rows, games


def check_episodes(env, rows, games):
    """Every episode of a seat begins with `first`, and its rewards add up to the game's return."""
    returns: dict = {}
    for (k, row), decisions in rows.items():
        begin = True
        group, total, episodes = env.groups[k], 0.0, []
        for _, _, _, reward, discount, last, _, first in decisions:
            assert first == begin
            total, begin = total + reward, last
            if last:
                episodes.append(total)
                total = 0.0
            else:
                assert discount == 1
        returns[int(group.env_id[row]), int(group.agent_id[row])] = episodes
    for e in range(env.num_envs):
        mine = [game for game in games if game[0] == e]
        for agent in range(len(env.agents)):
            np.testing.assert_allclose([game[1][agent] for game in mine], returns[e, agent][: len(mine)], atol=1e-5)
