"""`shoal.trainable` in real runs of Ray Tune: trials train, are stopped, copied with other values, and restored."""

import logging
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.rundir import RunDir
from shoal.runtime.ray.ray_config import set_defaults

tune = pytest.importorskip("ray.tune", exc_type=ImportError)
ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
SMALL = {"tensorboard": False, "eval.episodes": 5, "algorithm.unroll": 8}


@pytest.fixture
def cluster(monkeypatch):
    for name in ("RAY_AIR_NEW_OUTPUT", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"):
        monkeypatch.setenv(name, "0" if name == "RAY_AIR_NEW_OUTPUT" else "1")
    set_defaults()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
             object_store_memory=100_000_000)
    yield
    ray.shutdown()


def learner(run):
    return TensorFiles().load(RunDir(Path(run)).checkpoints().newest() / "trainer-0.safetensors")


def test_tune_run(cluster, tmp_path, monkeypatch):
    """Two trials for two intervals each; a checkpoint is a run that another trial takes over with its own values."""
    trainable = shoal.trainable("a2c", "shoal/Catch-v0", every_env_steps=200, **SMALL)
    results = tune.Tuner(trainable, param_space={"algorithm.lr": tune.grid_search([1e-3, 2e-3]), "seed": 3},
                         tune_config=tune.TuneConfig(metric="eval_return", mode="max"),
                         run_config=tune.RunConfig(storage_path=str(tmp_path), name="t", stop={"training_iteration": 2}, verbose=0,
                                                   checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True))).fit()
    assert not results.errors and len(results) == 2
    for result in results:
        assert result.metrics["env_steps"] >= 400 and np.isfinite(result.metrics["eval_return"])
    best = results.get_best_result()
    with best.checkpoint.as_directory() as folder:
        assert shoal.load(f"{folder}/run").policy is not None
        plain = shoal.train("a2c", "shoal/Catch-v0", run_dir=str(tmp_path / "plain"), seed=3, max_env_steps=200, policy="last",
                            runtime="inline", **{**SMALL, "algorithm.lr": best.config["algorithm.lr"]})
        plain = shoal.resume(plain.directory, max_env_steps=400)
        mine, other = learner(f"{folder}/run"), learner(plain.directory)
        assert all(np.array_equal(mine[name], other[name]) for name in other), "the trial is a run like any other"
        monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))  # not the home directory
        trial = trainable({"algorithm.lr": 5e-3})
        trial.load_checkpoint(folder)
    before = learner(trial.run.path)
    assert all(np.array_equal(before[name], other[name]) for name in other)
    found = trial.train()
    assert found["env_steps"] >= 600 and trial.run.config()["algorithm"]["lr"] == 5e-3
    trial.stop()
