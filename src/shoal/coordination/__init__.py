"""What steers a program from above its roles: calibration of the layout (`--actors auto`)."""

from shoal.coordination.calibration import Layout, Trial, calibrate, candidates

__all__ = ["Layout", "Trial", "calibrate", "candidates"]
