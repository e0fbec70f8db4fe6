"""A checkpoint: every stateful role writes its file, and something stands for those that are not there.

A role that died, and perhaps waits for room, begins again from its file in the newest checkpoint. So that file is its state, and
goes into the next checkpoint too: a run is not kept from being saved by an evaluator that a cluster has no room for. A role of
which there are few (a learner, a server, a table) mostly comes back at once and would then write a newer one: a checkpoint
without it fails at first, and is made without it when it is still not there, or when the run ends.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.runtime.answers import Done, Gone, after

if TYPE_CHECKING:
    from shoal.runtime.supervisor import Supervisor

__all__ = ["FEW", "Saving"]

FEW = ("source", "server", "publisher", "member")  # ends of wires of which there are few: a run is nothing without what they know


class Saving:
    """One of them, from the question to the answer."""

    def __init__(self, control: Supervisor, folder: Path) -> None:
        self._control, self._folder = control, folder
        self._wrote: set[str] = set()
        self._gone: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    def begin(self, names: list[str]) -> None:
        """Ask these roles for their files."""
        one_more = after(len(names), self._finish)
        for name in names:
            self._control.command(name, "checkpoint", self._written(name, one_more), folder=str(self._folder))

    def _written(self, name: str, then: Done) -> Done:
        def done(result: Any, error: str | None) -> None:
            if error:
                (self._gone if isinstance(error, Gone) else self._failed)[name] = error
            elif result:
                self._wrote.add(name)
            then(None, None)

        return done

    def _finish(self, result: Any, error: str | None) -> None:
        control = self._control
        if not self._wrote and not self._failed:
            self._failed.update(self._gone)  # what is left of the last checkpoint is no new one
        absent = [name for name in (*self._gone, *control.unheard()) if name in control.running]  # else it was drained meanwhile
        for name in absent if not self._failed else ():
            try:
                self._stand_in(name)
            except OSError as failure:
                self._failed[name] = str(failure)
        for name, why in self._failed.items():
            control.event("checkpoint failed", name, why.removeprefix(name).removeprefix(":").strip())
        control.absent = {name: control.absent.get(name, False) for name in self._gone}
        control.session.saved(self._folder, not self._failed)

    def _stand_in(self, name: str) -> None:
        """Put a role's file of the newest checkpoint into this one; where it has none, its successor begins without."""
        control, file = self._control, f"{name}.safetensors"
        node, newest, known = control.running[name][0], control.session.newest(), name in self._gone
        (self._folder / file).unlink(missing_ok=True)  # it may have died while it wrote
        if control.sharing.get(node) and any(control.running.get(other, ("",))[0] == node for other in self._wrote):
            how = "another's is its own as well"
        elif known and any(port.end in FEW for port in control.program.nodes[node].ports.values()) and (
                newest is None or not (control.ending or name in control.absent)):
            raise OSError(self._gone[name])
        elif newest is not None and (newest / file).exists():
            how = "its part of the one before is kept"
            link(newest / file, self._folder / file)
        else:
            how = "there is nothing of it"
        if known and not control.absent.get(name):
            control.absent[name] = True
            control.event("checkpoint", name, f"saved without it, since it is not there; {how}")


def link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system knows no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
