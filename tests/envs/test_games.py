"""The compiled games for two: rules against plain references, known values, and the rules of the stream."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from shoal import envs
from shoal.envs.builtin.games import GAMES
from shoal.envs.random_policy import RandomPolicy
from shoal.errors import EnvironmentError_
from tests.envs.seat_log import check_episodes, play


@pytest.mark.parametrize("name", sorted(GAMES))
def test_stream(name):
    env = envs.make_multi_agent(name, 5)
    rows, games = play(env, 80, seed=3)
    check_episodes(env, rows, games)
    assert games and all(len(returns) == 2 for _, returns, _ in games)
    if name != "shoal/PrisonersDilemma-v0":
        assert all(returns.sum() == 0 for _, returns, _ in games)
    again, same = play(envs.make_multi_agent(name, 5), 80, seed=3)
    for seat, decisions in rows.items():
        for one, two in zip(decisions, again[seat], strict=True):
            np.testing.assert_array_equal(one[0], two[0])
    assert [g[2] for g in games] == [g[2] for g in same]


@pytest.mark.parametrize("name", sorted(GAMES))
def test_as_a_batch(name):
    """One policy for both seats sees the same rows as one Step."""
    spec = envs.describe(name)
    assert spec.seats_per_env == 2 and spec.backend == "compiled" and spec.takes_turns == GAMES[name]().takes_turns
    assert spec.has_action_mask == GAMES[name]().masked
    batch, multi = envs.make(name, 4), envs.make_multi_agent(name, 4)
    a, b = batch.reset(seed=1), multi.reset(seed=1).groups[0]
    rng = np.random.default_rng(0)
    for _ in range(40):
        for field in ("observation", "reward", "first", "last", "valid", "acts", "episode_return", "episode_length"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
        mask = np.ones((8, batch.action_space.n)) if a.action_mask is None else a.action_mask
        action = (rng.random(mask.shape) * mask).argmax(1)
        a, b = batch.step(action), multi.step([action]).groups[0]


def line(board, length):
    """Whether any row, column or diagonal of a board of one player's pieces has `length` in a row."""
    rows, columns = board.shape
    for y, x in itertools.product(range(rows), range(columns)):
        for dy, dx in ((0, 1), (1, 0), (1, 1), (1, -1)):
            cells = [(y + i * dy, x + i * dx) for i in range(length)]
            if all(0 <= v < rows and 0 <= u < columns and board[v, u] for v, u in cells):
                return True
    return False


@pytest.mark.parametrize(("name", "options", "shape", "length"), [
    ("shoal/TicTacToe-v0", {}, (3, 3), 3),
    ("shoal/ConnectFour-v0", {}, (6, 7), 4),
    ("shoal/ConnectFour-v0", {"rows": 4, "columns": 5}, (4, 5), 4),
    ("shoal/ConnectFour-v0", {"rows": 3, "columns": 3, "length": 3}, (3, 3), 3),
])
def test_boards(name, options, shape, length):
    """Many random games against boards kept in plain NumPy."""
    env, games = envs.make_multi_agent(name, 3, **options), 0
    falls, rng = "Four" in name, np.random.default_rng(1)
    boards, moves = np.zeros((3, 2, *shape), bool), np.zeros(3, int)
    now = env.reset(seed=1)
    while games < 60:
        step, action = now.groups[0], np.zeros(6, np.int64)
        for e in range(3):
            seat, row = moves[e] % 2, 2 * e + moves[e] % 2
            assert step.acts[2 * e : 2 * e + 2].tolist() == [seat == 0, seat == 1]
            np.testing.assert_array_equal(step.observation[row].reshape(2, *shape), boards[e, [seat, 1 - seat]])
            free = ~boards[e].any(0)
            legal = free[0] if falls else free.ravel()
            np.testing.assert_array_equal(step.action_mask[row], legal)
            action[row] = rng.choice(np.flatnonzero(legal))
            cell = (np.flatnonzero(free[:, action[row]])[-1], action[row]) if falls else np.unravel_index(action[row], shape)
            boards[e, seat][cell] = True
            moves[e] += 1
        now = env.step([action])
        over = {int(e): r for e, r in zip(now.ended, now.returns, strict=True)}
        for e in range(3):
            seat = (moves[e] - 1) % 2
            won, full = line(boards[e, seat], length), boards[e].any(0).all()
            assert (e in over) == bool(won or full)
            if e in over:
                games += 1
                assert over[e].tolist() == ([1, -1] if seat == 0 else [-1, 1]) if won else [0, 0]
                boards[e], moves[e] = False, 0


