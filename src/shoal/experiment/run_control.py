"""What a run does with the letters in its mailbox: set, stop, pause, unpause, checkpoint.

The session asks it ten times a second. All letters that wait are read together: a thousand changes cost as much as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError, ProgramError
from shoal.experiment.config import Plan
from shoal.experiment.live_settings import OF_ROLES
from shoal.experiment.live_values import changed_plan
from shoal.experiment.mailbox import Letter, Mailbox
from shoal.experiment.prepare import plan_to_json
from shoal.experiment.rundir import RunDir

if TYPE_CHECKING:
    from shoal.experiment.session import RunSession
    from shoal.runtime import Supervisor

__all__ = ["RunControl"]


class RunControl:
    """What a user does to a live run."""

    def __init__(self, rundir: RunDir, plan: Plan, resumed: int) -> None:
        self.rundir, self.plan, self.resumed = rundir, plan, resumed
        self.mailbox = Mailbox(rundir.path)
        self.mailbox.clear()
        self.paused = False
        self._saving: list[Letter] = []  # letters that wait for a checkpoint

    def tick(self, control: Supervisor, session: RunSession) -> None:
        letters = self.mailbox.take()
        if not letters:
            return
        values: dict[str, Any] = {}
        for letter in letters:
            try:
                text = self._obey(letter, control, session, values)
            except (ConfigError, ProgramError) as error:
                self.mailbox.reply(letter.name, error=" ".join(str(error).split()))
            except OSError as error:  # config.json could not be written: a full disk
                self.mailbox.reply(letter.name, error=f"{error.strerror or error}; nothing has changed: make room, and try again")
            else:
                if text:
                    self.mailbox.reply(letter.name, text=text)
        if values:
            self._carry_out(values, control, session)

    def _obey(self, letter: Letter, control: Supervisor, session: RunSession, values: dict[str, Any]) -> str:
        """Do what a letter says; returns the answer, or nothing if that comes later. What is set is added to `values`."""
        content = letter.content
        command = content.get("command")
        if command == "set" and isinstance(content.get("values"), dict):
            return self._set(content["values"], control, session, values)
        if command == "stop":
            control.stop("stop")
            return "it writes a checkpoint and ends"
        if command in ("pause", "unpause"):
            return self._pause(command == "pause", control, session)
        if command == "checkpoint":
            self._saving.append(letter)
            session.save_soon()
            return ""
        raise ConfigError(f"there is no command {command!r}; there are set, stop, pause, unpause and checkpoint")

    def saved(self, folder: Path | None, why: str = "") -> None:
        """A checkpoint was written, or could not be."""
        for letter in self._saving:
            self.mailbox.reply(letter.name, error=why, text=f"written: {folder}")
        self._saving = []

    # ------------------------------------------------------------------ values
    def _set(self, given: Mapping[str, Any], control: Supervisor, session: RunSession, values: dict[str, Any]) -> str:
        plan = changed_plan(self.plan, given)
        if "actors" in given:
            self._check_actors(given["actors"], control)
        self.rundir.save_config(plan_to_json(plan, self.resumed))  # first: a run that dies now resumes with it
        before, self.plan = self.plan, plan
        changes = [f"{key} {_value(before, key)} -> {_value(plan, key)}" for key in given]
        values.update({key: _value(plan, key) for key in given})
        session.note_change(", ".join(changes), {key: _value(plan, key) for key in given})
        return ", ".join(changes)

    def _check_actors(self, count: int, control: Supervisor) -> None:
        role = self.plan.architecture.scaled_role
        node = control.program.nodes.get(role)
        if node is None or node.least == node.most:
            raise ConfigError(f"--architecture {self.plan.names.architecture} has a fixed number of actors; stop the run and "
                              f"resume it with --actors {count}")
        if not node.least <= count <= node.most:
            raise ConfigError(f"actors={count} is not possible: the wires of this run were laid out for {node.least} to "
                              f"{node.most}; stop it and resume it with --actors {count}")

    def _carry_out(self, values: Mapping[str, Any], control: Supervisor, session: RunSession) -> None:
        for_roles = {key: value for key, value in values.items() if key.split(".")[0] in OF_ROLES}
        if for_roles:
            control.change(for_roles)
        if "checkpoint.every_seconds" in values:
            session.checkpoint_every(values["checkpoint.every_seconds"])
        if "actors" in values:
            session.fix_actors()
            control.scale(self.plan.architecture.scaled_role, values["actors"])

    # ------------------------------------------------------------------ pausing
    def _pause(self, wanted: bool, control: Supervisor, session: RunSession) -> str:
        if wanted == self.paused:
            return f"it is {'paused' if wanted else 'running'} already"
        self.paused = wanted
        for role in control.program.nodes:
            (control.pause if wanted else control.resume)(role)
        session.note_change("paused" if wanted else "unpaused", {})
        return "no other step begins; --max-seconds keeps counting" if wanted else "it continues"


def _value(plan: Plan, key: str) -> Any:
    found: Any = plan.experiment
    for part in key.split("."):
        found = getattr(found, part)
    return found

