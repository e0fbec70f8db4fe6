"""What algorithms of every family are made of.

    phases.py       the flat parameters in phases: a slice, an optimiser and perhaps a target each
    learn.py        PhasedLearn, a learning.Learn that lacks only minibatches and a loss
    model.py        a network over flat parameters, with the statistics through which it sees observations
    policy.py       a policy with a model's weights
    plan.py         environment, network and seats, checked; the layout of published weights
    metrics.py      the metrics that algorithms declare
"""
