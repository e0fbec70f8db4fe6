"""`shoal tune`: many runs of one preset as a population whose values are searched while they train.

study.py          the folder of a study: what is varied, its members' records, who descends from whom
coordinator.py    trains members slice by slice, and lets them copy and explore between two slices
command.py        `shoal tune`, `shoal tune resume`, `shoal tune show`; `shoal.tune`
"""
