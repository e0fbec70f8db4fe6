"""The compiled environments: one kernel steps all rows of a batch, resets included; each row has its own random stream.

A kernel is `x_step(action, s, rng, p, o)` with s the state [S, B], rng the generators [B] (uint64), p the parameters
(float64) and o the outputs. For every row it writes observation, reward and `over`; `settle` then updates the
totals of all rows and returns those whose episode ended, and `x_start` draws their next episode. Arrays are taken out of `o`
before a loop: Numba counts a reference at every `o.x`. All kernels are in this one file because Numba's disk
cache notices changes only in a kernel's own file, not in the functions it calls; only `draw`, which never changes, is shared.

References: Catch and DeepSea as in bsuite (Osband et al. 2020); Blind Cliffwalk as in Schaul et al. 2016; T-maze as in
Bakker 2002; cart-pole as in gymnasium's CartPole-v1 (Barto, Sutton and Anderson 1983).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shoal.envs.builtin.kernel_random import Array, draw, jit

# o.meta
ENDED, FINALS, KEEP_TERMINAL, LIMIT = 0, 1, 2, 3


class Out(NamedTuple):
    """What a kernel writes."""

    obs: np.ndarray  # [B, size], flat
    reward: np.ndarray  # [B] float32
    over: np.ndarray  # [B] bool: terminated
    discount: np.ndarray  # [B] float32
    last: np.ndarray  # [B] bool
    truncated: np.ndarray  # [B] bool
    executed: np.ndarray  # [B] int64, written by environments that replace actions
    final: np.ndarray  # [B, size]: the first meta[FINALS] rows are last observations
    final_rows: np.ndarray  # [B] int64
    returns: np.ndarray  # [B] float64, of the running episodes
    lengths: np.ndarray  # [B] int64
    ended_rows: np.ndarray  # [B] int64: the first meta[ENDED] are the rows that just ended, ...
    ended_return: np.ndarray  # [B] float32: ... their returns
    ended_length: np.ndarray  # [B] int64: ... and lengths
    meta: np.ndarray  # [4] int64


@jit
def settle(o: Out) -> Array:
    """Add one transition to every row's totals; return the rows whose episode ended. The caller starts their next one."""
    obs, reward, over, discount, last, truncated = o.obs, o.reward, o.over, o.discount, o.last, o.truncated
    returns, lengths, rows = o.returns, o.lengths, o.ended_rows
    limit = o.meta[LIMIT] if o.meta[LIMIT] > 0 else np.iinfo(np.int64).max
    n = k = 0
    for i in range(reward.shape[0]):
        returns[i] += reward[i]
        lengths[i] += 1
        discount[i] = 0.0 if over[i] else 1.0
        truncated[i] = lengths[i] >= limit and not over[i]
        last[i] = over[i] or truncated[i]
        if last[i]:
            rows[n] = i
            n += 1
    for j in range(n):
        i = rows[j]
        o.ended_return[j] = returns[i]
        o.ended_length[j] = lengths[i]
        returns[i] = 0.0
        lengths[i] = 0
        if truncated[i] or o.meta[KEEP_TERMINAL]:
            o.final[k] = obs[i]
            o.final_rows[k] = i
            k += 1
    o.meta[ENDED] = n
    o.meta[FINALS] = k
    return rows[:n]


# Catch and PixelCatch. s = ball row, ball column, paddle column.
# p = rows, columns, ball column (-1: random), reward scale, value of a lit pixel, pixels per cell, top, left, width


@jit
def catch_light(obs: Array, i: int, row: int, column: int, p: Array, value: float) -> None:
    cell, width = int(p[5]), int(p[8])
    corner = (int(p[6]) + row * cell) * width + int(p[7]) + column * cell
    for y in range(cell):
        for x in range(cell):
            obs[i, corner + y * width + x] = value


@jit
def catch_start(i: int, s: Array, rng: Array, p: Array, obs: Array) -> None:
    bottom = int(p[0]) - 1
    catch_light(obs, i, s[0, i], s[1, i], p, 0.0)
    catch_light(obs, i, bottom, s[2, i], p, 0.0)
    s[0, i] = 0
    s[1, i] = int(p[2]) if p[2] >= 0 else int(draw(rng, i) * p[1])
    s[2, i] = int(p[1]) // 2
    catch_light(obs, i, 0, s[1, i], p, p[4])
    catch_light(obs, i, bottom, s[2, i], p, p[4])


@jit
def catch_reset(s: Array, rng: Array, p: Array, o: Out) -> None:
    obs = o.obs
    for i in range(s.shape[1]):
        catch_start(i, s, rng, p, obs)


