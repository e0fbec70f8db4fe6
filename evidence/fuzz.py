"""Issue 15: 5,000 mutated run directories and 500 command lines by a generator. No traceback, no hang, no growth.

Cases run in processes of their own, 250 in each, through the function behind the `shoal` command: a case that ends the process,
takes longer than a minute (two, in a run), raises, or prints a traceback is a finding. What a process holds in memory is measured
after a quarter of its cases (libraries are loaded by then) and at its end. A case follows from its number:
`python -m evidence.fuzz runs 172` repeats one.
Messages and replay checkpoints are fuzzed by `replay-fuzz` (evidence/replay_kills.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evidence.lines import ROOT, Line

__all__ = ["LINES"]

RUNS, COMMANDS, TOGETHER = 5000, 500, 250
CASE_SECONDS = 60.0
KEPT = "SHOAL_FUZZ_FOLDER"
GROWTH_MB = 150.0  # of a process over its last three quarters
DEEP = "[" * 5000 + "]" * 5000
ODD: list[Any] = [[], {}, "x", None, -1, 0, 1, 2, 1e300, -1e300, True, False, ["a", 3], {"name": 3}, "?x", "no.such:Thing",
                  float("nan"), float("inf"), 2**31, 2**63, 2**70, 10**26, "", "\x00", "é" * 50, "/", "..", [[[]]], [None],
                  "os:system", 0.5]


class Hang(BaseException):
    """A case took too long."""


def ring(number: int, frame: Any) -> None:
    raise Hang


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def judge(words: list[str], seconds: float = CASE_SECONDS) -> dict[str, Any]:
    """One command line: its exit code, and what is wrong with how it ended."""
    from shoal import cli

    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    begun, code, wrong = time.monotonic(), 0, ""
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    faulthandler.dump_traceback_later(2 * seconds, exit=True)  # where the command has a use for that signal itself
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(words)
    except SystemExit as ended:  # of an argument parser
        code = ended.code if isinstance(ended.code, int) else 1
    except Hang:
        wrong = f"longer than {seconds:g} s"
    except BaseException:
        wrong = traceback.format_exc()[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = err.getvalue() + out.getvalue()
    if not wrong and "Traceback" in said:
        wrong = said[-1500:]
    if not wrong and code not in (0, 1, 2, 3):
        wrong = f"exit code {code}"
    if not wrong and code and not said.strip():
        wrong = f"exit code {code} without a word"
    return {"words": words, "code": code, "seconds": round(time.monotonic() - begun, 2), "wrong": wrong}


# ---------------------------------------------------------------------------------------------- run directories
TEMPLATES = {"a2c": 5, "dqn": 5, "sac": 2, "bc": 2, "es": 2, "league": 2, "study": 2}  # how often each is taken
BY_UPDATES = ("bc", "es")  # their goal is a number of updates


def train_templates(folder: Path) -> None:
    """Runs to be damaged: an actor-critic, one with a replay table in its checkpoints, several phases, a recording, es, a league;
    and a study. Each has two checkpoints at least."""
    import shoal

    small: dict[str, Any] = {"console": {"mode": "none"}, "tensorboard": False, "net": {"hidden": (4,)}, "runtime": "inline",
                             "eval": {"episodes": 2, "every_env_steps": 64}}
    acting: dict[str, Any] = {**small, "actors": 1, "architecture": {"envs_per_actor": 2}}
    table = {"replay": {"checkpoint": True, "capacity": 200, "min_size": 20}}
    league = {"league": {"least_steps": 32, "most_steps": 64, "league_exploiters": 0}}
    for preset, env, more in (("a2c", "CartPole-v1", acting), ("dqn", "CartPole-v1", {**acting, **table}),
                              ("sac", "Pendulum-v1", {**acting, **table}),
                              ("league", "shoal/RockPaperScissors-v0", {**acting, **league})):
        shoal.train(preset, env, run_dir=str(folder / preset), max_env_steps=200, **more)
        shoal.resume(folder / preset, max_env_steps=300)
    demos = folder / "demos"
    for words in (["data", "record", "random", "CartPole-v1", "--episodes", "5", "--out", str(demos)],
                  ["tune", "a2c", "CartPole-v1", "--population", "2", "--vary", "algorithm.lr=loguniform(1e-4,1e-2)",
                   "--every-env-steps", "200", "--max-env-steps", "400", "--study", str(folder / "study"), "--net.hidden", "4",
                   "--actors", "1", "--architecture.envs-per-actor", "2", "--eval.episodes", "2", "--no-tensorboard"]):
        if judge(words, 10 * CASE_SECONDS)["code"]:
            raise RuntimeError(f"no template: shoal {' '.join(words)}")
    shoal.train("bc", data=str(demos), env="CartPole-v1", run_dir=str(folder / "bc"), max_learner_steps=2, **small)
    few = {"actors": 1, "algorithm": {"population": 4}}
    shoal.train("es", "CartPole-v1", run_dir=str(folder / "es"), max_learner_steps=2, **few, **small)
    for preset in BY_UPDATES:
        shoal.resume(folder / preset, max_learner_steps=8)


def inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    for at, inner in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
        yield value, at
        if isinstance(inner, (list, dict)):
            yield from inside(inner)


def mutate_json(text: str, rng: random.Random) -> str:
    """One to three mistakes in the values."""
    value = json.loads(text)
    for _ in range(rng.choice([1, 1, 2, 3])):
        spots = list(inside(value))
        if not spots:
            break
        where, at = rng.choice(spots)
        if isinstance(where, dict) and (kind := rng.random()) < 0.3:
            inner = where.pop(at)
            if kind < 0.1:
                where[rng.choice(["", "\x00", "x", "../x", "é" * 50, "0"])] = inner
        else:
            where[at] = rng.choice(ODD)
    return json.dumps(value)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, doubled, emptied or replaced."""
    kind = rng.randrange(7)
    found = bytearray(data)
    if kind == 0 or not found:
        return rng.choice([b"", b"\xff\xfe{}", DEEP.encode(), b"[]", b"3", bytes(400), b"{", rng.randbytes(100)])
    at = rng.randrange(len(found)) if rng.random() < 0.6 else rng.randrange(min(300, len(found)))  # headers stand at the beginning
    if kind in (1, 2, 3):
        for _ in range(rng.choice([1, 1, 4, 16])):
            spot = min(len(found) - 1, at + rng.randrange(16))
            found[spot] ^= rng.randrange(1, 256)
    elif kind == 4:
        del found[at:]
    elif kind == 5:
        found[at:at] = found[at : at + rng.randrange(1, 2000)]
    else:
        found[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7])
    return bytes(found)


