"""A runtime's numbers without a runtime."""

import numpy as np

from shoal.telemetry.metrics import Stats

WIRES = {"unrolls": {"slots": 4.0, "occupied": 1.0, "written": 0.0, "consumed": 0.0, "dropped": 0.0},
         "weights": {"version": 0.0, "retries": 0.0}}


class Pages:
    """One Stats page per instance, as the runtime has them."""

    def __init__(self, *instances: str) -> None:
        names = Stats.names(["wait_seconds/unrolls", "wait_seconds/weights"])
        self.stats = {name: Stats(names, np.zeros(len(names))) for name in instances}
        for stats in self.stats.values():
            stats.set("alive", 1)

    def __getitem__(self, name: str) -> Stats:
        return self.stats[name]

    def read(self) -> dict[str, dict[str, float]]:
        return {name: stats.read() for name, stats in self.stats.items()}


def second(pages: Pages, *, busy: float, blocked: float = 0.0, weights: float = 0.0, steps: int = 1000,
           lag: float = 1.0) -> None:
    """One second of a run with two actors and a learner that computes for `busy` of it."""
    for name in ("actor-0", "actor-1"):
        pages[name].add("env_steps", steps / 2)
        pages[name].add("busy_seconds", 1 - blocked - weights)
        pages[name].add("phase_seconds/env", 1 - blocked - weights)
        pages[name].waited("unrolls", blocked)
        pages[name].waited("weights", weights)
    pages["learner-0"].add("learner_steps", 10)
    pages["learner-0"].add("samples_consumed", steps)
    pages["learner-0"].add("busy_seconds", busy)
    pages["learner-0"].add("phase_seconds/learn", busy)
    pages["learner-0"].waited("unrolls", 1 - busy)
    pages["learner-0"].observe("policy_lag", lag)
    pages["learner-0"].observe("data_age_seconds", 0.1)
