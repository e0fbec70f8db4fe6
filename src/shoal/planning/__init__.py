"""What a run would do with more actors, learners and machines: a discrete-event model, its calibration, `shoal plan`."""

from shoal.planning.pipeline import simulate
from shoal.planning.terms import Cluster, Cost, Costs, Forecast

__all__ = ["Cluster", "Cost", "Costs", "Forecast", "simulate"]