def test_tic_tac_toe_at_random():
    """How often random players win, from all games; and the number of positions."""
    positions = set()

    @cache
    def outcome(board):
        positions.add(board)
        mover = 1 + board.count(1) - board.count(2) if board.count(1) == board.count(2) else 2
        array = np.array(board).reshape(3, 3)
        for player, result in ((1, (1.0, 0.0)), (2, (0.0, 1.0))):
            if line(array == player, 3):
                return np.array(result)
        free = [i for i, cell in enumerate(board) if not cell]
        if not free:
            return np.zeros(2)
        return sum(outcome((*board[:i], mover, *board[i + 1 :])) for i in free) / len(free)

    win, lose = outcome((0,) * 9)
    assert len(positions) == 5478 and round(win, 3) == 0.585 and round(lose, 3) == 0.288
    env, first = envs.make_multi_agent("shoal/TicTacToe-v0", 1000), []
    now, choose = env.reset(seed=2), RandomPolicy(env.action_space, np.random.default_rng(0))
    for _ in range(60):
        now = env.step([choose(now.groups[0])])
        first += now.returns[:, 0].tolist()
    games, first = len(first), np.array(first)
    assert games > 5000
    assert abs((first == 1).mean() - win) < 4 * 0.5 / np.sqrt(games)
    assert abs((first == -1).mean() - lose) < 4 * 0.5 / np.sqrt(games)


KUHN = {"pp": 1, "pbp": -1, "pbb": 2, "bp": 1, "bb": 2}  # what agent 0 wins; a showdown's sign is that of the better card


def test_kuhn_payoffs():
    """Every deal and every history."""
    env = envs.make_multi_agent("shoal/Kuhn-v0", 1)
    for (mine, other), history in itertools.product(itertools.permutations(range(3), 2), KUHN):
        now = env.reset(seed=0)
        env._state[:, 0] = [mine, other, 0, 0, 0]
        for t, move in enumerate(history):
            seat = t % 2
            assert now.groups[0].acts.tolist() == [seat == 0, seat == 1] and not len(now.ended)
            if t:
                seen = np.zeros(7)
                seen[(mine, other)[seat]] = 1
                for i, before in enumerate(history[:t]):
                    seen[3 + 2 * i + "pb".index(before)] = 1
                np.testing.assert_array_equal(now.groups[0].observation[seat], seen)
            now = env.step([np.full(2, "pb".index(move))])
        stake = KUHN[history] * (1 if history in ("pbp", "bp") else np.sign(mine - other))
        assert now.returns.tolist() == [[stake, -stake]] and now.lengths.tolist() == [len(history)]
        assert now.groups[0].reward.tolist() == [stake, -stake] and now.groups[0].last.all()


def test_kuhn_deals():
    env = envs.make_multi_agent("shoal/Kuhn-v0", 6000)
    env.reset(seed=4)
    deals = env._state[0] * 3 + env._state[1]
    counts = np.bincount(deals, minlength=9)
    assert (counts[[0, 4, 8]] == 0).all() and (abs(counts[[1, 2, 3, 5, 6, 7]] - 1000) < 150).all()


@pytest.mark.parametrize(("name", "options"), [
    ("shoal/RockPaperScissors-v0", {}), ("shoal/RockPaperScissors-v0", {"biased": True, "rounds": 2}),
    ("shoal/FiveCycle-v0", {}), ("shoal/PrisonersDilemma-v0", {"rounds": 3})])
def test_matrix_payoffs(name, options):
    env = envs.make_multi_agent(name, 1, **options)
    payoffs, actions, rounds = env.spec.payoffs, env.spec.actions, options.get("rounds", 1)
    assert payoffs.shape == (2, actions, actions)
    if name != "shoal/PrisonersDilemma-v0":
        np.testing.assert_array_equal(payoffs[0], -payoffs[0].T)
    for pair in itertools.product(range(actions), repeat=2):
        now = env.reset(seed=0)
        assert now.groups[0].observation[:, 0].all() and now.groups[0].observation.sum() == 2
        for t in range(rounds):
            now = env.step([np.array(pair)])
            step = now.groups[0]
            np.testing.assert_array_equal(step.reward, np.float32(payoffs[(slice(None), *pair)]))
            assert step.last.all() == (t == rounds - 1) and step.acts.all() and step.valid.all()
            if t < rounds - 1:
                for seat in range(2):
                    assert np.flatnonzero(step.observation[seat]).tolist() == [1 + pair[seat], 1 + actions + pair[1 - seat]]
        np.testing.assert_allclose(now.returns[0], rounds * payoffs[(slice(None), *pair)])


def test_five_cycle_beats():
    payoff = GAMES["shoal/FiveCycle-v0"]().payoffs[0]
    for i in range(5):
        assert [payoff[i, (i + k) % 5] for k in range(5)] == [0, 1, 1, -1, -1]


def test_illegal():
    env = envs.make("shoal/TicTacToe-v0", 2)
    env.reset(seed=0)
    env.step(np.zeros(4, int))
    with pytest.raises(EnvironmentError_, match=r"environment 0, agent 1 \(seat 1\), at step 2: was given the illegal action 0"):
        env.step(np.zeros(4, int))
    with pytest.raises(EnvironmentError_, match="instead of"):
        env.step(np.zeros(3, int))
