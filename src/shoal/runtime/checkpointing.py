"""A checkpoint: every stateful role writes its file; for roles that are not running, the file of the last checkpoint is used.

A role that died, and perhaps waits for free CPUs, will start again from its file in the newest checkpoint. So that file is its
state and goes into the next checkpoint too: one role that a cluster has no CPUs for does not keep the run from being saved. A
role that few others can replace (one that takes, serves or publishes) usually restarts at once and then writes a newer file:
the first checkpoint without it fails; the next one, or the one at the end of the run, is made with its last file.
A role that was scaled down to nothing keeps its last file too: when it is started again it continues from there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import CheckpointError
from shoal.runtime.replies import NotRunning, OnReply, after_all

if TYPE_CHECKING:
    from shoal.runtime.supervisor import Supervisor

__all__ = ["SCARCE_ENDS", "CheckpointRequest"]

SCARCE_ENDS = ("source", "server", "publisher", "member")  # ends that few roles hold; a run is lost without what those know


class CheckpointRequest:
    """One checkpoint, from the command to the roles until their replies."""

    def __init__(self, control: Supervisor, folder: Path, over: Callable[[bool], None]) -> None:
        """`over` is told at the end whether it is whole."""
        self._control, self._folder, self._over = control, folder, over
        self._wrote: set[str] = set()
        self._gone: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    def begin(self, names: list[str]) -> None:
        """Tell these roles to write their files."""
        one_more = after_all(len(names), self._finish)
        for name in names:
            self._control.command(name, "checkpoint", self._written(name, one_more), folder=str(self._folder))

    def _written(self, name: str, then: OnReply) -> OnReply:
        def done(result: Any, error: str | None) -> None:
            if error:
                (self._gone if isinstance(error, NotRunning) else self._failed)[name] = error
            elif result:
                self._wrote.add(name)
            then(None, None)

        return done

    def _finish(self, result: Any, error: str | None) -> None:
        control = self._control
        if not self._wrote and not self._failed:
            self._failed.update(self._gone)  # nothing new was written
        absent = [name for name in (*self._gone, *control.unheard()) if name in control.running]  # else it was drained meanwhile
        for name in absent if not self._failed else ():
            try:
                self._reuse_last_file(name)
            except (OSError, CheckpointError) as failure:
                self._failed[name] = str(failure)
        if not self._failed:
            self._keep_files_of_absent_roles()
        for name, why in self._failed.items():
            control.event("checkpoint failed", name, why.removeprefix(name).removeprefix(":").strip())
        control.absent = {name: control.absent.get(name, False) for name in self._gone}
        self._over(not self._failed)

    def _keep_files_of_absent_roles(self) -> None:
        """Of roles that the graph has no replica of now."""
        control, newest = self._control, self._control.session.newest()
        if newest is None:
            return
        for node in control.program.nodes.keys() - {node for node, _ in control.running.values()}:
            for path in sorted(newest.glob(f"{node}-*.safetensors")):
                try:
                    link(path, self._folder / path.name)
                except OSError as failure:
                    self._failed[path.stem] = str(failure)

    def _reuse_last_file(self, name: str) -> None:
        """Put a role's file of the newest checkpoint into this one; a role that has none will start without."""
        control, file = self._control, f"{name}.safetensors"
        node, newest, known = control.running[name][0], control.session.newest(name), name in self._gone
        (self._folder / file).unlink(missing_ok=True)  # it may have died while it wrote
        if control.sharing.get(node) and any(control.running.get(other, ("",))[0] == node for other in self._wrote):
            how = "another replica's file holds the same state"
        elif known and any(port.end in SCARCE_ENDS for port in control.program.nodes[node].ports.values()) and (
                newest is None or not (control.ending or name in control.absent)):
            raise OSError(self._gone[name])
        elif newest is not None and (newest / file).exists():
            how = "its file of the last checkpoint is kept"
            link(newest / file, self._folder / file)
        else:
            how = "there is no file of it"
        if known and not control.absent.get(name):
            control.absent[name] = True
            control.event("checkpoint", name, f"saved while it was not running; {how}")


def link(source: Path, target: Path) -> None:
    """Give a file another name; copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
