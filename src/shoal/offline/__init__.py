"""Recorded episodes: making them, keeping them on disk and reading them again. docs/demos.md has the format.

    with DemoWriter.create(path, info, made) as writer: writer.add(episode)     # a folder in shoal's own format
    demos = open_demos(path)                                                    # such a folder, or a Minari dataset
    demos.info.episodes, demos.info.observation_space
    for episode in demos.episodes(): episode.observation, episode.action, episode.reward
"""

from __future__ import annotations

from shoal.offline.demo_folder import DemoWriter
from shoal.offline.loading import check_recording, found_at, open_demos, open_shards
from shoal.offline.recorded_episodes import Demos, Episode, RecordingInfo, ShardedDemos

__all__ = ["DemoWriter", "Demos", "Episode", "RecordingInfo", "ShardedDemos", "check_recording", "found_at", "open_demos",
           "open_shards"]
