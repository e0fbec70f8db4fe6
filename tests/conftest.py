"""For all tests: the processor's instructions that oneDNN may use, one thread for PyTorch, Ctrl-C, and Ray's tests first."""

import os
import signal

# Before torch is imported: some virtual machines announce AMX but do not allow it, and oneDNN's bfloat16 kernels die of SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from shoal.runtime import local
from tests.runtime.harness import Farm

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts jobs in the background so, and their children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that use Ray come first: so one of the processes of `make test` gets all of them, and one cluster is enough."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


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
    """Runs on the local runtime in this process share one fork server: to start one takes longer than many a run."""
    own = local.run_local

    def run_local(program, session, log_dir, faults=None, fork_server=None):
        return own(program, session, log_dir, faults, fork_server or Farm.get())

    monkeypatch.setattr(local, "run_local", run_local)
