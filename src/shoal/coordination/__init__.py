"""What steers a program from above its roles: `--actors auto`, calibration of the layout and the controller that moves it on."""

from shoal.coordination.autoscale import AutoscaleConfig, Autoscaler, Rule
from shoal.coordination.calibration import ActorLayout, Trial, calibrate, candidates

__all__ = ["ActorLayout", "AutoscaleConfig", "Autoscaler", "Rule", "Trial", "calibrate", "candidates"]
