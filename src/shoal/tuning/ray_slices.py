"""Members that train on the nodes of a Ray cluster.

A slice is one task with a CPU of its own. It takes the member's run directory along and brings it back, so nodes need no common
disk; a slice whose node is lost has changed nothing here, and is done again elsewhere.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from shoal.experiment.rundir import RunDir
from shoal.runtime.ray.connection import connect, disconnect
from shoal.runtime.ray.ray_config import RayConfig
from shoal.tuning.slices import RunningSlice, Words, start_process

__all__ = ["RaySlices"]

LOST = -9  # exit code of a slice that did not come back


def trained_there(words: Words, packed: bytes) -> tuple[int, bytes, str]:
    """Runs on a node: the exit code, the run directory, and what was printed."""
    with tempfile.TemporaryDirectory(prefix="shoal-member-") as folder:
        run, log = Path(folder, "run"), Path(folder, "log")
        _unpack(packed, run)
        code = start_process(words(run), log).wait()
        return code, _pack(run), log.read_text(encoding="utf-8", errors="replace")


class RaySlices:
    """Tasks of a cluster: one that is joined, or with "local" one on this machine."""

    def __init__(self, address: str) -> None:
        self._joined = ray.is_initialized()  # by the program that has called us
        if not self._joined:
            connect(RayConfig(address=None if address == "local" else address), 1)
        self._task = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(trained_there)

    @property
    def workers(self) -> int:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    def start(self, words: Words, run: Path, log: Path) -> RunningSlice:
        return RaySlice(self._task.remote(words, _pack(run)), run, log)

    def close(self) -> None:
        if not self._joined:
            disconnect()


class RaySlice:
    """A slices.RunningSlice."""

    def __init__(self, reference: Any, run: Path, log: Path) -> None:
        self.reference, self.run, self.log = reference, run, log

    def poll(self) -> int | None:
        done, _ = ray.wait([self.reference], timeout=0)
        if not done:
            return None
        try:
            code, packed, text = ray.get(self.reference)
        except RayError as error:
            self._note(f"the slice was lost: {str(error).splitlines()[0]}\n")
            return LOST
        self._note(text)
        if code == 0:
            _replace(packed, self.run)
        return int(code)

    def terminate(self) -> None:
        """What it has learned since its interval began is lost: a task that is cancelled brings nothing back."""
        ray.cancel(self.reference, force=True)

    def _note(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text)


# ---------------------------------------------------------------------------------------------- run directories that travel
def _pack(run: Path) -> bytes:
    """What a run needs to continue, and nothing where it has not begun."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        if RunDir(run).checkpoints().newest() is not None:
            for entry in sorted(run.iterdir()):
                if entry.name != ".lock":
                    file.add(entry, entry.name)
    return packed.getvalue()


def _unpack(packed: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(packed)) as file:
        if file.getmembers():
            folder.mkdir(parents=True)
            file.extractall(folder, filter="data")


def _replace(packed: bytes, run: Path) -> None:
    """Put a run directory in the place of an older one, by renames: it is never half of each (Study.restore)."""
    new, old = run.with_name(f"{run.name}.new"), run.with_name(f"{run.name}.old")
    for left in (new, old):  # by a study that was killed here
        shutil.rmtree(left, ignore_errors=True)
    _unpack(packed, new)
    if run.exists():
        run.rename(old)
    new.rename(run)
    shutil.rmtree(old, ignore_errors=True)
