"""Evolution strategies: any number of workers is one, replicas stay alike, drift is mended, kills and resumes leave no trace."""

from dataclasses import replace

import numpy as np
import pytest

from shoal import cli
from shoal.algorithms import es
from shoal.errors import ConfigError, RoleFailed
from shoal.experiment.checkpoints import TensorFiles
from shoal.nets import NetConfig
from shoal.roles.parts import EnvSource, EvalPlan
from tests.architectures.graphs import Weights, draw, go, train
from tests.runtime.harness import kill

QUICK = es.Config(population=8, sigma=0.1, lr=0.05, episode_limit=10, limit_growth=1.01, noise_size=50_000)
NET = NetConfig(hidden=(8,))
FIT = {"net": NET, "envs_per_actor": 2}  # four chunks


def test_any_number_of_workers_is_one_worker(tmp_path):
    """Chunks do not depend on who plays them, so the parameters are the same to the bit; on the local runtime too."""
    alone = train(tmp_path, QUICK, "evolution", "CartPole-v1", "inline", **FIT)
    assert alone.reason == "counted" and np.isfinite(alone.published["params"]).all()
    for kind, workers in (("inline", 2), ("inline", 3), ("local", 2)):
        run = train(tmp_path, QUICK, "evolution", "CartPole-v1", kind, actors=workers, **FIT)
        assert run.hash == alone.hash, (kind, workers)
        np.testing.assert_array_equal(run.published["norm"]["mean"], alone.published["norm"]["mean"])
    other = train(tmp_path, QUICK, "evolution", "CartPole-v1", "inline", seed=8, **FIT)
    assert other.hash != alone.hash


def test_virtual_batch_normalisation(tmp_path):
    """Every worker collects the same reference batch, so any number of them is one; a master collects it for its workers."""
    pixels = EnvSource("shoal/Catch-v0", kwargs={"observation": "pixels"})
    config = replace(QUICK, reference_batch=8, noise_size=200_000)
    runs = [train(tmp_path, config, architecture, pixels, kind, updates=4, actors=workers, envs_per_actor=2)
            for architecture, kind, workers in (("evolution", "inline", 1), ("evolution", "inline", 3), ("evolution", "local", 2),
                                                ("evolution_master", "inline", 1))]
    assert len({run.hash for run in runs}) == 1
    reference = runs[0].published["reference"]
    assert reference.shape == (8, 1, 10, 5) and set(np.unique(reference)) == {0, 255} and len(np.unique(reference, axis=0)) > 4
    assert all((run.published["reference"] == reference).all() for run in runs)
    plain = train(tmp_path, replace(config, reference_batch=None), "evolution", pixels, "inline", updates=4, envs_per_actor=2)
    assert plain.hash != runs[0].hash


@pytest.mark.parametrize("env", ["Pendulum-v1", "FrozenLake-v1"])
def test_other_spaces_run(env, tmp_path):
    config = es.Config(population=4, episodes=2, action_noise=0.01, episode_limit=5, noise_size=50_000)
    runs = [train(tmp_path, config, "evolution", env, "inline", updates=3, actors=n, net=NET, envs_per_actor=3) for n in (1, 2)]
    assert runs[0].hash == runs[1].hash


@pytest.mark.parametrize("architecture", ["evolution", "evolution_master"])
def test_evaluations_are_apart(architecture, tmp_path):
    """The unperturbed policy is evaluated beside the members: neither its returns nor its decisions count for the update."""
    rare, often = (train(tmp_path, QUICK, architecture, "CartPole-v1", "inline", updates=6, **FIT,
                         eval=EvalPlan(enabled=True, episodes=2, every_env_steps=period)) for period in (10**9, 1))
    assert often.hash == rare.hash
    assert often.final["evaluator-0"]["eval_env_steps"] > rare.final["evaluator-0"]["eval_env_steps"]
    members = [sum(page["env_steps"] for name, page in run.final.items() if name.startswith("worker")) for run in (rare, often)]
    assert members[0] == members[1] > 0


def kept(program):
    """The roles that a program makes, inline."""
    roles, node = [], program.nodes["worker"]
    make = node.role

    def made(me, **arguments):
        roles.append(make(me, **arguments))
        return roles[-1]

    node.role = made
    return roles


def test_replicas_stay_equal(tmp_path):
    program, _ = draw(QUICK, "evolution", "CartPole-v1", actors=3, **FIT)
    roles = kept(program)
    run = go(program, "inline", tmp_path, Weights(until=lambda control: control.total("learner_steps") >= 100))
    assert run.reason == "until" and len(roles) == 3
    least = min(role.iteration for role in roles)
    assert least >= 99 and all(role.iteration - least <= 1 for role in roles)
    assert len({role.checksum() for role in roles if role.iteration == least}) == 1
    assert all(run.final[name]["replicas_resynchronised"] == 0 for name in ("worker-0", "worker-1", "worker-2"))


