"""shoal's own small environments, compiled with Numba. catalog.py lists them, kernels.py holds their rules."""
