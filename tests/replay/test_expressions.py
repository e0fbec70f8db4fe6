"""Section 4: every operation against NumPy, and the same result at writer, service and reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal import replay
from shoal.replay import column, concat, n_step
from shoal.replay.client.expressions import Expression
from tests.replay.conftest import Start

X, C, R, D = column("x"), column("c"), column("r"), column("d")
Oracle = Callable[[dict[str, np.ndarray]], np.ndarray]


def first(flags: np.ndarray) -> int:
    return int(np.argmax(flags)) if flags.any() else len(flags)


def returns(r: np.ndarray, d: np.ndarray, gamma: float, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A literal transcription: sum of discounted rewards and the product of discounts."""
    total, product = np.zeros_like(r), np.ones_like(d)
    for t in range(len(r)):
        for k in range(t, min(t + n, len(r))):
            total[t] += product[t] * r[k]
            product[t] *= np.float64(gamma) * d[k]
    return total, product


CASES: dict[str, tuple[Any, Oracle]] = {
    "index": (X[2], lambda a: a["x"][2]),
    "slice": (X[1:-1:2], lambda a: a["x"][1:-1:2]),
    "backwards": (X[::-1], lambda a: a["x"][::-1]),
    "gather": (X[[3, 0, 0, -1]], lambda a: a["x"][[3, 0, 0, -1]]),
    "window": (X.window(3, 2), lambda a: np.lib.stride_tricks.sliding_window_view(a["x"], 3, 0)[::2].transpose(0, 3, 1, 2)),
    "before": (X.before(C), lambda a: a["x"][: first(a["c"])]),
    "after": (X.after(C), lambda a: a["x"][first(a["c"]) + 1 :]),
    "truncate": (X.truncate(C), lambda a: a["x"][: first(a["c"]) + 1]),
    "concat time": (concat([X, X[:2]]), lambda a: np.concatenate([a["x"], a["x"][:2]])),
    "concat axis 1": (concat([X, X * 2], 1), lambda a: np.concatenate([a["x"], a["x"] * 2], 1)),
    "stack": (X.stack(3), lambda a: np.stack([a["x"][[max(t - 2, 0), max(t - 1, 0), t]] for t in range(len(a["x"]))])),
    "pad end": (X.pad(15), lambda a: np.concatenate([a["x"], np.zeros((15 - len(a["x"]), 3, 2))])),
    "pad begin": (X.pad(15, "begin"), lambda a: np.concatenate([np.zeros((15 - len(a["x"]), 3, 2)), a["x"]])),
    "pad edge": (X.pad(15, "edge"), lambda a: np.concatenate([a["x"], np.repeat(a["x"][-1:], 15 - len(a["x"]), 0)])),
    "transpose": (X.transpose(2, 0, 1), lambda a: a["x"].transpose(2, 0, 1)),
    "reshape": (X.reshape(-1, 6), lambda a: a["x"].reshape(-1, 6)),
    "shift later": (X.shift(2, 7), lambda a: np.concatenate([np.full((2, 3, 2), 7.0), a["x"][:-2]])),
    "shift earlier": (X.shift(-1), lambda a: np.concatenate([a["x"][1:], np.zeros((1, 3, 2))])),
    "time and batch": (X.swap_time_batch(), lambda a: a["x"].swapaxes(0, 1)),
    "sum": (X.sum(), lambda a: a["x"].sum()),
    "sum time": (X.sum(0), lambda a: a["x"].sum(0)),
    "prod": (X.prod([0, 2]), lambda a: a["x"].prod((0, 2))),
    "mean": (X.mean(-1), lambda a: a["x"].mean(-1)),
    "min": (X.min(1), lambda a: a["x"].min(1)),
    "max": (X.max(0), lambda a: a["x"].max(0)),
    "any": (C.any(), lambda a: a["c"].any()),
    "all": (C.all(0), lambda a: a["c"].all(0)),
    "cumsum": (X.cumsum(), lambda a: np.cumsum(a["x"], 0)),
    "cumprod": (X.cumprod(), lambda a: np.cumprod(a["x"], 0)),
    "running max": (X.running_max(), lambda a: np.maximum.accumulate(a["x"], 0)),
    "discounted": (R.discounted_sum(D), lambda a: _discounted(a["r"], a["d"])),
    "n-step return": (n_step(R, D, 0.9, 3)[0], lambda a: returns(a["r"], a["d"], 0.9, 3)[0]),
    "n-step discount": (n_step(R, D, 0.9, 3)[1], lambda a: returns(a["r"], a["d"], 0.9, 3)[1]),
    "n-step mask": (n_step(R, D, 0.9, 3, "mask")[2], lambda a: np.arange(len(a["r"])) + 3 <= len(a["r"])),
    "n-step drop": (n_step(R, D, 0.9, 2, "drop")[0], lambda a: returns(a["r"], a["d"], 0.9, 2)[0][: len(a["r"]) - 1]),
    "priority": (0.9 * abs(R).max() + 0.1 * abs(R).mean(), lambda a: 0.9 * abs(a["r"]).max() + 0.1 * abs(a["r"]).mean()),
    "arithmetic": (-(X - 1) / 2 + X**2 * (X > 0), lambda a: -(a["x"] - 1) / 2 + a["x"] ** 2 * (a["x"] > 0)),
    "compare": (~(X <= 0.5), lambda a: ~(a["x"] <= 0.5)),
}  # fmt: skip


