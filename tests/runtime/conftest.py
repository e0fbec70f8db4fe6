"""One fork server and one Ray cluster for all runtime tests: their start is the dearest part of a small run."""

import logging
import warnings

import pytest

from shoal.runtime.ray.ray_config import set_defaults
from tests.runtime.harness import Shared


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    yield
    Shared.close()


@pytest.fixture
def lent_fork_server():
    """What a run does with a fork server of its own is tested here."""


@pytest.fixture(scope="package")
def ray_cluster():
    """Two nodes with raylets and object stores of their own; programs that run on `ray` in this process join them."""
    set_defaults()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray.cluster_utils import Cluster

        size = {"num_cpus": 8, "object_store_memory": 150_000_000}
        cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        cluster.add_node(**size)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
        ray.shutdown()
        cluster.shutdown()
