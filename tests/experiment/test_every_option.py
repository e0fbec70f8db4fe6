"""Every option of `shoal train` is used by a run with a value that is not its default: none can break without anybody noticing."""

import dataclasses
import json
from pathlib import Path

import pytest

from shoal import cli
from shoal.experiment.parse import parse_train
from shoal.experiment.presets import load_preset, preset_names

SMALL = ("--net.hidden 8 --replay.capacity 500 --replay.min-size 8 --replay.batch-size 4 --replay.insert-batch 2 "
         "--replay.samples-per-insert 4")
PIXELS = "shoal/PixelCatch-v0"
COMMANDS = {
    "impala": "impala CartPole-v1 --algorithm.unroll 5 --algorithm.gamma 0.9 --algorithm.lambda 0.9 --algorithm.lr 0.002 "
              "--algorithm.lr-final 0.0001 --anneal-env-steps 1000 --algorithm.optimiser rmsprop "
              "--algorithm.optimiser-epsilon 1e-4 "
              "--algorithm.grad-norm 40 --algorithm.reduction sum --algorithm.value-weight 0.25 --algorithm.entropy 0.02 "
              "--algorithm.entropy-final 0 --no-algorithm.normalise-observations --no-algorithm.normalise-returns "
              "--algorithm.final-rows 1 --algorithm.rho-bar 2 --algorithm.pg-rho-bar 2 --algorithm.c-bar 2 --algorithm.upgo 0.5 "
              "--algorithm.td-lambda 0.9 --algorithm.initial-kl 0.1 "
              "--algorithm.behaviour-mix 0.1 --architecture.batch-slots 1 "
              "--architecture.slots-per-actor 3 --architecture.buffer-slots 4 --architecture.reuse 2 "
              "--architecture.max-staleness 8 --architecture.delay-slots 1 --net.activation relu --net.separate-value "
              "--net.hidden 8 --net.torso mlp --learners 2 --checkpoint.every-seconds 1 --checkpoint.keep 1 "
              "--eval.every-env-steps 50 --eval.last-env-steps 50 --no-eval.greedy --policy last",
    "impala in lock step": "impala Pendulum-v1 --algorithm.correction none --architecture.lockstep --architecture.one-place "
                           "--net.recurrent lstm --net.lstm-size 8 --net.prev-action-reward --net.continuous tanh_gaussian "
                           "--max-learner-steps 2 --max-seconds 1000 --seed 3 --faults.hang-seconds 50 --faults.start-seconds 500 "
                           "--faults.deaths-without-step 4 --faults.exceptions-per-minute 4 --console.every-seconds 1",
    "a2c": "a2c CartPole-v1 --algorithm.normalise-advantage --envs.backend loop --eval.every-learner-steps 2 --until-return 1000 "
           "--architecture.one-place --learner-threads 2",
    "central value": "ppo shoal/RockPaperScissors-v0 --net.central-value",
    "state value": "ppo pettingzoo:mpe2.simple_spread_v3 --net.state-value",
    "league": "league shoal/RockPaperScissors-v0 --league.periods main_exploiter=0:0 --algorithm.unroll 4 "
              "--architecture.batch-slots 1",
    "a3c": "a3c CartPole-v1 --architecture.mode master --architecture.aggregate 2 --architecture.max-staleness 4",
    "appo": "appo CartPole-v1 --algorithm.clip 0.3 --algorithm.clip-final 0.1 --algorithm.epochs 2 --algorithm.minibatches 2 "
            "--algorithm.max-lag none --algorithm.ratio-least 0.1 --algorithm.ratio-most 10 --algorithm.value-clip none "
            "--no-algorithm.vtrace --algorithm.unroll 8 --architecture.groups 1 --architecture.inference-rows 64 "
            "--architecture.batch-slots 1 --architecture.queue-slots 4 --architecture.one-place",
    "anakin": "anakin CartPole-v1 --architecture.updates-per-step 2 --algorithm.unroll 4",
    "gala": "gala CartPole-v1 --architecture.graph random --architecture.peers 2 --architecture.tau 2 --actors 3 --no-eval.enabled",
    "ga3c": "ga3c CartPole-v1 --algorithm.unroll 5 "
            "--architecture.predictors 2 --architecture.trainers 2 --architecture.prediction-rows 64 "
            "--architecture.most-threads 3 --architecture.most-agents 6 --architecture.adjust-seconds 100 "
            "--architecture.queue-slots 3 --architecture.batch-slots 2",
    "es": "es CartPole-v1 --algorithm.population 4 --algorithm.episodes 2 --algorithm.sigma 0.2 --no-algorithm.mirrored "
          "--algorithm.shaping raw --algorithm.optimiser sgd --algorithm.momentum 0.5 --algorithm.weight-decay 0.01 "
          "--algorithm.episode-limit 20 --algorithm.limit-share 0.4 --algorithm.limit-growth 2 --algorithm.noise-size 100000",
    "es on images": "es shoal/Catch-v0 --envs.kwargs observation=pixels --algorithm.population 2 --algorithm.reference-batch 4",
    "dqn": "dqn CartPole-v1 --algorithm.n-step 2 --algorithm.double --algorithm.dueling --algorithm.dueling-hidden 8 "
           "--algorithm.epsilon 0.5 --algorithm.epsilon-final 0.1 --algorithm.epsilon-steps 100 --algorithm.loss squared "
           "--algorithm.huber-delta 2 --algorithm.importance 0.5 --algorithm.importance-final 1 --algorithm.optimiser adagrad "
           "--algorithm.adagrad-start 0.2 --algorithm.reward-clip 1 --algorithm.target-period-updates 7 --algorithm.target-tau 0.5 "
           "--algorithm.zero-head --algorithm.normalise-observations --replay.exponent 0.5 --replay.compression zstd "
           f"--replay.checkpoint --replay.publish-updates 2 {SMALL}",
    "distributional dqn": "dqn CartPole-v1 --algorithm.atoms 5 --algorithm.value-min -2 --algorithm.value-max 2 "
                          "--algorithm.noisy-sigma 0.4 --algorithm.exploration ladder --algorithm.ladder-alpha 3 "
                          f"--algorithm.optimiser rmsprop_centred --algorithm.rmsprop-decay 0.9 {SMALL}",
    "apex": "apex CartPole-v1 --replay.shards 2 --replay.prefetch 1 --replay.trim-updates 2 --replay.evict-exponent -0.4 "
            f"--replay.tolerance 100 --algorithm.rescale {SMALL}",
    "gorila": "gorila shoal/Catch-v0 --architecture.shards 1 --architecture.table global --architecture.max-staleness none "
              f"--architecture.outlier-width none {SMALL}",
    "r2d2": "r2d2 shoal/Catch-v0 --algorithm.length 6 --algorithm.stride 3 --algorithm.burn-in 2 --algorithm.eta 0.5 "
            f"--algorithm.state zero --algorithm.diagnose --net.lstm-size 8 {SMALL}",
    "sac": "sac Pendulum-v1 --algorithm.alpha-start 0.5 --algorithm.alpha-lr 0.01 --algorithm.target-entropy -2 "
           f"--algorithm.actor-lr 0.01 --algorithm.critic-lr 0.01 --algorithm.random-steps 20 --algorithm.actor-priorities {SMALL}",
    "sac with a fixed alpha": f"sac CartPole-v1 --algorithm.alpha 0.1 {SMALL}",
    "ddpg": "ddpg Pendulum-v1 --algorithm.noise gaussian --algorithm.noise-std 0.15 --algorithm.actor-grad-limit 0.5 "
            f"--algorithm.reward-scale 0.5 --algorithm.reward-shift 1 {SMALL}",
    "td3": "td3 Pendulum-v1 --algorithm.noise ou --algorithm.noise-theta 0.3 "
           "--algorithm.policy-delay 3 --algorithm.target-noise 0.1 --algorithm.target-noise-limit 0.3 "
           f"{SMALL}",
    "qtopt": "qtopt shoal/PointGrasp-v0 --algorithm.binary --algorithm.cem-elites 2 --algorithm.cem-iterations 1 "
             "--algorithm.cem-samples 8 --no-algorithm.clipped-double --algorithm.lag-snapshot-updates 2 --algorithm.lag-updates 4 "
             "--architecture.online-after 2 --architecture.online-final 0.4 --architecture.online-start 0.1 "
             "--architecture.online-updates 10 --architecture.train-capacity 500 --architecture.train-min-size 16 "
             f"--architecture.train-samples-per-insert none --architecture.updater-batch 8 --architecture.updaters 2 {SMALL}",
    "curl_async": f"curl_async {PIXELS} --architecture.features detached --architecture.encoder-updates 2 {SMALL}",
    "curl": f"curl_async {PIXELS} --algorithm.code-size 8 --algorithm.contrast 0.5 --algorithm.crop 10 --no-algorithm.crop-all "
            "--algorithm.detached --algorithm.key-momentum 0.5 --algorithm.logit-scale 2 --algorithm.projection 8 "
            f"--architecture.lockstep {SMALL}",
}  # fmt: skip
ELSEWHERE = {  # what needs a GPU, a cluster, data, players, actions that are numbers or a file of its own, and where it is tried
    "gpu.": "gpu", "device": "gpu", "ray.": "runtime/test_ray_runs.py", "net.module": "experiment/test_extensions.py",
    "demos": "architectures/test_demos.py", "foreign_demos": "architectures/test_demos.py",
    "replay.demo_ratio": "architectures/test_demos.py", "offline": "architectures/test_demos.py", "envs.kwargs": "test_cli.py",
    "autoscale.": "coordination/test_autoscale.py", "policies": "experiment/test_self_play.py",
    "names": "experiment/test_policies.py", "train": "experiment/test_policies.py", "fixed": "experiment/test_policies.py",
    "each": "experiment/test_policies.py", "league.": "league/test_league_run.py", "data.": "architectures/test_dataset_reader.py",
    "log.": "experiment/test_env_reports.py", "init_from": "experiment/test_first_hour.py",
    "envs.restart_on_error": "experiment/test_env_reports.py",
    "architecture.record": "architectures/test_qtopt.py", "algorithm.action_noise": "architectures/test_evolution.py",
    "until": "experiment/test_self_play.py", "values": "experiment/test_sizing.py", "cores": "experiment/test_sizing.py"}


