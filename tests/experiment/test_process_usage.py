"""Processor time counts children, also those that have ended. The clock of the kernel has steps of a hundredth of a second."""

import subprocess
import sys

from shoal.experiment.process_usage import cpu_seconds

BURN = "import sys, time\nwhile time.process_time() < 0.3: pass\n"
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_child_that_ended_is_counted():
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert cpu_seconds() - before >= 0.25


def test_living_grandchild_is_counted():
    before = cpu_seconds()
    words = [sys.executable, "-c", CHILD, BURN + "print(1, flush=True); sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"1\n"
        assert cpu_seconds() - before >= 0.25
