"""What a run measures, and where it goes: counters -> snapshots -> console, metrics.jsonl, TensorBoard."""

from shoal.telemetry.metrics import PHASES, REGISTRY, Metric, Stats

__all__ = ["PHASES", "REGISTRY", "Metric", "Stats"]
