"""What the user sees while it runs: a small live table on a terminal, plain lines every few seconds anywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

__all__ = ["Live", "Plain", "console", "counted", "progress"]

PLAIN_WIDTH = 30  # of a plain line, for the algorithm's metrics: two of them
FRAME_WIDTH = 20  # of the live table: its border, its names, and the space between
LEARNING_LINES = 2


def console(mode: str, stream: IO[str], title: str, goals: Mapping[str, Any],
            every_seconds: float) -> Live | Plain | None:
    """The output for a mode: live | plain | none, or auto (live on a terminal, plain otherwise)."""
    if mode == "none":
        return None
    if mode == "live" or (mode == "auto" and stream.isatty()):
        return Live(stream, title, goals)
    return Plain(stream, title, goals, every_seconds)


def progress(shot: Mapping[str, Any], goals: Mapping[str, Any]) -> tuple[float, str]:
    """How far towards the stop condition that will come first, from 0 to 1, and in words."""
    best, words = 0.0, ""
    seconds, wanted = goals.get("max_seconds"), goals.get("until_return")
    for name, what in (("env_steps", "env steps"), ("learner_steps", "updates")):
        steps = goals.get(f"max_{name}")
        if steps and shot[name] / steps >= best:
            best, words = shot[name] / steps, f"{shot[name]:,} of {steps:,} {what}"
    if seconds and shot["seconds"] / seconds >= best:
        best, words = shot["seconds"] / seconds, f"{shot['seconds']:.0f} of {seconds:g} s"
    if wanted is not None:
        best_so_far = shot["best_return"]
        words = f"evaluation {number(best_so_far)} of {wanted:g}" + (f"; {words}" if words else "")
        lowest = shot["lowest_return"]
        if math.isfinite(best_so_far) and wanted > lowest:
            best = max(best, (best_so_far - lowest) / (wanted - lowest))
    if goals.get("until"):
        words = f"until {goals['until']}" + (f"; {words}" if words else "")
    return min(1.0, max(0.0, best)), words or "no stop condition: Ctrl-C stops the run"


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def counted(number: Any, what: str) -> str:
    """1 actor, 2 actors."""
    return f"{f'{number:,}' if isinstance(number, int) else number} {what}{'s' * (number != 1)}"


def percent(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.0f} %"


def cluster(shot: Mapping[str, Any]) -> str:
    """For a run on several nodes: how many, what their object stores hold, what goes from process to process."""
    if "nodes" not in shot:
        return ""
    return (f"{shot['nodes']:.0f} node{'s' * (shot['nodes'] != 1)}   object store {number(shot['object_store_mb'])} MB   "
            f"{number(shot['carried_mb_per_second'])} MB/s in {number(shot['calls_per_second'], 0)} calls/s")


def learning(shot: Mapping[str, Any], width: int, lines: int = 1) -> str:
    """The algorithm's own metrics, in the order in which it declares them: as many as fit into `lines` of `width`."""
    shown = [""]
    for name, value in shot["losses"].items():
        if not math.isfinite(value):
            continue
        word = f"{name} {value:.3g}"
        if shown[-1] and len(shown[-1]) + 3 + len(word) > width:
            if len(shown) == lines:
                break
            shown.append("")
        shown[-1] += f"   {word}" if shown[-1] else word
    return "\n".join(shown)


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class Plain:
    """One line every `every_seconds`, one line per event."""

    def __init__(self, stream: IO[str], title: str, goals: Mapping[str, Any], every_seconds: float) -> None:
        self._stream, self._goals, self._every, self._next = stream, goals, every_seconds, 0.0
        self._line(title)

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def write(self, shot: Mapping[str, Any]) -> None:
        name, what = ("env_steps", "env steps") if shot["env_steps"] else ("learner_steps", "updates")
        begun = math.isfinite(shot[f"{name}_per_second"])  # a rate needs two readings after the first step
        if not shot[name] or ((time.monotonic() < self._next or not begun) and not shot.get("last")):
            return
        self._next = time.monotonic() + self._every
        evaluating = f"evaluating {shot['evaluating']}" if shot["evaluating"] else ""
        if evaluating and not shot["training"]:
            self._line(f"{clock(shot['seconds']):>7}  {evaluating}")
            return
        learned = learning(shot, PLAIN_WIDTH)
        words = [f"{clock(shot['seconds']):>7}", f"{shot[name]:>11,} {what} ({number(shot[f'{name}_per_second'], 0)}/s)",
                 epochs(shot),
                 f"return {number(shot['train_return'])}", f"eval {number(shot['eval_return'])}", evaluating,
                 f"learner idle {percent(shot['learner_idle'])}", f"lag {number(shot['policy_lag']['mean'])}", learned,
                 cluster(shot)]
        self._line(f"{'  '.join(word for word in words if word)}  | {shot['verdict']}")

    def event(self, event: Mapping[str, Any]) -> None:
        self._line(event_line(event))

    def close(self) -> None:
        """The stream is not ours."""


