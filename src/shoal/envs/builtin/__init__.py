"""shoal's own small environments, compiled with Numba. catalog.py lists them, env_kernels.py holds their rules."""