@jit
def catch_step(action: Array, s: Array, rng: Array, p: Array, o: Out) -> None:
    obs, reward, over = o.obs, o.reward, o.over
    bottom = int(p[0]) - 1
    for i in range(action.shape[0]):
        catch_light(obs, i, s[0, i], s[1, i], p, 0.0)
        catch_light(obs, i, bottom, s[2, i], p, 0.0)
        s[0, i] += 1
        s[2, i] = min(max(s[2, i] + action[i] - 1, 0), int(p[1]) - 1)
        catch_light(obs, i, s[0, i], s[1, i], p, p[4])
        catch_light(obs, i, bottom, s[2, i], p, p[4])
        over[i] = s[0, i] == bottom
        reward[i] = 0.0
        if over[i]:
            reward[i] = p[3] if s[1, i] == s[2, i] else -p[3]
    for i in settle(o):
        catch_start(i, s, rng, p, obs)


# Environments whose observation is a one-hot state. s = state.


@jit
def onehot_move(i: int, s: Array, obs: Array, state: int) -> None:
    obs[i, s[0, i]] = 0
    s[0, i] = state
    obs[i, state] = 1


@jit
def onehot_reset(s: Array, rng: Array, p: Array, o: Out) -> None:
    obs = o.obs
    for i in range(s.shape[1]):
        onehot_move(i, s, obs, 0)


@jit
def risky_step(action: Array, s: Array, rng: Array, p: Array, o: Out) -> None:
    """p = m. State 0: action 0 ends with +0.5, others enter the chain; there action 0 advances, others end with -1."""
    obs, reward, over = o.obs, o.reward, o.over
    m = int(p[0])
    for i in range(action.shape[0]):
        state = s[0, i]
        reward[i], over[i] = 0.0, True
        if state == 0 and action[i] == 0:
            reward[i] = 0.5
        elif state > 0 and action[i] != 0:
            reward[i] = -1.0
        elif state == m:
            reward[i] = 1.0
        else:
            over[i] = False
            onehot_move(i, s, obs, state + 1)
    for i in settle(o):
        onehot_move(i, s, obs, 0)


@jit
def lure_step(action: Array, s: Array, rng: Array, p: Array, o: Out) -> None:
    """p = length, lure. Action 0 ends with the lure; action 1 advances, from the last state to +1 and the end."""
    obs, reward, over = o.obs, o.reward, o.over
    end = int(p[0]) - 1
    for i in range(action.shape[0]):
        reward[i], over[i] = 0.0, True
        if action[i] == 0:
            reward[i] = p[1]
        elif s[0, i] == end:
            reward[i] = 1.0
        else:
            over[i] = False
            onehot_move(i, s, obs, s[0, i] + 1)
    for i in settle(o):
        onehot_move(i, s, obs, 0)


@jit
def sea_step(action: Array, s: Array, rng: Array, p: Array, o: Out) -> None:
    """p = N, cost of a move right, then for each cell the action that means "right". state = row * N + column."""
    obs, reward, over = o.obs, o.reward, o.over
    n = int(p[0])
    for i in range(action.shape[0]):
        row, column = s[0, i] // n, s[0, i] % n
        right = action[i] == int(p[2 + s[0, i]])
        reward[i] = -p[1] if right else 0.0
        if right and column == n - 1:
            reward[i] += 1.0
        column = min(column + 1, n - 1) if right else max(column - 1, 0)
        over[i] = row == n - 1
        if not over[i]:
            onehot_move(i, s, obs, (row + 1) * n + column)
    for i in settle(o):
        onehot_move(i, s, obs, 0)


# T-maze and Cue-lure. s = t, cue (0 or 1). Observation: cue (-1 or 1 at t = 0, then 0), is_junction, 1.


@jit
def cue_look(i: int, s: Array, p: Array, obs: Array) -> None:
    obs[i, 0] = 2.0 * s[1, i] - 1.0 if s[0, i] == 0 else 0.0
    obs[i, 1] = 1.0 if s[0, i] == int(p[0]) else 0.0
    obs[i, 2] = 1.0


@jit
def cue_start(i: int, s: Array, rng: Array, p: Array, obs: Array) -> None:
    s[0, i] = 0
    s[1, i] = 1 if draw(rng, i) < 0.5 else 0
    cue_look(i, s, p, obs)


@jit
def cue_reset(s: Array, rng: Array, p: Array, o: Out) -> None:
    obs = o.obs
    for i in range(s.shape[1]):
        cue_start(i, s, rng, p, obs)


@jit
def tmaze_step(action: Array, s: Array, rng: Array, p: Array, o: Out) -> None:
    """p = length. In the corridor the action is replaced by 0, and `executed` says so."""
    obs, reward, over, executed = o.obs, o.reward, o.over, o.executed
    for i in range(action.shape[0]):
        over[i] = s[0, i] == int(p[0])
        executed[i] = action[i] if over[i] else 0
        reward[i] = 0.0
        if over[i]:
            reward[i] = 1.0 if action[i] == s[1, i] else -1.0
        else:
            s[0, i] += 1
            cue_look(i, s, p, obs)
    for i in settle(o):
        cue_start(i, s, rng, p, obs)