def test_traffic_is_free_of_parameters(tmp_path):
    """What travels does not depend on the number of parameters."""
    moved = []
    for hidden in ((), (64, 64)):
        run = train(tmp_path, QUICK, "evolution", "CartPole-v1", "inline", updates=5, actors=2, net=NetConfig(hidden=hidden),
                    envs_per_actor=4)
        wire = run.wires["scores"]
        first = train(tmp_path, QUICK, "evolution", "CartPole-v1", "inline", updates=2, actors=2, net=NetConfig(hidden=hidden),
                      envs_per_actor=4).wires["scores"]
        moved.append(wire["bytes_moved"] - first["bytes_moved"])  # without the state that they agree on at first
    assert moved[0] == moved[1] > 0


def test_drifted_worker_is_resynchronised(tmp_path):
    clean = train(tmp_path, QUICK, "evolution", "CartPole-v1", "inline", updates=6, actors=2, **FIT)
    program, _ = draw(QUICK, "evolution", "CartPole-v1", actors=2, **FIT)
    roles = kept(program)

    def act(control):
        if len(roles) == 2 and roles[1].iteration == 3 and not drifted:
            drifted.append(True)
            roles[1].learn.model.params[0] += 1e-3

    drifted = []
    run = go(program, "inline", tmp_path, Weights(act=act, until=lambda control: drifted and control.total("learner_steps") >= 8))
    assert run.final["worker-1"]["replicas_resynchronised"] == 1 and run.final["worker-0"]["replicas_resynchronised"] == 0
    assert any("had drifted" in text for text in run.texts("note"))
    again = train(tmp_path, QUICK, "evolution", "CartPole-v1", "inline", updates=roles[0].iteration, actors=2, **FIT)
    assert again.published["params"].tobytes() == roles[0].learn.model.params.numpy().tobytes() and clean.hash != again.hash


def test_another_noise_table_ends_the_run(tmp_path):
    program, _ = draw(QUICK, "evolution", "CartPole-v1", actors=2, **FIT)
    roles = kept(program)
    with pytest.raises(RoleFailed, match="noise table of this machine differs"):
        go(program, "inline", tmp_path, Weights(act=lambda control: roles[1].learn.table.__dict__.update(fingerprint=1)))


def test_killed_worker_leaves_no_trace(tmp_path):
    """A killed worker leaves no trace in the parameters."""
    left, mark = ["worker-1", "worker-0"], [3.0]

    def act(control):
        if left and control.total("learner_steps") > mark[0]:
            kill(control, left.pop(0))
            mark[0] = control.total("learner_steps") + 3

    watch = Weights(until=lambda c: not left and c.total("restarts") >= 2 and c.total("learner_steps") > mark[0], act=act)
    run = train(tmp_path, QUICK, "evolution", "CartPole-v1", "local", actors=2, updates=None, watch=watch, **FIT)
    assert run.reason == "until"
    iterations = int(run.published["progress"][1])
    alone = train(tmp_path, QUICK, "evolution", "CartPole-v1", "inline", updates=iterations, **FIT)
    assert alone.hash == run.hash


@pytest.mark.parametrize("architecture", ["evolution", "evolution_master"])
def test_number_of_workers_changes(architecture, tmp_path):
    """One of two workers leaves and comes back; with workers that tell each other returns, the parameters do not show it."""
    wanted, mark = [1, 2], [3.0]

    def act(control):
        if wanted and control.total("learner_steps") > mark[0]:
            control.scale("worker", wanted.pop(0))
            mark[0] = control.total("learner_steps") + 4

    watch = Weights(until=lambda c: not wanted and c.total("learner_steps") > mark[0], act=act)
    run = train(tmp_path, QUICK, architecture, "CartPole-v1", "local", actors=2, updates=None, watch=watch, **FIT)
    assert run.reason == "until" and np.isfinite(run.published["params"]).all()
    if architecture == "evolution":
        alone = train(tmp_path, QUICK, architecture, "CartPole-v1", "inline", updates=int(run.published["progress"][1]), **FIT)
        assert alone.hash == run.hash


def test_master_with_one_worker(tmp_path):
    """Parameters that travel are updated to the same bits as those that do not."""
    config = replace(QUICK, normalise_observations=False)
    alone, led = (train(tmp_path, config, architecture, "CartPole-v1", "inline", updates=6, **FIT)
                  for architecture in ("evolution", "evolution_master"))
    assert led.hash == alone.hash and led.wires["results"]["consumed"] >= 6 * 4


