"""Small recordings for tests."""

from __future__ import annotations

import numpy as np

from shoal import envs
from shoal.envs.experts import follow_cue
from shoal.envs.random_policy import RandomPolicy
from shoal.offline import DemoWriter
from shoal.offline.recording import RecordingOptions, ScriptPolicy, record, recording_info


def recorded(path, name, episodes, *, rows=4, seed=0, expert=None, epsilon=0.0, **kwargs):
    """Episodes of an expert, or of random actions, in a folder."""
    env = envs.make(name, rows, **kwargs)
    first, rng = env.reset(seed), np.random.default_rng(seed)
    actor = ScriptPolicy(expert, env, rng, "expert") if expert else RandomPolicy(env.action_space, rng)
    with DemoWriter.create(path, recording_info(env, first, kwargs), {"source": "test"}) as writer:
        record(env, first, actor, writer, RecordingOptions(episodes, seed=seed, epsilon=epsilon), lambda line: None, lambda: False)
    env.close()
    return path


def cue(path, episodes=20, **kwargs):
    return recorded(path, "shoal/CueLure-v0", episodes, expert=follow_cue, **kwargs)
