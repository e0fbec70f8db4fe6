"""The replay service: tables of experience with selectors and rate limiters, in-process or for many machines.

    from shoal import replay
    server = replay.Server([replay.Table("replay", replay.Prioritized(0.6))])
    client = server.client()
    client.insert({"obs": obs, "action": action}, {"replay": 1.0})
    batch = client.sample("replay", batch_size=256)
    client.update_priorities("replay", batch.info.keys, priorities)

Needs neither PyTorch nor the rest of shoal. In the manner of Reverb (Cassirer et al. 2021); docs/replay.md.
"""

from shoal.replay.client.client import Client
from shoal.replay.client.dataset import Dataset
from shoal.replay.client.expressions import Expression, apply, column, concat, n_step
from shoal.replay.client.trajectory_writers import (
    EpisodeWriter,
    SequenceWriter,
    TransitionWriter,
    VectorEpisodeWriter,
    VectorSequenceWriter,
    VectorTransitionWriter,
)
from shoal.replay.client.writer import Writer
from shoal.replay.errors import Closed, InvalidItem, NotFound, Refused, ReplayError, SignatureMismatch, Timeout
from shoal.replay.service.keys import Key
from shoal.replay.service.server import ReplayServer as Server
from shoal.replay.table.columns import Array
from shoal.replay.table.limiters import MinSize, Queue, RateLimiter, SampleToInsertRatio, Stack
from shoal.replay.table.replay_core import Core
from shoal.replay.table.sampled_batch import Batch, Buffers, Info
from shoal.replay.table.selectors import Fifo, Lifo, MaxHeap, MinHeap, Prioritized, Uniform
from shoal.replay.table.table import Table

__all__ = [
    "Array",
    "Batch",
    "Buffers",
    "Client",
    "Closed",
    "Core",
    "Dataset",
    "EpisodeWriter",
    "Expression",
    "Fifo",
    "Info",
    "InvalidItem",
    "Key",
    "Lifo",
    "MaxHeap",
    "MinHeap",
    "MinSize",
    "NotFound",
    "Prioritized",
    "Queue",
    "RateLimiter",
    "Refused",
    "ReplayError",
    "SampleToInsertRatio",
    "SequenceWriter",
    "Server",
    "SignatureMismatch",
    "Stack",
    "Table",
    "Timeout",
    "TransitionWriter",
    "Uniform",
    "VectorEpisodeWriter",
    "VectorSequenceWriter",
    "VectorTransitionWriter",
    "Writer",
    "apply",
    "column",
    "concat",
    "n_step",
]
