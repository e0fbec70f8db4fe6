"""`shoal plot`: which runs are one line, what lines are called, and what is drawn."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.experiment.config import Experiment
from shoal.experiment.plot_lines import ANY, plot_lines
from shoal.experiment.rundir import RunDir
from shoal.telemetry.curves import Curve, band_of, joined, read_curve, sparkline
from tests.experiment.test_first_hour import TINY, say

SHORT = {**TINY, "max_env_steps": 600, "eval.every_env_steps": 150}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of two seeds, and single runs."""
    folder = tmp_path_factory.mktemp("plots")
    shoal.train("ppo", "CartPole-v1", seeds=2, run_dir=str(folder / "two"), **SHORT)
    for name, values in {"longer": {"seed": 3, "max_env_steps": 900, "checkpoint.every_seconds": 9.0, "policy": "last"},
                         "local": {"seed": 4, "runtime": "local", "max_env_steps": 900}, "again": {"seed": 3}}.items():
        shoal.train("ppo", "CartPole-v1", run_dir=str(folder / name), **{**SHORT, **values})
    return folder


def changed(source: Path, path: Path, **values) -> RunDir:
    """A run of 60,000 env steps, with the values of another one but for those (dotted names, with __ for the dot)."""
    path.mkdir(parents=True)
    points = [(0, 10), (20_000, 60), (40_000, 300), (40_100, 90), (60_000, 400)]  # it was stopped and resumed at 40,000
    rows = [{"kind": "snapshot", "env_steps": steps, "seconds": steps / 8000, "eval_return": value, "eval_version": version,
             "eval_episodes": 10} for version, (steps, value) in enumerate(points)]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = json.loads((source / "config.json").read_text())
    for name, value in values.items():
        section, _, key = name.partition("__")
        config[section] = {**config[section], key: value} if key else value
    (path / "config.json").write_text(json.dumps(config))
    return RunDir(path)


def lines(*runs) -> dict[str, int]:
    """By name, of how many runs."""
    return {line.name: len(line.runs) for line in plot_lines([run if isinstance(run, RunDir) else RunDir(run) for run in runs])}


# ---------------------------------------------------------------------------------------------- which runs are one line
def test_seeds_are_one_line(trained):
    """Also with another budget, another pace of checkpoints, another choice of the policy."""
    seeds = sorted((trained / "two").glob("seed-*"))
    assert lines(*seeds) == {"ppo": 2}
    assert lines(*seeds, trained / "longer") == {"ppo": 3}


def test_another_runtime_is_another_line(trained):
    seeds = sorted((trained / "two").glob("seed-*"))
    assert lines(*seeds, trained / "local") == {"ppo, runtime=inline": 2, "ppo, runtime=local": 1}


def test_the_same_seed_is_no_second_seed(trained):
    assert lines(trained / "longer", trained / "again") == {"ppo, longer": 1, "ppo, again": 1}
    assert lines(trained / "longer", trained / "longer", trained / "two" / ".." / "longer") == {"ppo": 1}, "named twice"
    assert lines(trained / "longer", trained / "again", *sorted((trained / "two").glob("seed-*"))) == {
        "ppo, longer": 1, "ppo, again": 1, "ppo, two": 2}, "a folder stays together"


@pytest.mark.parametrize(("values", "name"), [
    ({"algorithm__lr": 0.5}, "ppo, algorithm.lr=0.5"), ({"net__hidden": [9]}, "ppo, net.hidden=[9]"),
    ({"device": "cuda"}, "ppo, device=cuda"), ({"init_from": "runs/a"}, "ppo, init_from=runs/a"),
    ({"eval__greedy": False}, "ppo, eval.greedy=false"), ({"preset": "mine"}, "mine"),
    ({"preset": None}, "ppo x synchronous"), ({"actors": 7}, "ppo, actors=7, environments=28"),
    ({"env": {"name": "Acrobot-v1", "id": "Acrobot-v1"}}, "ppo, Acrobot-v1")])
