"""Computing on a device: placement, transfers, CUDA graphs, batched inference, handing weights over.

Importing this package imports no torch: the command line reads the options in `placement`.
"""
