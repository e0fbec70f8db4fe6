"""Writes docs/metrics.md from what roles and algorithms declare (`make docs`); a test checks that it is current."""

from __future__ import annotations

from shoal.bench.machine import ROOT
from shoal.telemetry.metrics import PHASES, REGISTRY, Metric
from shoal.telemetry.snapshot import SHOWN_AS

__all__ = ["DERIVED", "metrics_page"]

KIND_TEXT = {
    "counter": "only grows; summed over instances and restarts",
    "gauge": "the newest value, of the first instance that set it; sizes of tables are added up",
    "mean": "a sum and a count",
    "histogram": "counts in fixed buckets; shown as mean, p95 and max",
}

DERIVED = {
    "seconds": "Wall time since the first environment step, all earlier parts of a resumed run included.",
    "startup_seconds": "Wall time from the start of the command's run to the first environment step.",
    "env_steps_per_second": "env_steps over the last seconds; in summary.json over the whole run, from the first step.",
    "env_frames_per_second": "The same for env_frames.",
    "learner_steps_per_second": "The same for learner_steps.",
    "window_seconds": "The time that shares and distributions of a snapshot are taken over: at most the last minute.",
    "train_return": "Mean return of the last 100 or so training episodes, with exploration.",
    "train_length": "Mean length of the same episodes.",
    "learner_idle": "Share of wall time in which the learners did not compute: they waited for data, or for a turn.",
    "samples_per_insert": "samples_consumed over env_steps: how often a decision is used.",
    "bytes_per_env_step": "Bytes that went through streams, broadcasts, calls and groups, counted once where they are handed over, "
                          "per decision; memory that `shared` wires hold is not moved and not counted.",
    "bytes_per_second": "The same, per second.",
    "cores_busy": "--runtime local, and ray on one machine: of the cores that a run may use, those in use in the last minute, by "
                  "all programs, as the kernel counts.",
    "nodes": "--runtime ray: nodes of the cluster that are alive.",
    "object_store_mb": "--runtime ray: what the object stores of all nodes hold, looked at every five seconds.",
    "calls_per_second": "--runtime ray: calls from place to place, each carrying everything queued since the last, over the last "
                        "seconds.",
    "carried_mb_per_second": "--runtime ray: megabytes that came to places from other ones, over the network or through an object "
                             "store; what stays within a place is not in it.",
    "policies": "Several policies: of each one that learns its learner_steps, weights_version, evaluation, train_return and "
                "losses; eval_return and losses at the top are those of the first one.",
    "info": "Means of the numbers of the environments' info that `--log.info` names, of the last minute; TensorBoard: `info/KEY`.",
    "role_metrics": "Gauges and means that roles declare through `program.metrics`; in TensorBoard as `role/NAME`.",
    "roles": "Per role: living instances, busy share, shares of wall time by phase and by wire waited for.",
    "wires": "Per wire: time-weighted occupancy of a stream (1 is full), growth of its counters per second.",
    "slots": "All streams together, since the last start: slots written, consumed, dropped, held, and `conserved`: whether written "
             "was consumed + dropped + held in every stream at every look of the supervisor (ten a second).",
    "verdict": "One sentence: what the run waits for, and the knob to turn.",
    "layout": "With --actors auto: the layout that was chosen, how, and the env steps/s of all that were tried; else null.",
    "cpu_seconds": "Processor time of all processes of the run since the first environment step, those that have ended included.",
    "peak_memory_mb": "Largest sum of the proportional set sizes of all processes of the run.",
}


def metrics_page() -> str:
    """The whole page."""
    lines = ["# Metrics", "", "Generated from what roles and algorithms declare by `make docs`; do not edit.",
             "", "## Measured by the roles", "",
             *(f"- **{kind}**: {text}" for kind, text in KIND_TEXT.items()), "",
             "A snapshot in metrics.jsonl has each of them under its name, but for those that say \"in a snapshot\" below. What a "
             "replay table, demonstrations or a parameter server measure is only in the snapshots of runs that have one.", "",
             "| name | kind | unit | what it is |", "|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.kind} | {m.unit} | {m.text}{_elsewhere(m)} |" for m in REGISTRY]
    lines += ["", "Every role also counts `phase_seconds/<phase>` and, per wire, `wait_seconds/<wire>`. Phases: "
              + ", ".join(f"`{phase}`" for phase in PHASES) + ".",
              "", "## Measured by the algorithms", "",
              "Of the last update, in a snapshot's `losses` and in TensorBoard as `loss/NAME`; a run has only those that its "
              "algorithm declares.", "",
              "| name | kind | unit | what it is | algorithms |", "|---|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.kind} | {m.unit} | {m.text} | {', '.join(names)} |" for m, names in _by_algorithms().items()]
    lines += ["", "## Derived by the supervisor", "", "| name | what it is |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in DERIVED.items()]
    return "\n".join(lines) + "\n"


def _elsewhere(metric: Metric) -> str:
    return f" In a snapshot: {SHOWN_AS[metric.name]}." if metric.name in SHOWN_AS else ""


def _by_algorithms() -> dict[Metric, list[str]]:
    """What the registered algorithms declare, and which of them do."""
    from shoal import algorithms

    found: dict[Metric, list[str]] = {}
    for name in algorithms.ALGORITHMS:
        for metric in algorithms.named(name).metrics:
            found.setdefault(metric, []).append(name)
    return found


if __name__ == "__main__":
    page = ROOT / "docs" / "metrics.md"
    page.write_text(metrics_page(), encoding="utf-8")
