"""Mappings (agent, episode) -> policy and scripted policies, as users write them."""

from __future__ import annotations

import numpy as np


def by_turns(agent, episode):
    return "walker" if (agent == "player_0") == (episode % 2 == 0) else "rival"


def sometimes_nobody(agent, episode):
    return None if episode == 700 else "walker"


def stranger(agent, episode):
    return "stranger" if episode == 3 else "walker"


def one(agent, episode):
    return "walker"


def first_legal(observation, mask):
    return int(np.flatnonzero(mask)[0])


def long_names(agent, episode):
    return "x" * 300 if agent == "player_0" else "rival"


def ghost_later(agent, episode):
    return by_turns(agent, episode) if episode < 1200 else "ghost"
