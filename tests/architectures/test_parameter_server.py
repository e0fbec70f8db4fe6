"""GORILA: one bundle is DQN, four shards are one, bad gradients are refused, and any process may be killed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import shoal
from shoal import cli
from shoal.algorithms import dqn, r2d2
from shoal.errors import ConfigError
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.evaluation import published_of
from shoal.experiment.policy_choice import PolicyChoice
from shoal.nets import NetConfig
from shoal.roles.gradient_learner import GradientLearner
from shoal.roles.learner_state import LearnerState
from shoal.roles.parameter_shards import Shard, cuts_of, first_shard
from shoal.roles.replay_config import ReplayConfig
from tests.architectures.gorila import Poisoned, with_laggard
from tests.architectures.graphs import Weights, draw, go, train
from tests.runtime.harness import Files, Killer, Saver

CATCH, TMAZE = "shoal/Catch-v0", "shoal/TMaze-v0"
PLAIN = dqn.Config(double=False, epsilon_steps=500, target_period_updates=10, optimiser="adagrad", optimiser_epsilon=1e-8, lr=0.02)
R2D2 = r2d2.Config(burn_in=2, length=4, stride=2, lr=1e-3, target_period_updates=10)
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16, prev_action_reward=True)
TURNS = ReplayConfig(capacity=400, min_size=64, batch_size=16, insert_batch=4, samples_per_insert=4.0, exponent=0.0)
GLOBAL = replace(TURNS, insert_batch=10)
BARE = {"shards": 1, "max_staleness": 0, "outlier_width": None}


# ---------------------------------------------------------------------------------------------- identities
@pytest.mark.parametrize("kind", ["inline", "local"])
def test_one_bundle_is_dqn_with_adagrad(kind, tmp_path):
    """No gradient of the only learner is ever old; the target net is the server's, and its actor has every update it waited for."""
    alone = train(tmp_path, PLAIN, "synchronous", CATCH, "inline", updates=60, replay=TURNS)
    bundle = train(tmp_path, PLAIN, "parameter_server", CATCH, kind, updates=60, replay=TURNS, **BARE)
    assert alone.reason == bundle.reason == "counted"
    assert bundle.hash == alone.hash
    np.testing.assert_array_equal(bundle.published["progress"], alone.published["progress"])
    assert bundle.final["server-0"]["gradients_stale"] == 0


def trace(folder, config, updates=40, **options):
    """What the learner has after every update: parameters and target net."""
    seen = []

    class Tracing(GradientLearner):
        async def step(self):
            await super().step()
            seen.append([tensor.numpy().copy() for tensor in self.link.learn.weights.values()])

    program, _ = draw(config, "parameter_server", CATCH, replay=TURNS, max_env_steps=2000, **options)
    program.nodes["learner"].role = Tracing
    go(program, "inline", folder, Weights(lambda control: len(seen) >= updates))
    return seen[:updates]


@pytest.mark.parametrize("optimiser", ["adagrad", "adam", "rmsprop_centred"])
def test_four_shards_are_one_bit_for_bit(optimiser, tmp_path):
    """Gradients are clipped before they are cut, and all shards make a step of the annealed size."""
    config = replace(PLAIN, optimiser=optimiser, lr=1e-3, lr_final=1e-5, grad_norm=0.05)
    one, four = (trace(tmp_path, config, shards=shards) for shards in (1, 4))
    assert len(one) == 40 and not np.array_equal(one[0][0], one[-1][0]) and not np.array_equal(one[0][1], one[-1][1])
    for whole, pieces in zip(one, four, strict=True):
        for a, b in zip(whole, pieces, strict=True):
            np.testing.assert_array_equal(a, b)


def test_slices_cover_the_vector_once():
    for size, shards in ((1000, 1), (1000, 4), (64, 1), (65, 2), (12_345, 7)):
        cuts = cuts_of(size, shards)
        assert np.concatenate([np.arange(size)[cut] for cut in cuts]).tolist() == list(range(size))
        assert all(cut.start % 64 == 0 and cut.stop > cut.start for cut in cuts)
    with pytest.raises(ConfigError, match="use 16 or fewer"):
        cuts_of(1000, 17)


