"""A role that is killed while its file in the newest checkpoint is damaged."""

import os
import signal

from shoal.experiment.checkpoints import read_meta
from shoal.experiment.rundir import RunDir
from shoal.telemetry.outputs import read_lines
from tests.experiment.test_checkpoints import flip
from tests.experiment.test_live_values import Running, eventually, place
from tests.runtime.harness import PATIENCE


def test_trainer_skips_damaged_checkpoint(tmp_path):
    """It goes on from the one before, and the next checkpoint does not give the damaged file a right checksum."""
    run = tmp_path / "run"
    with Running(run, "a2c", "CartPole-v1", "--actors", "1", "--checkpoint.every-seconds", "1000") as running:
        checkpoints = RunDir(run).checkpoints()
        assert running.shoal("checkpoint") == 0
        newest = checkpoints.newest()
        flip(newest / "trainer-0.safetensors")
        os.kill(place(running.process.pid, "trainer"), signal.SIGKILL)
        told = eventually(lambda: [row for row in read_lines(run / "metrics.jsonl") if "is used instead" in str(row)])
        assert told[0]["text"].startswith(f"checkpoint {newest.name} is damaged (trainer-0.safetensors")
        eventually(lambda: running.shoal("checkpoint") == 0)
        after = checkpoints.sound()
        assert after.name > newest.name and read_meta(after)["learner_steps"] > 0
        assert running.shoal("stop") == 0
        assert running.process.wait(PATIENCE) == 0