def test_other_values_are_other_lines(values, name, trained, tmp_path):
    other = changed(trained / "longer", tmp_path / "other", seed=8, **values)
    found = lines(trained / "longer", other)
    assert list(found.values()) == [1, 1] and list(found)[1] == name


@pytest.mark.parametrize("values", [
    {"max_env_steps": 1}, {"max_seconds": 3.0}, {"until_return": 9.0}, {"until": "return >= 3"}, {"run_dir": "x"}, {"resumed": 5},
    {"console__mode": "live"}, {"log__episodes": True}, {"tensorboard": True}, {"faults__hang_seconds": 9.0}, {"shoal": "0.0.1"},
    {"ray__address": "auto"}, {"eval__episodes": 77}, {"eval__every_env_steps": 77}])
def test_what_cannot_change_learning(values, trained, tmp_path):
    other = changed(trained / "longer", tmp_path / "other", seed=8, **values)
    assert lines(trained / "longer", other) == {"ppo": 2}


def test_names_that_do_not_count_exist(trained):
    """A renamed option would count from then on, and nobody would notice."""
    config = json.loads((trained / "longer" / "config.json").read_text())
    known = {*config, *(f"{section}.{name}" for section, values in config.items() if isinstance(values, dict) for name in values)}
    assert known >= ANY and set(Experiment.__dataclass_fields__) <= set(config)


def test_a_folder_of_seeds_is_one_line(trained, tmp_path):
    """Whatever became of its seeds: one was resumed on another runtime. More seeds of the same values join them."""
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "seeds.json").write_text((trained / "two" / "seeds.json").read_text())
    inside = [changed(trained / "two" / f"seed-{seed}", tmp_path / "two" / f"seed-{seed}", **values)
              for seed, values in ((0, {}), (1, {"runtime": "local"}))]
    assert lines(*inside) == {"ppo": 2}
    assert lines(*inside, trained / "longer") == {"ppo": 3}


def test_the_layout_of_actors_auto(trained, tmp_path):
    """It is measured before every run. Of two numbers that the user gave each counts."""
    layouts = ({"actors": 2, "architecture__envs_per_actor": 4}, {"actors": 1, "architecture__envs_per_actor": 8,
                                                                  "learner_threads": 2, "architecture__one_place": True})
    runs = [changed(trained / "longer", tmp_path / f"run-{seed}", seed=seed, **layout) for seed, layout in enumerate(layouts)]
    assert len(lines(*runs)) == 2
    for run in runs:
        with run.metrics_file.open("a") as file:
            file.write(json.dumps({"kind": "event", "event": "layout", "text": "chosen: ... by trying (--actors auto)"}) + "\n")
    assert lines(*runs) == {"ppo": 2}
    more = changed(runs[1].path, tmp_path / "more", seed=9, architecture__envs_per_actor=16)
    (auto, count), (given, one) = lines(*runs, more).items()
    assert (count, one) == (2, 1), "a number that was given, and one that was not"
    assert auto.startswith("ppo, actors=auto, environments=8, ") and given.startswith("ppo, actors=1, environments=16, ")
    with more.metrics_file.open("a") as file:
        file.write('{"kind": "event", "event": "layout"}\n')
    assert lines(*runs, more) == {"ppo, environments=8": 2, "ppo, environments=16": 1}


def test_names_tell_lines_apart(trained, tmp_path):
    """Three values are told, more where it takes more."""
    base = {"algorithm__lr": 0.1, "algorithm__gamma": 0.2, "algorithm__clip": 0.3}
    a = changed(trained / "longer", tmp_path / "a", **base)
    b = changed(trained / "longer", tmp_path / "b", **base, net__hidden=[9], values="paper")
    names = list(lines(trained / "longer", a, b))
    assert len(set(names)) == 3 and names[1].count("=") == 4 and names[1].endswith("net.hidden=[8], ...")


