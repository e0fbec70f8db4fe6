"""Transitions and what all items share, against literal transcriptions on scripted episodes; T2 and T20 of specs/value.md."""

import pickle

import gymnasium as gym
import numpy as np
import pytest

from shoal.algorithms.records.first_priority import DistributionEstimates, ValueEstimates
from shoal.algorithms.records.moments import moment_fields
from shoal.algorithms.records.transitions import Transitions
from shoal.algorithms.records.windows import Windows
from shoal.envs.interface import Step
from shoal.errors import ConfigError
from shoal.ops import priorities
from tests.algorithms.item_script import (
    BOX,
    DICT,
    A,
    H,
    Script,
    best,
    clipped,
    common,
    error,
    play,
    row_of,
    same,
    transitions,
    windows,
    zeros_like,
)


# ---------------------------------------------------------------------------------------------- transitions
def literal_transitions(record, episode):
    """Every transition of one episode that must have come, with its priority."""
    rows, T, n, out = episode.rows, len(episode.rows), record.n_step, []
    for t in range(T):
        steps = min(n, T - t)
        if not episode.over and t + n > T - 1:
            break  # its last observation was not acted on yet
        total = sum(record.gamma**k * clipped(record, rows[t + k]["reward"]) for k in range(steps))
        ends = episode.over and t + steps == T
        product = 0.0 if ends and episode.terminated else record.gamma**steps
        if not ends:
            following, mask, bootstrap = rows[t + steps]["observation"], rows[t + steps]["mask"], best(record, rows[t + steps])
        else:
            following = zeros_like(rows[0]["observation"]) if episode.terminated else episode.last
            mask = np.ones(A, bool) if episode.last_mask is None else episode.last_mask  # nothing depends on it where terminated
            bootstrap = best(record, rows[-1])
        item = {"observation": rows[t]["observation"], "action": rows[t]["action"], "reward": total, "discount": product,
                "next_observation": following, "weights_version": rows[t]["version"]}  # fmt: skip
        if record.mask_size:
            item["next_action_mask"] = mask
        out.append((item, error(record, total + product * bootstrap, rows[t]["q"][rows[t]["action"]])))
    return out


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize(
    ("seats", "options", "more"),
    [
        (4, {}, {}),
        (3, {"late": True}, {"rescale": True}),
        (3, {"masks": True, "space": DICT}, {"reward_clip": 1.0}),
        (1, {"terminate": 0.0}, {}),
        (2, {"replaces": True, "terminate": 1.0}, {"gamma": 1.0}),
    ],
)
def test_transitions_are_what_happened(n, seats, options, more):
    record = transitions(seats, options.get("space", BOX), options.get("masks", False), n_step=n, **more)
    items, found, told = play(record, Script(seats, n, **options), 80)
    want = {(*key, t): one for key, episode in told.items() for t, one in enumerate(literal_transitions(record, episode))}
    keys = items["observation"] if options.get("space", BOX) is BOX else items["observation"]["a"]
    assert len(found) == len(want) > 60 * seats // 2
    assert len({tuple(key) for key in keys.astype(int)}) == len(found)
    for i, key in enumerate(keys.astype(int)):
        item, priority = want[tuple(key)]
        same({name: row_of(items, i)[name] for name in item}, item)
        assert found[i] == pytest.approx(priority + priorities.FLOOR, rel=1e-4, abs=2e-5)


@pytest.mark.parametrize("kind", ["transitions", "windows"])
def test_items_whenever_they_are_taken(kind):
    """One by one, each is cut as soon as it is due; all at the end, they are cut in blocks, some of them just before the memory
    of their steps is written over."""
    place = common(3, n_step=3)
    record = Transitions(**place) if kind == "transitions" else windows(place, 2, 4, 2, state={"h": (H,), "c": (H,)})
    (first, priority, _), *others = (play(record, Script(3, 1, lengths=[70, 3, 45, 1]), 200, take) for take in (1, 7, 10_000))
    assert len(priority) > 250
    for items, found, _ in others:
        np.testing.assert_array_equal(found, priority)
        same({**items, "time": first["time"]}, first)


def test_T2_five_transitions_of_five_steps():
    """T2: an episode of five steps gives five transitions."""
    items, _, _ = play(transitions(1, gamma=0.9, n_step=3), Script(1, 0, lengths=[5], terminate=0.0), 5)
    assert items["observation"][:, 2].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(np.log(items["discount"]) / np.log(0.9), [3, 3, 3, 2, 1], rtol=1e-5)
    assert items["next_observation"][:, 2].tolist() == [3, 4, 5, 5, 5]


