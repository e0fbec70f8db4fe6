"""`shoal tune`: many runs of one preset as a population whose values are searched while they train.

study.py          the folder of a study: what is varied, its members' records, who descends from whom
searches.py       first values of members, and who trains next: population, random, grid, halving
coordinator.py    trains members slice by slice, and lets them copy and explore between two slices
member_run.py     the run of one member: its command, a copy of another one's state, other values
slices.py         where slices run: processes here (member_server.py) or tasks of a Ray cluster (ray_slices.py)
checks.py         what can be wrong with a study; command.py: `shoal tune`, `tune resume`, `tune show`, `shoal.tune`
report.py         the table and report.html
trainable.py      `shoal.trainable`: runs as trials of Ray Tune
"""
