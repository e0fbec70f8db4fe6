"""The parts of population-based training that know no process (Jaderberg et al. 2017, 1711.09846).

priors.py     where a value may lie, how it is drawn, perturbed and kept within its bounds
exploit.py    who copies whom: truncation, Welch's t-test, binary tournament
halving.py    who goes on with a larger budget: asynchronous successive halving
"""
