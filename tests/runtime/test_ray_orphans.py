"""Nothing is left of a Ray cluster that a driver started, nor of what environments started in it, however the driver ends."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from tests.runtime.harness import eventually, gone
from tests.runtime.test_leftovers import PIDS, started
from tests.tree import tree_environment

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PATIENCE = 120.0
SCRIPT = """
    from pathlib import Path
    from shoal.runtime import Program, run
    from tests.runtime.harness import Watch
    from tests.runtime.test_leftovers import Parent

    folder = Path({folder!r})
    program = Program("t")
    program.add("parent", Parent, folder=folder, replicas=2)

    def until(control):
        if control.total("alive") == 2 and control.total("env_steps") > 20:
            (folder / "up").touch()
        return (folder / "end").exists()

    run(program, Watch(until, seconds=100), "ray", folder / "logs")
"""


@pytest.mark.parametrize("how", ["end", "interrupt", "kill -9"])
def test_nothing_is_left_of_a_cluster(how, tmp_path):
    environment = {name: value for name, value in tree_environment().items() if not name.startswith("RAY_")}
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SCRIPT).format(folder=str(tmp_path))], env=environment,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert eventually(lambda: (tmp_path / "up").exists(), PATIENCE)
        below = [process.pid for process in psutil.Process(driver.pid).children(recursive=True)]
        pids = {*below, *started(tmp_path, "*-0")}
        assert len(started(tmp_path, "*-0")) == 2 * PIDS and not any(map(gone, pids))
        if how == "kill -9":
            driver.kill()
        elif how == "interrupt":
            driver.send_signal(signal.SIGINT)
        else:
            (tmp_path / "end").touch()
        driver.wait(PATIENCE)
        assert eventually(lambda: all(map(gone, pids)), 15.0), [psutil.Process(pid) for pid in pids if not gone(pid)]
    finally:
        driver.kill()
        driver.wait()
        for pid in started(tmp_path):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
