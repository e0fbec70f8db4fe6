"""One sentence: what the run is waiting for, and the knob to turn.

The theoretical limit of a distributed RL system is a learner that always finds its next batch ready. So the first
question is whether the learner waits; if it does, what the actors wait for says why; if it does not, whether the actors
wait for it says whether there are too many of them. Where handing weights over takes the time of the learner or of the actors,
the run waits for that. Weights are not blamed if all cores are taken: a learner that wakes others by publishing then loses its core
to them, and what looks like publishing is their work. A replay table or an inference server that works all the time while the
learner waits is named first: more actors would only wait longer for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["verdict"]

IDLE = 0.25  # a learner that waits less than this is kept busy
FULL = 0.9  # of the cores: there is none to spare
BLOCKED = 0.25  # actors that wait more than this for one thing are held up by it
SATURATED = 0.85  # of its time: a role that all others need can do no more
EVALUATING = 0.4  # of a core: worth a word where cores are scarce
WARM_SECONDS = 3.0


def verdict(shot: Mapping[str, Any], seconds: float, runtime: str = "local", cores: int | None = None) -> str:
    """Judge a snapshot `seconds` after the first environment step."""
    idle = shot["learner_idle"]
    if seconds < WARM_SECONDS or not shot["learner_steps"] or idle != idle:
        return "warming up"
    if runtime == "inline":
        shares = {name: _percent(role["busy"] * role["instances"]) for name, role in shot["roles"].items()}
        turns = ", ".join(f"{name} {share}" for name, share in shares.items())
        return f"one thread: {turns}; --runtime local lets them run at once"
    if slow := _slow_relabelling(shot):
        return slow
    if not shot["env_steps"]:
        return f"offline: nobody acts; the learner computed {_percent(1 - idle)} of the time"
    actors = {name: role for name, role in shot["roles"].items() if _acts(role)}
    blocked, weights, calls = (_longest(actors, shot["wires"], kind) for kind in ("stream", "broadcast", "call"))
    replays = shot["replay_inserts"] > 0 or shot.get("relabelled", 0) > 0
    limited = replays and not _infers(shot)  # then actors call a table that holds them back
    if limited:
        blocked, calls = blocked + calls, 0.0
    span = "of the last minute" if shot["window_seconds"] >= 59 else f"of the last {shot['window_seconds']:.0f} s"
    publishing = _publishing(shot["roles"])
    cores = cores or len(os.sched_getaffinity(0))
    full = _used(shot) >= FULL * cores
    if publishing >= max(BLOCKED, idle) and not full:
        return (f"weight-bound: the learner spent {_percent(publishing)} {span} publishing weights, more than learning; larger "
                "batches publish less often, or a smaller network")
    also = f" (publishing took {_percent(publishing)} of the learner's time there: larger batches do it less often)" \
        if publishing >= BLOCKED else ""
    if idle >= IDLE and replays and (table := _saturated(shot, _keeps)):
        instead = f"all {cores} cores are busy: larger --replay.insert-batch, fewer --replay.samples-per-insert, or more cores" \
            if full else "more --replay.shards, larger --replay.insert-batch, or fewer --replay.samples-per-insert"
        return f"replay-bound: the replay table worked {_percent(table)} {span} while the learner idled {_percent(idle)}; {instead}"
    if idle >= IDLE:
        pulling = max((role["phases"].get("pull", 0.0) for role in actors.values()), default=0.0)
        if calls >= BLOCKED and (server := _saturated(shot, _answers)):
            return (f"inference-bound: the inference server worked {_percent(server)} {span}, and actors waited {_percent(calls)} "
                    f"for inference while the learner idled {_percent(idle)}; a faster device, a smaller network, or "
                    "--architecture actor_learner, whose actors infer themselves")
        if calls >= BLOCKED and calls >= weights:
            return (f"inference-bound: actors waited {_percent(calls)} {span} for inference while the learner idled "
                    f"{_percent(idle)}; more environments per actor")
        if weights >= BLOCKED and not _lock_step(shot):
            return (f"weight-bound: actors waited {_percent(weights)} {span} for new weights while the learner idled "
                    f"{_percent(idle)}; let actors continue with older weights, or publish more often")
        if pulling >= BLOCKED:
            return (f"weight-bound: actors spent {_percent(pulling)} {span} pulling weights while the learner idled "
                    f"{_percent(idle)}; longer unrolls pull less often, or a smaller network")
        return f"actor-bound: the learner idled {_percent(idle)} {span}; {_faster_actors(shot, cores, full)}{also}"
    if max(blocked, weights) >= BLOCKED:
        what = "waiting for weights" if blocked < weights else "held back by replay" if limited else "blocked on a full queue"
        passes = "fewer --replay.samples-per-insert" if limited else "fewer passes over each batch"
        return (f"learner-bound: actors were {what} {_percent(max(blocked, weights))} {span}; fewer --actors, "
                f"or a smaller network, or {passes}{also}")
    taken = f"; all {cores} cores are busy: a faster environment, or more cores" if full else ""
    return f"balanced: the learner idled {_percent(idle)} and the actors were held up {_percent(blocked)} {span}{taken}{also}"


def _slow_relabelling(shot: Mapping[str, Any]) -> str:
    """The verdict where the learner waits for items that are recomputed between two tables; empty where it does not."""
    busy = max((role["busy"] for role in shot["roles"].values() if "inference" in role["phases"] and not _acts(role)
                and "evaluate" not in role["phases"]), default=0.0)
    if not shot.get("relabelled", 0) or shot["learner_idle"] < IDLE or busy < shot["learner_idle"] / 2:
        return ""
    return (f"relabel-bound: the learner idled {_percent(shot['learner_idle'])} while items were recomputed ({_percent(busy)} "
            "of an updater's time); more --architecture.updaters, or more --architecture.train-samples-per-insert")


def _acts(role: Mapping[str, Any]) -> bool:
    return "env" in role["phases"] and "evaluate" not in role["phases"]


def _keeps(phases: Mapping[str, float]) -> bool:
    """Whether these are the phases of a replay table."""
    return "gather" in phases and not phases.keys() & {"env", "inference", "learn", "evaluate"}


def _answers(phases: Mapping[str, float]) -> bool:
    """Whether these are the phases of an inference server."""
    return "inference" in phases and not phases.keys() & {"env", "learn", "evaluate"}


def _saturated(shot: Mapping[str, Any], kind: Callable[[Mapping[str, float]], bool]) -> float:
    """The share of time that a role of this kind works, where that is nearly all of it; else 0."""
    busy = max((role["busy"] for role in shot["roles"].values() if kind(role["phases"])), default=0.0)
    return float(busy) if busy >= SATURATED else 0.0


def _infers(shot: Mapping[str, Any]) -> bool:
    """Whether actors ask a server for their actions."""
    return math.isfinite(shot["inference_batch"]["mean"])


def _kind(wire: Mapping[str, Any]) -> str:
    if "occupancy" in wire:
        return "stream"
    return "call" if "asked_per_second" in wire else "broadcast"


def _longest(actors: Mapping[str, Any], wires: Mapping[str, Any], kind: str) -> float:
    """The largest share of time that a kind of actor waited on wires of one kind."""
    return max((sum(share for wire, share in role["waits"].items() if _kind(wires.get(wire, {})) == kind)
                for role in actors.values()), default=0.0)


def _publishing(roles: Mapping[str, Any]) -> float:
    """The share of time that learners spend on handing out weights, if it is more than they compute otherwise; else 0."""
    shares = {name: role["phases"].get("publish", 0.0) for name, role in roles.items()}
    return max((share for name, share in shares.items() if share > roles[name]["busy"] - share), default=0.0)


def _lock_step(shot: Mapping[str, Any]) -> bool:
    """No lag at all: actors and the learner take turns, and waiting for weights is how they do it."""
    return bool(shot["policy_lag"]["max"] == 0)


def _used(shot: Mapping[str, Any]) -> float:
    """Cores in use by all programs, as the kernel counts them; else by what roles say, which also call sleeping in a step busy."""
    counted = float(shot.get("cores_busy", math.nan))
    return counted if math.isfinite(counted) else sum(role["busy"] * role["instances"] for role in shot["roles"].values())


def _faster_actors(shot: Mapping[str, Any], cores: int, full: bool) -> str:
    if full:
        evaluating = sum(role["busy"] for role in shot["roles"].values() if "evaluate" in role["phases"])
        if evaluating >= EVALUATING:
            return (f"all {cores} cores are busy, {_percent(evaluating)} of one with evaluations: "
                    "a larger --eval.every-env-steps, or fewer --eval.episodes")
        return f"all {cores} cores are busy, so more actors will not help: a faster environment, or more cores"
    return "more --actors, or more environments per actor"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
