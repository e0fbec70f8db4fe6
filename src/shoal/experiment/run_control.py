"""What a run does with the letters in its mailbox: set, stop, pause, unpause, checkpoint.

The session asks it ten times a second. All letters that wait are read together: config.json is written and the roles are told once
for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import ConfigError, ProgramError
from shoal.experiment.config import Plan
from shoal.experiment.live_settings import OF_ROLES
from shoal.experiment.live_values import changed_plan
from shoal.experiment.mailbox import Letter, Mailbox
from shoal.experiment.prepare import plan_to_json
from shoal.experiment.rundir import RunDir
from shoal.experiment.values import value_of

if TYPE_CHECKING:
    from shoal.experiment.session import RunSession
    from shoal.runtime import Supervisor

__all__ = ["RunControl"]


class _Change(NamedTuple):
    """What one letter sets."""

    letter: str
    text: str
    values: dict[str, Any]


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
        before, changes, answers = self.plan, list[_Change](), list[tuple[str, str]]()
        for letter in letters:
            try:
                text = self._obey(letter, control, session, changes)
            except (ConfigError, ProgramError) as error:
                self.mailbox.reply(letter.name, error=" ".join(str(error).split()))
            else:
                if text:
                    answers.append((letter.name, text))
        if changes:
            answers += self._change(before, changes, control, session)
        for name, text in answers:
            self.mailbox.reply(name, text=text)

    def _obey(self, letter: Letter, control: Supervisor, session: RunSession, changes: list[_Change]) -> str:
        """Do what a letter says; returns the answer, or nothing if that comes later. What is to be set is added to `changes`."""
        content = letter.content
        command = content.get("command")
        if command == "set" and isinstance(content.get("values"), dict):
            changes.append(self._set(letter.name, content["values"], control))
            return ""
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
    def _set(self, letter: str, given: Mapping[str, Any], control: Supervisor) -> _Change:
        """Check what is given against all that came before it."""
        plan = changed_plan(self.plan, given)
        if "actors" in given:
            self._check_actors(given["actors"], control)
        before, self.plan = self.plan, plan
        text = ", ".join(f"{key} {value_of(before.experiment, key)} -> {value_of(plan.experiment, key)}" for key in given)
        return _Change(letter, text, {key: value_of(plan.experiment, key) for key in given})

    def _change(self, before: Plan, changes: Sequence[_Change], control: Supervisor, session: RunSession) -> list[tuple[str, str]]:
        """Make these changes; returns the answers to their letters."""
        try:
            self.rundir.save_config(plan_to_json(self.plan, self.resumed))  # first: a run that dies now resumes with it
        except OSError as error:  # a full disk
            self.plan = before
            for change in changes:
                self.mailbox.reply(change.letter, error=f"{error.strerror or error}; nothing has changed: make room, and try again")
            return []
        values: dict[str, Any] = {}
        for change in changes:
            session.note_change(change.text, change.values)
            values.update(change.values)
        self._carry_out(values, control, session)
        return [(change.letter, change.text) for change in changes]

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
