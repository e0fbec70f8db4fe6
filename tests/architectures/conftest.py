"""One fork server for all architecture tests: its imports are the dearest part of a small run."""

import pytest

from tests.architectures.graphs import Farm


@pytest.fixture(scope="session", autouse=True)
def farm():
    yield
    Farm.close()
