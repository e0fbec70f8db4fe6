"""What a learner's process frees stays with it (device/heap.py)."""

import subprocess
import sys

PROGRAM = """
import resource
import torch
from shoal.device.heap import keep_freed_memory

KEEP
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def update():
    return [torch.ones(1 << 20) for _ in range(4)]   # 4 MB each

for _ in range(3):
    update()
seen = []
for _ in range(3):   # memory may come to lie elsewhere once
    before = faults()
    for _ in range(20):
        update()
    seen.append(faults() - before)
print(min(seen))
"""


def test_freed_memory_is_used_again():
    """Without a page fault for each of its pages."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.replace("KEEP", "keep_freed_memory()")], capture_output=True, text=True,
                          check=True)
    assert int(done.stdout) < 100  # 20 times four tensors are 81,920 pages