@jit
def cuelure_step(action: Array, s: Array, rng: Array, p: Array, o: Out) -> None:
    """p = length, lure. In the corridor action 0 ends with the lure; at its end the door named by the cue gives 1."""
    obs, reward, over = o.obs, o.reward, o.over
    for i in range(action.shape[0]):
        reward[i], over[i] = 0.0, True
        if s[0, i] == int(p[0]):
            reward[i] = 1.0 if action[i] == s[1, i] else 0.0
        elif action[i] == 0:
            reward[i] = p[1]
        else:
            over[i] = False
            s[0, i] += 1
            cue_look(i, s, p, obs)
    for i in settle(o):
        cue_start(i, s, rng, p, obs)


# PointGrasp. s = gripper x, y, object x, y, t.


@jit
def grasp_look(i: int, s: Array, obs: Array) -> None:
    for k in range(4):
        obs[i, k] = s[k, i]
    obs[i, 4] = s[4, i] / 10.0


@jit
def grasp_start(i: int, s: Array, rng: Array, p: Array, obs: Array) -> None:
    for k in range(4):
        s[k, i] = 1.6 * draw(rng, i) - 0.8
    s[4, i] = 0.0
    grasp_look(i, s, obs)


@jit
def grasp_reset(s: Array, rng: Array, p: Array, o: Out) -> None:
    obs = o.obs
    for i in range(s.shape[1]):
        grasp_start(i, s, rng, p, obs)


@jit
def grasp_step(action: Array, s: Array, rng: Array, p: Array, o: Out) -> None:
    obs, reward, over = o.obs, o.reward, o.over
    for i in range(action.shape[0]):
        for k in range(2):
            move = 0.25 * min(max(action[i, k], -1.0), 1.0)
            s[k, i] = min(max(s[k, i] + move, -1.0), 1.0)
        s[4, i] += 1.0
        grasp_look(i, s, obs)
        if action[i, 2] > 0:
            near = max(abs(s[0, i] - s[2, i]), abs(s[1, i] - s[3, i])) <= 0.1
            reward[i], over[i] = 1.0 if near else 0.0, True
        else:
            reward[i], over[i] = -0.05, s[4, i] >= 10.0
    for i in settle(o):
        grasp_start(i, s, rng, p, obs)


# Cart-pole. s = x, x', theta, theta'. p = positions only, Sutton and Barto's reward.

FALL = 12 * 2 * math.pi / 360


@jit
def cartpole_look(i: int, s: Array, p: Array, obs: Array) -> None:
    obs[i, 0] = s[0, i]
    if p[0] > 0:
        obs[i, 1] = s[2, i]
    else:
        obs[i, 1], obs[i, 2], obs[i, 3] = s[1, i], s[2, i], s[3, i]


@jit
def cartpole_start(i: int, s: Array, rng: Array, p: Array, obs: Array) -> None:
    for k in range(4):
        s[k, i] = 0.1 * draw(rng, i) - 0.05
    cartpole_look(i, s, p, obs)


@jit
def cartpole_reset(s: Array, rng: Array, p: Array, o: Out) -> None:
    obs = o.obs
    for i in range(s.shape[1]):
        cartpole_start(i, s, rng, p, obs)


@jit
def cartpole_step(action: Array, s: Array, rng: Array, p: Array, o: Out) -> None:
    obs, reward, over = o.obs, o.reward, o.over
    for i in range(action.shape[0]):
        force = 10.0 if action[i] == 1 else -10.0
        angle, spin = s[2, i], s[3, i]
        # A standing pole has |angle| < 0.21, where these series are exact to a bit or two; libm's take 5 times longer.
        q = angle * angle
        sin = angle * (1 - q / 6 * (1 - q / 20 * (1 - q / 42 * (1 - q / 72 * (1 - q / 110 * (1 - q / 156))))))
        cos = 1 - q / 2 * (1 - q / 12 * (1 - q / 30 * (1 - q / 56 * (1 - q / 90 * (1 - q / 132)))))
        push = (force + 0.05 * spin * spin * sin) / 1.1
        bend = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos * cos / 1.1))
        s[0, i] += 0.02 * s[1, i]
        s[1, i] += 0.02 * (push - 0.05 * bend * cos / 1.1)
        s[2, i] += 0.02 * spin
        s[3, i] += 0.02 * bend
        over[i] = abs(s[0, i]) > 2.4 or abs(s[2, i]) > FALL
        reward[i] = 1.0
        if p[1] > 0:
            reward[i] = -1.0 if over[i] else 0.0
    for i in range(action.shape[0]):
        cartpole_look(i, s, p, obs)
    for i in settle(o):
        cartpole_start(i, s, rng, p, obs)


RESETS = {
    "cartpole": cartpole_reset,
    "catch": catch_reset,
    "cue": cue_reset,
    "grasp": grasp_reset,
    "onehot": onehot_reset,
}
STEPS = {
    "cartpole": cartpole_step,
    "catch": catch_step,
    "cuelure": cuelure_step,
    "grasp": grasp_step,
    "lure": lure_step,
    "risky": risky_step,
    "sea": sea_step,
    "tmaze": tmaze_step,
}
