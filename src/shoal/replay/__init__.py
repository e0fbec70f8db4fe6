"""The replay service: tables of experience with selectors and rate limiters, in-process or for many machines.

    from shoal import replay
    server = replay.Server([replay.Table("replay", replay.Prioritized(0.6))])
    client = server.client()
    client.insert({"obs": obs, "action": action}, {"replay": 1.0})
    batch = client.sample("replay", batch_size=256)
    client.update_priorities("replay", batch.info.keys, priorities)

Needs neither PyTorch nor the rest of shoal. In the manner of Reverb (Cassirer et al. 2021); docs/replay.md.
"""

from shoal.replay.batch import Batch, Buffers, Info
from shoal.replay.client import Client, Dataset
from shoal.replay.columns import Array
from shoal.replay.core import Core
from shoal.replay.errors import Closed, InvalidItem, NotFound, Refused, ReplayError, SignatureMismatch, Timeout
from shoal.replay.expressions import Expression, apply, column, concat, n_step
from shoal.replay.keys import Key
from shoal.replay.limiters import MinSize, Queue, RateLimiter, SampleToInsertRatio, Stack
from shoal.replay.recipes import (
    EpisodeWriter,
    SequenceWriter,
    TransitionWriter,
    VectorEpisodeWriter,
    VectorSequenceWriter,
    VectorTransitionWriter,
)
from shoal.replay.selectors import Fifo, Lifo, MaxHeap, MinHeap, Prioritized, Uniform
from shoal.replay.server import Server
from shoal.replay.table import Table
from shoal.replay.writer import Writer

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
