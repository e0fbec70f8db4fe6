"""Scores: what the workers of a population tell each other of an iteration."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.algorithms.records.moments import moment_fields
from shoal.algorithms.records.step_view import StepViewer
from shoal.population import ScoreRecord
from shoal.slots import Field, Layout

__all__ = ["Scores"]


@dataclass(frozen=True)
class Scores(ScoreRecord):
    """A return and a number of decisions for every member."""

    seats: int
    members: int
    episodes: int
    mask_size: int = 0
    observation_moments: int = 0
    """How many numbers of an observation are normalised; 0 for none."""
    previous: bool = False

    @property
    def layout(self) -> Layout:
        one = Field((self.members,), "float64")
        moments = {"observation_moments": moment_fields(self.observation_moments)} if self.observation_moments else {}
        return Layout({"score": one, "decisions": one, **moments})

    def viewer(self, seats: int) -> StepViewer:
        return StepViewer()
