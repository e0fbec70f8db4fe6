"""From two runs to costs, and `shoal plan` as it is typed."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from shoal.bench.text_tables import UNMEASURED
from shoal.cli import main
from shoal.errors import ConfigError
from shoal.planning import command, measure
from shoal.planning.measure import Observation, costs_of, fitted, scaled
from shoal.planning.pipeline import simulate
from shoal.planning.terms import Cluster, Cost, Costs

TRUE = Costs(decisions=100.0, env=Cost(0.004), inference=Cost(0.006), put=Cost(0.001), pull=Cost(0.0002), get=Cost(0.0001),
             update=Cost(0.004), publish=Cost(0.0005), slot_bytes=4000.0, weights_bytes=8000.0)


def observation(costs, actors, cores=2):
    """What a run with these costs would have shown."""
    said = simulate(costs, Cluster(cores), actors, 1, 2, 2)
    seconds, unrolls = 10.0, 10.0 * said.env_steps_per_second / costs.decisions
    updates, slow = unrolls / 2, said.inflation
    acting = {"env": costs.env.cpu * unrolls, "inference": costs.inference.cpu * unrolls, "write": costs.put.cpu * unrolls,
              "pull": costs.pull.cpu * min(unrolls, actors * updates)}
    learning = {"gather": costs.get.cpu * unrolls, "learn": costs.update.cpu * updates, "publish": costs.publish.cpu * updates}
    waits = {"actor": costs.unroll.wait * unrolls, "learner": costs.update.wait * updates}

    def role(phases, wait, where):
        inflated = {name: slow * value for name, value in phases.items()}
        cpu = sum(inflated.values())
        return {**inflated, where: inflated[where] + wait, "busy": cpu + wait, "cpu": cpu}

    squeezed = costs.unroll.cpu + costs.pull.cpu + costs.turn * simulate(scaled(costs, 1.0, 1.0), Cluster(1), actors, 1, 2, 2).turns
    return Observation(actors, 1, seconds, unrolls * costs.decisions, unrolls, updates, unrolls, updates,
                       role(acting, waits["actor"], "env"), role(learning, waits["learner"], "learn"), said.policy_lag,
                       said.blocked, costs.slot_bytes, costs.weights_bytes, costs.spread, squeezed)


@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_costs(wait):
    """Costs are what the phases and the kernel say."""
    true = scaled(TRUE, 1.0, 1.0)
    true = Costs(**{**vars(true), "env": Cost(0.004, wait), "update": Cost(0.004, wait)})
    found = costs_of(observation(true, 1, cores=64))
    for name in ("env", "inference", "put", "pull", "get", "update", "publish"):
        assert getattr(found, name).cpu == pytest.approx(getattr(true, name).cpu, rel=0.02), name
        assert getattr(found, name).wait == pytest.approx(getattr(true, name).wait, rel=0.02, abs=1e-6), name
    assert found.decisions == 100.0


@pytest.mark.parametrize("speed", [1.0, 0.6])
def test_speed_of_busy_cores(speed):
    true = scaled(TRUE, 1.0, speed)
    found = fitted(observation(true, 1), observation(true, 2), 2, 2, cores=2)
    assert found.full_speed == pytest.approx(speed, abs=0.06)
    for actors in (4, 8):
        said, would = (simulate(one, Cluster(2), actors, 1, 2, 2).env_steps_per_second for one in (found, true))
        assert said == pytest.approx(would, rel=0.05)


def test_cost_of_a_turn_on_one_core():
    true = Costs(**{**vars(TRUE), "turn": 0.0008, "spread": 0.03})
    found = fitted(observation(true, 1), observation(true, 2), 2, 2, cores=2)
    assert found.turn == pytest.approx(0.0008, rel=0.2) and found.spread == 0.03
    for actors in (4, 8):
        said, would = (simulate(one, Cluster(2), actors, 1, 2, 2).env_steps_per_second for one in (found, true))
        assert said == pytest.approx(would, rel=0.05)
    warmer = dataclasses.replace(observation(true, 2), squeezed_unroll=0.001)  # less than alone: cores that are never idle
    assert fitted(observation(true, 1), warmer, 2, 2, cores=2).turn == 0.0


def test_runs_on_idle_cores():
    """Runs that hardly use their cores do not tell how fast busy ones are."""
    true = Costs(**{**vars(TRUE), "env": Cost(0.004, 0.2)})
    two = observation(true, 2)
    noisy = dataclasses.replace(two, actor_seconds={**two.actor_seconds, "cpu": 1.3 * two.actor_seconds["cpu"]})
    assert fitted(observation(true, 1), noisy, 2, 2, cores=2).full_speed == 1.0


def test_spread_of_an_unroll():
    """The spread of an unroll from moments in between."""
    random = np.random.default_rng(0)
    ends = np.cumsum(random.normal(0.01, 0.001, 5000))
    steps = np.arange(0, 5001, random.integers(1, 20))
    ticks = [(float(k), float(ends[k - 1]) if k else 0.0) for k in steps]
    assert measure.spread_of(ticks) == pytest.approx(0.1, rel=0.15)
    assert measure.spread_of([(float(k), 0.01 * k) for k in range(50)]) == pytest.approx(0.0, abs=1e-6)
    assert measure.spread_of([]) == measure.spread_of([(3.0, 0.1)]) == 0.0


def test_squeezed_processes_share_one_core():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        measure._squeeze([child.pid])
        assert os.sched_getaffinity(child.pid) == {min(os.sched_getaffinity(0))}
        child.communicate(b"\n")


def test_cost_of_a_slot_in_lock_step():
    """In lock step two runs tell what a slot costs."""
    assert measure.per_slot(Cost(0.03), Cost(0.05)) == (Cost(pytest.approx(0.01)), Cost(pytest.approx(0.02)))
    assert measure.per_slot(Cost(0.03, 0.04), Cost(0.03, 0.04)) == (Cost(0.03, 0.04), Cost(0.0))
    assert measure.per_slot(Cost(0.03), Cost(0.09)) == (Cost(0.0), Cost(0.03))  # no batch costs less than nothing


def test_shoal_plan_measures_and_answers(capsys):
    assert main(["plan", "impala", "--actors", "40", "--learners=2", "CartPole-v1", "--seconds", "0.4", "--cores-per-node", "8",
                 "--architecture.envs-per-actor", "4"]) == 0
    said = capsys.readouterr().out
    assert "measured with 1 actor:" in said and "measured with 2 actors:" in said
    rows = [line.split() for line in said.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "5", "10", "20", "40"] and {row[1] for row in rows} == {"2"}
    assert [row[2] for row in rows] == ["1", "1", "1", "3", "4", "6"]  # nodes of 8 cores
    assert "first bottleneck" in said and "assumed   cores like those here, links of 10 Gbit/s" in said
    assert said.endswith(f"\n\n{UNMEASURED}\n")


@pytest.mark.parametrize(("words", "match"), [
    (["plan", "seed", "CartPole-v1"], "not vtrace x central_inference"),
    (["plan", "apex", "CartPole-v1"], "not dqn x actor_learner"),
    (["plan", "impala", "CartPole-v1", "--actors", "0"], "--actors is 0; it must be at least 1"),
    (["plan", "impala", "CartPole-v1", "--actors", "20000"], "--actors is 20000; it must be at least 1 and at most 10000"),
    (["plan", "impala", "CartPole-v1", "--gigabits", "0"], "--gigabits is 0.0; it must be above 0"),
    (["plan", "impala", "CartPole-v1", "--architecture.one-place"], "does not work with --architecture.one-place"),
    (["plan", "impala", "CartPole-v1", "--actors", "10", "--nodes", "1000000000"], "give --nodes 11 or fewer"),
    (["plan", "impala"], "which environment"),
    (["plan", "impala", "CartPole-v1", "--nonsense", "3"], "there is no option --nonsense"),
])
def test_what_makes_no_sense_gets_a_sentence(words, match, capsys):
    assert main(words) == 2
    assert match in capsys.readouterr().err


def test_other_runtimes(monkeypatch, capsys):
    """The command says that another runtime was not measured."""

    def never(*_):
        raise ConfigError("enough")

    monkeypatch.setattr(command, "_measured", never)
    for words, said in ((["--runtime", "ray"], "--runtime ray is ignored"), ([], "")):
        assert main(["plan", "impala", "CartPole-v1", *words]) == 2
        assert capsys.readouterr().out.startswith(said) and bool(said) == bool(words)


def test_run_that_never_learns(monkeypatch):
    monkeypatch.setattr(measure, "run", lambda *_, **__: "slow")
    with pytest.raises(measure.ShoalError, match="nothing to plan with"):
        measure.observe(None, None)


def test_options_of_both_commands():
    """The options of both commands are told apart."""
    mine, rest = command._apart(["impala", "--actors", "5", "CartPole-v1", "--seed", "3", "--nodes=2", "--algorithm.lr", "1e-3"])
    assert mine == ["--actors", "5", "--nodes=2"]
    assert rest == ["impala", "CartPole-v1", "--seed", "3", "--algorithm.lr", "1e-3"]
    with pytest.raises(ConfigError):
        command.PlanOptions(nodes=0).validate()


def summary_of(seen):
    """The summary.json of a run that was like this."""

    def role(seconds, count, steps):
        shares = {name: value / count / seen.seconds for name, value in seconds.items()}
        busy = shares.pop("busy")
        shares.pop("cpu")
        return {"instances": count, "steps_per_second": steps / seen.seconds, "busy": busy, "phases": shares, "waits": {}}

    return {"seconds": seen.seconds, "env_steps": seen.env_steps, "learner_steps": seen.optimiser_steps,
            "policy_lag": {"mean": seen.policy_lag}, "cpu_seconds": seen.actor_seconds["cpu"] + seen.learner_seconds["cpu"],
            "wires": {"unrolls": {"consumed_per_second": seen.slots / seen.seconds}},
            "roles": {"actor": role(seen.actor_seconds, seen.actors, seen.unrolls),
                      "learner": role(seen.learner_seconds, 1, seen.updates)}}


def test_curve_of_a_benchmark():
    """A benchmark draws the same curve from its summaries."""
    from benchmarks.model_curve import observed, predicted

    true = scaled(TRUE, 1.0, 0.8)
    architecture = {"name": "actor_learner", "one_place": False, "batch_slots": 2, "slots_per_actor": 2}
    rows = {n: [{"observed": observed(summary_of(observation(true, n)), architecture), "limit": {"cores": 2}, "error": None}]
            for n in (1, 2, 4, 8)}
    points = predicted(rows)
    assert [n for n, _ in points] == [1, 2, 4, 8]
    for n, steps in points:
        assert steps == pytest.approx(simulate(true, Cluster(2), int(n), 1, 2, 2).env_steps_per_second, rel=0.05)
    assert predicted({n: [{"observed": None, "error": None}] for n in (1, 2)}) == [] == predicted({1: rows[1]})
    assert observed(summary_of(observation(true, 1)), {"name": "central_inference"}) is None


def test_page_is_written_from_the_results(tmp_path, monkeypatch):
    import json

    from benchmarks import scaling_page as page

    text = page.PAGE.read_text()
    (tmp_path / "scaling.md").write_text(text)
    row = {"actors": 4, "learners": 1, "off": 0.2, "met": False, "measured": {"env_steps_per_second": 10.0, "learner_idle": 0.5,
           "policy_lag": 1.0}, "predicted": {"env_steps_per_second": 12.0, "learner_idle": 0.4, "policy_lag": 1.5}}
    run = {"seed": 1, "judged": [row], "costs": dataclasses.asdict(TRUE), "batch": 2, "depth": 2, "lockstep": False}
    (tmp_path / "scaling-computing.json").write_text(json.dumps({"runs": [run], "met": False, "date": "today", "commit": "abc",
                                                                 "machine": {"cores": 2, "cpu": "x"}}))
    monkeypatch.setattr(page, "ACTORS", (1, 10, 100))
    page.write(tmp_path / "scaling.md", tmp_path)
    said = (tmp_path / "scaling.md").read_text()
    assert "| 1 | 4 | 1 | 10 | 12 | +20 % **missed** | 50 % | 40 % | 1.0 | 1.5 |" in said and "**not met**" in said
    assert "| 64 | 100 | 11 |" in said and "results/scaling-computing.svg" in said and said.count(UNMEASURED) == 2
    assert "Not measured yet: run `python -m evidence --only scaling-sleeping`" in said
    assert (tmp_path / "scaling-computing.svg").read_text().startswith("<svg") and page.PAGE.read_text() == text
    page.write(tmp_path / "scaling.md", tmp_path)
    assert (tmp_path / "scaling.md").read_text() == said
