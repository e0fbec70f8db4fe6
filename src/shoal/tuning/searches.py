"""How a study searches: the values that its members begin with, and the member that trains next.

    population   drawn at first; all members train in turns, and worse ones copy better ones (exploit.py)
    random       drawn, and never changed
    grid         every combination of evenly spread values
    halving      drawn; only the best of those that finished a rung continue to a longer one (halving.py)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from shoal.coordination.population.halving import rungs, to_promote
from shoal.coordination.population.priors import Prior

if TYPE_CHECKING:
    from shoal.tuning.study import Member, StudySettings

__all__ = ["SEARCH_RULES", "SearchRule", "first_values", "grid_of", "next_member", "until_env_steps"]

SearchRule = Literal["population", "random", "grid", "halving"]
SEARCH_RULES: tuple[str, ...] = get_args(SearchRule)


def grid_of(priors: Mapping[str, Prior], points: int) -> list[dict[str, Any]]:
    """Every combination, the last value moving fastest."""
    points_of = [prior.grid(points) for prior in priors.values()]
    return [dict(zip(priors, values, strict=True)) for values in itertools.product(*points_of)]


def first_values(settings: StudySettings, number: int) -> dict[str, Any]:
    """What a member begins with."""
    priors = settings.priors
    if settings.search == "grid":
        return grid_of(priors, settings.points)[number]
    rng = np.random.default_rng([settings.seed, number])
    return {name: prior.draw(rng) for name, prior in priors.items()}


def next_member(settings: StudySettings, members: Sequence[Member], busy: Collection[int]) -> Member | None:
    """The member that trains next, while the `busy` ones train already: the one that is least far, or with halving the one that
    may continue, and a new one where nobody may. Those that have failed do not."""
    busy = {*busy, *(member.number for member in members if member.failed)}
    free = [member for member in members if member.number not in busy]
    if settings.search == "halving":
        results = {member.number: [-math.inf if one is None else one for one in member.rungs] for member in members}
        promoted = to_promote(results, busy, settings.reduction, len(_rungs(settings)))
        return next((member for member in free if member.number == promoted or (promoted is None and not member.rungs)), None)
    left = [member for member in free if member.env_steps < settings.max_env_steps]
    return min(left, key=lambda member: (member.env_steps, member.number), default=None)


def until_env_steps(settings: StudySettings, member: Member, done: int) -> int:
    """Where the next slice of a member ends that has made `done` env steps: after at least one more, since its evaluation may be
    missing although its last slice was long enough."""
    if settings.search == "halving":
        end = _rungs(settings)[len(member.rungs)]
    elif settings.population == 1:  # nobody to be compared with: one run without a break
        end = settings.max_env_steps
    else:
        end = min(settings.max_env_steps, done + settings.every_env_steps)
    return max(end, done + 1)


def _rungs(settings: StudySettings) -> list[int]:
    return rungs(settings.every_env_steps, settings.max_env_steps, settings.reduction)
