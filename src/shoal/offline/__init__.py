"""Recorded episodes: how they are made, kept on disk and read again. docs/demos.md has the format.

    with Writer.create(path, about) as writer: writer.add(episode)       # a folder of shoal's own
    demos = open_demos(path)                                             # such a folder, or a Minari dataset
    demos.about.episodes, demos.about.observation_space
    for episode in demos.episodes(): episode.observation, episode.action, episode.reward
"""

from __future__ import annotations

from shoal.offline.episodes import About, Demos, Episode
from shoal.offline.folder import Writer
from shoal.offline.opening import check_fit, open_demos

__all__ = ["About", "Demos", "Episode", "Writer", "check_fit", "open_demos"]
