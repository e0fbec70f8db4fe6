"""The roles that architectures join by wires, one kind in each file, and the parts that several of them share.

No role knows where it runs: it awaits wires and nothing else. The drawings that put roles together are in `shoal.architectures`.
"""
