"""What a benchmark starts ends with it, however it ends; and peers that cannot be installed are rows, with the reason."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.peers import cases, install
from benchmarks.replay_buffers.cases import PEERS
from shoal.bench import machine
from shoal.bench.child_processes import ChildProcesses
from shoal.bench.jobs import run_job
from shoal.bench.parent_death import tied_to_parent
from shoal.bench.suite import Job, SuiteCase


def gone(processes: list[psutil.Process], seconds: float = 60.0) -> bool:
    """Whether all of them have ended in time; nobody may have reaped them."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                left += [process] * (process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        if not left:
            return True
        time.sleep(0.02)
    return False


def below(pid: int, word: str, many: int = 1, seconds: float = 60.0) -> list[psutil.Process]:
    """All processes below one, as soon as this many of them have this word in their command."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = []
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found.append((child, " ".join(child.cmdline())))
        if sum(word in words for _, words in found) >= many:
            return [child for child, _ in found]
        time.sleep(0.02)
    raise AssertionError(f"no {word}")


# ---------------------------------------------------------------------------------------------- ends
HEARS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # also as a job in the background
START = "from shoal.bench.child_processes import ChildProcesses; ChildProcesses().run(WORDS, 600)"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)  # asleep"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_command_ends_with_its_parent(number):
    """A command ends with the process that started it."""
    code = HEARS + START.replace("WORDS", repr(SLEEP))
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as parent:
        children = below(parent.pid, "-c import time")
        parent.send_signal(number)
    assert gone(children)


def test_tied_command():
    """A tied command is the process itself and says if it is missing."""
    words = tied_to_parent([sys.executable, "-c", "import os; print(os.getpid())"])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and int(child.stdout.read()) == child.pid
    done = subprocess.run(tied_to_parent(["/no/such/command"]), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == "/no/such/command cannot be run: No such file or directory\n"
    orphan = tied_to_parent([sys.executable, "-c", "print('alive')"])
    orphan[4] = "1"  # its parent is another one by now
    assert subprocess.run(orphan, capture_output=True, text=True, check=False).stdout == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_replay_driver_ends_with_the_suite(tmp_path, number):
    """A replay driver and its server end with the suite."""
    (tmp_path / "s.toml").write_text(
        '[[case]]\nworkload = "small"\nsize = 100\nwho = ["shoal ipc"]\nmax_seconds = 60.0\nseeds = [1]\n')
    words = [sys.executable, "-m", "shoal.cli", "bench", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        children = below(bench.pid, "spawn_main", 2)  # a writer, and so the server before it is at work
        bench.send_signal(number)
    assert gone(children)


# ---------------------------------------------------------------------------------------------- peers
BUFFER = Job(SuiteCase("c", workload="small", size=1000, who=("cpprb",), max_seconds=0.2), 1, who="cpprb")
LIBRARY = Job(SuiteCase("c", peer="torchrl", env="CartPole-v1", max_seconds=1.0), 1)


@pytest.fixture
def nothing_installed(monkeypatch):
    cases.installed.cache_clear()
    yield monkeypatch
    cases.installed.cache_clear()


@pytest.mark.parametrize("job", [BUFFER, LIBRARY], ids=["buffer", "library"])
def test_failed_venv_is_a_row(job, nothing_installed):
    """A virtual environment that cannot be made becomes a row."""
    nothing_installed.setattr(install, "FOLDER", Path("/proc/nope"))
    row = run_job(job, ChildProcesses())
    assert row["error"].startswith("could not be installed: ") and "/proc/nope" in row["error"]


@pytest.mark.parametrize("job", [BUFFER, LIBRARY], ids=["buffer", "library"])
def test_words_of_pip_are_kept(job, nothing_installed):
    """The words of pip are kept and it is asked once."""
    ran: list[list[str]] = []

    def run(command):
        ran.append(command)
        failed = "venv" not in command
        return subprocess.CompletedProcess(command, int(failed), "", "ERROR: no matching distribution" if failed else "")

    nothing_installed.setattr(install, "_run", run)
    rows = [run_job(job, ChildProcesses()) for _ in range(3)]
    assert {row["error"] for row in rows} == {"could not be installed: ERROR: no matching distribution"}
    assert sum("pip" in command for command in ran) == 1


def test_buffer_without_torch(nothing_installed):
    ran: list[list[str]] = []

    def run(command):
        ran.append(command)
        return subprocess.CompletedProcess(command, int("-c" in command and len(ran) == 1), "cpprb 11.0.0, numpy 2.0.0\n", "")

    nothing_installed.setattr(install, "_run", run)
    cpprb, sb3 = PEERS[:2]
    assert install.install(cpprb, lambda text: None) == (True, "cpprb 11.0.0, numpy 2.0.0")
    assert not any(install.TORCH in command for command in ran)
    assert sb3 in install.PEERS  # one environment for its buffer and its algorithms


# ---------------------------------------------------------------------------------------------- where and with what
def test_outside_a_checkout(tmp_path, monkeypatch):
    """Outside a checkout nothing is said of changes."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(machine, "ROOT", tmp_path / "site-packages")  # in somebody else's repository
    about = machine.describe()
    assert about["commit"] == "unknown" and about["uncommitted_changes"] is None


def test_only_code_counts_as_a_change(tmp_path, monkeypatch):
    """Results that have just been written, and pages, change nothing that is measured."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    files = [tmp_path / name for name in ("docs/results/a/results.jsonl", "README.md", "docs/benchmark.md", "src/a.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("old")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *words], check=True)
    for file in files[:-1]:
        file.write_text("new")
    assert machine.describe()["uncommitted_changes"] is False
    files[-1].write_text("new")
    assert machine.describe()["uncommitted_changes"] is True
