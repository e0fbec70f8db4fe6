"""TensorBoard scalars, written with tensorboard's own record writer: no torch, no TensorFlow, no extra thread."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from shoal.telemetry.outputs import Thinning

__all__ = ["TensorBoard"]

GROUPS = {
    "train_return": "return/train", "eval_return": "return/evaluation", "train_length": "return/train_length",
    "env_steps_per_second": "speed/env_steps", "env_frames_per_second": "speed/env_frames",
    "learner_steps_per_second": "speed/learner_steps", "learner_idle": "speed/learner_idle",
    "samples_per_insert": "data/samples_per_insert", "learner_steps": "progress/learner_steps",
    "seconds": "progress/seconds", "restarts": "progress/restarts", "bytes_per_second": "data/bytes_per_second",
    "replay_size": "data/replay_size", "replay_bytes": "data/replay_bytes",
    "nodes": "cluster/nodes", "object_store_mb": "cluster/object_store_mb", "calls_per_second": "cluster/calls_per_second",
    "carried_mb_per_second": "cluster/carried_mb_per_second",
}


class TensorBoard:
    """One event file in the run directory, with the snapshots that metrics.jsonl has; the x-axis is env_steps."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._thinning = folder, Thinning()
        self._file: IO[bytes] | None = None

    def _open(self) -> None:
        """With the first snapshot: the import takes a quarter of a second, in which roles may already start."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = (self._folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._record(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, shot: Mapping[str, Any]) -> None:
        if not self._thinning.due(shot):
            return
        if self._file is None:
            self._open()
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(shot)]
        if values:
            summary = self._summary(value=values)
            self._record(self._event(wall_time=time.time(), step=int(shot["env_steps"]), summary=summary))

    def event(self, event: Mapping[str, Any]) -> None:
        """Events are in metrics.jsonl."""

    def _record(self, event: Any) -> None:
        assert self._file is not None
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def scalars(shot: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a snapshot, with TensorBoard tags."""
    named = {tag: shot.get(name) for name, tag in GROUPS.items()}
    named |= {f"loss/{name}": value for name, value in shot.get("losses", {}).items()}
    named |= {f"info/{name}": value for name, value in shot.get("info", {}).items()}
    named |= {f"role/{name}": value for name, value in shot.get("role_metrics", {}).items()}
    for policy, numbers in shot.get("policies", {}).items():
        named |= {f"{policy}/{name}": numbers[name] for name in ("eval_return", "train_return", "learner_steps")}
        named |= {f"{policy}/loss_{name}": value for name, value in numbers["losses"].items()}
    for name in ("policy_lag", "data_age_seconds", "publish_to_use_seconds"):
        named |= {f"data/{name}_{part}": value for part, value in shot.get(name, {}).items()}
    for role, numbers in shot.get("roles", {}).items():
        named |= {f"time_{role}/{phase}": share for phase, share in numbers["phases"].items()}
        named |= {f"time_{role}/waits_{wire}": share for wire, share in numbers["waits"].items()}
    named |= {f"data/occupancy_{wire}": numbers.get("occupancy") for wire, numbers in shot.get("wires", {}).items()}
    for tag, value in named.items():
        if value is not None and math.isfinite(value):
            yield tag, float(value)
