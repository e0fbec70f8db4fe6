"""The parts of a league that know no process: who plays whom, how that ended, and where snapshots lie.

payoff.py         how often each player beats each other, with decay
opponents.py      how a player chooses among its past opponents: PFSP weightings, OpenAI Five's qualities
matchmaking.py    main agents and exploiters: matches, snapshots, resets (AlphaStar)
vault.py          snapshots on disk: immutable, content-addressed
"""
