"""A study whose files are damaged, that is begun twice in a second, or ended by a signal."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from shoal import cli
from shoal.experiment.checkpoints import read_meta
from shoal.tuning.study import Member, Study, StudySettings
from tests.tuning.test_tuning import SETTINGS, learner, study  # noqa: F401  (a fixture)

VALUES = {"algorithm.lr": 0.001}
ONE_MINUTE = 60.0


@pytest.fixture
def small(tmp_path):
    """A study whose members have not trained."""
    made = Study.create(tmp_path / "study", SETTINGS)
    for number in range(2):
        made.save(Member(number, dict(VALUES), ancestor=number))
    return made


@pytest.mark.parametrize(("file", "name", "value"), [
    ("study.json", "vary", 3), ("study.json", "vary", {"algorithm.lr": 3}), ("study.json", "vary", {"algorithm.lr": "uniform("}),
    ("study.json", "options", "x"), ("study.json", "workers", 0), ("study.json", "population", 2**40), ("study.json", "seed", "x"),
    ("study.json", "every_env_steps", -1), ("study.json", "nosuch", 1), ("study.json", "exploit", []),
    ("members/00.json", "values", {}), ("members/00.json", "values", []), ("members/00.json", "number", 1),
    ("members/00.json", "env_steps", None), ("members/00.json", "fitness", "x"), ("members/00.json", "copying", {"parent": 1}),
    ("study.json", "vary", {"algorithm.lr": "uniform(" * 5000}), ("members/00.json", "rungs", ["x"]),
    ("members/01.json", "copying", {"parent": [], "values": VALUES, "ancestor": 0}), ("members/01.json", "\x00", 1),
])
@pytest.mark.parametrize("command", ["show", "resume"])
def test_damaged_records(command, file, name, value, small, capsys):
    path = small.path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert cli.main(["tune", command, str(small.path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shoal: ") and said.count("\n") == 1


def test_lines_that_cannot_be_used(small, capsys):
    small.log("start", 0, values=VALUES)
    with (small.path / "lineage.jsonl").open("a") as file:
        file.write('[]\n{"event": 3}\n{"event": "copy", "member": 0}\n{"member": []}\nx\n')
    small.log("slice", 0, values=VALUES, env_steps=9)  # without a fitness
    assert [row["event"] for row in small.lineage()] == ["start"] and small.schedule(0) == []
    assert cli.main(["tune", "show", str(small.path)]) == 0 and "2 of 2 ancestors" in capsys.readouterr().out


def test_damage_is_not_copied(study, caplog):  # noqa: F811
    """A flipped byte of the parent's newest checkpoint does not get a right checksum in the child's."""
    child, parent = study.members()
    newest = study.run(1).checkpoints().newest()
    path = newest / "trainer-0.safetensors"
    before = sorted(study.run(1).checkpoints()._folders())[-2]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    study.finish_copy(study.begin_copy(child, parent, {"algorithm.lr": 2e-3}))
    copied, source = learner(study.run(0).path), read_meta(before)
    assert "has changed since it was written" in caplog.text and len(copied)
    assert read_meta(study.run(0).checkpoints().newest())["sha256"] == source["sha256"]


def test_two_in_one_second(tmp_path):
    made = [Study.create_default(tmp_path / "studies" / "now", SETTINGS) for _ in range(3)]
    assert [one.path.name for one in made] == ["now", "now-2", "now-3"]
    assert all(one.settings == SETTINGS for one in made)


def test_closed_terminal(tmp_path):
    """As after Ctrl-C members write a checkpoint and end; the exit code and a sentence say how to go on."""
    words = ["tune", "a2c", "shoal/Catch-v0", "--vary", "algorithm.lr=uniform(0.1,1.0)", "--population", "1", "--every-env-steps",
             "1000000", "--max-env-steps", "2000000", "--study", str(tmp_path / "study"), "--eval.episodes", "1"]
    process = subprocess.Popen([sys.executable, "-m", "shoal.cli", *words], stdout=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    checkpoints = Study(tmp_path / "study").run(0).checkpoints()
    deadline = time.monotonic() + 2 * ONE_MINUTE
    while checkpoints.newest() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    (member,) = _children(process.pid)
    process.send_signal(signal.SIGHUP)
    said, _ = process.communicate(timeout=2 * ONE_MINUTE)
    assert process.returncode == 130 and "shoal tune resume" in said
    assert not os.path.exists(f"/proc/{member}") and (tmp_path / "study" / "members" / "00" / "summary.json").exists()


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def test_settings_are_what_was_written(tmp_path):
    settings = StudySettings("ppo", "CartPole-v1", {"lr": "x"}, 3, 10, 20, 4.5, "population", "t_test", 0.5, 4, 5,
                             7, 2, None, ("--a", "b"))
    assert Study.create(tmp_path / "study", settings).settings == settings
