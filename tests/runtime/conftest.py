"""One fork server for all runtime tests: its imports are the dearest part of a small run."""

import pytest

from tests.runtime.harness import Shared


@pytest.fixture(scope="session", autouse=True)
def nursery():
    yield
    Shared.close()
