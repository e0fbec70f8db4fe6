"""For all tests: the processor's instructions that oneDNN may use, one thread for PyTorch, Ctrl-C, and which tests run alone."""

import os
import signal

# Before torch is imported: some virtual machines announce AMX but do not allow it, and oneDNN's bfloat16 kernels die of SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from pathlib import Path

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts jobs in the background so, and their children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
ALONE = ("runtime", "coordination", "replay/test_conformance.py", "replay/test_deadlines.py", "replay/test_faults.py",
         "replay/test_fuzz.py", "replay/test_hostile.py", "replay/test_lifetimes.py", "replay/test_limiters.py",
         "replay/test_network.py", "replay/test_sharding.py", "experiment/test_hangup.py", "experiment/test_starts.py",
         "bench/test_processes.py", "bench/test_suite.py", "architectures/test_hard_to_kill.py",
         "architectures/test_signs_of_life.py", "architectures/test_verdicts.py", "benchmarks/test_race.py")
"""Tests that measure time, kill processes by the clock, start Ray, or look at all of the machine's shared memory."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if any(item.path.is_relative_to(HERE / name) for name in ALONE):
            item.add_marker("alone")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """What somebody has calibrated on this machine decides nothing here."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.getbasetemp() / "no_cache"))


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small here: more threads only spin on cores that other processes need."""
    torch.set_num_threads(1)
