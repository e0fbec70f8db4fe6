"""Roles of a run are really killed when they are due."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

from benchmarks.kills import kill_victims

VICTIM = "import setproctitle, time; setproctitle.setproctitle('shoal: actor 1'); time.sleep(600)"
PARENT = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); print(p.wait(), flush=True)"


def test_a_victim_is_killed_when_it_is_due(tmp_path):
    metrics, kills, over = tmp_path / "metrics.jsonl", [], threading.Event()
    with subprocess.Popen([sys.executable, "-c", PARENT, VICTIM], stdout=subprocess.PIPE, text=True) as parent:
        thread = threading.Thread(target=kill_victims, args=(parent.pid, ("actor 1",), metrics, 100, kills, over))
        thread.start()
        metrics.write_text(json.dumps({"env_steps": 99}) + "\n")
        time.sleep(0.2)
        assert not kills
        metrics.write_text(json.dumps({"env_steps": 150}) + "\n{torn")
        assert parent.stdout is not None and parent.stdout.readline() == "-9\n"
        over.set()
        thread.join()
    assert kills == [{"victim": "actor 1", "env_steps": 150}]
