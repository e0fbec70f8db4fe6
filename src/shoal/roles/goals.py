"""Goals: when an evaluation is good enough to stop a run.

    METRIC[(OPPONENT)] >= NUMBER, or <=       return >= 475      win_rate(random) >= 0.95      exploitability <= 0.05

METRIC is return, win_rate, loss_rate or exploitability; OPPONENT is whom evaluations are played against. fqe is fitted Q of a
recording that is learned from alone, and needs no evaluation (value_estimator.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.envs.opponent_env import OPPONENTS
from shoal.errors import ConfigError

__all__ = ["METRICS", "Goal"]

METRICS = ("return", "win_rate", "loss_rate", "exploitability", "fqe")
POSSIBLE = {"win_rate": (0.0, 1.0), "loss_rate": (0.0, 1.0), "exploitability": (0.0, math.inf)}
GRAMMAR = re.compile(r"\s*(\w+)\s*(?:\(\s*([^()]*?)\s*\))?\s*(>=|<=)\s*(\S+)\s*")


@dataclass(frozen=True)
class Goal:
    """A bound for one number of an evaluation."""

    metric: str
    bound: float
    at_least: bool = True
    opponent: str | None = None

    @classmethod
    def parse(cls, text: str) -> Goal:
        """What --until says."""
        found = GRAMMAR.fullmatch(text)
        try:
            bound = float(found[4]) if found else math.nan
        except ValueError:
            bound = math.nan
        if found is None or not math.isfinite(bound):
            raise ConfigError(f'--until "{text}" cannot be read; write METRIC >= NUMBER or METRIC(OPPONENT) <= NUMBER, such as '
                              '"win_rate(random) >= 0.95"')
        metric, opponent = found[1], found[2]
        if metric not in METRICS:
            raise ConfigError(f'--until "{text}": {metric} is not measured; use one of {", ".join(METRICS)}')
        if opponent is not None and opponent not in OPPONENTS:
            raise ConfigError(f'--until "{text}": there is no opponent {opponent}; use one of {", ".join(OPPONENTS)}')
        if metric == "fqe" and opponent is not None:
            raise ConfigError(f'--until "{text}": fqe is estimated from the recording, without matches; leave ({opponent}) out')
        if metric == "exploitability" and opponent is not None:
            raise ConfigError(f'--until "{text}": exploitability is that against a best response; leave ({opponent}) out')
        goal = cls(metric, bound, found[3] == ">=", opponent)
        least, most = POSSIBLE.get(metric, (-math.inf, math.inf))
        if (goal.at_least and bound > most) or (not goal.at_least and bound < least):
            what = f"between {least:g} and {most:g}" if most < math.inf else f"at least {least:g}"
            raise ConfigError(f'--until "{text}" is never reached: {metric} is {what}; give a number that it can have')
        return goal

    @property
    def reason(self) -> str:
        """What summary.json gives as stopped_by."""
        return "return" if self.metric == "return" and self.at_least else "until"

    def reached(self, scores: Mapping[str, float]) -> bool:
        value = scores[self.metric]
        return value >= self.bound if self.at_least else value <= self.bound

    def rank(self, scores: Mapping[str, float]) -> float:
        """Higher is better."""
        return scores[self.metric] if self.at_least else -scores[self.metric]

    def __str__(self) -> str:
        against = f"({self.opponent})" if self.opponent else ""
        return f"{self.metric}{against} {'>=' if self.at_least else '<='} {self.bound:g}"
