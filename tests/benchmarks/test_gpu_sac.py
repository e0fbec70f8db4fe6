"""sac against its bare update loop, on a CPU and small."""

import json

import numpy as np

from benchmarks import gpu_sac
from benchmarks.training_curve import evaluations
from shoal.acting import Progress
from shoal.device.placement import Hardware


def test_the_bare_loop_makes_whole_updates():
    algorithm = gpu_sac.algorithm_of("Pendulum-v1", (8,))
    loop = gpu_sac.BareUpdates(algorithm, Hardware(), 16, graphs=False, whole=0)
    before = loop.learn.published(Progress())["params"].copy()
    assert loop.update() == 1 and loop.rate(0.01) > 0
    assert not np.array_equal(loop.learn.published(Progress())["params"], before)
    assert set(gpu_sac.bare("Pendulum-v1", Hardware(), 0.01)) == {"eager"}


def test_settings_become_options():
    words = gpu_sac.option_words
    assert words("eval.enabled", False) == ["--no-eval.enabled"] and words("net.hidden", (8, 8)) == ["--net.hidden", "8", "8"]
    assert words("replay.min_size", 64) == ["--replay.min-size", "64"]


def test_evaluations_are_listed_once_each():
    shots = [{"evaluations": n, "eval_return": value, "env_steps": n, "learner_steps": 0, "seconds": 0.0}
             for n, value in ((0, None), (1, -5.0), (1, -5.0), (2, 3.0))]
    assert [row["eval_return"] for row in evaluations(shots)] == [-5.0, 3.0]


def test_result_as_json(tmp_path, capsys):
    """A result is valid JSON, with a rate or without."""
    gpu_sac.main(["--env", "Pendulum-v1", "--device", "cpu", "--layouts", "turns", "--seconds", "4", "--bare-seconds", "0.01",
                  "--set", "net.hidden=[8]", "replay.batch_size=8", "replay.samples_per_insert=8.0", "replay.min_size=50",
                  "algorithm.random_steps=50", "eval.episodes=1", "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == json.loads(capsys.readouterr().out) and found["run"]["command"].startswith("shoal train sac Pendulum-v1")
    assert found["run"]["updates_per_second"] > 0 or "error" in found["run"]