def run(words, tmp_path):
    rest = ["--runtime", "inline", "--run-dir", str(tmp_path / "run"), "--console.mode", "none", "--no-tensorboard",
            "--device", "cpu", "--eval.episodes", "2", "--eval.max-episode-steps", "20", "--architecture.envs-per-actor", "2"]
    rest += [] if "--actors" in words or "anakin" in words else ["--actors", "2"]
    return cli.main(["train", *words, *rest, "--max-env-steps", "120"])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_with_these_options_learns(name, tmp_path, capsys):
    assert run(COMMANDS[name].split(), tmp_path) == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["learner_steps"] > 0 and (summary["eval_episodes"] > 0) == ("--no-eval.enabled" not in COMMANDS[name])


def values(config, prefix=""):
    """Every option: what it is known by, its name in sections, and its value. Architectures have the same name for other things."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from values(value, f"{prefix}{field.name}.")
        else:
            name = f"{prefix}{field.name}"
            yield (type(config) if prefix == "architecture." else prefix.partition(".")[0], field.name), name, value


def test_every_option_is_tried_somewhere():
    known = {}
    for preset in (name for name in preset_names() if not load_preset(name).offline):  # those have tests/offline
        for option, name, _ in values(parse_train([preset, "CartPole-v1"]).experiment):
            known.setdefault(option, name)
    tried = set()
    for command in COMMANDS.values():
        words = command.split()
        usual = {option: value for option, _, value in values(parse_train(words[:2]).experiment)}
        tried |= {option for option, _, value in values(parse_train(words).experiment) if value != usual[option]}
    common = {"run_dir", "runtime", "tensorboard", "console.mode", "eval.episodes", "eval.max_episode_steps", "max_env_steps",
              "actors", "architecture.envs_per_actor"}
    missing = [name for option, name in known.items() if option not in tried and name not in common
               and not any(name == part or name.startswith(part) for part in ELSEWHERE)]
    assert not missing
    assert all((Path(__file__).parents[1] / file).exists() for file in ELSEWHERE.values())
