"""Callbacks (issue 17): loggers receive what metrics.jsonl has, training does not pay for callbacks, and they cannot harm it.

wandb and mlflow are no dependencies of shoal: SHOAL_LOGGERS names a folder that has them (pip install --target, or site-packages).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from evidence.lines import ROOT, Line
from shoal.bench.rates import marks_of, rate, snapshots
from shoal.bench.run_folders import temporary_run_folder
from shoal.telemetry.callbacks import scalars
from shoal.telemetry.outputs import read_lines

__all__ = ["LINES"]

FOLDER = "SHOAL_LOGGERS"  # the environment variable
TURNS, SECONDS, WARM_SECONDS = 5, 12.0, 4.0
QUIET = {"console.mode": "none", "tensorboard": False}

LOGGED = """
import json, sys, shoal
folder = sys.argv[1]
loggers = [shoal.log.wandb(project="x", mode="offline", dir=folder), shoal.log.mlflow("x", f"sqlite:///{folder}/mlflow.db"),
           shoal.log.mlflow("x", f"file:{folder}/mlruns")]
shoal.train("ppo", "CartPole-v1", run_dir=f"{folder}/run", callbacks=loggers, max_env_steps=30_000, seed=int(sys.argv[2]), actors=1,
            **{"console.mode": "none", "tensorboard": False, "eval.episodes": 5, "eval.every_env_steps": 5_000})
"""

READ = """
import glob, json, struct, sys
import mlflow
folder = sys.argv[1]
found = {}
for name, uri in (("mlflow, sqlite", f"sqlite:///{folder}/mlflow.db"), ("mlflow, files", f"file:{folder}/mlruns")):
    rows = {}
    try:
        client = mlflow.MlflowClient(tracking_uri=uri)
        (run,) = client.search_runs([client.get_experiment_by_name("x").experiment_id])
        for metric in run.data.metrics:
            for entry in client.get_metric_history(run.info.run_id, metric):
                rows.setdefault(entry.step, {})[metric] = entry.value
        found[name] = [[step, values] for step, values in sorted(rows.items())]
    except Exception as error:
        found[name] = str(error)
from wandb.proto import wandb_internal_pb2
def records(data, block=32768):
    # LevelDB's log format, behind 7 bytes: crc, length and kind (whole, first, middle, last) of each piece
    place, whole = 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
