"""The list of shoal's own games for two agents: spaces and parameters of each, without importing Numba.

| id | game | known values |
|---|---|---|
| shoal/RockPaperScissors-v0 | one round, +1/0/-1; `biased=True`: [[0, -1/4, 1/2], [1/4, 0, -1/20], [-1/2, 1/20, 0]] | Nash: uniform; biased (1/16, 10/16, 5/16) |
| shoal/FiveCycle-v0 | action i beats i + 1 and i + 2, loses to i + 3 and i + 4 (mod 5) | Nash: uniform |
| shoal/PrisonersDilemma-v0 | 0 cooperates, 1 defects: (3, 3), (0, 5), (5, 0), (1, 1); `rounds` (10) | defecting is dominant |
| shoal/Kuhn-v0 | Kuhn poker: jack, queen, king; 0 passes, 1 bets | -1/18 for agent 0 |
| shoal/TicTacToe-v0 | 3 x 3, a line of 3 | draw; at random agent 0 wins 0.585, loses 0.288 |
| shoal/ConnectFour-v0 | `rows` (6) x `columns` (7), a line of `length` (4) | agent 0 wins on 6 x 7 |

Matrix games take `rounds`, after which they end; their seats see the last actions of both. All end by themselves.
"""  # noqa: E501  a table

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import ConfigError

__all__ = ["GAMES", "GameSpec", "game_spec"]


@dataclass(frozen=True)
class GameSpec:
    """All that the compiled back-end needs to know about one game."""

    name: str
    kernel: str  # key of game_kernels.RESETS and STEPS
    agents: tuple[str, str]
    observation_size: int
    actions: int
    state_size: int
    params: np.ndarray
    longest: int  # decisions of one agent in a game, at most
    takes_turns: bool = True
    masked: bool = False
    payoffs: np.ndarray | None = None  # [2, A, A], of both agents, where the game is a matrix


def _need(holds: bool, text: str) -> None:
    if not holds:
        raise ConfigError(text)


def _matrix(name: str, payoff: Any, other: Any = None, rounds: int = 1) -> GameSpec:
    """`payoff` [A, A] is that of agent 0, by its action and agent 1's; `other` is agent 1's, by the same; None: zero-sum."""
    _need(rounds >= 1, f"rounds={rounds}: a game needs at least one round")
    mine = np.asarray(payoff, np.float64)
    both = np.stack([mine, -mine if other is None else np.asarray(other, np.float64)])
    actions = len(mine)
    params = np.concatenate([[actions, rounds], both.ravel()])
    return GameSpec(name, "matrix", ("player_0", "player_1"), 1 + 2 * actions, actions, 1, params, rounds, takes_turns=False,
                    payoffs=both)


def _rps(biased: bool = False, rounds: int = 1) -> GameSpec:
    fair, unfair = [[0, -1, 1], [1, 0, -1], [-1, 1, 0]], [[0, -0.25, 0.5], [0.25, 0, -0.05], [-0.5, 0.05, 0]]
    return _matrix("shoal/RockPaperScissors-v0", unfair if biased else fair, rounds=rounds)


def _five_cycle(rounds: int = 1) -> GameSpec:
    ahead = (np.arange(5)[None] - np.arange(5)[:, None]) % 5  # of agent 1's action over agent 0's
    return _matrix("shoal/FiveCycle-v0", np.select([ahead == 0, ahead <= 2], [0.0, 1.0], -1.0), rounds=rounds)


def _dilemma(rounds: int = 10) -> GameSpec:
    payoff = np.array([[3.0, 0.0], [5.0, 1.0]])
    return _matrix("shoal/PrisonersDilemma-v0", payoff, payoff.T, rounds)


def _kuhn() -> GameSpec:
    return GameSpec("shoal/Kuhn-v0", "kuhn", ("player_0", "player_1"), 7, 2, 5, np.zeros(1), 2)


def _board(name: str, rows: int, columns: int, length: int, falls: bool) -> GameSpec:
    _need(rows >= 1 and columns >= 1, f"rows={rows}, columns={columns}: a board needs at least one of each")
    _need(2 <= length <= max(rows, columns), f"length={length}: a line of at least 2 must fit on {rows} x {columns}")
    cells = rows * columns
    params = np.array([rows, columns, length, falls], np.float64)
    return GameSpec(name, "board", ("player_0", "player_1"), 2 * cells, columns if falls else cells, cells + 1, params,
                    (cells + 1) // 2, masked=True)


def _tic_tac_toe() -> GameSpec:
    return _board("shoal/TicTacToe-v0", 3, 3, 3, falls=False)


def _connect_four(rows: int = 6, columns: int = 7, length: int = 4) -> GameSpec:
    return _board("shoal/ConnectFour-v0", rows, columns, length, falls=True)


GAMES: dict[str, Callable[..., GameSpec]] = {
    "shoal/ConnectFour-v0": _connect_four,
    "shoal/FiveCycle-v0": _five_cycle,
    "shoal/Kuhn-v0": _kuhn,
    "shoal/PrisonersDilemma-v0": _dilemma,
    "shoal/RockPaperScissors-v0": _rps,
    "shoal/TicTacToe-v0": _tic_tac_toe,
}


def game_spec(name: str, kwargs: dict[str, Any]) -> GameSpec:
    """The spec of a built-in game with these options; ConfigError for an option it does not have."""
    try:
        return GAMES[name](**kwargs)
    except TypeError as error:
        raise ConfigError(f"{name}: {str(error).replace('()', '', 1)}; options are those of {GAMES[name].__name__} in "
                          "shoal/envs/builtin/games.py") from error
