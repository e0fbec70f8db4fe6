"""A terminal that is closed: real ones, and the signal alone."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.experiment.run import interruptible

WORDS = ["train", "a2c", "CartPole-v1", "--runtime", "inline", "--actors", "1", "--eval.no-enabled", "--no-tensorboard",
         "--net.hidden", "8"]
LEADER = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_closed_terminal(tmp_path):
    """Checkpoint, summary and exit code, with nowhere left to say so."""
    screen, terminal = pty.openpty()
    words = [*WORDS, "--console.mode", "live", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen([sys.executable, "-c", LEADER, "-m", "shoal.cli", *words], stdin=terminal, stdout=terminal,
                               stderr=terminal, start_new_session=True, cwd=Path(__file__).parents[2])
    os.close(terminal)
    try:
        os.set_blocking(screen, False)
        deadline = time.monotonic() + 60
        while not _stepped(tmp_path / "run" / "metrics.jsonl"):
            assert process.poll() is None and time.monotonic() < deadline
            _read(screen)
            time.sleep(0.05)
        os.close(screen)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "interrupt" and summary["checkpoint_failed"] is None
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    assert 0 < int(newest.name) <= summary["env_steps"]


def _stepped(metrics: Path) -> bool:
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    return any('"env_steps"' in row and json.loads(row).get("env_steps") for row in rows[:-1])


def _read(screen: int) -> None:
    """What is on it, so that there is room for more."""
    try:
        while os.read(screen, 1 << 16):
            pass
    except BlockingIOError:
        pass


class Presses:
    count, begun = 0, True

    def interrupt(self):
        self.count += 1


@pytest.mark.parametrize("nohup", [False, True])
def test_hangup_and_nohup(nohup):
    """A hangup counts once; under nohup it does not count."""
    session = Presses()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        with interruptible(session):
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)  # a second Ctrl-C would end this process at once
            if not nohup:
                assert session.count >= 1
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if nohup else signal.SIG_DFL)
        assert (session.count == 0) == nohup
        os.write(1, b"")  # this terminal, or file, is still there
    finally:
        signal.signal(signal.SIGHUP, before)
