"""The README's replay section is run as it stands."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text()
PROGRAM = str(Path(sys.executable).parent / "shoal")


def test_python() -> None:
    (code,) = re.findall(r"```python\n(from shoal import replay\n.*?)```", TEXT, re.S)
    assert len(code.strip().splitlines()) - 2 == 5  # five lines after the import
    for word in ("Prioritized", "client()", "append", "sample", "update_priorities"):
        assert word in code
    steps = [SimpleNamespace(obs=np.full(4, t, np.float32), action=t, reward=1.0, discount=1.0) for t in range(9)]
    names: dict[str, Any] = {"steps": steps, "priorities": np.ones(256)}
    exec(code, names)
    data = names["batch"].data
    assert len(names["batch"]) == 256 and (data["next_observation"] == data["observation"] + 3).all()


def test_commands(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    serve, info = (line.strip() for line in TEXT.splitlines() if line.startswith("    shoal replay "))
    words = serve.replace("tcp://127.0.0.1:7777", address).replace("DIR", str(tmp_path / "saved")).split()[1:]
    server = subprocess.Popen([PROGRAM, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline().strip() == f"serving {address}"
        asked = info.replace("tcp://127.0.0.1:7777", address).split()[1:]
        shown = subprocess.run([PROGRAM, *asked], capture_output=True, text=True, timeout=60, check=True)
        assert "samples per insert" in shown.stdout and shown.stdout.splitlines()[1] == "replay"
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert server.stdout is not None
        server.stdout.close()
    assert list((tmp_path / "saved").glob("checkpoint-*"))


def test_conformance_table_names_tests() -> None:
    """The conformance table names tests that exist."""
    here = Path(__file__).parent
    named = set(re.findall(r"\btest_\w+", (here.parents[1] / "docs" / "replay_conformance.md").read_text()))
    there = set(re.findall(r"def (test_\w+)\(", "".join(path.read_text() for path in here.glob("test_*.py"))))
    assert named and named <= there