# ---------------------------------------------------------------------------------------------- what is refused
def test_gradients_of_a_laggard(tmp_path):
    """The gradients of a laggard are refused and counted."""

    def run(limit):
        program, _ = draw(PLAIN, "parameter_server", CATCH, actors=2, replay=TURNS, shards=1, max_staleness=limit)
        program.nodes["learner"].role = with_laggard(1)
        return go(program, "inline", tmp_path, Weights(lambda control: control.total("learner_steps") >= 60))

    strict, lenient = run(5), run(None)
    pushed = strict.final["learner-1"]["steps"]
    refused = strict.final["server-0"]["gradients_stale"]
    assert pushed >= 40 and pushed - 6 <= refused <= pushed
    assert strict.final["server-0"]["gradient_age/max"] >= 50 and lenient.final["server-0"]["gradients_stale"] == 0
    inserted = sum(strict.final[f"actor-{k}"]["env_steps"] for k in range(2))
    assert inserted - 32 <= strict.published["progress"][0] <= inserted, "steps of refused gradients count too"


def test_refused_by_all_shards(tmp_path):
    """Two bundles in turn, and no gradient may be old: of each pair one is refused, and never half of it applied."""
    roles = {}

    def kept(make):
        def made(me, **arguments):
            roles[me.name] = make(me, **arguments)
            return roles[me.name]

        return made

    program, _ = draw(PLAIN, "parameter_server", CATCH, actors=2, replay=TURNS, shards=3, max_staleness=0)
    for name, make in (("server", first_shard), ("shard_1", Shard), ("shard_2", Shard)):
        program.nodes[name].role = kept(make)
    done = go(program, "inline", tmp_path, Weights(lambda control: control.total("learner_steps") >= 60))
    assert done.final["server-0"]["gradients_stale"] >= 40
    applied = [int(role.learn.state["updates"]) for role in roles.values()]
    assert max(applied) - min(applied) <= 1 and max(applied) == roles["server"].version  # one may be on its way


def test_outliers_are_kept_back_and_counted(tmp_path):
    """Rewards of one bundle in two are spoiled after the gate has warmed up; only its learner's gradients are refused."""
    source = Poisoned(CATCH, victim=1, begin=150, share=0.02)
    config = replace(PLAIN, loss="squared")
    program, _ = draw(config, "parameter_server", source, actors=2, replay=TURNS, outlier_width=4.0, shards=1)
    done = go(program, "inline", tmp_path, Weights(lambda control: control.total("gradients_outlying") >= 6))
    assert done.reason == "until"
    healthy, spoiled = (done.final[f"learner-{k}"]["gradients_outlying"] for k in range(2))
    assert spoiled >= 4 > healthy
    inserted = sum(done.final[f"actor-{k}"]["env_steps"] for k in range(2))
    assert inserted - 64 <= done.published["progress"][0] <= inserted, "steps of gradients that were kept back count too"


def test_usual_losses_are_remembered(tmp_path):
    """A learner remembers which losses are usual."""
    _, parts = draw(PLAIN, "parameter_server", CATCH, replay=TURNS)

    class Me:
        rng = staticmethod(lambda salt: np.random.default_rng(1))

    wire = type("Wire", (), {"depth": 1})()
    first, second = (GradientLearner(Me(), parts, [slice(0, 64)], wire, None, 4.0, server_0=None) for _ in range(2))
    for loss in np.linspace(0.9, 1.1, 150):
        assert first.link._usual(float(loss))
    second.load(first.state())
    assert second.link.gate == first.link.gate and not second.link._usual(10.0) and second.link._usual(1.05)
    assert second.link._usual(float("nan")), "the server has the say over numbers that are not finite"