def _discounted(r: np.ndarray, d: np.ndarray) -> np.ndarray:
    result = r.copy()
    for t in reversed(range(len(r) - 1)):
        result[t] = r[t] + d[t] * result[t + 1]
    return result


@st.composite
def items(draw: st.DrawFn) -> dict[str, np.ndarray]:
    steps = draw(st.integers(5, 12))
    numbers = st.floats(-3, 3, width=32).map(float)
    return {
        "x": draw(hnp.arrays(np.float64, (steps, 3, 2), elements=numbers)),
        "c": draw(hnp.arrays(np.bool_, steps)),
        "r": draw(hnp.arrays(np.float64, steps, elements=numbers)),
        "d": draw(hnp.arrays(np.float64, steps, elements=st.sampled_from([0.0, 0.5, 1.0]))),
    }


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_operation_agrees_with_numpy(name: str, data: st.DataObject) -> None:
    expression, oracle = CASES[name]
    item = data.draw(items())
    expected = np.asarray(oracle(item))
    result = expression.item(item)
    assert result.shape == expected.shape and result.dtype == expected.dtype
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)
    travelled = Expression.from_data(expression.to_data())
    np.testing.assert_array_equal(travelled.item(item), result)
    batch = {path: np.stack([value, value]) for path, value in item.items()}
    np.testing.assert_array_equal(expression.batch(batch)[1], result)


def test_writer_service_and_reader_agree(start: Start) -> None:
    rng = np.random.default_rng(0)
    steps = [
        {"x": rng.random((3, 2)), "c": bool(rng.random() < 0.3), "r": rng.random(), "d": float(rng.integers(2))}
        for _ in range(9)
    ]
    static = {name.replace(" ", "_"): expression for name, (expression, _) in CASES.items()}
    _, client = start(replay.Table("raw"), replay.Table("made"))
    with client.writer(max_history=9) as writer:
        for step in steps:
            writer.append(step)
        writer.create_item("raw", 1.0, {name: writer.history[name][:] for name in "xcrd"})
        writer.create_item("made", 1.0, dict(static))
        writer.flush()
    at_writer = client.sample("made").data
    at_service = client.sample("raw", transform=static).data
    at_reader = replay.apply(static, client.sample("raw").data)
    for name in static:
        np.testing.assert_array_equal(at_writer[name], at_service[name], err_msg=name)
        np.testing.assert_array_equal(at_writer[name], at_reader[name], err_msg=name)