def test_results_of_an_older_task_are_refused(tmp_path):
    """What two workers send after a task is over counts for nothing: every update is of as many members as one worker's."""
    program, _ = draw(QUICK, "evolution_master", "CartPole-v1", actors=2, envs_per_actor=4)
    made, roles = program.nodes["master"].role, []

    def keep(me, **arguments):
        roles.append(made(me, **arguments))
        return roles[-1]

    program.nodes["master"].role = keep
    run = go(program, "inline", tmp_path, Weights(until=lambda control: control.total("learner_steps") >= 20))
    (master,) = roles
    wire, refused = run.wires["results"], run.final["master-0"]["results_refused"]
    assert refused > 0 and wire["consumed"] == 2 * master.iteration + len(master.collected) + refused  # 8 members in chunks of 4
    assert master.learn.statistics.observations is not None and run.published["norm"]["mean"].any()


def test_killed_master_and_worker(tmp_path):
    """A worker's death costs nothing; a master begins again, and takes no old result for a new one."""
    left, mark = ["worker-1", "master-0", "worker-0"], [3.0]

    def act(control):
        if left and control.total("learner_steps") > mark[0]:
            kill(control, left.pop(0))
            mark[0] = control.total("learner_steps") + 3

    watch = Weights(until=lambda c: not left and c.total("restarts") >= 3 and c.total("learner_steps") > mark[0], act=act)
    run = train(tmp_path, QUICK, "evolution_master", "CartPole-v1", "local", actors=2, updates=None, watch=watch, **FIT)
    assert run.reason == "until" and np.isfinite(run.published["params"]).all()


def newest(run):
    return max((run / "checkpoints").iterdir(), key=lambda folder: folder.stat().st_mtime)


SMALL = ["--runtime", "inline", "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "2", "--algorithm.population", "8",
         "--algorithm.noise-size", "200000", "--architecture.envs-per-actor", "4", "--eval.every-env-steps", "1000000"]


PIXELS = ["shoal/Catch-v0", "--envs.kwargs", "observation=pixels", "--algorithm.reference-batch", "8"]


@pytest.mark.parametrize("env", [["CartPole-v1"], PIXELS], ids=["numbers", "pixels"])
def test_resumed_run_is_the_same_run(env, tmp_path, monkeypatch, capsys):
    """Nothing random depends on how often a run was resumed."""
    monkeypatch.chdir(tmp_path)
    words = ["train", "es", *env, *SMALL]
    assert cli.main([*words, "--max-learner-steps", "6", "--run-dir", "whole"]) == 0
    assert cli.main([*words, "--max-learner-steps", "3", "--run-dir", "parts"]) == 0
    assert cli.main(["resume", "parts", "--max-learner-steps", "6", "--console.mode", "none"]) == 0
    whole, parts = (TensorFiles().load(newest(tmp_path / name) / "worker-0.safetensors") for name in ("whole", "parts"))
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])
    assert all(cli.main(["eval", "parts", "--episodes", "2", "--policy", policy]) == 0 for policy in ("best", "last"))
    capsys.readouterr()


@pytest.mark.parametrize(("preset", "role"), [("es", "worker-0"), ("es_master", "master-0")])
def test_a_run_begins_with_anothers_weights(preset, role, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", preset, *PIXELS, *SMALL]
    assert cli.main([*words, "--max-learner-steps", "2", "--run-dir", "first"]) == 0
    assert cli.main([*words, "--max-learner-steps", "1", "--run-dir", "second", "--init-from", "first", "--seed", "5",
                     "--algorithm.lr", "1e-12"]) == 0
    first, second = (TensorFiles().load(newest(tmp_path / name) / f"{role}.safetensors") for name in ("first", "second"))
    np.testing.assert_allclose(second["learn/params"], first["learn/params"], atol=1e-6)
    np.testing.assert_array_equal(second["learn/reference"], first["learn/reference"])  # what they were trained with


def test_it_fits_its_own_algorithm_only(capsys):
    for words, fix in ((["--algorithm", "es", "--architecture", "synchronous"], "use --architecture evolution"),
                       (["--algorithm", "ppo", "--architecture", "evolution"], "use --algorithm es"),
                       (["--algorithm", "dqn", "--architecture", "evolution"], "use --algorithm es"),
                       (["es", "--learners", "2"], "use --actors 2"),
                       (["es", "--replay.capacity", "5000"], "returns of whole episodes"),
                       (["es", "--algorithm.population", "7"], "is odd")):
        assert cli.main(["show", *words, "CartPole-v1"]) == 2
        assert fix in capsys.readouterr().err
    with pytest.raises(ConfigError, match="vary from actor to actor"):
        draw(QUICK, "evolution", EnvSource("CartPole-v1", varied={"a": (1, 2)}))
