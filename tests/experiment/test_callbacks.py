"""`shoal.train(..., callbacks=[...])`: callbacks follow a run and cannot harm it."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import shoal
from shoal.telemetry import callbacks as module
from shoal.telemetry.callbacks import Callback, CallbackOutput, scalars
from tests.tree import tree_environment

QUIET = {"runtime": "inline", "max_env_steps": 2000, "eval.episodes": 2, "eval.every_env_steps": 500, "console.mode": "none",
         "tensorboard": False, "net.hidden": (8,), "actors": 1}


class Diary(Callback):
    def __init__(self):
        self.calls = []

    def on_start(self, directory, config):
        self.calls.append(("start", directory, config))

    def on_metrics(self, metrics):
        self.calls.append(("metrics", metrics))

    def on_evaluation(self, metrics):
        self.calls.append(("evaluation", metrics))

    def on_checkpoint(self, folder):
        self.calls.append(("checkpoint", folder))

    def on_restart(self, event):
        self.calls.append(("restart", event))

    def on_end(self, summary):
        self.calls.append(("end", summary))

    def of(self, kind):
        return [call[1:] for call in self.calls if call[0] == kind]


class Broken(Callback):
    def on_metrics(self, metrics):
        raise RuntimeError("no route to the tracker")


def lines(run, kind):
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_the_run_is_followed(tmp_path):
    diary = Diary()
    run = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), callbacks=[diary], **QUIET)
    assert diary.calls[0][0] == "start" and diary.calls[-1][0] == "end"
    ((directory, config),) = diary.of("start")
    assert directory == run.directory and config["seed"] == 0
    assert all((folder / "checkpoint.json").is_file() for (folder,) in diary.of("checkpoint")[-1:])
    assert diary.of("end") == [(run.summary,)]
    written = {json.dumps(scalars(row), sort_keys=True) for row in lines(run, "snapshot")}
    told = [json.dumps(scalars(metrics), sort_keys=True) for (metrics,) in diary.of("metrics")]
    assert told and set(told) <= written  # the same numbers
    versions = [metrics["eval_version"] for (metrics,) in diary.of("evaluation")]
    assert versions == sorted(set(versions)) and versions


def test_what_it_raises_is_told(tmp_path):
    diary = Diary()
    run = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), callbacks=[Broken(), diary], **QUIET)
    assert run.summary["stopped_by"] == "env_steps" and diary.of("end")
    told = [row["text"] for row in lines(run, "event") if row["event"] == "callback failed"]
    assert told and set(told) == {"Broken.on_metrics raised RuntimeError: no route to the tracker"}


def test_leaving_is_not_allowed(tmp_path):
    """sys.exit() in a callback ends neither the run nor the callback."""

    class Leaving(Diary):
        def on_metrics(self, metrics):
            super().on_metrics(metrics)
            sys.exit(3)

    diary = Leaving()
    run = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), callbacks=[diary], **QUIET)
    assert run.summary["stopped_by"] == "env_steps" and diary.of("end") and diary.of("metrics")
    assert any("SystemExit" in row["text"] for row in lines(run, "event") if row["event"] == "callback failed")


KILLED = """
import os, sys, shoal

class Killer(shoal.Callback):
    def on_checkpoint(self, folder):
        if int(folder.name.partition("+")[0]) > 0:
            os.kill(os.getpid(), 9)

shoal.train("a2c", "CartPole-v1", run_dir=sys.argv[1], callbacks=[Killer()], actors=1, tensorboard=False, net={"hidden": (8,)},
            **{"checkpoint.every_seconds": 0.3, "console.mode": "none", "eval.episodes": 2})
"""


def test_a_kill_in_a_callback(tmp_path):
    """The whole run is gone, with all its processes, and goes on from its newest checkpoint when it is resumed."""
    folder = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], env=tree_environment(), capture_output=True, timeout=180)
    assert done.returncode == -9, done.stderr
    saved = max(int(path.name.partition("+")[0]) for path in (folder / "checkpoints").glob("0*"))
    assert saved > 0
    run = shoal.resume(folder, max_env_steps=saved + 5_000, runtime="inline")
    assert run.summary["stopped_by"] == "env_steps" and run.summary["env_steps"] >= saved + 5_000


def test_a_restart_is_told(tmp_path):
    diary = Diary()
    output = CallbackOutput(diary)
    output.event({"kind": "restart", "role": "actor-0", "text": "it was killed"})
    output.event({"kind": "note", "text": "nothing"})
    output.close()
    assert diary.of("restart") == [({"kind": "restart", "role": "actor-0", "text": "it was killed"},)]


def test_a_slow_one_gets_the_newest_metrics(monkeypatch):
    entered, leave, diary = threading.Event(), threading.Event(), Diary()

    class Slow(Diary):
        def on_metrics(self, metrics):
            entered.set()
            leave.wait(60)
            super().on_metrics(metrics)

    diary = Slow()
    output = CallbackOutput(diary)
    output.write({"env_steps": 0})
    assert entered.wait(60)
    for steps in range(1, 50):
        output.write({"env_steps": steps})
    output.checkpoint("there")
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.0)
    output.close()  # does not wait for ever
    assert "is still busy" in output.complaints()[0]
    leave.set()
    output._thread.join(60)
    assert [metrics["env_steps"] for (metrics,) in diary.of("metrics")] == [0, 49]
    assert diary.of("checkpoint") == [("there",)]


def test_metrics_do_not_pile_up_behind_other_calls():
    """A slow callback is not given old metrics: they would keep it from hearing of the end in time."""
    began, leave = threading.Event(), threading.Event()

    class Slow(Diary):
        def on_start(self, directory, config):
            began.set()
            leave.wait(60)

    diary = Slow()
    output = CallbackOutput(diary)
    output.begin(Path("run"), {})
    assert began.wait(60)
    for step in range(5):
        output.write({"env_steps": step})
        output.checkpoint(Path(str(step)))
    output.end({})
    leave.set()
    output.close()
    assert [call[0] for call in diary.calls] == [*["checkpoint"] * 4, "metrics", "checkpoint", "end"]
    assert diary.of("metrics") == [({"env_steps": 4},)]


@pytest.mark.parametrize(("given", "said"), [(3, "give a list"), (Diary(), r"callbacks=Diary\(\) is one callback; give a list"),
                                             ([print], "no shoal.Callback; derive a class"), ([Diary], "make one of it with")])
def test_what_is_no_list_of_callbacks_is_refused(given, said, tmp_path):
    for start in (lambda: shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), callbacks=given, **QUIET),
                  lambda: shoal.resume(tmp_path / "run", callbacks=given)):
        with pytest.raises(shoal.ConfigError, match=said):
            start()
    assert not list(tmp_path.iterdir())


def test_a_logger_that_is_not_there(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(shoal.ConfigError, match="wandb is not installed here; pip install wandb"):
        shoal.log.wandb(project="x")


def test_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs/callbacks.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(block.replace("20_000", "1_000, runtime='inline'"), names)
    assert "ended by env_steps" in capsys.readouterr().out
