"""What processes that compute beside others are given, so that threads which wait leave their cores to them."""

from __future__ import annotations

from pathlib import Path

from shoal.runtime.core_use import SPINS, waiting_threads
from tests.runtime.harness import Shared


def test_threads_that_wait_soon_sleep(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert waiting_threads() == {"GOMP_SPINCOUNT": str(SPINS)}
    environ = Path(f"/proc/{Shared.get().process.pid}/environ").read_bytes().split(b"\0")
    assert f"GOMP_SPINCOUNT={SPINS}".encode() in environ, "places are forks of this process, which has imported torch"


def test_what_the_user_has_set_wins(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "ACTIVE")
            assert waiting_threads() == {}