# ---------------------------------------------------------------------------------------------- checkpoints, kills
def test_checkpoint_of_a_slice():
    """A slice goes on from its checkpoint bit for bit."""
    _, parts = draw(PLAIN, "parameter_server", CATCH, replay=TURNS)
    cut = slice(64, 256)

    def shard():
        return LearnerState(None, parts, parts.algorithm.learn(parts.seed).cut(cut))

    def advance(learner_state, steps):
        for k in steps:
            learner_state.learn.anneal(learner_state.progress)
            learner_state.learn.apply(np.random.default_rng(k).normal(size=192).astype(np.float32), "all")

    first, second = shard(), shard()
    advance(first, range(7))  # the target is refreshed after ten
    second.load({name: array.copy() for name, array in first.arrays().items()})
    advance(first, range(7, 15))
    advance(second, range(7, 15))
    assert first.arrays().keys() == second.arrays().keys() >= {"learn/adagrad.square", "learn/target", "learn/updates"}
    for name, array in first.arrays().items():
        np.testing.assert_array_equal(array, second.arrays()[name], err_msg=name)
    assert not np.array_equal(first.arrays()["learn/target"], shard().arrays()["learn/target"])


def test_policy_of_all_slices(tmp_path):
    """A policy is put together from the slices of a checkpoint."""
    _, parts = draw(PLAIN, "parameter_server", CATCH, replay=TURNS)
    learn = parts.algorithm.learn(3)
    with torch.no_grad():
        learn.state["params"].normal_()
    size = len(learn.state["params"])
    for k, cut in enumerate(cuts_of(size, 12)):
        learner_state = LearnerState(None, parts, learn.cut(cut))
        learner_state.count(70, 30)
        TensorFiles().save(tmp_path / f"{'server' if k == 0 else f'shard_{k}'}-0.safetensors", learner_state.arrays())
    published = published_of(parts.algorithm, tmp_path, PolicyChoice("last", "learner"))
    np.testing.assert_array_equal(published["params"], learn.state["params"].detach().numpy())
    assert published["progress"][:2].tolist() == [70, 30]


def test_kill_9_of_server_shard_and_bundle(tmp_path):
    """The run goes on after kill -9 of the server, a shard and a bundle."""
    program, _ = draw(PLAIN, "parameter_server", CATCH, actors=2, replay=replace(TURNS, checkpoint=True), shards=2,
                      max_staleness=20)
    program.store = Files()
    killer = Killer(("server-0", "shard_1-0", "bundle-0"), times=3, progress="learner_steps", every=30)
    save, versions, shown = Saver(tmp_path, every=20), [], []

    def act(control):
        versions.append(control.wires()["weights"]["version"])
        shown.append(control.snapshot()["server-0"]["weights_version"])
        save(control)
        killer(control)

    watch = go(program, "local", tmp_path, Weights(killer.done, act, seconds=90))
    assert watch.reason == "until" and killer.kills == 3
    assert versions == sorted(versions) and shown == sorted(shown), "a version ran backwards"
    assert np.isfinite(watch.published["params"]).all()
    steps = sum(page["env_steps"] for page in watch.final.values())
    assert watch.published["progress"][0] <= steps, "steps were counted twice"
    saved = dict(np.load(watch.newest() / "server-0.safetensors"))
    assert saved["learn/updates"][0] > 10 and (saved["learn/adagrad.square"] != PLAIN.adagrad_start).any()