def epochs(shot: Mapping[str, Any]) -> str:
    """How often a recording was read; empty where nobody reads one."""
    return f"{shot['epochs']:.2f} epochs" if shot.get("epochs", 0.0) > 0 else ""


def event_line(event: Mapping[str, Any]) -> str:
    role = f"{event['role']}: " if event.get("role") else ""
    return f"  * {event.get('kind', 'note')}: {role}{event.get('text', '')}"


class Live:
    """A table that redraws itself in place."""

    def __init__(self, stream: IO[str], title: str, goals: Mapping[str, Any]) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._title, self._goals = title, goals
        self._events: deque[str] = deque(maxlen=3)
        self._shot: Mapping[str, Any] | None = None
        self._screen = Console(file=stream)
        self._live = RichLive(console=self._screen, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()
        self._draw()

    def write(self, shot: Mapping[str, Any]) -> None:
        self._shot = shot
        self._draw()

    def event(self, event: Mapping[str, Any]) -> None:
        self._events.append(event_line(event).strip(" *"))
        self._draw()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for name, value in self._rows():
            table.add_row(name, value)
        self._live.update(Panel(table, title=self._title, title_align="left", border_style="cyan"), refresh=True)

    def _rows(self) -> list[tuple[str, Any]]:
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        shot = self._shot
        if shot is None:
            return [("starting", "environments, networks, processes")]
        share, words = progress(shot, self._goals)
        lag, age = shot["policy_lag"], shot["data_age_seconds"]
        evaluated = f"   evaluation {number(shot['eval_return'])}" if math.isfinite(shot["eval_return"]) else ""
        rows: list[tuple[str, Any]] = [
            ("return", Text(f"{number(shot['train_return'])} while training{evaluated}", style="bold")),
            ("env steps", f"{shot['env_steps']:,}   {number(shot['env_steps_per_second'], 0)}/s"),
            ("learner", f"{shot['learner_steps']:,} updates   {number(shot['learner_steps_per_second'])}/s   {epochs(shot)}   "
                        f"idle {percent(shot['learner_idle'])}"),
            ("policy lag", f"{number(lag['mean'])} mean   {number(lag['p95'], 0)} p95   {number(lag['max'], 0)} max   "
                           f"data age {number(age['mean'], 3)} s"),
            ("time", f"{clock(shot['seconds'])}   {words}"),
            ("progress", ProgressBar(total=1.0, completed=share, width=40)),
            ("verdict", Text(shot["verdict"], style="yellow")),
        ]
        if shot["evaluating"]:
            rows.insert(1, ("evaluating", shot["evaluating"]))
        if learned := learning(shot, self._screen.width - FRAME_WIDTH, LEARNING_LINES):
            rows.insert(-4, ("learning", learned))
        if words := cluster(shot):
            rows.insert(-1, ("cluster", words))
        rows += [("", Text(line, style="dim")) for line in self._events]
        return rows
