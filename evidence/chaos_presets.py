"""Issue 15: random faults on every preset for half an hour; not one promise of docs/faults.md is broken.

    python -m evidence --only chaos-presets           thirty minutes, written to docs/results
    python -m evidence.chaos_presets --minutes 5      a shorter trial: printed, not written

A round is one run of one preset, and all presets take turns. When it learns, faults are drawn:

    kill     SIGKILL to a role, that of this preset which was killed least so far, or to the fork server
    stop     SIGSTOP to one of them: it hangs, and is replaced after --faults.hang-seconds (--faults.start-seconds while it starts)
    pause    SIGSTOP to the supervisor, and SIGCONT three seconds later (Ctrl-Z and fg)
    fill     the disk of the run is full for three seconds
    damage   bytes of the newest checkpoint are changed, and a role is killed, which may want to start from it

Then it must learn further, and is ended: by TERM, HUP, INT, two INT, or SIGKILL to the supervisor. Half of the time the newest
checkpoint or metrics.jsonl is damaged after that. `shoal resume` goes on from the newest whole checkpoint, and `shoal eval` plays
it. With --jobs 2 two rounds go on side by side.

Promises, fixed here before any result: every wait ends within its limit; exit code 130 (after SIGKILL: -9), and a summary; no
traceback; counters and versions never run backwards; slots are conserved; no process that was seen is left after ten seconds;
resume and eval exit with 0. What a round that broke one of them has written stays in a folder that is named in its result.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from evidence.chaos import FORK_SERVER, monotone
from evidence.demos import ENV as DEMOS_ENV
from evidence.demos import recorded
from evidence.lines import JOBS, ROOT, Line, side_by_side
from shoal.bench.suite import load_suite
from shoal.experiment.presets import load_preset
from shoal.experiment.rundir import RunDir
from shoal.telemetry.outputs import read_lines

__all__ = ["LINES"]

MINUTES, MOST_MINUTES = 30.0, 36.0  # at least; and until every preset has had its turn, but not longer than this
FAULTS = {"kill": 4, "stop": 1, "pause": 1, "fill": 1, "damage": 1}
EACH_ROUND = 4
ENDS = ("TERM", "HUP", "INT", "INT INT", "KILL")
START_SECONDS, LEARN_SECONDS, STOP_SECONDS, LEFT_SECONDS = 300.0, 240.0, 60.0, 10.0  # kernels of a new checkout are compiled first
DISK_MB, FULL_SECONDS, PAUSE_SECONDS = 256, 3.0, 3.0
MORE_STEPS = 600   # environment steps, or updates from a recording, of the resumed run
COMMON = ("--checkpoint.every-seconds", "2", "--faults.hang-seconds", "10", "--faults.start-seconds", "60",
          "--console.mode", "plain", "--no-tensorboard", "--device", "cpu", "--eval.episodes", "5")


FEW_ENVS = ("--architecture.envs-per-actor", "64")  # of presets that are made for a GPU
OPTIONS = {"anakin": FEW_ENVS, "anakin_throughput": FEW_ENVS, "impala_throughput": ("--actors", "1"),
           "ppo_throughput": ("--actors", "1"), "r2d3": ("--actors", "2", "--demos", "DEMOS")}
VARIANTS = (("a3c", "CartPole-v1", "--actors", "2", "--architecture.mode", "master"),
            ("impala", "CartPole-v1", "--actors", "2", "--learners", "2"),
            ("apex", "CartPole-v1", "--actors", "2", "--replay.checkpoint", "--replay.shards", "2"))


OFFLINE = tuple((preset, "DEMOS", "--env", DEMOS_ENV, "--max-learner-steps", "1000000") for preset in ("bc", "iql"))


def presets() -> list[tuple[str, ...]]:
    """Each preset that acts, with the environment that the learning suite has for it (the suite leaves none out); variants; and two
    that learn from a recording."""
    envs: dict[str, str] = {}
    for case in load_suite("learning").cases:
        if case.preset and not load_preset(case.preset).offline:
            envs.setdefault(case.preset, case.env)
    return [*((preset, env, *OPTIONS.get(preset, ("--actors", "2"))) for preset, env in envs.items()), *VARIANTS, *OFFLINE]


def reached(line: Line) -> set[tuple[str, ...]]:
    """What has had its turn in the last result of this line."""
    rounds = [one for run in line.known().get("runs", []) for one in run.get("all", [])]
    return {(*one["command"].split(), *one["options"]) for one in rounds}


class Broken(Exception):
    """A promise was not kept."""


@contextlib.contextmanager
def disk() -> Iterator[tuple[Path, bool]]:
    """A folder, and whether it is a small disk of its own."""
    with tempfile.TemporaryDirectory() as name:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", name]
        mounted = subprocess.run(command, capture_output=True, check=False)
        try:
            yield Path(name), mounted.returncode == 0
        finally:
            if mounted.returncode == 0:
                subprocess.run(["umount", "-l", name], check=False)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def checkpoint_files(run: Path) -> list[Path]:
    """Those of the newest checkpoint; the only one is spared."""
    folders = sorted((run / "checkpoints").glob("0*"))
    with contextlib.suppress(FileNotFoundError):  # it was the oldest meanwhile, and is gone
        return sorted(folders[-1].iterdir()) if len(folders) > 1 else []
    return []


def damage(files: list[Path], rng: random.Random) -> str:
    """Change some bytes of one of these files, or cut it off."""
    if not files:
        return "nothing"
    path = rng.choice(files)
    with contextlib.suppress(FileNotFoundError):
        data = bytearray(path.read_bytes())
        if rng.random() < 0.3:
            del data[len(data) // 2 :]
        else:
            for _ in range(min(4, len(data))):
                data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        path.write_bytes(data)
    return f"{path.parent.name}/{path.name}"


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def shoal_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli", *words]


ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}


@dataclass
class Round:
    """One run, what is done to it, and what came of it."""

    words: tuple[str, ...]
    seed: int
    folder: Path
    small_disk: bool
    killed: Counter[str]
    acts: list[str] = field(default_factory=list)
    seen: dict[int, float] = field(default_factory=dict)  # every process of the run: its pid and when it was created

    def __post_init__(self) -> None:
        self.rng, self.run = random.Random(self.seed), self.folder / "run"
        self.output = self.folder.parent / f"{self.folder.name}.log"  # not on the disk that is filled
        self.process = self._start("train", *self.words, *COMMON, "--seed", str(self.seed), "--run-dir", str(self.run))

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with self.output.open("wb") as output:
            return subprocess.Popen(shoal_command(*words), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                    env=ENVIRONMENT, cwd=ROOT, start_new_session=True,
                                    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # under nohup it is ignored

    # ------------------------------------------------------------------ looking
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in read_lines(self.run / "metrics.jsonl") if row["kind"] == "snapshot"] if self.run.exists() else []

    def latest(self, name: str) -> float:
        rows = self.rows()
        return float(rows[-1][name]) if rows else 0.0

    def processes(self) -> list[psutil.Process]:
        """All below the supervisor; whatever was seen once must be gone at the end."""
        found = []
        with contextlib.suppress(psutil.Error):
            for process in [(parent := psutil.Process(self.process.pid)), *parent.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    self.seen[process.pid] = process.create_time()
                    found.append(process)
        return found[1:]

    def roles(self) -> list[tuple[str, int]]:
        """Those that there are, and the fork server; none while it is alone: three deaths in a row while it starts end a run."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                name = " ".join(process.cmdline()).strip()
                guard = process.parent()  # of the fork server; what it has just forked has its name, and another parent
                forked = name == FORK_SERVER and (guard is None or guard.ppid() != self.process.pid)
                if name.startswith("shoal: ") and not forked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((name.removeprefix("shoal: "), process.pid))
        return sorted(found) if any(f"shoal: {name}" != FORK_SERVER for name, _ in found) else []

    def wait(self, condition: Callable[[], Any], seconds: float, what: str, ends: bool = False) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if not ends and self.process.poll() is not None:
                raise Broken(f"the run ended with exit code {self.process.returncode} before {what}")
            if time.monotonic() > deadline:
                raise Broken(f"{what}: not within {seconds:g} s")
            self.processes()
            time.sleep(0.1)

    def saved(self) -> int:
        """Environment steps, or updates from a recording, of the newest checkpoint. (After a
        full disk metrics.jsonl is given up, and says nothing more.)"""
        return max((int(path.name.partition("+")[0]) for path in (self.run / "checkpoints").glob("0*")), default=0)

    def learns(self) -> None:
        """Wait until it has acted, learned and saved further."""
        start = max(self.saved(), self.latest("env_steps"))
        self.wait(lambda: self.saved() > start, LEARN_SECONDS, f"a checkpoint beyond {start:g} environment steps")

    # ------------------------------------------------------------------ faults
    def victim(self) -> tuple[str, int]:
        found: list[tuple[str, int]] = []
        self.wait(lambda: found.extend(self.roles()) or found, START_SECONDS, "a role to kill")
        preset = self.words[0]
        fewest = min(self.killed[f"{preset}: {name}"] for name, _ in found)
        return self.rng.choice([role for role in found if self.killed[f"{preset}: {role[0]}"] == fewest])

    def kill(self) -> str:
        name, pid = self.victim()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.killed[f"{self.words[0]}: {name}"] += 1
        return name

    def stop(self) -> str:
        name, pid = self.victim()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        self.wait(lambda: gone(pid), STOP_SECONDS + 60, f"the stopped {name} to be replaced")
        return name

    def pause(self) -> str:
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE_SECONDS)
        self.process.send_signal(signal.SIGCONT)
        return ""

    def fill(self) -> str:
        if not self.small_disk:
            return "no disk of its own"
        filler = self.folder / "filler"
        fill(filler)
        time.sleep(FULL_SECONDS)
        filler.unlink()
        return ""

    def damage(self) -> str:
        return f"{damage(checkpoint_files(self.run), self.rng)}, {self.kill()}"

    def do(self) -> None:
        self.wait(lambda: self.latest("learner_steps") > 0, START_SECONDS, "the first update")
        for fault in self.rng.choices(list(FAULTS), list(FAULTS.values()), k=EACH_ROUND):
            self.acts.append(fault)  # before it is done: it may be what breaks
            self.acts[-1] = f"{fault} {getattr(self, fault)()}".strip()
            time.sleep(self.rng.uniform(0.2, 2.0))
        self.learns()

    # ------------------------------------------------------------------ the end
    def end(self) -> None:
        kind = self.rng.choice(ENDS)
        self.acts.append(f"end {kind}")
        self.processes()
        for number, name in enumerate(kind.split()):
            time.sleep(0.3 * number)
            self.process.send_signal(getattr(signal, f"SIG{name}"))
        self.wait(lambda: self.process.poll() is not None, STOP_SECONDS, f"the end after {kind}", ends=True)
        wanted = -signal.SIGKILL if kind == "KILL" else 130
        if self.process.returncode != wanted:
            raise Broken(f"exit code {self.process.returncode} after {kind}, not {wanted}")
        if "Traceback" in self.said():
            raise Broken("a traceback was printed")
        self.check_left()
        if backwards := monotone(self.rows()):
            raise Broken(f"ran backwards: {', '.join(backwards)}")
        if kind in ("KILL", "INT INT"):
            return
        summary = json.loads((self.run / "summary.json").read_text())
        if summary["stopped_by"] != "interrupt" or not summary["slots"]["conserved"]:
            raise Broken(f"stopped by {summary['stopped_by']}, slots {summary['slots']}")

    def left(self) -> list[psutil.Process]:
        """Processes of the run that still live."""
        found = []
        for pid, created in self.seen.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def check_left(self) -> None:
        try:
            self.wait(lambda: not self.left(), LEFT_SECONDS, "the end of all its processes", ends=True)
        except Broken as error:
            names = []
            for process in self.left():
                with contextlib.suppress(psutil.Error):
                    names.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
            raise Broken(f"{error}: {names}") from None

    def again(self) -> None:
        """Resume and play it."""
        if self.rng.random() < 0.5:
            files = checkpoint_files(self.run) if self.rng.random() < 0.7 else [self.run / "metrics.jsonl"]
            self.acts.append(f"damage {damage(files, self.rng)}")
        goal = "--max-learner-steps" if "--max-learner-steps" in self.words else "--max-env-steps"
        counter = goal.removeprefix("--max-").replace("-", "_")
        before = max(self.saved(), self.latest("env_steps"), RunDir(self.run).summary().get(counter, 0))
        more = [goal, str(int(before) + MORE_STEPS), "--console.mode", "plain"]
        for words in (("resume", str(self.run), *more), ("eval", str(self.run), "--episodes", "2")):
            self.process = self._start(*words)
            self.wait(lambda: self.process.poll() is not None, START_SECONDS + LEARN_SECONDS, f"the end of {words[0]}", ends=True)
            if self.process.returncode or "Traceback" in self.said():
                raise Broken(f"{words[0]}: exit code {self.process.returncode}")
        self.check_left()

    def keep(self) -> Path:
        """Copy what the run has written to a folder that stays, with the stacks of what is still alive."""
        kept = Path(tempfile.mkdtemp(prefix=f"shoal-chaos-{self.words[0]}-"))
        shutil.copytree(self.run, kept / "run", dirs_exist_ok=True, ignore_dangling_symlinks=True)
        shutil.copy(self.output, kept / "output.log")
        with (kept / "processes.txt").open("w") as file:
            for process in [psutil.Process(), *self.processes()]:
                with contextlib.suppress(psutil.Error):
                    file.write(f"{process.pid} {process.ppid()} {process.status()} {' '.join(process.cmdline())}\n")
        return kept

    def close(self) -> None:
        self.processes()
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def one_round(words: tuple[str, ...], seed: int, killed: Counter[str]) -> dict[str, Any]:
    begun = time.monotonic()
    with disk() as (folder, small), tempfile.TemporaryDirectory() as demos:
        if "DEMOS" in words:
            recorded(demos, seed)
        here = Round(tuple(f"{demos}/demos" if word == "DEMOS" else word for word in words), seed, folder, small, killed)
        broken = ""
        try:
            here.do()
            here.end()
            here.again()
        except Exception as error:  # one that is not Broken is a fault of this script: the round counts as broken, the others go on
            what = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
            broken = f"{what}; it said: {here.said()[-1500:]}; kept in {here.keep()}".replace(f"{folder}/", "")
        finally:
            here.close()
            here.output.unlink(missing_ok=True)
    return {"command": " ".join(words[:2]), "options": words[2:], "seed": seed, "acts": here.acts, "broken": broken,
            "seconds": round(time.monotonic() - begun, 1)}


