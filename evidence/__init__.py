"""Evidence: every learning, mechanism and stress line of the issues, run for real and written to docs/results/*.json.

    python -m evidence                    all lines (hours); results that exist for this commit are kept
    python -m evidence --only learning    those whose name contains a word
    python -m evidence --list

A line is a statement with the runs that show it. All runs are written down, the bad ones too.
"""
