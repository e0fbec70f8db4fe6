"""`shoal.train(..., callbacks=[...])`: callbacks follow a run and cannot harm it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import shoal
from shoal import cli
from shoal.experiment.callback_process import callback_output
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
    assert re.fullmatch(r"Broken.on_metrics raised RuntimeError: no route to the tracker \(test_callbacks.py, line \d+\)", told[0])
    assert all(text.startswith(told[0]) and text.endswith("0 times so far") for text in told[1:])


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
    own_process = sys.argv[2] == "own"

    def on_checkpoint(self, folder):
        if int(folder.name.partition("+")[0]) > 0:
            os.kill(os.getpid(), 9)

shoal.train("a2c", "CartPole-v1", run_dir=sys.argv[1], callbacks=[Killer()], actors=1, tensorboard=False, net={"hidden": (8,)},
            max_seconds=5, **{"checkpoint.every_seconds": 0.3, "console.mode": "none", "eval.episodes": 2})
"""


def killed(folder, where):
    return subprocess.run([sys.executable, "-c", KILLED, str(folder), where], env=tree_environment(), capture_output=True,
                          timeout=180)


def test_a_kill_in_a_callback_of_the_driver(tmp_path):
    """The whole run is gone, with all its processes, and goes on from its newest checkpoint when it is resumed."""
    folder = tmp_path / "run"
    done = killed(folder, "here")
    assert done.returncode == -9, done.stderr
    saved = max(int(path.name.partition("+")[0]) for path in (folder / "checkpoints").glob("0*"))
    assert saved > 0
    run = shoal.resume(folder, max_env_steps=saved + 5_000, runtime="inline", max_seconds=None)
    assert run.summary["stopped_by"] == "env_steps" and run.summary["env_steps"] >= saved + 5_000


def test_a_kill_in_a_callback_with_a_process_of_its_own(tmp_path):
    """kill -9 in every checkpoint: the callback is started again once, then it is switched off, and the run ends as it should."""
    folder = tmp_path / "run"
    done = killed(folder, "own")
    assert done.returncode == 0, done.stderr
    run = shoal.load(folder)
    assert run.summary["stopped_by"] == "seconds" and run.summary["restarts"] == 0
    told = [row["text"] for row in lines(run, "event") if row["event"] == "callback failed"]
    assert told == ["Killer.on_checkpoint did not return: its process was killed by SIGKILL; it was started again",
                    "Killer.on_checkpoint did not return: its process was killed by SIGKILL; the callback is switched off, "
                    "training continues"]


class Elsewhere(Callback):
    """Writes down what it is told, and where."""

    own_process = True

    def __init__(self, file, do=lambda method: None):
        self.file, self.do = file, do

    def note(self, method):
        with open(self.file, "a") as file:
            file.write(f"{method} {os.getpid()}\n")
        self.do(method)

    def on_start(self, directory, config):
        self.note("start")

    def on_checkpoint(self, folder):
        self.note("checkpoint")

    def on_end(self, summary):
        self.note("end")

    def seen(self):
        return [line.split() for line in Path(self.file).read_text().splitlines()]


def leave(method):
    if method == "checkpoint":
        os._exit(7)


def say_goodbye(method):
    if method == "checkpoint":
        sys.exit(3)


def interrupt(method):
    if method == "checkpoint":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


@pytest.mark.parametrize(("do", "processes", "end", "said"), [
    (lambda method: None, 1, True, []),
    (leave, 2, False, ["its process ended with exit code 7; it was started again", "exit code 7; the callback is switched off"]),
    (say_goodbye, 1, True, ["on_checkpoint raised SystemExit: 3"]),
    (interrupt, 1, True, ["on_checkpoint raised KeyboardInterrupt"]),
    (lambda method: os._exit(0), 2, False,
     ["exit code 0; it was started again, and its process ended with exit code 0; the callback is switched"])],
    ids=["nothing", "os._exit", "sys.exit", "Ctrl-C", "os._exit in on_start"])
def test_a_process_of_its_own(tmp_path, monkeypatch, do, processes, end, said):
    """The calls are made there, in order, and what ends it is told of."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", 120.0)
    callback = Elsewhere(tmp_path / "seen", do)
    output = callback_output(callback)
    output.begin(tmp_path, {})
    for number in range(2):
        output.checkpoint(tmp_path / str(number))
    output.end({})
    output.close()
    seen = callback.seen()
    assert seen[0][0] == "start" and (seen[-1][0] == "end") == end
    assert len({pid for _, pid in seen} - {str(os.getpid())}) == processes
    for text, told in zip(said, output.complaints(), strict=True):
        assert text in told


def test_a_killed_driver_leaves_no_callback_behind(tmp_path):
    """kill -9 of the driver ends the callback's process too, even one in an endless loop."""
    code = ("import sys, time; from pathlib import Path\n"
            "from shoal.experiment.callback_process import callback_output\n"
            "from tests.experiment.test_callbacks import Elsewhere, loop\n"
            "callback_output(Elsewhere(sys.argv[1], loop)).begin(Path(), {})\n"
            "time.sleep(600)")
    seen = tmp_path / "seen"
    driver = subprocess.Popen([sys.executable, "-c", code, str(seen)], env=tree_environment())
    try:
        wait_until(lambda: seen.is_file() and seen.read_text().endswith("\n"))
    finally:
        driver.kill()
        driver.wait()
    pid = int(seen.read_text().split()[1])
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


