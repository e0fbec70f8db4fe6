"""Values that change while a run goes on: they arrive, are events, survive kills and resumes; others are refused."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import shoal
from shoal import cli
from shoal.experiment.config import Names, default_plan
from shoal.experiment.live_values import changed_plan, live_keys
from shoal.experiment.mailbox import Mailbox
from shoal.experiment.references import EnvRef
from shoal.experiment.run_control import RunControl
from shoal.experiment.rundir import RunDir
from shoal.telemetry.outputs import read_lines
from tests.runtime.harness import PATIENCE


def eventually(condition):
    until = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def events(run, kind):
    return [row for row in read_lines(run / "metrics.jsonl") if row.get("event") == kind]


class Running:
    """A run in processes of its own that is told something from here."""

    def __init__(self, run, *words):
        command = [sys.executable, "-m", "shoal.cli", "train", *words, "--run-dir", str(run), "--console.mode", "none",
                   "--no-tensorboard"]
        self.run, self.process = run, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        eventually(lambda: self.process.poll() is not None or (run / "summary.json").exists())
        assert self.process.poll() is None, self.process.stderr.read()

    def shoal(self, command, *words):
        return cli.main([command, str(self.run), *words])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    def snapshots(self):
        return [row for row in read_lines(self.run / "metrics.jsonl") if row.get("kind") == "snapshot"]

    def rates(self):
        return [row["losses"]["learning_rate"] for row in self.snapshots() if row["losses"].get("learning_rate") is not None]


def plan(preset="ppo", **overrides):
    loaded = shoal.experiment.presets.load_preset(preset)
    return default_plan(Names(loaded.algorithm, loaded.architecture, preset), EnvRef("CartPole-v1"), loaded, overrides)


def test_configs_declare_what_is_live():
    ppo = {"algorithm.lr", "algorithm.entropy", "eval.every_env_steps", "checkpoint.every_seconds", "actors"}
    assert ppo <= set(live_keys(plan()))
    assert {"algorithm.epsilon", "algorithm.lr", "replay.samples_per_insert"} <= set(live_keys(plan("dqn")))
    assert {"algorithm.actor_lr", "algorithm.alpha_lr"} <= set(live_keys(plan("sac")))
    assert {"algorithm.sigma", "algorithm.weight_decay"} <= set(live_keys(plan("es")))
    assert not {"algorithm.gamma", "net.hidden", "seed", "runtime", "replay.samples_per_insert"} & set(live_keys(plan()))


@pytest.mark.parametrize(("values", "words"), [
    ({"algorithm.gamma": 0.5}, "algorithm.gamma cannot change during a run"), ({"algorithm.lr": -1.0}, "lr is -1"),
    ({"algorithm.lr": "fast"}, "is not possible"), ({"algorithm.speed": 1}, "there is no setting"),
    ({"actors": "auto"}, "give a number"),
])
def test_what_cannot_change_is_refused(values, words):
    with pytest.raises(shoal.ConfigError, match=words):
        changed_plan(plan(), values)


@pytest.mark.parametrize(("preset", "overrides", "value", "words"), [
    ("ppo", {}, 4.0, "without a replay table"), ("apex", {}, 0.0, "must be above 0"), ("apex", {}, None, "this run has a ratio"),
    ("apex", {"replay.samples_per_insert": None}, 4.0, "this run has none"), ("qtopt", {}, 4.0, "ratios of their own"),
    ("apex", {"replay.tolerance": 2000.0}, 100.0, "could block both sides"),
])
def test_ratios_that_cannot_change(preset, overrides, value, words):
    with pytest.raises(shoal.ConfigError, match=words):
        changed_plan(plan(preset, **overrides), {"replay.samples_per_insert": value})


def test_learners_of_a_group_are_not_changed():
    """Learners of a group would change one after the other, and drift apart."""
    with pytest.raises(shoal.ConfigError, match="drift apart"):
        changed_plan(plan(learners=2), {"algorithm.lr": 1e-4})
    assert changed_plan(plan(learners=2), {"algorithm.lr": 1e-4}, running=False).experiment.algorithm.lr == 1e-4
    with pytest.raises(shoal.ConfigError, match="drift apart"):
        changed_plan(plan("es", actors=2), {"algorithm.sigma": 0.5})
    assert changed_plan(plan("es_master", actors=2), {"algorithm.sigma": 0.5}).experiment.algorithm.sigma == 0.5


def test_value_survives_kills(tmp_path, capsys):
    """A value reaches the learner and survives kills."""
    run = tmp_path / "run"
    with Running(run, "a2c", "shoal/Catch-v0", "--actors", "2") as running:
        assert running.shoal("set", "algorithm.lr=0.00025", "algorithm.entropy=0.5") == 0
        eventually(lambda: 0.00025 in running.rates())
        (event,) = events(run, "change")
        assert event["values"] == {"algorithm.lr": 0.00025, "algorithm.entropy": 0.5} and event["env_steps"] >= 0 and event["time"]
        assert running.shoal("set", "algorithm.gamma=0.5") == 2 and len(events(run, "change")) == 1
        before = running.snapshots()[-1]
        os.kill(place(running.process.pid, "learner"), signal.SIGKILL)
        eventually(lambda: running.snapshots()[-1]["restarts"] > before["restarts"])
        after = running.snapshots()[-1]["learner_steps"]
        eventually(lambda: running.snapshots()[-1]["learner_steps"] > after + 100)
        assert running.rates()[-1] == 0.00025
        running.process.send_signal(signal.SIGKILL)
    capsys.readouterr()
    assert json.loads((run / "config.json").read_text())["algorithm"]["lr"] == 0.00025
    further = str(RunDir(run).last_snapshot()["env_steps"] + 2000)
    assert cli.main(["resume", str(run), "--max-env-steps", further, "--console.mode", "none", "--runtime", "inline"]) == 0
    assert running.rates()[-1] == 0.00025


def test_ratio_survives_a_resume(tmp_path):
    """The table is saved with the ratio of 16 that the run began with; what is drawn after the resume keeps to 2."""
    run = tmp_path / "run"
    with Running(run, "apex", "shoal/Catch-v0", "--replay.checkpoint", "--actors", "1", "--no-eval.enabled",
                 "--replay.min-size", "100") as running:
        eventually(lambda: running.snapshots() and kept_to(running)[1] > 10_000)
        assert running.shoal("checkpoint") == 0 and running.shoal("set", "replay.samples_per_insert=2") == 0
        (event,) = events(run, "change")
        assert event["values"] == {"replay.samples_per_insert": 2.0} and event["env_steps"] > 0 and event["time"]
        running.process.send_signal(signal.SIGKILL)
    inserts, samples = kept_to(running)
    assert samples / inserts > 8
    before, further = len(running.snapshots()), str(RunDir(run).last_snapshot()["env_steps"] + 5000)
    assert cli.main(["resume", str(run), "--max-env-steps", further, "--console.mode", "none", "--runtime", "inline"]) == 0
    more, drawn = np.array(kept_to(running)) - kept_to(running, before)
    assert 1 < drawn / more < 3


def kept_to(running, snapshot=-1):
    """Inserts and samples of the table until then."""
    shot = running.snapshots()[snapshot]
    return shot["replay_inserts"], shot["replay_samples"]


def place(driver, name):
    """The process of a place of this driver."""
    titles = {" ".join(child.cmdline()): child.pid for child in psutil.Process(driver).children(recursive=True)}
    return next(pid for title, pid in titles.items() if name in title)


def env_steps(run):
    """Of all snapshots so far."""
    return [row["env_steps"] for row in read_lines(run / "metrics.jsonl") if row.get("kind") == "snapshot"]


def test_stop_pause_and_checkpoint(tmp_path, capsys):
    run = tmp_path / "run"
    with Running(run, "impala", "shoal/Catch-v0", "--actors", "2") as running:
        assert running.shoal("checkpoint") == 0
        assert (Path(capsys.readouterr().out.split("written: ")[1].strip()) / "checkpoint.json").is_file()
        assert running.shoal("set", "actors=1") == 0 and running.shoal("set", "actors=3") == 2
        assert "laid out for 1 to 2" in capsys.readouterr().err
        assert running.shoal("pause") == 0 and running.shoal("pause") == 0 and "already" in capsys.readouterr().out
        assert running.shoal("checkpoint") == 0
        assert running.shoal("pause") == 0 and "already" in capsys.readouterr().out, "a checkpoint lets nobody go on"
        before = env_steps(run)
        eventually(lambda: len(env_steps(run)) > len(before) + 2)
        assert len(set(env_steps(run)[len(before):])) == 1
        assert running.shoal("unpause") == 0
        assert running.shoal("stop") == 0 and running.process.wait(PATIENCE) == 0
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == "stop"
    texts = [event["text"] for event in events(run, "change")]
    assert [text.split(" at ")[0] for text in texts] == ["actors 2 -> 1", "paused", "unpaused"]
    assert cli.main(["stop", str(run)]) == 2 and "is not running" in capsys.readouterr().err
    assert cli.main(["set", str(run), "algorithm.lr=0.5"]) == 0
    assert json.loads((run / "config.json").read_text())["algorithm"]["lr"] == 0.5
    assert cli.main(["set", str(run), "algorithm.gamma=0.5"]) == 2


def test_letters(tmp_path):
    """Letters are whole, in order, and answered once."""
    box = Mailbox(tmp_path)
    assert box.take() == [] and box.answer("x") is None
    names = [box.post({"command": "set", "number": n}) for n in range(5)]
    (box.folder / "0-broken.letter").write_text("{")
    assert box.withdraw(names[0]) and not box.withdraw(names[0])
    (box.folder / ".9-begun.letter").write_text('{"number": 9}')  # its sender has not renamed it yet
    letters = box.take()
    assert (box.folder / ".9-begun.letter").exists()
    assert [letter.content["number"] for letter in letters] == [1, 2, 3, 4] and box.take() == []
    threading.Thread(target=box.reply, args=(names[1],), kwargs={"text": "done"}).start()
    assert eventually(lambda: box.answer(names[1])) == {"error": "", "text": "done"} and box.answer(names[1]) is None
    box.clear()
    assert not any(box.folder.iterdir())


def test_odd_files_in_the_mailbox(tmp_path):
    """A pipe, a link without an end, a folder, too much, or no letter at all: none of them holds the run up or ends it."""
    box = Mailbox(tmp_path)
    name = box.post({"command": "stop"})
    os.mkfifo(box.folder / "0-pipe.letter")
    (box.folder / "1-link.letter").symlink_to("/dev/zero")
    (box.folder / "2-folder.letter").mkdir()
    (box.folder / "3-deep.letter").write_text("[" * 5000)
    (box.folder / "4-long.letter").write_text(json.dumps({"x": "y" * (1 << 20)}))
    (box.folder / "5-bytes.letter").write_bytes(b"\xff\xfe")
    assert [letter.name for letter in box.take()] == [name] and box.take() == []
    assert [path.name for path in box.folder.iterdir()] == ["2-folder.letter"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mailbox").write_text("")
    assert Mailbox(tmp_path / "other").take() == []


def test_value_on_a_full_disk(tmp_path, monkeypatch):
    """A value that cannot be written down is refused; the run continues with the old one."""
    monkeypatch.setattr(RunDir, "save_config", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    control = RunControl(RunDir(tmp_path), plan(), 0)
    name = control.mailbox.post({"command": "set", "values": {"algorithm.lr": 0.5}})
    control.tick(None, None)  # neither is asked
    assert control.mailbox.answer(name)["error"].startswith("No space left on device; nothing has changed")
    assert control.plan.experiment.algorithm.lr == plan().experiment.algorithm.lr


def test_letters_that_wait_together(tmp_path, monkeypatch):
    """Each is checked against what came before it; config.json is written once, and the roles are told once."""
    written, told, noted = [], [], []
    monkeypatch.setattr(RunDir, "save_config", lambda _, config: written.append(config["algorithm"]["lr"]))
    control = RunControl(RunDir(tmp_path), plan(), 0)
    given = ({"algorithm.lr": 0.5}, {"algorithm.lr": -1.0}, {"algorithm.lr": 0.25, "algorithm.entropy": 0.125})
    names = [control.mailbox.post({"command": "set", "values": values}) for values in given]
    control.tick(SimpleNamespace(change=told.append), SimpleNamespace(note_change=lambda text, values: noted.append(values)))
    first, bad, last = [control.mailbox.answer(name) for name in names]
    assert first["text"].endswith("-> 0.5") and last["text"].startswith("algorithm.lr 0.5 -> 0.25, ")
    assert "-1" in bad["error"] and not bad["text"]
    assert written == [0.25] and told == [given[2]] and noted == [given[0], given[2]]
