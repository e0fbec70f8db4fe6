"""What the learners of a league are given of tic-tac-toe: every decision, with what the game made of it, by the rules alone."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.algorithms.records.seat_columns import ColumnRecorder
from shoal.algorithms.vtrace import VTraceObjective
from shoal.league.matchmaking import League
from shoal.roles.league_actor import MatchSeats
from shoal.roles.policy_actor import LearningSeats
from tests.league.test_league_run import league

LINES = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])


def has_line(cells):
    return cells[LINES].all(1).any()


def last_reward(own, other):
    """Of the decision that a game ended with, after which the board has these pieces: what the other side must have done then."""
    free = ~(own | other)
    if has_line(own) or not free.any():
        return 1.0 if has_line(own) else 0.0
    return -1.0 if free.sum() > 1 or has_line(other | free) else 0.0


@pytest.mark.parametrize("mix", [0.0, 0.3])
def test_rows_of_a_league(mix, tmp_path, monkeypatch):
    batches, sums = [], VTraceObjective.sums

    def keep(self, batch):
        batches.append({name: np.array(batch[name]) for name in ("observation", "action", "reward", "discount", "last", "first")})
        return sums(self, batch)

    monkeypatch.setattr(VTraceObjective, "sums", keep)
    league(tmp_path / "run", "shoal/TicTacToe-v0", max_env_steps=4000, architecture={"envs_per_actor": 8},
           algorithm={"unroll": 4, "behaviour_mix": mix})
    ends = []
    for batch in batches:
        for t, b in np.ndindex(batch["action"].shape):
            own, other = batch["observation"][t, b].reshape(2, 9) > 0
            after, action, reward = own.copy(), batch["action"][t, b], batch["reward"][t, b]
            assert not (own | other)[action]
            assert own.sum() - other.sum() in (0, -1) and batch["first"][t, b] == (own.sum() == 0)
            after[action] = True
            assert batch["discount"][t, b] == (not batch["last"][t, b])
            if batch["last"][t, b]:
                assert reward == last_reward(after, other)
                ends.append(reward)
            else:
                assert reward == 0
                following, reply = batch["observation"][t + 1, b].reshape(2, 9) > 0
                assert (following == after).all() and (reply >= other).all() and reply.sum() == other.sum() + 1
    assert len(batches) > 50 and min(ends.count(value) for value in (-1, 0, 1)) > 20


def test_only_home_learns(tmp_path, monkeypatch):
    """From the other side nobody does, also where a player that learns sits there; both sides do where a player meets itself."""
    seat, act, write, now, kinds = MatchSeats._seat, LearningSeats.act, ColumnRecorder.act, [], set()

    def seated(self, games, away):
        seat(self, games, away)
        for game in games:
            acting, learns = (array[2 * game : 2 * game + 2] for array in (self._table.acting, self._table.learns))
            side = self._played[game] % 2
            assert acting[side] == self._home[game] and learns[side] and learns[1 - side] == (acting[0] == acting[1])
            kinds.add("mirror" if learns.all() else "player" if acting[1 - side] < self._players else "snapshot")

    def acted(self, step, rows, learns):
        now[:] = [learns]
        return act(self, step, rows, learns)

    def written(self, rows, *others):
        assert len(rows) and now[0][rows].all()
        write(self, rows, *others)

    for kind, name, function in ((MatchSeats, "_seat", seated), (LearningSeats, "act", acted), (ColumnRecorder, "act", written)):
        monkeypatch.setattr(kind, name, function)
    league(tmp_path / "run", "shoal/TicTacToe-v0")
    assert kinds == {"mirror", "player", "snapshot"}


def test_results_are_homes(tmp_path, monkeypatch):
    """What is entered in the table is what the game's returns say of the player that sits on home's side, on every side."""
    begin, report, want, seen = MatchSeats.begin, League.report, {}, set()

    async def begun(self, games, ended):
        if ended is not None:
            for game, returns in zip(games, ended.returns, strict=True):
                acting = self._table.acting[2 * game : 2 * game + 2]
                if acting[0] != acting[1]:
                    side = int(np.flatnonzero(acting == self._home[game])[0])
                    margin = float(returns[side] - returns[1 - side])
                    want[int(self._match[game])] = side, "win" if margin > 0 else "loss" if margin < 0 else "draw"
        await begin(self, games, ended)

    def reported(self, number, result):
        if number in want:
            assert result == want[number][1]
            seen.add(want[number])
        return report(self, number, result)

    monkeypatch.setattr(MatchSeats, "begin", begun)
    monkeypatch.setattr(League, "report", reported)
    league(tmp_path / "run", "shoal/TicTacToe-v0", max_env_steps=3000)
    assert seen == {(side, result) for side in (0, 1) for result in ("win", "draw", "loss")}
