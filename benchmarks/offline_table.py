"""A table like D4RL's, made here: what bc, td3_bc, cql and iql make of what our own sac did in Hopper-v5.

    python -m benchmarks.offline_table record FOLDER [--goal 1200] [--seconds 240] [--device cuda]
    python -m benchmarks.offline_table train FOLDER --out FILE.json [--jobs 24] [--updates 100000] [--seconds 480] [--gpu cql]

`record` trains sac until its policy has this return or the time is over, and writes medium-replay (all that the run did until
then) and medium (as many decisions of that policy, with its noise). `train` makes a run of each preset, recording and seed, as
many at a time as --jobs says; presets that --gpu names compute there, the others on one core each. Many small runs share a GPU well
only through MPS (nvidia-cuda-mps-control -d), without which they take turns on it. Every run is evaluated ten times, over ten
episodes; scores are those of the last evaluation, as a share of the way from a random policy to an expert: 100 (return - RANDOM) /
(EXPERT - RANDOM). Runs that had to stop after --seconds say how many updates they made. Progress goes to stderr; all runs with
their curves to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_sac import BATCH, HIDDEN, LAYOUTS, option_words
from evidence.lines import commit, machine
from evidence.recorded_runs import LOGS
from shoal.bench.rates import snapshots, tail
from shoal.offline import open_demos
from shoal.runtime.fork_server import PR_SET_PDEATHSIG, prctl

__all__ = ["main"]

ENV, SOURCE = "Hopper-v5", "evidence.recorded_runs:hopper"
PRESETS = ("cql", "iql", "td3_bc", "bc")  # the slowest first
DATA = ("medium-replay", "medium")
RANDOM, EXPERT = -20.272305, 3234.3  # returns of Hopper between which D4RL normalises
START = 5_000          # random steps of sac
EVALUATIONS = 10
MORE = {"cql": ("--algorithm.alpha", "5"), "bc": (), "td3_bc": (), "iql": ()}
QUIET = ("--console.mode", "none", "--no-tensorboard")


def say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def shoal(*words: str, timeout: float | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """The command; it ends with this process."""
    return subprocess.run([sys.executable, "-m", "shoal.cli", *words], capture_output=True, text=True, check=False, timeout=timeout,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **more},
                          preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM))


def command(*words: str, **more: str) -> str:
    done = shoal(*words, **more)
    if done.returncode:
        raise SystemExit(f"shoal {' '.join(words)} failed: {tail(done.stderr or done.stdout, 8)}")
    return done.stdout


# ---------------------------------------------------------------------------------------------- recordings
def record(folder: Path, options: argparse.Namespace) -> None:
    """Until the goal is reached, or the time is over."""
    run, replay = str(folder / "sac"), str(folder / DATA[0])
    values = {"net.hidden": HIDDEN, "replay.batch_size": BATCH, "replay.samples_per_insert": float(BATCH),
              "replay.min_size": START, "algorithm.random_steps": START, "eval.every_env_steps": 5_000, "eval.episodes": 10}
    words = [word for name, value in values.items() for word in option_words(name, value)]
    command("train", LAYOUTS["apart"], SOURCE, "--run-dir", run, "--device", options.device, "--until-return", f"{options.goal:g}",
            "--max-seconds", f"{options.seconds:g}", "--seed", "1", *words, *QUIET, **{LOGS: replay})
    summary = json.loads(Path(run, "summary.json").read_text())
    decisions = open_demos(replay).info.steps
    say(f"sac: return {summary['eval_return']} after {summary['env_steps']:,} env steps and {summary['seconds']:.0f} s; "
        f"{decisions:,} of them in whole episodes; now as many of that policy")
    command("data", "record", run, ENV, "--trust", "--explore", "--episodes", "1000000", "--num-envs", "16", "--steps",
            str(decisions), "--out", str(folder / DATA[1]), "--seed", "1")


# ---------------------------------------------------------------------------------------------- training
def train(folder: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    gpu = options.gpu.split(",") if options.gpu else []
    cases = [(preset, data, seed) for preset in options.presets.split(",") for seed in range(1, options.seeds + 1) for data in DATA]
    runs_in = out.parent / f"{out.stem}-runs"
    began = time.monotonic()

    def one(case: tuple[str, str, int]) -> dict[str, Any]:
        left = options.seconds - (time.monotonic() - began)
        result = trained(case, folder, runs_in, options, "cuda" if case[0] in gpu else "cpu", left)
        say(f"{' '.join(map(str, case))}: {result.get('score', 'no score')} after {result['updates']:,} updates, "
            f"{result['seconds']} s {result.get('error', '')}")
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(one, cases))
    about = {name: _about(folder / name) for name in DATA}
    found = {"env": ENV, "commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine(),
             "updates": options.updates, "random": RANDOM, "expert": EXPERT, "data": about, "table": table(runs),
             "ordering": ordering(table(runs)), "runs": runs}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def trained(case: tuple[str, str, int], folder: Path, runs_in: Path, options: argparse.Namespace, device: str,
            left: float) -> dict[str, Any]:
    preset, data, seed = case
    run = runs_in / f"{preset}-{data}-{seed}"
    runtime = "inline" if device == "cpu" else "local"
    words = ["train", preset, str(folder / data), "--env", ENV, "--run-dir", str(run), "--seed", str(seed), "--device", device,
             "--runtime", runtime, "--max-learner-steps", str(options.updates), "--max-seconds", f"{max(1.0, left):.0f}",
             "--eval.every-learner-steps", str(max(1, options.updates // EVALUATIONS)), "--eval.episodes", "10", "--policy", "last",
             "--eval.last-env-steps", "10000", *MORE[preset], *QUIET]
    began = time.monotonic()
    done = shoal(*words, timeout=max(1.0, left) + 120)
    shots = snapshots(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    curve = curve_of(shots)
    head = {"preset": preset, "data": data, "seed": seed, "device": device, "command": "shoal " + " ".join(words),
            "seconds": round(time.monotonic() - began, 1), "updates": max((shot["learner_steps"] for shot in shots), default=0)}
    if done.returncode or not curve:
        return {**head, "error": tail(done.stderr or done.stdout or "it was never evaluated", 5)}
    return {**head, "return": curve[-1]["return"], "score": score(curve[-1]["return"]), "curve": curve}


def curve_of(shots: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The return of every evaluation, and after how many updates it was known."""
    curve: list[dict[str, Any]] = []
    seen = 0.0
    for shot in shots:
        if shot.get("eval_return") is not None and shot.get("evaluations", 0) > seen:
            seen = shot["evaluations"]
            curve.append({"updates": shot["learner_steps"], "return": round(shot["eval_return"], 1)})
    return curve


