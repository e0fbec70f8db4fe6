"""What only a GPU can show: the same numbers there as on the CPU, with graphs, pinned memory and a learner that runs ahead."""

import json
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch

from benchmarks.synthetic import fill
from shoal import algorithms, cli, envs
from shoal.acting import Progress, StepView
from shoal.algorithms import a2c, ppo, vtrace
from shoal.device.batched_inference import BatchedInference
from shoal.device.cuda_graph import CapturedFunction
from shoal.device.placement import GpuConfig, Hardware
from shoal.device.transfer import DirectSlotCopy
from shoal.device.weight_handoff import WeightHandoff
from shoal.envs import EnvSpec
from shoal.nets import NetConfig
from shoal.nets.heads import action_head
from shoal.roles.parts import EnvSource, Parts
from tests.algorithms.loop import Actor, join
from tests.architectures.graphs import draw, go, train
from tests.architectures.sequential import sequential
from tests.architectures.test_device import Me

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = Hardware("cuda", GpuConfig(bf16=False))
IMAGES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
FRAMES = EnvSpec("frames", IMAGES, gym.spaces.Discrete(6), 27_000, 4, 1, False, "none", "", 6)
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16, prev_action_reward=True)
SHARED = {"optimiser": "rmsprop", "optimiser_epsilon": 1e-3}  # a3c's: a gradient that is almost 0 makes a step that is almost 0
ALONE = {"a2c": (a2c.Config(unroll=5, lambda_=1.0, normalise_observations=True, normalise_returns=True, **SHARED), None),
         "a2c lstm": (a2c.Config(unroll=5, **SHARED), LSTM),
         "vtrace": (vtrace.Config(unroll=5, **SHARED), None),  # its gradient is captured
         "ppo": (ppo.Config(unroll=8, epochs=2, minibatches=2, normalise_observations=True, **SHARED), None)}
CONFIGS = {"a2c": a2c.Config(unroll=6, normalise_advantage=True), "vtrace": vtrace.Config(unroll=6, optimiser="rmsprop"),
           "ppo": ppo.Config(unroll=6, epochs=2, minibatches=2, normalise_observations=True, normalise_returns=True)}


