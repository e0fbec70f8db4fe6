"""What processes that compute beside others are given, so that threads which wait leave their cores to them."""

from __future__ import annotations

import os
import time

from shoal.runtime import Program
from shoal.runtime.core_use import SPINS, waiting_threads
from tests.runtime.harness import drive


class Looks:
    """Ends its program with what its process was given."""

    def __init__(self, me):
        self.me = me

    async def step(self):
        self.me.finish(f"spins {os.environ.get('GOMP_SPINCOUNT')}")
        time.sleep(0.05)


def test_threads_that_wait_soon_sleep(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert waiting_threads() == {"GOMP_SPINCOUNT": str(SPINS)}
    program = Program("t")
    program.add("looks", Looks)
    assert drive(program, "local", tmp_path).reason == f"spins {SPINS}"


def test_what_the_user_has_set_wins(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "ACTIVE")
            assert waiting_threads() == {}