LINKS: list[tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = [
    (lambda e: e[::-1], lambda a: a[::-1]),
    (lambda e: e[1:], lambda a: a[1:]),
    (lambda e: e[[0, -1, 1, 1]], lambda a: a[[0, -1, 1, 1]]),
    (lambda e: e.shift(1, 5), lambda a: np.concatenate([np.full_like(a[:1], 5), a[:-1]])),
    (lambda e: e.cumsum(), lambda a: np.cumsum(a, 0)),
    (lambda e: e.running_max(), lambda a: np.maximum.accumulate(a, 0)),
    (lambda e: concat([e, e * 2]), lambda a: np.concatenate([a, a * 2])),
    (lambda e: abs(e) - 0.5, lambda a: abs(a) - 0.5),
    (lambda e: -e / 2 + (e > 0), lambda a: -a / 2 + (a > 0)),
]
ENDS: list[tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = [
    (lambda e: e, lambda a: a),
    (lambda e: e.pad(99, "edge"), lambda a: np.concatenate([a, np.repeat(a[-1:], 99 - len(a), 0)])),
    (lambda e: e.max(0), lambda a: a.max(0)),
    (lambda e: e.sum(), lambda a: a.sum()),
    (lambda e: e.mean(-1), lambda a: a.mean(-1)),
    (lambda e: e.window(2), lambda a: np.stack([a[:-1], a[1:]], 1)),
    (lambda e: e.transpose(2, 0, 1), lambda a: a.transpose(2, 0, 1)),
]
Chains = st.tuples(st.lists(st.sampled_from(LINKS), max_size=3), st.sampled_from(ENDS))


def test_same_at_writer_service_and_reader(start: Start) -> None:
    """To the last bit, and what NumPy gives: two chains of operations and all single ones, on drawn data."""
    _, client = start(replay.Table("raw"), replay.Table("made"))
    single = {name.replace(" ", "_"): expression for name, (expression, _) in CASES.items()}

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(items(), st.tuples(Chains, Chains))
    def agree(item: dict[str, np.ndarray], chains: tuple[Any, Any]) -> None:
        made: dict[str, Any] = dict(single)
        expected = {}
        for at, (links, last) in enumerate(chains):
            expression, array = X, item["x"]
            for ours, theirs in [*links, last]:
                expression, array = ours(expression), theirs(array)
            made[f"chain_{at}"], expected[f"chain_{at}"] = expression, array
        client.reset("raw")
        client.reset("made")
        with client.writer(max_history=12) as writer:
            for t in range(len(item["r"])):
                writer.append({path: values[t] for path, values in item.items()})
            writer.create_item("raw", 1.0, {name: writer.history[name][:] for name in "xcrd"})
            writer.create_item("made", 1.0, made)
            writer.flush()
        at_writer = client.sample("made", 2).data
        at_service = client.sample("raw", 2, transform=made).data
        at_reader = replay.apply(made, client.sample("raw", 2).data)
        for name in made:
            for other in (at_service[name], at_reader[name]):
                assert other.dtype == at_writer[name].dtype and other.shape == at_writer[name].shape, name
                assert other.tobytes() == at_writer[name].tobytes(), name
        for name, array in expected.items():
            np.testing.assert_allclose(at_reader[name][1], array, rtol=1e-12, atol=1e-12, err_msg=name)

    agree()


def test_shapes_are_known_up_front() -> None:
    columns = {"x": ((9, 3, 2), np.float64), "c": ((9,), np.bool_)}
    assert X.window(3, 2).shape(columns) == (4, 3, 3, 2)
    assert X.before(C).shape(columns) == (None, 3, 2)
    assert X.mean().shape(columns) == ()
    for bad in (X[9], X.window(10), X.reshape(7), X.transpose(0, 0, 1), concat([X, C]), X.pad(3)):
        with pytest.raises(replay.InvalidItem):
            bad.shape(columns)
    with pytest.raises(replay.NotFound, match="nope"):
        column("nope").shape(columns)


def test_t12_sequence_priority() -> None:
    td = {"td": np.array([0.1, -0.5, 2.0, 0.4])}
    priority = 0.9 * abs(column("td")).max() + 0.1 * abs(column("td")).mean()
    assert priority.item(td) == pytest.approx(1.875)


def test_t3_t4_n_step() -> None:
    reward, discount = np.array([1.0, 2, 3, 4]), np.array([1.0, 0, 1, 1])
    ret, product, _ = n_step(R, D, 0.9, 3)
    item = {"r": reward, "d": discount}
    np.testing.assert_allclose(ret.item(item), [2.8, 2, 6.6, 4])
    np.testing.assert_allclose(product.item(item), [0, 0, 0.81, 0.9])


@pytest.mark.parametrize("bad", [None, [], ["column"], ["column", [], {}], ["eval", [], {}], ["index", [["x"]], {}],
                                 ["constant", [], {"value": "a"}], [["column", [], {"path": "x"}]]])  # fmt: skip
def test_bad_expressions_are_refused(bad: Any) -> None:
    with pytest.raises(replay.InvalidItem):
        Expression.from_data(bad)


def test_an_endless_expression_is_refused() -> None:
    data: Any = ["column", [], {"path": "x"}]
    for _ in range(12):
        data = ["add", [data, data], {}]
    with pytest.raises(replay.InvalidItem, match="bounded"):
        Expression.from_data(data)
