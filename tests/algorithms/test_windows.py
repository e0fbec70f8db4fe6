"""Windows against literal transcriptions, on scripted episodes; T29 of specs/value.md."""


import numpy as np
import pytest

from shoal.ops import priorities
from shoal.slots import map_tree
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
    windows,
    zeros_like,
)


def segments(T, stride, m, l):  # noqa: E741
    """(first loss step, last + 1, burn-in) of every window of an episode of T steps, until one reaches its end."""
    out, begin = [], 0
    while True:
        out.append((begin, min(begin + m, T), min(l, begin)))
        if begin + m >= T:
            return out
        begin += stride


def literal_window(record, episode, begin, end):
    place, rows, T, before, m = record, episode.rows, len(episode.rows), record.burn_in, record.length
    none = zeros_like(rows[0]["observation"])
    item = {name: [] for name in ("observation", "first", "action", "reward", "discount", "valid", "prev_action", "prev_reward")}
    if place.mask_size:
        item["action_mask"] = []
    for s in range(begin - before, begin + m + 1):
        real, at_end = 0 <= s < T, episode.over and s == T
        row = rows[s] if real else None
        seen = row["observation"] if real else episode.last if at_end and not episode.terminated else none
        item["observation"].append(seen)
        item["first"].append(s == 0)
        if real:
            previous = row["prev_action"], row["prev_reward"]
        else:
            previous = (rows[-1]["action"], rows[-1]["reward"]) if at_end else (0, 0.0)
        for name, one in zip(("prev_action", "prev_reward"), previous, strict=True):
            item[name].append(one)
        if place.mask_size:
            ended = np.ones(A, bool) if episode.last_mask is None or not at_end else episode.last_mask
            item["action_mask"].append(row["mask"] if real else ended)
        if s < begin + m:
            made = 0 <= s < end
            item["valid"].append(made)
            item["action"].append(rows[s]["action"] if made else 0)
            item["reward"].append(clipped(place, rows[s]["reward"]) if made else 0.0)
            item["discount"].append(float(made and not (episode.terminated and s == T - 1)))
    stacked = {name: map_tree(lambda *parts: np.stack(parts), *part) for name, part in item.items()}
    start = begin - before
    stacked["state"] = zeros_like(rows[0]["state"]) if start <= 0 else rows[start]["state"]
    stacked["weights_version"] = rows[begin]["version"]
    errors = []
    for s in range(begin, end):
        total, product, k = 0.0, 1.0, s
        while True:
            total += product * clipped(place, rows[k]["reward"])
            product *= place.gamma * float(not (episode.terminated and k == T - 1))
            k += 1
            if k - s == place.n_step or k == end:
                break
        bootstrap = best(place, rows[min(k, T - 1)])
        errors.append(error(place, total + product * bootstrap, rows[s]["q"][rows[s]["action"]]))
    return stacked, record.eta * max(errors) + (1 - record.eta) * sum(errors) / len(errors)


@pytest.mark.parametrize(("l", "m", "stride"), [(0, 4, 2), (2, 4, 2), (3, 3, 3), (2, 1, 1), (5, 20, 7)])
@pytest.mark.parametrize(
    ("seats", "options", "more"),
    [
        (4, {}, {"n_step": 5, "gamma": 0.997, "rescale": True}),
        (3, {"late": True}, {"n_step": 2}),
        (2, {"masks": True, "space": DICT, "replaces": True}, {"n_step": 3, "reward_clip": 1.0}),
        (1, {"terminate": 0.0}, {"n_step": 1}),
    ],
)
def test_windows_are_what_happened(l, m, stride, seats, options, more):  # noqa: E741
    space = options.get("space", BOX)
    place = common(seats, space, options.get("masks", False), **more)
    record = windows(place, l, m, stride, state={"h": (H,), "c": (H,)}, previous=True)
    items, found, told = play(record, Script(seats, m, **options), 80)
    want = {}
    for key, episode in told.items():
        T = len(episode.rows)
        for begin, end, _ in segments(T, stride, m, l):
            if episode.over or begin + m <= T - 1:  # else its last observation was not acted on yet
                want[(*key, begin)] = literal_window(record, episode, begin, end)
    assert len(found) == len(want) > 10
    keys = (items["observation"] if space is BOX else items["observation"]["a"])[:, l].astype(int)
    assert len({tuple(key) for key in keys}) == len(found)
    for i, key in enumerate(keys):
        item, priority = want[tuple(key)]
        same({name: row_of(items, i)[name] for name in item}, item)
        assert found[i] == pytest.approx(priority + priorities.FLOOR, rel=1e-4, abs=2e-5)


@pytest.mark.parametrize(
    ("T", "stride", "m", "l", "want"),
    [
        (9, 2, 4, 2, [(0, 4, 0), (2, 6, 2), (4, 8, 2), (6, 9, 2)]),
        (200, 40, 80, 40, [(0, 80, 0), (40, 120, 40), (80, 160, 40), (120, 200, 40)]),
    ],
)
def test_T29_where_windows_are_cut(T, stride, m, l, want):  # noqa: E741
    record = windows(common(1), l, m, stride, state={"h": (H,), "c": (H,)})
    items, _, _ = play(record, Script(1, 0, lengths=[T]), T, take=1)
    valid, age = items["valid"], items["observation"][:, :, 2].astype(int)
    cut = [(age[i, l], age[i, l] + valid[i, l:].sum(), valid[i, :l].sum()) for i in range(len(valid))]
    assert cut == want == segments(T, stride, m, l)


def test_diagnosed_windows():
    record = windows(common(2, extras={"q": ((A,), "float32")}), 2, 4, 2, state={"h": (H,), "c": (H,)}, keep_states=True)
    items, _, told = play(record, Script(2, 5), 40)
    for i in range(len(items["valid"])):
        seen = items["observation"][i].astype(int)
        for k in np.flatnonzero(items["valid"][i]):
            row = told[tuple(seen[k, :2])].rows[seen[k, 2]]
            np.testing.assert_array_equal(items["q"][i, k], row["q"])
            np.testing.assert_array_equal(items["states"]["h"][i, k], row["state"]["h"])
