"""Pure functions on tensors: no config, device, logging or class. Sequences are time-major ``[T, B, ...]``.

Names carry time subscripts (rlax): ``v_tm1[t]`` is the value of the observation that ``a_t`` was chosen in, ``r_t[t]``
and ``discount_t[t]`` follow that action, ``v_t[t]`` is the value of the observation it led to. A termination is a
discount of 0. A truncation is ``keep_t`` = 0 (1 keeps the trace, 0 cuts it) with ``v_t`` already holding the value of
the true final observation, never that of the observation after the reset.

Each module stands alone: ``from shoal.ops import returns, losses, distributions``.
"""