@pytest.mark.parametrize("net", [NetConfig(hidden=(16,)), LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize("name", CONFIGS)
def test_updates_as_on_the_cpu(name, net):
    """A learner on the GPU makes the updates of one on the CPU."""
    env = envs.make("CartPole-v1", 4, backend="compiled", max_episode_steps=8)
    algorithm = algorithms.make(CONFIGS[name], EnvSource("CartPole-v1", "compiled", {"max_episode_steps": 8}).describe(), net, 4)
    here, there = algorithm.learn(0), algorithm.learn(0)
    there.to(GPU)
    actor = Actor(algorithm, env, 0)
    for update in range(4):
        batch = join(algorithm.record, [actor.unroll(), actor.unroll()])
        for learn in (here, there):
            sums, moments = learn.sums(batch), learn.moments(batch)
            for minibatch in learn.minibatches(batch, sums, Progress(), np.random.default_rng(update)):
                gradient, _ = learn.gradients(minibatch, "all")
                assert learn.apply(gradient, "all")
            learn.absorb(moments)
        np.testing.assert_allclose(there.published(Progress())["params"], here.published(Progress())["params"], atol=1e-4)
        np.testing.assert_array_equal(there.snapshot(Progress())()["params"], there.published(Progress())["params"])


def replays(captured):
    """Whether a CapturedFunction replays a graph."""
    return any(shape._graph is not None for shape in captured._shapes.values())


@pytest.mark.parametrize("net", [NetConfig(hidden=(16,)), LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize("name", ["vtrace", "ppo"])
def test_captured_updates_as_on_the_cpu(name, net):
    """A captured learner makes the updates of one on the CPU."""
    config = {"vtrace": vtrace.Config(unroll=6, lr_final=1e-5, entropy_final=0.0),
              "ppo": ppo.Config(unroll=6, epochs=2, minibatches=2, lr_final=1e-5, clip_final=0.01, normalise_returns=True)}[name]
    env = envs.make("CartPole-v1", 4, backend="compiled")  # nothing is truncated: all batches are alike
    algorithm = algorithms.make(config, envs.describe("CartPole-v1", backend="compiled"), net, 4)
    here, there = algorithm.learn(0), algorithm.learn(0)
    there.to(GPU)
    there.capture()
    actor = Actor(algorithm, env, 0)
    for update in range(12):
        batch = join(algorithm.record, [actor.unroll(), actor.unroll()])
        for learn in (here, there):
            sums, moments = learn.sums(batch), learn.moments(batch)
            for minibatch in learn.minibatches(batch, sums, Progress(fraction=update / 12), np.random.default_rng(update)):
                gradient, metrics = learn.gradients(minibatch, "all")
                assert learn.apply(gradient, "all")
            learn.absorb(moments)
        np.testing.assert_allclose(there.published(Progress())["params"], here.published(Progress())["params"], atol=1e-4)
        assert metrics["learning_rate"] == pytest.approx(1e-3 + (1e-5 - 1e-3) * update / 12, rel=1e-4)
    assert replays(there._graphs["all"].descend)


def test_squashed_actions_can_be_captured():
    head = action_head(gym.spaces.Box(-2, 3, (2,)), "tanh_gaussian")
    given = {"params": torch.randn(8, 4), "action": torch.rand(8, 2)}
    captured = CapturedFunction(lambda given: head.log_prob(given["params"], given["action"]))
    for _ in range(6):
        found = captured({name: x.cuda() for name, x in given.items()}).cpu()
        torch.testing.assert_close(found, head.log_prob(**given), atol=1e-4, rtol=1e-4)
    assert replays(captured)


@pytest.mark.parametrize("net", [NetConfig(hidden=(16,)), LSTM], ids=["mlp", "lstm"])
def test_batched_inference_is_the_policy(net):
    algorithm = algorithms.make(vtrace.Config(), envs.describe("shoal/Catch-v0"), net, 4)
    policy, other = algorithm.policy(), algorithm.policy()
    policy.to(GPU)
    inference = BatchedInference(policy, GPU, torch.Generator("cuda").manual_seed(0))
    env, viewer = envs.make("shoal/Catch-v0", 4), algorithm.record.viewer(4)
    now, state, seen = env.reset(seed=0), policy.initial_state(4), set()
    state = {key: x.cpu().numpy() for key, x in state.items()}
    action = None
    for _ in range(40):  # the first calls go kernel by kernel, the others through the graph
        view = viewer.of(now, action)
        action, after, extras = inference.act([view], [state], np.zeros(4, np.float32))
        output = other.model.step(view, state)
        expected = other.model.net.head.log_prob(output.params, torch.from_numpy(action))
        np.testing.assert_allclose(extras["log_prob"], expected, atol=1e-4)
        for key, x in output.state.items():
            np.testing.assert_allclose(after[key], x, atol=1e-4)
        state = after
        seen.update(action.tolist())
        now = env.step(action)
    assert seen == {0, 1, 2}


def test_device_architecture_learns_catch(tmp_path):
    """The device architecture learns catch as a graph."""
    program, parts = draw(a2c.Config(unroll=9, lr=5e-3, lambda_=1.0), "device", "shoal/Catch-v0", envs_per_actor=256,
                          updates_per_step=10)
    role = program.nodes["device"].role(Me(), Parts(parts.algorithm, parts.env, 256, hardware=GPU), None, 10)
    for _ in range(21):
        _finish(role.step())
    assert role.graph is not None
    stats = role.me.stats
    before = stats.get("episode_return/sum"), stats.get("episode_return/count")
    _finish(role.step())
    episodes = stats.get("episode_return/count") - before[1]
    assert episodes == 2560 and (stats.get("episode_return/sum") - before[0]) / episodes > 0.9


def _finish(coroutine):
    with pytest.raises(StopIteration):
        coroutine.send(None)


def test_frames_straight_to_the_gpu(tmp_path):
    """A whole program: what a Source hands out is what was sent, also when slots are used again and again."""
    from shoal.runtime import Program
    from shoal.slots import Field, Layout

    layout = Layout({"observation": Field((3, 4, 128, 128), "u1", 1), "valid": Field((2, 4), "bool", 1)})

    class Producer:
        def __init__(self, me, unrolls):
            self.unrolls, self.number = unrolls, 0

        async def step(self):
            slot = await self.unrolls.slot()
            slot.data["observation"][...] = self.number % 251
            self.number += 1
            slot.send()

    class Consumer:
        def __init__(self, me, unrolls):
            self.me, self.unrolls, self.number = me, unrolls, 0
            unrolls.direct = DirectSlotCopy(layout, torch.device("cuda"))

        async def step(self):
            batch = await self.unrolls.take(2)
            frames = batch["observation"]
            assert frames.is_cuda and frames.shape == (3, 8, 128, 128)
            for k in range(2):
                assert bool((frames[:, 4 * k : 4 * k + 4] == self.number % 251).all())
                self.number += 1
            if self.number == 200:
                self.me.finish("counted")

    program = Program("frames")
    unrolls = program.stream("unrolls", layout, depth=3)
    program.add("producer", Producer, unrolls=unrolls.sink)
    program.add("consumer", Consumer, unrolls=unrolls.source)
    from tests.runtime.harness import Watch

    assert go(program, "local", tmp_path, Watch()).reason == "counted"


def pong_policy(torso="impala", **gpu):
    algorithm = algorithms.make(vtrace.Config(unroll=4), FRAMES, NetConfig(torso=torso), 4)
    hardware = Hardware("cuda", GpuConfig(**gpu))
    learn, policy = algorithm.learn(0), algorithm.policy()
    learn.to(hardware)
    policy.to(hardware)
    return learn, policy, BatchedInference(policy, hardware, torch.Generator("cuda").manual_seed(0)), algorithm, hardware


def test_graph_uses_the_newest_weights():
    """A captured graph answers with the weights that were handed over."""
    learn, policy, inference, *_ = pong_policy(bf16=False)
    view = StepView(np.random.default_rng(0).integers(256, size=(32, 4, 84, 84), dtype=np.uint8), np.zeros(32, bool))
    still, seen = np.zeros(32, np.float32), []
    for _ in range(8):
        with torch.no_grad():
            learn.model.params.mul_(1.1)
        device_weights = learn.device_weights(Progress())
        with torch.no_grad():
            learn.model.params.add_(0.0)  # the next update is on its way already
        with inference.on_stream():
            device_weights.load(policy)
        action, _, extras = inference.act([view], [{}], still)
        with torch.inference_mode():
            output = learn.model.step(view, {})
            expected = policy.model.net.head.log_prob(output.params, torch.from_numpy(action).cuda())
        np.testing.assert_allclose(extras["log_prob"], expected.cpu(), atol=2e-3)
        seen.append(extras["log_prob"].copy())
    assert any(buffers._graph is not None for buffers in inference._buffers.values())
    assert np.abs(seen[-1] - seen[-2]).max() > 1e-5


def test_weights_are_never_torn():
    """Two threads, two streams: DeviceWeights hold one number each, and so must what the server copies."""
    learn, policy, inference, *_ = pong_policy("nature")
    params, handoff, stop = learn.model.params, WeightHandoff(), threading.Event()

    def write():
        version = 0
        while not stop.is_set():
            version += 1
            with torch.no_grad():
                params.fill_(version % 1000)
            handoff.put(version, learn.device_weights(Progress()))
            if version % 50 == 0:
                torch.cuda.current_stream().synchronize()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    versions = []
    while len(versions) < 400:
        if handoff.newest is None:
            continue
        with inference.on_stream():
            device_weights = handoff.newest
            device_weights.load(policy)
            low, high = float(policy.model.params.min()), float(policy.model.params.max())
        assert low == high == device_weights.version % 1000
        versions.append(device_weights.version)
    stop.set()
    writer.join(60)
    assert versions == sorted(versions) and versions[-1] > versions[0]


@pytest.mark.parametrize("switch", ["channels_last", "fused", "graphs", "pinned"])
def test_a_switch_changes_no_number(switch):
    """Updates with it and without it go the same way; convolutions round differently."""
    rng, params = np.random.default_rng(0), []
    for on in (True, False):
        learn, _, _, algorithm, hardware = pong_policy(bf16=False, **{switch: on})
        if hardware.gpu.graphs:
            learn.capture()
        tree, begun = algorithm.record.layout.joined(2).empty(), learn.published(Progress())["params"].copy()
        fill(tree, np.random.default_rng(1), set())
        for _ in range(6):
            minibatch = next(iter(learn.minibatches(tree, learn.sums(tree), Progress(), rng)))
            learn.apply(learn.gradients(minibatch, "all")[0], "all")
        params.append(learn.published(Progress())["params"] - begun)
    assert np.abs(params[0]).max() > 1e-3 and np.corrcoef(*params)[0, 1] > 0.97


def test_one_member_through_nccl():
    from shoal.runtime.process_group import Operation, ProcessGroup, create_process_group, create_store

    woken = threading.Event()
    device = torch.device("cuda", 0)
    ring = ProcessGroup("nccl", lambda left: create_process_group(create_store("127.0.0.1"), 0, 1, "127.0.0.1", device), woken.set)
    vector = torch.arange(1000.0, device="cuda:0")
    for kind in ("broadcast", "sum"):
        operation = Operation(kind, vector.clone())
        ring.start(operation)
        assert woken.wait(120) and operation.done and not operation.error, operation.error
        woken.clear()
        assert torch.equal(operation.tensor, vector)
    ring.leave()


def test_two_learners_share_one_gpu(tmp_path, monkeypatch):
    """Through the host, where there is one GPU; through nccl where there are two."""
    monkeypatch.setattr("tests.architectures.graphs.Parts", lambda *a, **k: Parts(*a, **k, hardware=GPU))
    run = train(tmp_path, vtrace.Config(unroll=4), "actor_learner", "shoal/Catch-v0", "local", actors=2, learners=2, updates=40,
                net=LSTM)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()
    assert sum("nccl needs one for each" in text for text in run.texts("note")) == (torch.cuda.device_count() < 2)


def test_server_and_learner_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.architectures.graphs.Parts",
                        lambda *a, **k: Parts(*a, **k, hardware=Hardware("cuda", GpuConfig(bf16=False, together=True))))
    run = train(tmp_path, vtrace.Config(unroll=4), "central_inference", "shoal/Catch-v0", "local", actors=2, updates=60, net=LSTM)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()
    assert run.wires["weights"]["bytes_moved"] == 0  # nothing was read from the host


@pytest.mark.parametrize("architecture", ["actor_learner", "central_inference", "synchronous"])
def test_programs_on_the_gpu(architecture, tmp_path, monkeypatch):
    """Programs run with their learner on the GPU."""
    monkeypatch.setattr("tests.architectures.graphs.Parts", lambda *a, **k: Parts(*a, **k, hardware=GPU))
    run = train(tmp_path, vtrace.Config(unroll=4), architecture, "shoal/Catch-v0", "local", actors=2, updates=60, net=LSTM)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()


@pytest.mark.parametrize("kind", ["inline", "local"])
@pytest.mark.parametrize("mode", ["hogwild", "master"])
@pytest.mark.parametrize("case", ALONE)
def test_one_worker_is_sequential(case, mode, kind, tmp_path, monkeypatch):
    """One worker of async_gradients on the GPU is the sequential algorithm on the CPU, to 1e-5."""
    config, net = ALONE[case]
    monkeypatch.setattr("tests.architectures.graphs.Parts", lambda *a, **k: Parts(*a, **k, hardware=GPU))
    start, plain = (sequential(config, "CartPole-v1", updates=updates, net=net).state["params"].numpy() for updates in (0, 24))
    run = train(tmp_path, config, "async_gradients", "CartPole-v1", kind, net=net, updates=24, mode=mode)
    assert run.reason == "counted"
    np.testing.assert_allclose(run.published["params"], plain, rtol=0, atol=1e-5)
    assert np.abs(plain - start).max() > 1e-3


@pytest.mark.parametrize("mode", ["hogwild", "master"])
def test_workers_share_one_gpu(mode, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.architectures.graphs.Parts", lambda *a, **k: Parts(*a, **k, hardware=GPU))
    run = train(tmp_path, vtrace.Config(unroll=4), "async_gradients", "shoal/Catch-v0", "local", actors=2, updates=60, net=LSTM,
                mode=mode)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()
    assert min(run.final[f"worker-{i}"]["env_steps"] for i in range(2)) > 0


@pytest.mark.parametrize("words", [(), ("--architecture.mode", "master"), ("--gpu.actors",)], ids=["hogwild", "master", "acting"])
def test_a_whole_run_of_a3c_ends_well(words, tmp_path, monkeypatch):
    """From the command line, on images, with all switches as they are by default."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "a3c", "shoal/PixelCatch-v0", "--device", "cuda", "--run-dir", "run", "--max-env-steps", "6000",
                     "--eval.episodes", "10", "--console.mode", "none", "--no-tensorboard", *words]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["learner_steps"] >= 10, summary
