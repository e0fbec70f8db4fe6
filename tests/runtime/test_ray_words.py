"""What a program asks of a cluster, and what is said where a cluster does not have it. Without Ray."""

import pytest

from shoal.algorithms import vtrace
from shoal.experiment.prepare import OPTIONS
from shoal.roles.parts import EvalPlan
from shoal.runtime import RayConfig
from shoal.runtime.ray.resources import Demand, Size, demands, missing, replicas_that_fit, sizes, too_large
from tests.architectures.graphs import draw


def asked(architecture, config=None, **options):
    program, _ = draw(vtrace.Config(unroll=8), architecture, "CartPole-v1", eval=EvalPlan(enabled=False), **options)
    return demands(program, config or RayConfig(), program.places.values())


def words(wanted, cpus, free=None, nodes=1):
    have = Size(cpus, 0.0)
    return missing(wanted, have, have if free is None else Size(free, 0.0), nodes, 1.0, OPTIONS)


def test_tenths_add_up():
    """18 actors and a learner of a tenth of a CPU each fit into 1.9 CPUs, though the sum of the floats is a little more."""
    wanted = asked("actor_learner", RayConfig(cpus_per_place=0.1), actors=18)
    assert sum(d.cpus for d in wanted) > 1.9
    assert words(wanted, 1.9) == ""
    said = words(wanted, 1.8)
    assert said.startswith("asked for 1.9 CPUs and 0 GPUs, the cluster has 1.8 CPUs and 0 GPUs on 1 node; use --actors 17, or")
    program, _ = draw(vtrace.Config(unroll=8), "actor_learner", "CartPole-v1", eval=EvalPlan(enabled=False))
    assert replicas_that_fit(program, RayConfig(cpus_per_place=0.1), 1.9) == 18


def test_other_programs_are_named():
    """Other programs are named where they use what is there."""
    said = words(asked("actor_learner", actors=2), 4.0, free=2.0, nodes=2)
    assert "on 2 nodes, but other programs use all but 2 CPUs and 0 GPUs; use --actors 1, or" in said


@pytest.mark.parametrize(("architecture", "options", "way"), [
    ("gossip", {"actors": 4}, "use --actors 2, or"),
    ("actor_learner", {"actors": 4, "learners": 4, "one_place": True}, "use --actors 2 --learners 2, or"),
    ("actor_learner", {"actors": 4, "learners": 2}, "use --ray.cpus-per-place below"),  # learners alone take all of it
])
def test_the_error_names_a_number_that_fits(architecture, options, way):
    assert way in words(asked(architecture, **options), 2.0)


def test_a_place_too_large_for_any_node():
    wanted = [Demand("learner-0", 2.3, 0.0, False), Demand("actor-0", 0.3, 0.0, True)]
    assert words(wanted, 4.0) == ""  # there is enough, but not in one piece
    assert too_large(wanted, [Size(2.0, 0.0), Size(2.3, 0.0)], OPTIONS) == ""
    said = too_large(wanted, [Size(2.0, 0.0)] * 2, OPTIONS)
    assert "learner-0 asks for 2.3 CPUs and 0 GPUs on one node, the largest of 2 nodes has 2 CPUs and 0 GPUs; use fewer" in said
    computes = [Demand("learner-0", 1.0, 1.0, False)]
    assert "use --device cpu" in too_large(computes, [Size(8.0, 0.0), Size(0.5, 1.0)], OPTIONS)


def test_places_are_counted_by_their_size():
    wanted = [Demand("learner-0", 2.3, 0.0, False), Demand("a", 0.3, 0.0, True), Demand("b", 0.3, 0.0, True)]
    assert sizes(wanted) == "1 of 2.3 CPUs and 0 GPUs, 2 of 0.3 CPUs and 0 GPUs"
