"""Machines of two sizes and between, all of them made up: what a run takes of each, and what is never taken."""

from __future__ import annotations

import os
import shlex

import pytest

from shoal.errors import ConfigError
from shoal.experiment.inspect_commands import show_command
from shoal.experiment.parse import parse_train
from shoal.experiment.prepare import plan_from_json, plan_to_json
from shoal.experiment.presets import load_preset, preset_names
from shoal.experiment.run import plan_of
from shoal.experiment.sizing import Machine, kept_to, sizing_lines

PONG, CARTPOLE = "ALE/Pong-v5", "CartPole-v1"
TRAINED = ("appo", "seed", "impala", "ppo")
LARGE, LAPTOP, MIDDLE, CPUS = Machine(16, 1), Machine(2), Machine(8, 1), Machine(32)
BY_HAND = shlex.split("""appo ALE/Pong-v5 --gpu.no-bf16 --actors 14 --architecture.groups 2 --architecture.envs-per-actor 16
    --architecture.batch-slots 26 --architecture.queue-slots 32 --algorithm.unroll 20 --algorithm.lr 5e-4
    --algorithm.lr-final 5e-5 --algorithm.epochs 4 --algorithm.minibatches 16 --algorithm.no-vtrace --algorithm.entropy 0.01
    --algorithm.grad-norm 0.5 --algorithm.optimiser-epsilon 1e-5 --eval.every-env-steps 400000""")


@pytest.fixture
def on(monkeypatch):
    """Call it to be on another machine."""
    def there(machine: Machine) -> None:
        monkeypatch.setattr("shoal.experiment.sizing.machine_here", lambda: machine)
        monkeypatch.setattr("shoal.experiment.sizing.os.sched_getaffinity", lambda pid: set(range(machine.cores)))
    return there


def planned(*words: str):
    return parse_train(list(words))


def made(preset: str, env: str, **values):
    """The same from Python, which is faster."""
    return plan_of(preset, env, None, None, values)


def test_sixteen_cores_and_a_gpu(on):
    """Sixteen cores and a GPU take the values that solved Pong."""
    on(LARGE)
    plan = planned("appo", PONG, "--until-return", "18")
    by_hand = planned(*BY_HAND, "--anneal-env-steps", "12000000", "--eval.episodes", "10", "--until-return", "18",
                      "--values", "paper")
    chosen, typed = plan_to_json(plan), plan_to_json(by_hand)
    assert {**chosen, "values": "paper"} == typed
    assert plan.sizing.size == "large" and plan.experiment.max_env_steps is None


@pytest.mark.parametrize("preset", TRAINED)
@pytest.mark.parametrize("machine", [Machine(12, 1), LARGE, Machine(64, 8)])
def test_size_large(on, preset, machine):
    """Size `large` keeps the batch and leaves cores free."""
    on(LARGE)
    usual = made(preset, PONG)
    on(machine)
    plan = made(preset, PONG)
    options = plan.experiment.architecture
    assert plan.sizing.size == "large"
    assert plan.experiment.actors < machine.cores
    rows = [one.slots_per_batch * one.experiment.architecture.envs_per_actor for one in (plan, usual)]
    assert rows[0] == pytest.approx(rows[1], rel=0.05)
    assert plan.experiment.algorithm == usual.experiment.algorithm and options.envs_per_actor <= 40


@pytest.mark.parametrize("preset", ["apex", "r2d2", "seed_r2d2"])
def test_replay_at_size_large(on, preset):
    """Replay presets leave cores for the pieces of their table."""
    on(LARGE)
    experiment = made(preset, PONG).experiment
    assert experiment.replay.shards > 1
    assert experiment.actors == 14 - (experiment.replay.shards + 1) // 2
    on(MIDDLE)
    assert made(preset, PONG).experiment.replay.shards == 1


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("machine", [LARGE, MIDDLE, CPUS])
def test_same_on_every_machine(on, preset, machine):
    """Cheap environments and one thread are the same on every machine, and so are two cores of it."""

    def plans():
        return made(preset, CARTPOLE), made(preset, PONG, runtime="inline"), made(preset, PONG, cores=2, device="cpu")

    on(LAPTOP)
    small = plans()
    on(machine)
    assert plans() == small


@pytest.mark.parametrize("preset", preset_names())
def test_between_takes_small_values(on, preset):
    """A machine between the sizes takes a small machine's learning values."""
    on(LAPTOP)
    small = made(preset, PONG)
    assert small.sizing.size == "small"
    for machine in (MIDDLE, CPUS, Machine(5)):
        on(machine)
        plan = made(preset, PONG)
        plan.validate()
        assert plan.sizing.size == "small" and plan.experiment.algorithm == small.experiment.algorithm
        assert plan.experiment.net == small.experiment.net and plan.experiment.replay == small.experiment.replay
        if plan.architecture.spreads and not plan.one_place and plan.experiment.actors != "auto":
            assert small.experiment.actors <= plan.experiment.actors < machine.cores