def test_targets_after_a_restore(tmp_path):
    """A shard that goes on from a checkpoint keeps to the first shard's count, not to its own."""
    roles, saved, seen, refreshed = {}, {}, {}, {"server": [], "shard_1": []}

    def kept(make):
        def made(me, **arguments):
            roles[me.name] = make(me, **arguments)
            return roles[me.name]

        return made

    def act(control):
        steps = control.total("learner_steps")
        if steps >= 4 and not saved:
            saved.update({name: array.copy() for name, array in roles["shard_1"].state().items()})
        if steps >= 7 and "loaded" not in seen:
            seen["loaded"] = steps
            roles["shard_1"].load(saved)
        for name, role in roles.items():
            target = role.learn.state["target"].numpy().copy()
            if name in seen and not np.array_equal(target, seen[name]):
                refreshed[name].append(steps)
            seen[name] = target

    program, _ = draw(PLAIN, "parameter_server", CATCH, replay=TURNS, shards=2)
    for name, make in (("server", first_shard), ("shard_1", Shard)):
        program.nodes[name].role = kept(make)
    go(program, "inline", tmp_path, Weights(lambda control: control.total("learner_steps") >= 45, act))
    assert len(refreshed["server"]) == len(refreshed["shard_1"]) == 4
    for one, other in zip(*refreshed.values(), strict=True):
        assert abs(one - other) <= 1, refreshed  # the shard is sent its slice a moment later


# ---------------------------------------------------------------------------------------------- the grid
@pytest.mark.parametrize(("algorithm", "mode", "kind"), [
    ("dqn", "local", "inline"), ("dqn", "global", "inline"), ("dqn", "global", "local"), ("r2d2", "local", "local"),
    ("r2d2", "global", "inline")])
def test_both_run_with_either_replay(algorithm, mode, kind, tmp_path):
    config, env, net = (PLAIN, CATCH, None) if algorithm == "dqn" else (R2D2, TMAZE, LSTM)
    options = {"actors": 2, "net": net, "replay": TURNS if mode == "local" else GLOBAL, "table": mode, "shards": 1}
    start = train(tmp_path, config, "parameter_server", env, "inline", updates=0, **options)

    def both(control):
        pages = control.snapshot()
        return control.total("learner_steps") >= 30 and all(pages[f"learner-{k}"]["samples_consumed"] for k in range(2))

    run = train(tmp_path, config, "parameter_server", env, kind, updates=None, watch=Weights(both, seconds=60), **options)
    assert run.reason == "until" and np.isfinite(run.published["params"]).all()
    assert np.abs(run.published["params"] - start.published["params"]).max() > 1e-5


@pytest.mark.parametrize(("words", "sentence"), [
    (["--algorithm", "vtrace"], "vtrace learns from unrolls as they come, and parameter_server has replay tables"),
    (["--algorithm", "dqn", "--learners", "2"], "use --actors"),
    (["--algorithm", "dqn", "--architecture.shards", "0"], "shards is 0; it must be at least 1"),
    (["--algorithm", "dqn", "--architecture.shards", "100000"], "parameters can be cut into"),
    (["--algorithm", "dqn", "--architecture.outlier-width", "-1"], "must be above 0, or none"),
    (["--algorithm", "dqn", "--architecture.max-staleness", "-1"], "must be at least 0, or none"),
    (["--algorithm", "dqn", "--replay.publish-updates", "4"], "after every update"),
    (["--algorithm", "dqn", "--architecture.table", "global", "--replay.tolerance", "5"], "could block both sides"),
])
def test_senseless_options(words, sentence, capsys):
    """What makes no sense is refused before anything starts."""
    assert cli.main(["show", "--architecture", "parameter_server", *words, CATCH, "--actors", "2"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("change", "sentence"), [
    ({"architecture.shards": 3}, "in 2 slices; leave out --architecture.shards 3"), ({"net.hidden": (8,)}, "what changes it")])
def test_resumed_with_its_slices(change, sentence, tmp_path):
    """Refused before anything is written: without the change it goes on."""
    quiet = {"console.mode": "none", "tensorboard": False, "runtime": "inline", "replay.min_size": 100, "eval.episodes": 2}
    first = shoal.train("gorila", CATCH, run_dir=str(tmp_path / "run"), max_env_steps=300, **quiet)
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=sentence):
        shoal.resume(first.directory, max_env_steps=500, **change)
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert shoal.resume(first.directory, max_env_steps=500).summary["env_steps"] >= 500
