"""`--learners 2`: the senior learner's state is in every checkpoint, the first one included."""

import pytest

import shoal

SMALL = {"actors": 2, "learners": 2, "net.hidden": (8,), "eval.enabled": False, "console.mode": "none", "tensorboard": False}


@pytest.mark.parametrize("preset,learner,kind", [("ppo", "trainer-0", "inline"), ("impala", "learner-0", "inline"),
                                                 ("ppo", "trainer-0", "local"), ("impala", "learner-0", "local")])
def test_checkpoints_and_resume(preset, learner, kind, tmp_path):
    run = shoal.train(preset, "CartPole-v1", runtime=kind, max_env_steps=3000, run_dir=str(tmp_path / "run"), **SMALL)
    first, *_, last = sorted((tmp_path / "run" / "checkpoints").glob("0*"))
    assert first.name == "000000000000" and int(last.name) > 0
    for folder in (first, last):
        assert (folder / f"{learner}.safetensors").is_file()
    again = shoal.resume(str(tmp_path / "run"), max_env_steps=6000)
    assert again.summary["stopped_by"] == "env_steps"
    assert again.summary["learner_steps"] > run.summary["learner_steps"] > 0
