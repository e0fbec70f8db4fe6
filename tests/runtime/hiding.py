"""A server of a cluster, for tests: like a place on Ray it is a sub-reaper, and daemons below it hide in three ways."""

import time

from shoal.runtime.cleanup import become_subreaper
from tests.runtime.test_leftovers import empty_environment, forked, overwrite_names

if __name__ == "__main__":
    become_subreaper()
    print(forked(), forked(overwrite_names), empty_environment(), flush=True)
    time.sleep(600)
