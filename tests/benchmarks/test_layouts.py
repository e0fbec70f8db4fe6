"""How the choice of `--actors auto` is judged."""

from evidence.layouts import share_of_best


def test_choice_that_fails():
    """A choice that fails by itself has no share."""
    speeds = {"a": 50.0, "b": 100.0}
    assert share_of_best("a", speeds) == {"best": "b", "share_of_best": 0.5}
    assert share_of_best("c", speeds) == {"best": "b", "share_of_best": 0.0}, "it is not among those that ran"
    assert share_of_best("a", {}) == {"best": None, "share_of_best": 0.0}, "nobody ran"
