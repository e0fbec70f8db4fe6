"""a3c's sides on a machine without a GPU: a result is valid JSON, and a side that fails says why."""

import json

import pytest

from benchmarks import gpu_a3c


def test_result_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_a3c, "WARM_SECONDS", 1.0)
    gpu_a3c.main(["--only", "CartPole-v1", "--sides", "cpu,cuda", "--turns", "1", "--seconds", "4", "--actors", "1",
                  "--set", "net.hidden=[8]", "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == json.loads(capsys.readouterr().out)
    (env,) = found["envs"]
    here, there = env["turns"][0]["cpu"], env["turns"][0]["cuda"]
    assert here["env_steps_per_second"] == env["env_steps_per_second"]["cpu"] > 0 and here["updates_per_second"] > 0
    assert there["env_steps_per_second"] or "finds no GPU here" in there["error"]


def test_unknown_side(capsys):
    with pytest.raises(SystemExit):
        gpu_a3c.main(["--sides", "cpu,tpu"])
    assert "--sides has 'tpu'; there are cpu, cuda, cuda act" in capsys.readouterr().err


def test_a_share_needs_both_rates():
    turn = {"cpu": {"env_steps_per_second": 100}, "cuda": {"env_steps_per_second": 150}, "cuda act": {"env_steps_per_second": None}}
    assert gpu_a3c.share(turn, "cuda") == 1.5 and gpu_a3c.share(turn, "cuda act") is None
    assert gpu_a3c.middle([None, 2.0, 1.0]) == 1.5 and gpu_a3c.middle([None]) is None