def loop(method):
    while True:
        pass


def wait_until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_process_that_does_not_end(tmp_path, monkeypatch):
    """An endless loop there keeps no core after the run."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    entered = tmp_path / "seen"
    output = callback_output(Elsewhere(entered, loop))
    output.begin(tmp_path, {})
    wait_until(lambda: entered.is_file() and entered.read_text().endswith("\n"))
    pid = int(entered.read_text().split()[1])
    output.close()
    assert output.complaints()[0] == "Elsewhere is still busy 0.2 s after the end of the run; its process is ended"
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_callback_that_cannot_be_sent(tmp_path):
    callback = Elsewhere(tmp_path / "seen")
    callback.lock = threading.Lock()
    with pytest.raises(shoal.ConfigError, match=r"Elsewhere has own_process = True and cannot be sent .*make what it needs"):
        shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), callbacks=[callback], **QUIET)
    assert not list(tmp_path.iterdir())


def test_a_restart_is_told(tmp_path):
    """An actor is killed while it trains."""

    class Assassin(Diary):
        def on_checkpoint(self, folder):
            for child in psutil.Process().children(recursive=True):
                if " ".join(child.cmdline()).startswith("shoal: actor") and not self.of("killed"):
                    self.calls.append(("killed", child.pid))
                    child.kill()

        def on_restart(self, event):
            super().on_restart(event)
            cli.main(["stop", str(tmp_path / "run")])

    diary = Assassin()
    run = shoal.train("impala", "CartPole-v1", run_dir=str(tmp_path / "run"), callbacks=[diary], actors=1, tensorboard=False,
                      max_seconds=300, **{"checkpoint.every_seconds": 1.0, "console.mode": "none", "eval.enabled": False})
    assert len(diary.of("killed")) == 1 and run.summary["stopped_by"] == "stop" and run.summary["restarts"] == 1
    ((event,),) = diary.of("restart")
    assert "actor" in event["role"] and "restarted (1 so far)" in event["text"]


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


WANDB = """
import json
class Run:
    def __init__(self, given):
        self.file, self.summary = open(given["dir"] + "/logged", "a"), {}
        print(json.dumps({"project": given["project"], "preset": given["config"]["preset"]}), file=self.file, flush=True)
    def log(self, numbers, step):
        print(json.dumps({**numbers, "step": step}), file=self.file, flush=True)
    def finish(self):
        print(json.dumps({"summary": self.summary["env_steps"]}), file=self.file, flush=True)
def init(**given):
    return Run(given)
"""
MLFLOW = """
import json, types
class MlflowClient:
    def __init__(self, tracking_uri):
        self.file = open(tracking_uri, "a")
    def get_experiment_by_name(self, name):
        return None
    def create_experiment(self, name):
        return name
    def create_run(self, experiment, run_name):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"{experiment}/{run_name}"))
    def log_param(self, run, key, value):
        pass
    def log_batch(self, run, metrics):
        for name, value, _, step in metrics:
            print(json.dumps([run, name, value, step]), file=self.file, flush=True)
    def set_terminated(self, run):
        print(json.dumps([run, "end", 0, 0]), file=self.file, flush=True)
entities = types.SimpleNamespace(Metric=lambda *row: row)
"""


def test_loggers_get_the_numbers_of_metrics_jsonl(tmp_path, monkeypatch):
    """With stand-ins for the two libraries; evidence/callbacks.py does it with the real ones."""
    for name, code in (("wandb", WANDB), ("mlflow", MLFLOW)):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    loggers = [shoal.log.wandb(project="x"), shoal.log.mlflow("y", str(tmp_path / "rows"))]
    run = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), callbacks=loggers, **QUIET)
    assert not [row for row in lines(run, "event") if row["event"] == "callback failed"]
    written = {(int(row["env_steps"]), name, value) for row in lines(run, "snapshot") for name, value in scalars(row).items()}
    first, *rows, last = (json.loads(line) for line in (run.directory / "logged").read_text().splitlines())
    assert first == {"project": "x", "preset": "a2c"} and last == {"summary": run.summary["env_steps"]}
    logged = {(row["step"], name, value) for row in rows for name, value in row.items() if name != "step"}
    assert logged and logged <= written and max(logged)[0] == run.summary["env_steps"]
    *rows, end = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    assert end[:2] == ["y/run", "end"]
    logged = {(step, name, value) for _, name, value, step in rows}
    assert logged and logged <= written


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
