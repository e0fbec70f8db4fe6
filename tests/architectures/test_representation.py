"""CURL's representation learner: in lock step it is the synchronous learner, beside it the encoder lags, and kills cost nothing."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from shoal import cli
from shoal.acting import Progress
from shoal.algorithms import curl
from shoal.nets import NetConfig
from shoal.roles.replay_config import ReplayConfig
from tests.algorithms.test_curl import Drawing
from tests.architectures.graphs import Weights, draw, go, train
from tests.runtime.harness import Killer, Saver

CATCH = "shoal/PixelCatch-v0"
NET = NetConfig(hidden=(16,), activation="relu")
SMALL = ReplayConfig(capacity=1000, min_size=32, batch_size=16, insert_batch=4, samples_per_insert=16.0, exponent=0.6)
DQN = curl.Config(code_size=8, dqn=curl.CURLDiscreteOptions(n_step=3, importance_final=1.0, lr_final=0.0))
RAINBOW = curl.Config(code_size=8, crop_all=False, projection=(8,), dqn=curl.CURLDiscreteOptions(atoms=11, noisy_sigma=0.1))
SAC = curl.Config(code_size=8, sac=curl.CURLBoxOptions(random_steps=40))
LOCK_STEP = {"features": "shared", "lockstep": True}


@pytest.mark.parametrize(("algorithm", "env"), [pytest.param(DQN, CATCH, id="dqn"), pytest.param(SAC, Drawing, id="sac"),
                                                pytest.param(RAINBOW, CATCH, id="rainbow", marks=pytest.mark.slow)])
def test_lock_step_is_synchronous(algorithm, env, tmp_path):
    """Shared, in lock step, it is the synchronous learner bit for bit."""
    options = {"net": NET, "replay": SMALL, "updates": 50, "max_env_steps": 400}
    one = train(tmp_path, algorithm, "synchronous", env, "inline", **options)
    two = train(tmp_path, algorithm, "representation", env, "inline", **options, **LOCK_STEP)
    assert Progress.of(one.published["progress"]).learner_steps == 50 and one.reason == two.reason == "counted"
    assert (one.version, one.hash) == (two.version, two.hash)
    assert two.final["learner-0"]["encoder_lag/count"] == 50 and two.final["learner-0"]["encoder_lag/max"] == 0
    assert two.final["representation-0"]["encoder_updates"] == 50


def test_lock_step_between_processes(tmp_path):
    """Lock step has the same bits between processes."""
    options = {"net": NET, "replay": SMALL, "updates": 12, **LOCK_STEP}
    inline, local = (train(tmp_path, DQN, "representation", CATCH, kind, **options) for kind in ("inline", "local"))
    assert (local.version, local.hash) == (inline.version, inline.hash)


def test_detached_encoder(tmp_path):
    """A detached encoder is learned beside the learner, at its pace."""
    program, _ = draw(DQN, "representation", CATCH, net=NET, replay=SMALL)
    assert set(program.nodes) == {"actor", "replay", "learner", "representation"}
    watch = train(tmp_path, DQN, "representation", CATCH, "inline", net=NET, replay=SMALL, updates=60, encoder_updates=0.5)
    page = watch.final
    made = page["representation-0"]["encoder_updates"]
    assert 25 <= made <= 0.5 * 61 + 1, "half as many as the learner's"
    assert page["replay-0"]["uncounted_samples"] >= made * SMALL.batch_size
    assert page["replay-0"]["replay_samples"] >= 60 * SMALL.batch_size and page["learner-0"]["encoder_lag/count"] == 60
    assert page["representation-0"]["encoder_version"] == made + 1 and page["representation-0"]["contrast_loss"] > 0


@pytest.mark.parametrize("features", ["detached", "shared"])
def test_killed_representation_learner(features, tmp_path):
    """Training goes on after a kill of the representation learner."""
    killer, save = Killer(("representation-0",), times=2, progress="encoder_updates", every=30), Saver(tmp_path, every=50)
    highest: dict[str, float] = {}

    def act(control):
        wire = control.program.wires["encoder"]
        stored = wire.layout.empty()
        now = {name: control.total(name) for name in ("env_steps", "learner_steps", "encoder_updates", "replay_inserts")}
        now["encoder"] = wire.attach("reader", 0, 0).pull(stored)
        now["updates that the encoder has seen"] = int(stored["updates"][0])
        for name, value in now.items():
            assert value >= highest.get(name, 0), f"{name} ran backwards"
            highest[name] = value
        save(control)
        killer(control)

    program, _ = draw(DQN, "representation", CATCH, net=NET, replay=SMALL, features=features)
    watch = go(program, "local", tmp_path, Weights(killer.done, act, seconds=240))
    assert watch.reason == "until" and killer.kills == 2, (watch.reason, killer.kills, highest)
    assert not [event for event in watch.events if event["kind"] == "error"]
    assert watch.final["representation-0"]["restarts"] >= 2 and np.isfinite(watch.published["params"]).all()
    assert highest["updates that the encoder has seen"] >= highest["encoder_updates"] - 2, "what was published is not lost"


QUICK = ["--runtime", "inline", "--max-env-steps", "200", "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "4",
         "--replay.batch-size", "16", "--replay.min-size", "64", "--net.hidden", "16"]


@pytest.mark.parametrize(("preset", "env", "loss"), [
    ("curl", CATCH, "head_loss"),
    ("curl", "tests.algorithms.test_curl:Drawing", "critic_loss"),
    pytest.param("curl_rainbow", CATCH, "head_loss", marks=pytest.mark.slow),
])
def test_every_preset_and_action_space(preset, env, loss, tmp_path, monkeypatch):
    """Every preset runs with every kind of actions."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", preset, env, "--run-dir", "run", *QUICK]) == 0
    losses = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["losses"]
    assert losses[loss] > 0 and losses["encoder_loss"] > 0 and losses["contrast_loss"] > 0


def test_resumed_and_evaluated(tmp_path, monkeypatch):
    """A run with a representation learner is resumed and evaluated."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "curl_async", CATCH, "--run-dir", "run", *QUICK]) == 0
    assert cli.main(["resume", "run", "--max-env-steps", "400", "--console.mode", "none"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    versions = [row["encoder_version"] for row in rows if "encoder_version" in row]
    assert versions == sorted(versions) and rows[-1]["losses"]["contrast_loss"] > 0 and rows[-1]["encoder_lag"]["max"] >= 0
    assert cli.main(["eval", "run", "--episodes", "4"]) == 0


@pytest.mark.parametrize(("words", "sentence"), [
    (["--algorithm", "dqn", "--architecture", "representation", CATCH], "dqn has none apart from its nets"),
    (["curl_async", CATCH, "--learners", "2"], "--learners 2 with --architecture representation does not fit"),
    (["curl_async", CATCH, "--replay.shards", "2"], "--replay.shards 2 with --architecture representation does not fit"),
    (["curl_async", CATCH, "--architecture.lockstep", "--architecture.features", "detached"], "needs gradients to wait for"),
    (["curl_async", CATCH, "--architecture.lockstep", "--replay.samples-per-insert", "none"], "take turns by it"),
    (["--algorithm", "curl", "--architecture", "parameter_server", CATCH], "a part of them; use --architecture actor_learner"),
    (["curl_async", "CartPole-v1"], "it learns from crops of one image"),
])
def test_what_does_not_fit(words, sentence, tmp_path, monkeypatch, capsys):
    """What does not fit is refused with one sentence."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *words, "--console.mode", "none"]) == 2
    assert sentence in capsys.readouterr().err
    assert not os.path.exists("runs"), "nothing was written"