rows = []
for data in records(open(glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")[0], "rb").read()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    if record.WhichOneof("record_type") == "history":
        values = {}
        for item in record.history.item:
            given = {field.name: value for field, value in item.ListFields()}
            name = "/".join(item.nested_key) or item.key
            other = given.get("number", given.get("integer", 0))
            values[name] = json.loads(given["value_json"]) if "value_json" in given else other
        rows.append([record.history.step.num, {key: value for key, value in values.items() if not key.startswith("_")}])
found["wandb, offline"] = rows
print(json.dumps(found))
"""


def loggers(seed: int) -> dict[str, Any]:
    """Every number that a logger has is in metrics.jsonl at the same step, and of a snapshot that it was told none is missing."""
    where = Path(os.environ[FOLDER]).resolve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(where)]), "WANDB_SILENT": "true",
                   "MLFLOW_ALLOW_FILE_STORE": "true"}
    with temporary_run_folder() as folder:
        for code in (LOGGED, READ):
            done = subprocess.run([sys.executable, "-c", code, str(folder), str(seed)], env=environment, capture_output=True,
                                  text=True, timeout=600, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr[-1500:])
        logged = json.loads(done.stdout.splitlines()[-1])
        lines = read_lines(folder / "run" / "metrics.jsonl")
    truth: dict[int, list[dict[str, float]]] = {}
    for row in lines:
        if row["kind"] == "snapshot":
            truth.setdefault(int(row["env_steps"]), []).append(scalars(row))
    failed = [row["text"] for row in lines if row.get("event") == "callback failed"]
    found = {name: rows if isinstance(rows, str) else compared(rows, truth) for name, rows in logged.items()}
    met = not failed and all(not isinstance(one, str) and one["steps"] > 1 and one["wrong"] == 0 for one in found.values())
    return {"met": met, "snapshots": sum(map(len, truth.values())), "failed": failed[:3], **found}


def compared(rows: list[Any], truth: dict[int, list[dict[str, float]]]) -> dict[str, Any]:
    """How many numbers were logged, and how many of them metrics.jsonl does not have at that step."""
    numbers = wrong = 0
    for step, values in rows:
        shots = truth.get(int(step), [])
        for name, value in values.items():
            numbers += 1
            wrong += not any(shot.get(name) == value for shot in shots)
        wrong += not any(set(shot) <= set(values) for shot in shots)
    return {"steps": len(rows), "numbers": numbers, "wrong": wrong}


def env_rate(seed: int, callbacks: str) -> float:
    code = f"""
import os, sys, time, shoal
class One(shoal.Callback):
    def on_metrics(self, metrics): self.seen = dict(metrics)
class Two(One):
    def on_metrics(self, metrics): open(sys.argv[1] + ".two", "a").write(str(metrics["env_steps"]) + chr(10))
class Broken(One):
    def on_metrics(self, metrics): raise ValueError("no")
class Killer(One):
    own_process = True
    def on_metrics(self, metrics): os.kill(os.getpid(), 9)
class Leaver(One):
    own_process = True
    def on_metrics(self, metrics): os._exit(3)
class Busy(One):
    def on_metrics(self, metrics):
        end = time.monotonic() + 10
        while time.monotonic() < end: pass
shoal.train("impala", "CartPole-v1", run_dir=sys.argv[1], seed={seed}, actors=1, max_seconds={WARM_SECONDS + SECONDS},
            callbacks=[{callbacks}], **{QUIET | {"eval.enabled": False}!r})
"""
    with temporary_run_folder() as folder:
        subprocess.run([sys.executable, "-c", code, str(folder / "run")], check=True, capture_output=True, timeout=300,
                       env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")})
        return rate(marks_of(snapshots(folder / "run" / "metrics.jsonl")), WARM_SECONDS, looked=True)


def throughput(seed: int) -> dict[str, Any]:
    """Runs with three callbacks and without in turns; the medians are compared."""
    plain, called = [], []
    for turn in range(TURNS):
        pair = [(plain, ""), (called, "One(), Two(), Two()")]
        for rates, callbacks in reversed(pair) if turn % 2 else pair:
            rates.append(env_rate(seed + turn, callbacks))
    ratio = statistics.median(called) / statistics.median(plain)
    return {"met": ratio >= 0.99, "ratio": ratio, "without": plain, "with_three": called}


def harmless(seed: int) -> dict[str, Any]:
    """The same with one that raises, one that loops for ten seconds every time, one that kills its process and one that leaves."""
    harmful = {"raises": "Broken()", "loops": "Busy()", "both": "Broken(), Busy()", "killed": "Killer()", "leaves": "Leaver()",
               "all": "Broken(), Busy(), Killer(), Leaver()"}
    rates = {name: env_rate(seed, callbacks) for name, callbacks in {"without": "", **harmful, "without_again": ""}.items()}
    plain = min(rates["without"], rates["without_again"])
    return {"met": all(rates[name] >= 0.8 * plain for name in harmful), **rates}


LINES = [
    Line("callbacks-loggers", 17, "W&B (offline) and MLflow (file store, SQLite) receive the numbers of metrics.jsonl", loggers,
         (0,)),
    Line("callbacks-throughput", 17, "throughput with three callbacks >= 0.99 of without, medians of 5 alternating runs",
         throughput, (0,)),
    Line("callbacks-harmless", 17, "an exception, a loop of 10 s and a kill in a callback leave a run its speed (>= 0.8)",
         harmless, (0,)),
]
