"""Servers of every kind: in this process, over ipc, over TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import replay
from shoal.replay.client import timings

Start = Callable[..., tuple[replay.Server, replay.Client]]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of dead servers do not wait for an answer that takes long on its way."""
    monkeypatch.setattr(timings, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(timings, "LATE_SECONDS", 0.1)


@pytest.fixture(params=["inline", "ipc", "tcp"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """start(*tables, **options) -> server and a client that reaches it in one of the three ways."""
    opened: list[Any] = []

    def begin(*tables: replay.Table, **options: Any) -> tuple[replay.Server, replay.Client]:
        address = {"inline": None, "ipc": f"ipc://{tmp_path}/replay.sock", "tcp": "tcp://127.0.0.1:0"}[request.param]
        server = replay.Server(list(tables), address=address, **options)
        client = server.client(timeout=10) if address is None else replay.Client(server.address, timeout=10)
        opened.extend([server, client])
        return server, client

    yield begin
    for thing in reversed(opened):
        thing.close()