# ---------------------------------------------------------------------------------------------- curves
def test_curves(tmp_path):
    rows = [{"kind": "snapshot", "env_steps": n, "eval_return": v, "eval_version": e, "losses": {"a": n}, "seconds": n / 10}
            for n, v, e in ((10, None, 0), (20, 1.0, 1), (30, 1.0, 1), (40, 3.0, 2))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"torn')
    curve = read_curve(tmp_path / "metrics.jsonl", "eval_return")
    assert curve.x.tolist() == [20, 40] and curve.y.tolist() == [1, 3], "an evaluation counts once"
    assert read_curve(tmp_path / "metrics.jsonl", "losses/a", "seconds").x.tolist() == [1, 2, 3, 4]
    flat = [Curve(np.array([a, b]), np.array([v, v])) for a, b, v in ((0.0, 10.0, 1.0), (0.0, 10.0, 3.0), (2.0, 8.0, 2.0))]
    band = band_of(flat, "std")
    assert (band.x[0], band.x[-1]) == (2, 8)
    assert np.allclose(band.mean, 2) and np.allclose(band.high, 3) and np.allclose(band.low, 1)
    assert np.allclose(band_of(flat, "interval").high, 2 + 4.303 / np.sqrt(3)) and np.allclose(band_of(flat, "range").low, 1)
    assert sparkline(np.array([0.0, 1.0, 2.0]), 3) == "▁▅█" and sparkline(np.zeros(0), 3) == ""


def test_evaluations_at_nearly_the_same_step():
    """What ends a run and what begins its resumed part are one point, by their episodes; a regular pace stays as it is."""
    x, y = np.array([0.0, 20_000, 40_000, 40_200, 60_000]), np.array([1.0, 2.0, 5.0, 3.0, 7.0])
    found = joined(Curve(x, y, np.array([100.0, 100, 10, 30, 100])))
    assert found.x.tolist() == [0, 20_000, 40_150, 60_000] and found.y.tolist() == [1, 2, 3.5, 7]
    even = Curve(np.arange(50.0), np.arange(50.0), np.ones(50))
    assert joined(even).x.tolist() == even.x.tolist()
    assert joined(Curve(x, y)).x.tolist() == x.tolist(), "only evaluations"


# ---------------------------------------------------------------------------------------------- pictures
@pytest.mark.parametrize("over", ["steps", "seconds"])
def test_plotting_seeds(over, trained, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from PIL import Image

    for name, seed, runtime in (("a", 1, "inline"), ("b", 2, "inline"), ("c", 3, "local")):
        changed(trained / "longer", tmp_path / "runs" / name, seed=seed, runtime=runtime)
    picture = tmp_path / "curves.png"
    axes, told = drawn(monkeypatch, capsys, str(tmp_path / "runs"), "--out", str(picture), "--over", over)
    assert "of 3 runs in 2 lines\n  ppo, runtime=inline: mean of 2 seeds\n  ppo, runtime=local\n" in told
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ppo, runtime=inline (2 seeds)", "ppo, runtime=local"]
    assert len(axes.get_lines()) == 4 and len(axes.collections) == 1, "two seeds, their mean and its band; one run"
    colours = Image.open(picture).convert("RGB").getcolors(1 << 20)
    assert len(colours) > 20, "something is drawn"


def drawn(monkeypatch, capsys, *words):
    """The axes of a picture, and what was said."""
    from matplotlib import pyplot

    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    code, told = say(capsys, "plot", *words)
    assert code == 0, told
    return kept[0].axes[0], told


def test_ticks_are_whole(trained, tmp_path, monkeypatch, capsys):
    """A tick at 12.5 reads 12.5."""
    pytest.importorskip("matplotlib")
    axes, _ = drawn(monkeypatch, capsys, str(trained / "two"), "--out", str(tmp_path / "a.png"), "--over", "seconds")
    form = axes.xaxis.get_major_formatter()
    ticks = {0: "0", 2.5: "2.5", 12.5: "12.5", 20_000: "20,000", 0.1 + 0.2: "0.3", 1e9: "1,000,000,000"}
    assert {value: form(value, 0) for value in ticks} == ticks


def test_a_resumed_run_has_no_spike(trained, tmp_path, monkeypatch, capsys):
    """Its last evaluation before the end and its first one after are drawn as one."""
    pytest.importorskip("matplotlib")
    run = changed(trained / "longer", tmp_path / "run")
    axes, _ = drawn(monkeypatch, capsys, str(run.path), "--out", str(tmp_path / "a.png"))
    (line,) = axes.get_lines()
    assert line.get_xdata().tolist() == [0, 20_000, 40_050, 60_000] and line.get_ydata().tolist() == [10, 60, 195, 400]


def test_every_run_for_itself(trained, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    axes, told = drawn(monkeypatch, capsys, str(trained / "two"), "--each", "--out", str(tmp_path / "a.svg"))
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == [str(trained / "two" / f"seed-{seed}") for seed in (0, 1)] and "in 2 lines" in told


def test_seeds_without_a_common_stretch(trained, tmp_path, monkeypatch, capsys):
    """A short run has ended before the first evaluation of a long one: there is no mean, and that is said."""
    pytest.importorskip("matplotlib")
    late = changed(trained / "longer", tmp_path / "late", seed=9)
    rows = [json.loads(line) for line in late.metrics_file.read_text().splitlines()]
    late.metrics_file.write_text("\n".join(json.dumps({**row, "env_steps": row.get("env_steps", 0) + 10**6}) for row in rows))
    axes, told = drawn(monkeypatch, capsys, str(trained / "longer"), str(late.path), "--out", str(tmp_path / "a.png"))
    assert "ppo: 2 seeds without a mean, because they have no env steps in common" in told
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ppo (2 seeds)"]


def at(run: RunDir, *points: tuple[int, float]) -> str:
    """The run, evaluated at these env steps with these returns."""
    rows = [{"kind": "snapshot", "env_steps": steps, "train_return": value, "eval_return": value, "eval_version": version,
             "eval_episodes": 5} for version, (steps, value) in enumerate(points)]
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(run.path)


def test_a_seed_that_has_just_begun(trained, tmp_path, monkeypatch, capsys):
    """It is left out of its line, and that is said; a run that is a line of its own is refused."""
    pytest.importorskip("matplotlib")
    old, new = (changed(trained / "longer", tmp_path / name, seed=seed) for name, seed in (("old", 1), ("new", 2)))
    words = at(old, (0, 1.0), (100, 2.0)), at(new), "--out", str(tmp_path / "a.png")
    axes, told = drawn(monkeypatch, capsys, *words)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ppo"] and axes.get_ylabel() == "eval return"
    assert f"eval_return of 1 run in 1 line\n  ppo\n  without {new.path}, which has no eval_return yet\n" in told
    code, told = say(capsys, "plot", *words, "--each")
    assert code == 2 and f"{new.path} has no train_return" in told


def test_one_step_in_common(trained, tmp_path, monkeypatch, capsys):
    """Two evaluations of a seed at the same step are one; the mean at a single step is a dot, with what lies around it."""
    pytest.importorskip("matplotlib")
    runs = [changed(trained / "longer", tmp_path / f"run-{seed}", seed=seed) for seed in (1, 2)]
    words = at(runs[0], (3072, -500.0), (3072, -100.0)), at(runs[1], (3072, -200.0))
    axes, told = drawn(monkeypatch, capsys, *words, "--out", str(tmp_path / "a.png"))
    assert "ppo: mean of 2 seeds\n" in told
    (bar,) = axes.containers
    assert bar.lines[0].get_xdata().tolist() == [3072] and bar.lines[0].get_ydata().tolist() == [-250.0]
    assert bar.lines[2][0].get_segments()[0].tolist() == [[3072, -300.0], [3072, -200.0]]


def test_a_value_that_is_not_given(trained, tmp_path):
    begun = changed(trained / "longer", tmp_path / "begun", init_from="runs/a")
    assert list(lines(trained / "longer", begun)) == ["ppo, init_from=None", "ppo, init_from=runs/a"]


def test_plotting_without_matplotlib(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, told = say(capsys, "plot", str(trained / "two"), "--out", str(tmp_path / "curves.png"))
    assert code == 2 and 'pip install "shoal[plot]"' in told and not (tmp_path / "curves.png").exists()