def one_decision(record, qs, rewards, terminated):
    """Priorities of one seat that goes through these q-values and rewards."""
    recorder, size = record.recorder(), len(rewards)
    one, none = np.ones(1, bool), np.zeros(1, bool)

    def step(reward, discount, over):
        seen = np.zeros((1, 3), np.float32)
        return Step(seen, np.float32([reward]), np.float32([discount]), np.array([over]), np.array([over]), none, one)

    recorder.begin(Step(np.zeros((1, 3), np.float32), np.zeros(1, np.float32), np.ones(1, np.float32), one, none, none, one))
    for i, (q, reward) in enumerate(zip(qs, rewards, strict=True)):
        over = terminated and i == size - 1
        recorder.write(np.array([1]), {}, {"q": np.float32([q])}, step(reward, 0 if over else 1, over), 0)
    priority = np.zeros(recorder.ready)
    recorder.take(record.layout.joined(recorder.ready).empty(), priority)
    return priority - priorities.FLOOR


def test_T20_the_actors_priority():
    record = transitions(1, gamma=0.9, n_step=3, action_space=gym.spaces.Discrete(2))
    qs = [[0.5, 1.0], [0, 0], [0, 0], [2.0, 1.0]]
    np.testing.assert_allclose(one_decision(record, qs, [1.0, 0.0, 0.0, 5.0], False), [1.458], atol=1e-6)
    np.testing.assert_allclose(one_decision(record, qs[:1], [1.0], True), [0.0], atol=1e-6)  # R = 1, q = 1, nothing follows


# ---------------------------------------------------------------------------------------------- recorders
@pytest.mark.parametrize("record", [transitions(2), windows(common(2), 1, 2, 1, state={"h": (H,), "c": (H,)})])
def test_begin_drops_what_was_there(record):
    recorder, script = record.recorder(), Script(2, 0)
    recorder.begin(script.reset())
    for _ in range(20):
        recorder.write(np.ones(2, int), {"h": np.ones((2, H)), "c": np.ones((2, H))}, {"q": np.ones((2, A), np.float32)},
                       script.step(np.ones(2, int)), 0)  # fmt: skip
    assert recorder.ready > 4
    recorder.begin(script.reset())
    assert recorder.ready == 0
    with pytest.raises(ValueError, match="1 items were asked for, but 0 are ready"):
        recorder.take(record.layout.empty(), np.zeros(1))


def test_records_pickle_and_know_their_seats():
    for record in (transitions(2), windows(common(2), 1, 2, 1)):
        copy = pickle.loads(pickle.dumps(record))
        assert copy.layout == record.layout
        assert copy.recorder(2).ready == 0
        with pytest.raises(ConfigError, match="2 seats, not 5"):
            copy.recorder(5)


# ---------------------------------------------------------------------------------------------- any action, any estimate
def walk(record, actions, extras, steps=6, limit=3):
    """One record through an environment that is truncated after `limit` steps; all items and priorities."""
    recorder, B = record.recorder(), record.seats
    rng, age = np.random.default_rng(0), 0
    none, every = np.zeros(B, bool), np.ones(B, bool)

    def see(last=False, first=False):
        rows = np.arange(B) if last else np.zeros(0, int)
        final = np.full((B, 3), limit, np.float32) if last else None
        return Step(np.full((B, 3), age, np.float32), np.full(B, 1 + age, np.float32), np.ones(B, np.float32), every & first,
                    every & last, every & last, every, rows, final)

    recorder.begin(Step(np.zeros((B, 3), np.float32), np.zeros(B, np.float32), np.ones(B, np.float32), every, none, none, every))
    for t in range(steps):
        action = actions(t)
        age = (age + 1) % limit
        recorder.write(action, {}, extras(rng, B), see(age == 0, age == 0), t)
    items, priority = record.layout.joined(recorder.ready).empty(), np.zeros(recorder.ready)
    recorder.take(items, priority)
    return items, priority


@pytest.mark.parametrize("space, shape, dtype", [(gym.spaces.Box(-2, 2, (2, 3), np.float64), (2, 3), np.float32),
                                                 (gym.spaces.MultiDiscrete([3, 4]), (2,), np.int64)])
