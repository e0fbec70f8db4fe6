"""A run directory has one driver at a time, and none after its death."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from shoal import cli, runtime, train
from shoal.errors import ConfigError
from shoal.experiment.lock import NAME, alone

QUIET = {"runtime": "inline", "actors": 1, "max_env_steps": 200, "eval.enabled": False, "console.mode": "none",
         "tensorboard": False}
DRIVER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from shoal.experiment.lock import alone

with alone(Path(sys.argv[1])):
    forked = os.fork()
    if forked == 0:
        time.sleep(120)
        os._exit(0)
    executed = subprocess.Popen(["sleep", "120"], close_fds=False)
    print(forked, executed.pid, flush=True)
    signal.pause()
"""
HOLDER = """
import fcntl, sys, time

file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(120)
"""


def test_killed_driver_leaves_no_lock(tmp_path):
    """A killed driver leaves no lock though its children live on."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    children = [int(word) for word in driver.stdout.readline().split()]
    try:
        words = rf"{tmp_path} is running \(pid {driver.pid}\); wait, or stop it with `kill {driver.pid}`"
        with pytest.raises(ConfigError, match=words), alone(tmp_path):
            pass
        driver.kill()
        driver.wait()
        for child in children:
            os.kill(child, 0)  # both are alive
        with alone(tmp_path):
            assert (tmp_path / NAME).read_text() == str(os.getpid())
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        driver.kill()
        driver.communicate()  # to the end of its output, which the children have too


def test_child_that_has_not_run_yet(tmp_path):
    """A stopped holder of the lock stands for a child whose first moment has not come."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / NAME)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / NAME).write_text(str(dead.pid))
    release = threading.Timer(0.5, holder.kill)
    release.start()
    with alone(tmp_path):
        assert holder.wait() == -signal.SIGKILL
    release.join()
    holder.stdout.close()


def test_running_run_is_not_resumed(tmp_path, capsys):
    """A run that goes on cannot be resumed elsewhere."""
    run = tmp_path / "run"
    train("a2c", "CartPole-v1", run_dir=str(run), **QUIET)
    newest = max((run / "checkpoints").iterdir())
    with (newest / "trainer-0.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff\xff")  # damaged: a resume would rename it
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != NAME}
    command = ["resume", str(run), "--max-env-steps", "400", "--console.mode", "none"]
    with alone(run):
        assert cli.main(command) == 2
        assert capsys.readouterr().err.startswith(f"shoal: {run} is running (pid {os.getpid()}); wait, or stop it with `kill ")
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != NAME}, "something was written"
    assert cli.main(command) == 0
    assert newest.with_name(f"damaged-{newest.name}").is_dir()


def test_a_new_run_holds_its_directory(tmp_path, monkeypatch):
    held, run = [], runtime.run

    def look(*arguments, **more):
        with pytest.raises(ConfigError, match="is running"), alone(tmp_path / "run"):
            pass
        held.append(True)
        return run(*arguments, **more)

    monkeypatch.setattr(runtime, "run", look)
    train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), **QUIET)
    assert held
    with alone(tmp_path / "run"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_file_system_without_locks(number, tmp_path, monkeypatch):
    """A run goes on where the file system has no locks."""

    def unable(fd, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unable)
    before = len(os.listdir("/proc/self/fd"))
    with alone(tmp_path), alone(tmp_path):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_folder_that_cannot_be_written(tmp_path):
    """A folder that cannot be written needs no lock."""
    with alone(tmp_path / "nowhere"):
        pass
    assert not (tmp_path / "nowhere").exists()
