"""What evolution strategies share: a table of noise, perturbed copies of a policy, an update from their returns."""