def test_items_of_any_action(space, shape, dtype):
    kinds = (Transitions(2, BOX, space), Windows(2, BOX, space, burn_in=1, length=2, stride=1, eta=0.9, previous=True))
    given = [np.random.default_rng(t).integers(0, 3, (2, *shape)).astype(dtype) for t in range(6)]
    for record in kinds:
        items, priority = walk(record, given.__getitem__, lambda rng, B: {})
        assert items["action"].dtype == dtype and items["action"].shape[-len(shape) :] == shape
        assert (priority == 1).all() and len(priority)
        for i, version in enumerate(items["weights_version"]):
            action = items["action"][i] if record is kinds[0] else items["action"][i, 1]
            assert any(np.array_equal(action, one) for one in given[version])
    view = kinds[1].viewer(5).view
    assert view.prev_action.shape == (5, *shape) and view.prev_action.dtype == dtype


def test_continuous_critic():
    """Extras and estimates of a continuous critic."""
    record = Transitions(2, BOX, gym.spaces.Box(-1, 1, (1,), np.float32), gamma=0.5, n_step=2, estimates=ValueEstimates(),
                         extras={"value_taken": ((), "float32"), "noise": ((4,), "float32")})
    told = []

    def extras(rng, B):
        told.append({"value_taken": rng.random(B, np.float32), "value": rng.random(B, np.float32),
                     "noise": rng.random((B, 4), np.float32)})
        return told[-1]

    items, priority = walk(record, lambda t: np.zeros((2, 1), np.float32), extras)
    assert len(priority) == 12  # two episodes of two seats
    for i, t in enumerate(items["weights_version"]):
        seat = int(np.flatnonzero(told[t]["value_taken"] == items["value_taken"][i])[0])
        np.testing.assert_array_equal(items["noise"][i], told[t]["noise"][seat])
        end = min(t + 2, t - t % 3 + 3)  # episodes are truncated after three steps: then the value before stands in
        bootstrap = told[end if end % 3 else end - 1]["value"][seat]
        want = abs(items["reward"][i] + 0.5 ** (end - t) * bootstrap - told[t]["value_taken"][seat])
        assert priority[i] == pytest.approx(want + priorities.FLOOR, rel=1e-5)


def test_executed_action_behind_the_mask():
    """The policy has no value for it: that of the best legal action stands in."""
    class Forbidding(Script):
        def step(self, action):
            step = super().step(action)
            step.executed_action = np.zeros_like(action)
            return step

        def mask(self):
            return np.tile([False, True, True], (self.seats, 1))

    for record in (transitions(2, masks=True), windows(common(2, masks=True), 1, 2, 1, state={"h": (H,), "c": (H,)})):
        items, found, _ = play(record, Forbidding(2, 0, masks=True), 40)
        assert (items["action"] == 0).all() and np.isfinite(found).all() and (found > 0).all()
    record = transitions(1, gamma=0.9, action_space=gym.spaces.Discrete(2))
    np.testing.assert_allclose(one_decision(record, [[3.0, -np.inf]], [1.0], True), [2.0], rtol=1e-6)  # |1 - 3|, not infinite
    extras = {"q": np.array([[3.0, -np.inf]]), "logits": np.array([[[0, 0, 5.0], [5.0, 0, 0]]])}
    taken, value = DistributionEstimates(3, 0.0, 2.0).of(extras, np.array([1]))
    np.testing.assert_allclose(np.exp(taken), value)


@pytest.mark.parametrize("seats", [1, 3])
def test_moments_of_what_was_acted_on(seats):
    """Of a single seat there are steps in which nobody acts: its next episode begins."""
    record = transitions(seats, observation_moments=3)
    recorder, script, into = record.recorder(), Script(seats, 4, late=True), {}
    step = script.reset()
    recorder.begin(step)
    seen, parts = [], []
    for t in range(60):
        after = script.step(np.ones(seats, int))
        seen.append(step.observation[after.valid])
        recorder.write(np.ones(seats, int), {}, {"q": np.ones((seats, A), np.float32)}, after, 0)
        step = after
        if t % 20 == 19:
            into = {name: np.zeros(field.shape) for name, field in moment_fields(3).items()}
            recorder.take_moments(into)
            parts.append(into)
    values = np.concatenate(seen).astype(np.float64)
    count = sum(part["count"][0, 0] for part in parts)
    shift = parts[0]["shift"][0]
    assert count == len(values) and all((part["shift"][0] == shift).all() for part in parts)
    np.testing.assert_allclose(shift + sum(part["sum"][0] for part in parts) / count, values.mean(0))
    np.testing.assert_allclose(sum(part["square"][0] for part in parts), ((values - shift) ** 2).sum(0))