def test_between_has_more_actors(on):
    """A machine between the sizes has more actors and the same batch."""
    on(MIDDLE)
    impala, ppo = planned("impala", PONG), planned("ppo", PONG)
    assert impala.experiment.actors == 6 and impala.slots_per_batch == 2
    assert ppo.experiment.actors * ppo.experiment.architecture.envs_per_actor == 8 and ppo.experiment.actors == 4
    on(CPUS)  # no GPU: the learner needs threads
    assert planned("impala", PONG).experiment.learner_threads == 8 and planned("impala", PONG).experiment.actors == 23


def test_a_few_cores_are_all_for_learners_of_images(on):
    """Updates of images are most of the work: one core would be the limit. Small updates, GPUs and inline runs have one thread."""
    on(LAPTOP)
    several = [made(preset, PONG).experiment.learner_threads for preset in ("impala", "seed", "ppo", "apex", "dqn", "a3c")]
    assert several == [2] * 5 + [1]
    assert made("impala", PONG, learners=2).experiment.learner_threads == 1, "two learners have a core each"
    assert made("impala", PONG, learner_threads=1).experiment.learner_threads == 1
    assert made("impala", PONG, runtime="inline").experiment.learner_threads == 1
    assert made("impala", CARTPOLE).experiment.learner_threads == 1
    on(Machine(4))
    assert made("ppo", PONG).experiment.learner_threads == 4
    on(Machine(4, 1))
    assert made("ppo", PONG).experiment.learner_threads == 1


def test_what_is_given_wins(on):
    on(LARGE)
    given = planned("appo", PONG, "--actors", "5", "--algorithm.lr", "1e-3", "--architecture.envs-per-actor", "4").experiment
    assert (given.actors, given.algorithm.lr, given.architecture.envs_per_actor, given.architecture.batch_slots) == (5, 1e-3, 4, 26)
    python = plan_of("appo", PONG, None, {"envs_per_actor": 4}, {"actors": 5, "algorithm.lr": 1e-3})
    assert python.experiment == given
    assert planned("appo", PONG, "--actors", "auto").experiment.actors == "auto"


def test_device_and_cores(on):
    """Device and cores say how much of the machine there is."""
    on(LARGE)
    assert planned("appo", PONG, "--device", "cpu").sizing.machine == Machine(16)
    assert planned("appo", PONG, "--device", "cpu").sizing.size == "small"
    assert planned("appo", PONG, "--cores", "8").sizing.machine == Machine(8, 1)
    assert planned("appo", PONG, "--cores", "12").sizing.size == "large"
    assert planned("gala", PONG).sizing.machine == Machine(16)  # which computes on the CPU only
    assert planned("a3c", PONG).sizing.machine == Machine(16)  # which takes a GPU only when it is told to
    assert planned("a3c", PONG, "--device", "cuda").sizing.machine == Machine(16, 1)
    with pytest.raises(ConfigError, match="--cores 17 is more than the 16 cores"):
        planned("appo", PONG, "--cores", "17")


def test_a_run_is_kept_to_its_cores():
    before = os.sched_getaffinity(0)
    with kept_to(1):
        assert len(os.sched_getaffinity(0)) == 1
    with kept_to(10_000):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


def test_paper_s_values_are_kept_on_request(on):
    on(LARGE)
    plan = planned("impala", PONG, "--values", "paper")
    assert plan.experiment.algorithm.optimiser == "rmsprop" and plan.experiment.net.torso == "impala"
    assert plan.experiment.actors == 14  # only the machine counts
    preset = load_preset("impala")
    papers = {one.key: one.value for one in preset.overrides if one.source == "paper" and one.env in (None, "ALE/*")}
    assert papers.items() <= preset.values(PONG, paper=True).items()
    with pytest.raises(ConfigError, match="no preset"):
        planned("--algorithm", "ppo", "--architecture", "synchronous", CARTPOLE, "--values", "paper").validate()


def test_run_that_goes_on_is_not_sized_anew(on):
    on(LARGE)
    saved = plan_to_json(planned("appo", PONG))
    on(LAPTOP)
    assert plan_to_json(plan_from_json(saved, "config.json")) == saved


def test_what_was_chosen_is_told(on):
    on(LARGE)
    text = " ".join(sizing_lines(planned("appo", PONG)))
    for words in ("size large", "16 cores and a GPU", "14 actors of 2 x 16 environments", "26 unrolls", "--values paper"):
        assert words in text
    assert "the paper's" in " ".join(sizing_lines(planned("appo", PONG, "--values", "paper")))
    assert "none for this size" in " ".join(sizing_lines(planned("dqn", PONG)))
    assert "13 actors of 16 environments, batches of 512 from a replay table in 2 processes" in " ".join(
        sizing_lines(planned("apex", PONG)))
    on(MIDDLE)
    assert "6 actors" in " ".join(sizing_lines(planned("impala", PONG)))
    assert list(sizing_lines(planned("impala", CARTPOLE))) == []


@pytest.mark.atari
def test_show_tells_it_too(on, capsys, monkeypatch):
    pytest.importorskip("ale_py")
    on(LARGE)
    monkeypatch.setattr("shoal.experiment.prepare.os.sched_getaffinity", lambda pid: set(range(16)))
    assert show_command(["ppo", PONG]) == 0
    shown = capsys.readouterr().out
    assert "size large" in shown and "15 actors of 28 environments" in shown and "large   for ALE/*" in shown
