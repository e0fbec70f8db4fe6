"""Small games for two as trees: what exact best responses are computed on.

A tree has the same rules and observations as the compiled game of the same id (shoal.envs.builtin.games). Positions that look the
same to the player who is to move (`seen`) are one information set. Paths that lead to the same position may meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import numpy as np

from shoal.envs.builtin.games import GAMES, GameSpec, game_spec
from shoal.errors import ConfigError

__all__ = ["BoardTree", "GameTree", "KuhnTree", "MatrixTree", "tree_of"]

LARGEST_BOARD = 9  # cells


class GameTree(Protocol):
    """A game of agents 0 and 1. Positions are hashable; every move leads to a position of another depth."""

    spec: GameSpec

    def roots(self) -> list[tuple[float, Hashable]]: ...  # probability and position
    def mover(self, position: Any) -> int | None: ...  # None: the game is over
    def returns(self, position: Any) -> tuple[float, float]: ...  # of a game that is over
    def moves(self, position: Any) -> list[int]: ...
    def play(self, position: Any, move: int) -> Hashable: ...
    def seen(self, position: Any) -> np.ndarray: ...  # what the mover observes


def tree_of(name: str, options: Mapping[str, Any] | None = None) -> GameTree:
    """The tree of a built-in game that is small enough; ConfigError for any other."""
    if name in GAMES:
        spec = game_spec(name, dict(options or {}))
        if spec.kernel == "matrix" and spec.params[1] == 1:
            return MatrixTree(spec)
        if spec.kernel == "kuhn":
            return KuhnTree(spec)
        if spec.kernel == "board" and spec.params[0] * spec.params[1] <= LARGEST_BOARD:
            return BoardTree(spec)
    raise ConfigError(f"the exploitability of {name} cannot be computed; it can for matrix games of one round, shoal/Kuhn-v0, "
                      f"shoal/TicTacToe-v0 and boards of at most {LARGEST_BOARD} cells")


class MatrixTree:
    """One round: agent 1 does not see what agent 0 has chosen. A position is the actions so far."""

    def __init__(self, spec: GameSpec) -> None:
        self.spec = spec

    def roots(self) -> list[tuple[float, Hashable]]:
        return [(1.0, ())]

    def mover(self, position: tuple[int, ...]) -> int | None:
        return len(position) if len(position) < 2 else None

    def returns(self, position: tuple[int, ...]) -> tuple[float, float]:
        assert self.spec.payoffs is not None
        return float(self.spec.payoffs[(0, *position)]), float(self.spec.payoffs[(1, *position)])

    def moves(self, position: tuple[int, ...]) -> list[int]:
        return list(range(self.spec.actions))

    def play(self, position: tuple[int, ...], move: int) -> Hashable:
        return (*position, move)

    def seen(self, position: tuple[int, ...]) -> np.ndarray:
        return np.asarray(np.eye(1, self.spec.observation_size, dtype=np.float32)[0])


class KuhnTree:
    """A position is (card of agent 0, of agent 1, moves so far)."""

    ENDS = ((0, 0), (0, 1, 0), (0, 1, 1), (1, 0), (1, 1))

    def __init__(self, spec: GameSpec) -> None:
        self.spec = spec

    def roots(self) -> list[tuple[float, Hashable]]:
        return [(1 / 6, (*cards, ())) for cards in itertools.permutations(range(3), 2)]

    def mover(self, position: tuple[int, int, tuple[int, ...]]) -> int | None:
        return None if position[2] in self.ENDS else len(position[2]) % 2

    def returns(self, position: tuple[int, int, tuple[int, ...]]) -> tuple[float, float]:
        mine, other, moves = position
        if moves == (1, 0):
            won = 1.0
        elif moves == (0, 1, 0):
            won = -1.0
        else:
            won = (2.0 if sum(moves) else 1.0) * (1 if mine > other else -1)
        return won, -won

    def moves(self, position: tuple[int, int, tuple[int, ...]]) -> list[int]:
        return [0, 1]

    def play(self, position: tuple[int, int, tuple[int, ...]], move: int) -> Hashable:
        return (position[0], position[1], (*position[2], move))

    def seen(self, position: tuple[int, int, tuple[int, ...]]) -> np.ndarray:
        row = np.zeros(7, np.float32)
        row[position[len(position[2]) % 2]] = 1
        for i, move in enumerate(position[2]):
            row[3 + 2 * i + move] = 1
        return row


class BoardTree:
    """A position is the cells: 0 empty, 1 + agent. Everything is seen."""

    def __init__(self, spec: GameSpec) -> None:
        self.spec = spec
        self.rows, self.columns, self.length = (int(n) for n in spec.params[:3])
        self.falls = bool(spec.params[3])
        cells = itertools.product(range(self.rows), range(self.columns))
        runs = ([(y + k * dy, x + k * dx) for k in range(self.length)] for y, x in cells
                for dy, dx in ((0, 1), (1, 0), (1, 1), (1, -1)))
        self._lines = [[y * self.columns + x for y, x in run] for run in runs
                       if all(0 <= y < self.rows and 0 <= x < self.columns for y, x in run)]

    def roots(self) -> list[tuple[float, Hashable]]:
        return [(1.0, (0,) * (self.rows * self.columns))]

    def _winner(self, position: tuple[int, ...]) -> int | None:
        for line in self._lines:
            piece = position[line[0]]
            if piece and all(position[cell] == piece for cell in line):
                return piece - 1
        return None

    def mover(self, position: tuple[int, ...]) -> int | None:
        if self._winner(position) is not None or 0 not in position:
            return None
        return sum(piece > 0 for piece in position) % 2

    def returns(self, position: tuple[int, ...]) -> tuple[float, float]:
        winner = self._winner(position)
        if winner is None:
            return 0.0, 0.0
        return (1.0, -1.0) if winner == 0 else (-1.0, 1.0)

    def moves(self, position: tuple[int, ...]) -> list[int]:
        return [i for i in range(self.spec.actions) if position[i] == 0]

    def play(self, position: tuple[int, ...], move: int) -> Hashable:
        cell, piece = move, 1 + sum(piece > 0 for piece in position) % 2
        while self.falls and cell + self.columns < len(position) and position[cell + self.columns] == 0:
            cell += self.columns
        return (*position[:cell], piece, *position[cell + 1 :])

    def seen(self, position: tuple[int, ...]) -> np.ndarray:
        mover = sum(piece > 0 for piece in position) % 2
        cells = np.array(position)
        return np.concatenate([cells == 1 + mover, cells == 2 - mover]).astype(np.float32)