def mutate_run(run: Path, rng: random.Random) -> None:
    """One to three files are changed, removed or replaced; half of the time checksums are made right again."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    for path in rng.sample(files, rng.choice([1, 1, 2, 3])):
        kind = rng.random()
        if kind < 0.05:
            path.unlink()
        elif kind < 0.08:
            path.unlink()
            path.mkdir()
        elif kind < 0.1:
            path.unlink()
            path.symlink_to(path.name)
        elif path.suffix == ".json" and kind < 0.6:
            path.write_text(mutate_json(path.read_text(), rng))
        elif path.suffix == ".jsonl" and kind < 0.6:
            lines = path.read_text().splitlines()
            at = rng.randrange(len(lines))
            lines[at] = mutate_json(lines[at], rng)
            path.write_text("\n".join(lines) + "\n")
        else:
            path.write_bytes(mutate_bytes(path.read_bytes(), rng))
    if rng.random() < 0.5:
        for folder in run.rglob("checkpoints/*"):
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
                seal(folder)


def seal(folder: Path) -> None:
    """Sizes and checksums that fit what is there."""
    meta = json.loads((folder / "checkpoint.json").read_text())
    meta.pop("seal", None)
    paths = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    meta["files"] = {path.name: path.stat().st_size for path in paths}
    meta["sha256"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    meta["seal"] = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps(meta))


def run_commands(template: str, run: Path) -> tuple[list[list[str]], list[int]]:
    """Commands for a directory of this kind, and how often each is taken."""
    more = ["--max-env-steps", "340", "--max-seconds", "1000000", "--runtime", "inline", "--console.mode", "none"]
    if template == "study":
        member = str(run / "members" / "00")
        return [["tune", "show", str(run)], ["tune", "resume", str(run)], ["eval", member, "--episodes", "1"]], [6, 1, 2]
    found = [["eval", str(run), "--episodes", "1"],
             ["resume", str(run), *(["--max-learner-steps", "14", *more[2:]] if template in BY_UPDATES else more)],
             ["runs", str(run.parent)], ["play", str(run), "--episodes", "1"], ["set", str(run)],
             ["set", str(run), "checkpoint.every_seconds=7"], ["stop", str(run)], ["watch", str(run), "--mode", "plain"],
             ["watch", str(run), "--mode", "live"], ["plot", str(run), "--out", f"{run}.svg"], ["clean", str(run), "--yes"],
             ["league", str(run)]]
    return found, [8, 8, 2, 2, 1, 1, 1, 1, 1, 1, 1, 4 if template == "league" else 1]


def try_run(case: int, folder: Path) -> dict[str, Any]:
    """One mutated run directory, or study, under one command."""
    rng = random.Random(f"run {case}")
    run = folder / "case" / "run"
    shutil.rmtree(run.parent, ignore_errors=True)
    template = rng.choices(list(TEMPLATES), list(TEMPLATES.values()))[0]
    shutil.copytree(folder / template, run)
    mutate_run(run, rng)
    return {"case": case, "template": template, **judge(rng.choices(*run_commands(template, run))[0])}


# ---------------------------------------------------------------------------------------------- command lines
PRESETS = ("impala", "ppo", "a2c", "a3c", "dqn", "apex", "r2d2", "seed", "gala", "gorila", "ga3c", "r2d3", "anakin", "sac", "es",
           "league", "qtopt", "td3", "curl", "rainbow", "iql", "bc", "", "IMPALA")
ENVS = ("CartPole-v1", "shoal/Catch-v0", "Pendulum-v1", "shoal/TMaze-v0", "shoal/TicTacToe-v0", "shoal/PixelCatch-v0", "NoSuch-v0",
        "os:getcwd", "cartpole", "", "-1",
        "CartPole-v1/..")
VALUES = ("0", "1", "2", "-1", "3", "0.5", "-0.0", "nan", "inf", "1e300", "1000000000", "99999999999999999999999999", "", " ", "x",
          "auto", "none", "None", "true", "True", "[1,2]", "4 4", "/", "/dev/null", "../..", "\x00", "é", "-", "--", "=", "a=b",
          "os:system", "{}")
GARBAGE = ("--", "-x", "--help", "-h", "--=3", "--no-such 3", "--actors", "--actors=", "--seed=--seed", "--net.hidden",
           "--algorithm", "--learning_rate", "--total_timesteps=100", "--n_steps=3", "--batch-size=9", "--no-eval.enabled",
           "--no-no", "-1", "\x01")
OTHERS = (
    ("list",), ("runs",), ("show",), ("doctor", "--env"), ("eval",), ("resume",), ("play",), ("replay", "info"), ("replay", "keys"),
    ("replay", "serve", "--table"), ("replay",), ("data", "info"), ("data", "record"), ("data",), ("bench", "compare"),
    ("bench", "nosuch"), ("plan",), ("nosuch",), ("trian",), ("--version",), ("help",), ("data", "check"), ("data", "convert"),
    ("set",), ("set", ".", "actors"), ("stop",), ("pause",), ("unpause",), ("checkpoint",), ("league",), ("tune", "show"),
    ("tune", "resume"), ("tune",), ("calibrate", "NoSuch-v0"), ("calibrate", "CartPole-v1", "ppo", "--no-such"),
)
RANGES = ("uniform(0,1)", "loguniform(1e-4,1e-2)", "loguniform(0,1)", "choice(1,2)", "choice()", "uniform(2,1)", "normal(0,1)", "3",
          "uniform(nan,1)", "__import__('os')", "", "(", "choice(4,8)")
LIMITS = ("--max-env-steps", "60", "--max-seconds", "5", "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "1")


@functools.cache
def fields() -> list[str]:
    """All flags of `shoal train`, by the names in its sections."""
    from shoal.experiment.parse import parse_train
    from shoal.experiment.values import keys

    found: list[str] = []
    for preset in ("impala", "apex", "gala", "seed", "sac", "es", "league"):
        env = "shoal/TicTacToe-v0" if preset == "league" else "CartPole-v1"
        found += keys(parse_train([preset, env]).experiment)
    return sorted({f"--{name.replace('_', '-')}" for name in found})


def command_line(rng: random.Random, flags: list[str]) -> list[str]:
    """What a user might type, with mistakes."""
    if rng.random() < 0.1:
        return tune_line(rng, flags)
    if rng.random() < 0.35:
        words = [*rng.choice(OTHERS), *rng.choices([*VALUES, *ENVS, *PRESETS], k=rng.randrange(3))]
        return [*words, *rng.choices(GARBAGE, k=rng.randrange(2))]
    words = ["train", rng.choice(PRESETS), rng.choice(ENVS[:6]) if rng.random() < 0.8 else rng.choice(ENVS)]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        flag = rng.choice(flags)
        words += [flag, rng.choice(VALUES)] if rng.random() < 0.8 else [f"{flag}={rng.choice(VALUES)}"]
    if rng.random() < 0.3:
        words.insert(rng.randrange(1, len(words) + 1), rng.choice(GARBAGE))
    if rng.random() < 0.1:
        del words[rng.randrange(1, len(words))]
    runtime = rng.choice(["inline", "inline", "inline", "local"])
    return [*words, *LIMITS, "--runtime", runtime, "--actors", rng.choice("112"), "--run-dir", "run"]


def tune_line(rng: random.Random, flags: list[str]) -> list[str]:
    """A study with mistakes; whole ones take several starts, so few have none."""
    name = rng.choice([rng.choice(flags).removeprefix("--"), "algorithm.lr", "net.hidden", "nosuch", ""])
    words = ["tune", rng.choice(PRESETS), rng.choice(ENVS), "--vary", f"{name}={rng.choice(RANGES)}", "--population",
             rng.choice(["1", "2", *VALUES]), "--every-env-steps", rng.choice(["30", *VALUES]), "--max-env-steps", "60"]
    if rng.random() < 0.5:
        flag = rng.choice(["--exploit", "--resample", "--workers", "--seed", "--until-return", rng.choice(flags)])
        words += [flag, rng.choice(VALUES)]
    return [*words, "--study", "study", "--actors", "1", "--eval.episodes", "1", "--no-tensorboard"]


def try_command(case: int, folder: Path) -> dict[str, Any]:
    rng = random.Random(f"command {case}")
    shutil.rmtree(folder / "case", ignore_errors=True)
    (folder / "case").mkdir()
    os.chdir(folder / "case")
    return {"case": case, **judge(command_line(rng, fields()))}


# ---------------------------------------------------------------------------------------------- processes
KINDS: dict[str, Callable[[int, Path], dict[str, Any]]] = {"runs": try_run, "commands": try_command}


def some(kind: str, first: int, count: int, folder: Path, out: Path) -> None:
    """Try cases one after another; a line of JSON for each, so that one which ends the process is known too."""
    with out.open("a") as file:
        for case in range(first, first + count):
            file.write(json.dumps({"begun": case}) + "\n")
            file.flush()
            done = KINDS[kind](case, folder)
            if case - first in (count // 4, count - 1):  # where growth is measured: what a collection frees has not grown
                gc.collect()
            file.write(json.dumps({**done, "resident_mb": round(resident_mb(), 1)}) + "\n")
            file.flush()


def plain(text: str, folder: Path) -> str:
    """Without the places of files on this machine."""
    return text.replace(f"{ROOT}/", "").replace(f"{folder}/", "")


def fuzz(kind: str, total: int, first: int = 0) -> dict[str, Any]:
    """All cases, in processes of TOGETHER cases. In a folder that is kept (KEPT) one that was cut short goes on where it was."""
    rows: list[dict[str, Any]] = []
    ended: list[str] = []
    growth: list[float] = []
    kept = os.environ.get(KEPT)
    with contextlib.nullcontext(kept) if kept else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "runs" and not (folder / "ready").exists():
            words = [sys.executable, "-m", "evidence.fuzz", "templates", str(folder)]
            subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
            (folder / "ready").touch()
        for start in range(first, first + total, TOGETHER):
            count, out = min(TOGETHER, first + total - start), folder / f"{start}.jsonl"
            words = [sys.executable, "-m", "evidence.fuzz", kind, str(start), str(count), str(folder), str(out)]
            if (note := out.with_suffix(".ended")).exists():
                code, said = note.read_text().split("\n", 1)
            else:
                out.unlink(missing_ok=True)
                done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True,
                                      env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"})
                code, said = str(done.returncode), done.stderr
                note.write_text(f"{code}\n{said}")
            lines = [json.loads(line) for line in plain(out.read_text(), folder).splitlines()]
            mine = [line for line in lines if "code" in line]
            rows += mine
            if code != "0":
                ended.append(f"case {lines[-1].get('begun')}: the process ended with {code}: {plain(said, folder)[-500:]}")
            if len(mine) == count >= TOGETHER:
                growth.append(round(mine[-1]["resident_mb"] - mine[count // 4]["resident_mb"], 1))
    wrong = [row for row in rows if row["wrong"]]
    return {"met": len(rows) == total and not wrong and not ended and max(growth, default=0.0) < GROWTH_MB, "cases": len(rows),
            "exit_codes": dict(sorted(Counter(str(row["code"]) for row in rows).items())), "findings": wrong[:50],
            "found": len(wrong), "ended": ended, "growth_mb": growth,
            "case_seconds": round(sum(row["seconds"] for row in rows), 1),
            "longest_seconds": max((row["seconds"] for row in rows), default=0.0)}


LINES = [
    Line("fuzz-runs", 15, f"{RUNS:,} mutated run directories and studies (configuration, summary, metrics, checkpoints, replay "
         "tables in them, a league's vault) under eval, resume, runs, play, set, stop, league and tune: no traceback, no hang, "
         "no growth",
         lambda seed: fuzz("runs", RUNS, seed * RUNS), seeds=(0,)),
    Line("fuzz-commands", 15, f"{COMMANDS} command lines by a generator: no traceback, no hang, no growth",
         lambda seed: fuzz("commands", COMMANDS, seed * COMMANDS), seeds=(0,)),
]


def main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "templates":
        train_templates(Path(rest[0]))
    elif len(rest) == 1:
        print(json.dumps(fuzz(kind, 1, int(rest[0])), indent=1))
    elif len(rest) == 2:
        print(json.dumps(fuzz(kind, int(rest[1]), int(rest[0])), indent=1))
    else:
        some(kind, int(rest[0]), int(rest[1]), Path(rest[2]), Path(rest[3]))


if __name__ == "__main__":
    main()
