"""Small recordings for tests."""

from __future__ import annotations

import numpy as np

from shoal import envs
from shoal.envs.experts import follow_cue
from shoal.offline import Writer
from shoal.offline.recording import Order, Random, Script, about_env, record


def recorded(path, name, episodes, *, rows=4, seed=0, expert=None, epsilon=0.0, **kwargs):
    """Episodes of an expert, or of random actions, in a folder."""
    env = envs.make(name, rows, **kwargs)
    first, rng = env.reset(seed), np.random.default_rng(seed)
    actor = Script(expert, env, rng, "expert") if expert else Random(env.action_space, rng)
    with Writer.create(path, about_env(env, first, kwargs), {"source": "test"}) as writer:
        record(env, first, actor, writer, Order(episodes, seed=seed, epsilon=epsilon), lambda line: None, lambda: False)
    env.close()
    return path


def cue(path, episodes=20, **kwargs):
    return recorded(path, "shoal/CueLure-v0", episodes, expert=follow_cue, **kwargs)
