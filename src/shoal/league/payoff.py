"""The payoff table of a league: how often each player beats each other (Vinyals et al. 2019).

For each ordered pair: games, wins, draws and losses, all multiplied by `decay` before a result is added, so that the table follows
players that learn. A result is entered for both orders, so rate(A, B) + rate(B, A) = 1. A player's games against itself say
nothing and are not entered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["RESULTS", "PayoffTable"]

RESULTS = ("win", "draw", "loss")
UNKNOWN = 0.5  # the rate of two players that have not met


class PayoffTable:
    """Decayed counts of results by (home, away)."""

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay
        self._counts: dict[tuple[str, str], list[float]] = {}  # wins, draws, losses
        self._played: dict[tuple[str, str], int] = {}  # games, old ones counting as much
        self.reports = 0
        """Results that were entered."""

    def report(self, home: str, away: str, result: str) -> None:
        """Enter one game, as `home` saw it: win, draw or loss."""
        at = RESULTS.index(result)
        if home == away:
            return
        for pair, column in (((home, away), at), ((away, home), 2 - at)):
            counts = self._counts[pair] = [self.decay * count for count in self._counts.get(pair, (0.0, 0.0, 0.0))]
            counts[column] += 1
            self._played[pair] = self._played.get(pair, 0) + 1
        self.reports += 1

    @property
    def played(self) -> int:
        """Games in the table, each once: as many as there were reports."""
        return sum(self._played.values()) // 2

    def games(self, home: str, away: str) -> float:
        """How many games there were, older ones counting less."""
        counts = self._counts.get((home, away))
        return 0.0 if counts is None else sum(counts)

    def rate(self, home: str, away: str) -> float:
        """How often `home` wins, a draw counting half; 0.5 where they have not met."""
        counts = self._counts.get((home, away))
        if counts is None or not (games := sum(counts)):
            return UNKNOWN
        return (counts[0] + counts[1] / 2) / games

    def rates(self, home: str, others: Sequence[str]) -> np.ndarray:
        return np.array([self.rate(home, away) for away in others])

    def elo(self, names: Sequence[str], rounds: int = 500) -> np.ndarray:
        """Elo ratings with mean 0 that explain the results among `names` best (Bradley and Terry 1952). One drawn game of every
        pair is added, so that a player that has won everything has a rating too."""
        wins = np.array([[0.5 + self.games(a, b) * self.rate(a, b) if a != b else 0.0 for b in names] for a in names])
        games, strength = wins + wins.T, np.ones(len(names))
        for _ in range(rounds if len(names) > 1 else 0):
            shares = games / (strength[:, None] + strength[None, :])
            strength = wins.sum(1) / shares.sum(1)
            strength /= np.exp(np.log(strength).mean())
        return np.asarray(400 / np.log(10) * np.log(strength))

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, object]:
        """As JSON."""
        counts = [[home, away, *counts, self._played[home, away]] for (home, away), counts in self._counts.items()]
        return {"decay": self.decay, "reports": self.reports, "counts": counts}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> PayoffTable:
        table = cls(float(str(state["decay"])))
        table.reports = int(str(state["reports"]))
        rows = state["counts"]
        if not isinstance(rows, list):
            raise TypeError(f"counts are {rows!r}")
        for home, away, wins, draws, losses, played in rows:
            table._counts[home, away], table._played[home, away] = [float(wins), float(draws), float(losses)], int(played)
        return table