def rounds(minutes: float, seed: int, only: str = "", most_minutes: float = 0.0) -> dict[str, Any]:
    """Rounds until the time is over and, where that does not take too long, every preset has had its turn. Those that had none in
    the result before come first."""
    rng, killed, begun = random.Random(seed), Counter[str](), time.monotonic()
    chosen = [words for words in presets() if only in " ".join(words)]
    rng.shuffle(chosen)
    chosen.sort(key=reached(LINES[0]).__contains__)
    done: list[dict[str, Any]] = []

    def turns() -> Iterator[tuple[tuple[str, ...], int]]:
        for number, words in enumerate(itertools.cycle(chosen)):
            elapsed = (time.monotonic() - begun) / 60
            if elapsed > minutes and (number >= len(chosen) or elapsed > most_minutes):
                return
            yield words, 1000 * seed + number

    waiting, taking = turns(), threading.Lock()

    def work(_: int) -> None:
        while True:
            with taking:
                turn = next(waiting, None)
            if turn is None:
                return
            done.append(one_round(*turn, killed))
            print(json.dumps(done[-1]), flush=True)

    side_by_side(work, range(int(os.environ.get(JOBS, "1"))))
    acts = Counter(act.split()[0] if not act.startswith("end") else act for one in done for act in one["acts"])
    broken = [one for one in done if one["broken"]]
    return {"met": not broken, "minutes": round((time.monotonic() - begun) / 60, 1), "rounds": len(done),
            "presets": len({one["command"].split()[0] for one in done}), "acts": dict(sorted(acts.items())),
            "killed": dict(sorted(killed.items())), "broken": broken, "all": done}


LINES = [
    Line("chaos-presets", 15, f"{MINUTES:g} minutes of kill, stop, full disk, damaged checkpoints, TERM, HUP, INT, INT twice and "
         "SIGKILL of the supervisor, at random on every preset and every role: no promise is broken",
         lambda seed: rounds(MINUTES, seed, most_minutes=MOST_MINUTES), seeds=(0,)),
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evidence.chaos_presets", description="A trial; nothing is written.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="presets whose command contains this")
    options = parser.parse_args()
    found = rounds(options.minutes, options.seed, options.only)
    print(json.dumps({key: value for key, value in found.items() if key != "all"}, indent=1))


if __name__ == "__main__":
    main()
