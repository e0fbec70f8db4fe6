"""Presets for Pong and Breakout: whole plans by one protocol, a convolutional torso, a graph that can be drawn, and steps."""

from __future__ import annotations

import pytest

import shoal
from shoal.envs.atari_protocol import AtariProtocol
from shoal.experiment.prepare import prepare
from shoal.experiment.run import plan_of

GAMES = ("ALE/Pong-v5", "ALE/Breakout-v5")
PRESETS = ("impala", "appo", "seed", "ppo", "apex", "r2d2")


def planned(preset: str, game: str):
    return plan_of(preset, game, None, None, {"actors": 1, "eval.enabled": False})


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("preset", PRESETS)
def test_rewards_are_clipped_once(preset, game):
    """Rewards are clipped once and the rest is the id's."""
    experiment = planned(preset, game).experiment
    protocol, _ = AtariProtocol.of(game, {}, experiment.envs.arguments())
    in_learner = getattr(experiment.algorithm, "reward_clip", 0.0)
    rescaled = preset == "r2d2"  # it rescales values instead (arXiv 1805.11593)
    assert protocol.reward_clipping + bool(in_learner) == (0 if rescaled else 1)
    assert (protocol.frameskip, protocol.stack_num, protocol.img_height, protocol.repeat_action_probability) == (4, 4, 84, 0.25)
    assert experiment.net.torso in ("nature", "impala")
    assert experiment.eval.episodes == 20


@pytest.mark.atari
@pytest.mark.parametrize("preset", PRESETS)
def test_it_can_be_drawn(preset):
    pytest.importorskip("ale_py")
    prepared = prepare(planned(preset, "ALE/Breakout-v5"))
    assert prepared.spec.backend == "ale" and prepared.spec.frame_skip == 4
    assert prepared.program().describe()


SMALL = {"architecture.envs_per_actor": 2, "eval.enabled": False, "console.mode": "none", "tensorboard": False, "actors": 1}
LITTLE = {"replay.capacity": 400, "replay.batch_size": 2, "replay.insert_batch": 2}
CUT = {  # of each preset only what decides how much is done before it learns
    "impala": {"algorithm.unroll": 4, "architecture.batch_slots": 1},
    "appo": {"algorithm.unroll": 4, "architecture.batch_slots": 1},
    "seed": {"algorithm.unroll": 4, "architecture.batch_slots": 1},
    "ppo": {"algorithm.unroll": 4},
    "apex": {**LITTLE, "replay.min_size": 16, "algorithm.dueling_hidden": 16},
    "r2d2": {**LITTLE, "replay.min_size": 2, "algorithm.burn_in": 2, "algorithm.length": 6, "algorithm.stride": 3,
             "net.lstm_size": 16, "algorithm.dueling_hidden": 16},
}


@pytest.mark.atari
@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("preset", PRESETS)
def test_it_plays_and_learns(preset, game, tmp_path):
    pytest.importorskip("ale_py")
    run = shoal.train(preset, game, runtime="inline", run_dir=str(tmp_path / "run"), max_learner_steps=2, max_seconds=120.0,
                      **SMALL, **CUT[preset])
    assert run.summary["stopped_by"] == "learner_steps" and run.summary["env_steps"] >= 8
    assert run.summary["env_frames"] == 4 * run.summary["env_steps"]
