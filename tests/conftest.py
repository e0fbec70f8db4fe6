"""For all tests: the processor's instructions that oneDNN may use, one thread for PyTorch, Ctrl-C, Ray's tests first, tests that
run alone."""

import os
import signal

# Before torch is imported: some virtual machines announce AMX but do not allow it, and oneDNN's bfloat16 kernels die of SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from pathlib import Path

import pytest
import torch

from shoal.runtime import local
from tests.runtime.harness import Farm

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts jobs in the background so, and their children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path.cwd()
ALONE = ("replay/test_deadlines.py", "replay/test_faults.py", "replay/test_fuzz.py", "replay/test_hostile.py",
         "replay/test_lifetimes.py", "architectures/test_hard_to_kill.py", "architectures/test_signs_of_life.py")
"""Tests that kill processes and wait for what others make of it."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that use Ray come first: so one of the processes of `make test` gets all of them, and one cluster is enough."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
    for item in items:
        if any(item.path.is_relative_to(Path(__file__).parent / name) for name in ALONE):
            item.add_marker("alone")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """What somebody has calibrated on this machine decides nothing here."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.getbasetemp() / "no_cache"))


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small here: more threads only spin on cores that other processes need."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def farm():
    yield
    Farm.close()


@pytest.fixture(autouse=True)
def lent_fork_server(monkeypatch):
    """Runs on the local runtime in this process share one fork server: to start one takes longer than many a run. What it forks
    works in the folder in which it began, so a test that goes to another folder has a server of its own."""
    own = local.run_local

    def run_local(program, session, log_dir, faults=None, fork_server=None):
        return own(program, session, log_dir, faults, fork_server or (Farm.get() if Path.cwd() == HERE else None))

    monkeypatch.setattr(local, "run_local", run_local)
