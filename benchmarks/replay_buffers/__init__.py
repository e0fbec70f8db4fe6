"""Replay buffers alone, shoal's beside those of other libraries: cases of a suite with a `workload`.

    cases.py         whose buffers there are, and how each is driven
    workloads.py     the work that all of them are measured at
    drive_shoal.py   shoal's, inline and over sockets
    drive_peers.py   the others', each in a virtual environment of its own under .peers/
"""