def score(value: float) -> float:
    return round(100 * (value - RANDOM) / (EXPERT - RANDOM), 1)


def table(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean and deviation over seeds, by recording and preset."""
    found: dict[str, dict[str, Any]] = {}
    for data in DATA:
        for preset in PRESETS:
            scores = [run["score"] for run in runs if (run["preset"], run["data"]) == (preset, data) and "score" in run]
            if scores:
                spread = round(statistics.pstdev(scores), 1)
                found.setdefault(data, {})[preset] = {"mean": round(statistics.mean(scores), 1), "std": spread, "scores": scores}
    return found


def ordering(found: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Whether the papers' order comes out where data are mixed."""
    means = {preset: one["mean"] for preset, one in found.get(DATA[0], {}).items()}
    return {f"{preset} above bc": means[preset] > means["bc"] for preset in ("iql", "cql") if preset in means and "bc" in means}


def _about(path: Path) -> dict[str, Any]:
    info = open_demos(path).info
    assert info.returns is not None
    return {"episodes": info.episodes, "steps": info.steps, "mean": round(info.returns.mean, 1), "std": round(info.returns.std, 1),
            "most": round(info.returns.most, 1), "score of the mean": score(info.returns.mean)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offline_table")
    parser.add_argument("what", choices=["record", "train"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--goal", type=float, default=1200.0, help="the return at which sac is medium")
    parser.add_argument("--device", default="auto", help="where sac learns")
    parser.add_argument("--out", type=Path, help="where the results go")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=480.0, help="for sac, or for all runs together")
    parser.add_argument("--presets", default=",".join(PRESETS), help="which to train")
    parser.add_argument("--gpu", default="cql", help="presets that compute on the GPU, with commas between; empty for none")
    options = parser.parse_args(arguments)
    if options.what == "record":
        record(options.folder, options)
        return 0
    if options.out is None:
        parser.error("train needs --out FILE.json")
    found = train(options.folder, options.out, options)
    print(json.dumps({"data": found["data"], "table": found["table"], "ordering": found["ordering"]}, indent=1))
    return 0 if all("score" in run for run in found["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
