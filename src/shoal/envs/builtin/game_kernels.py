"""The compiled games for two agents: one kernel steps all of a batch, the next games included; each game has its own random stream.

A kernel is `x_step(action, s, rng, p, o)` with s the state [S, E], rng the generators [E] (uint64), p the parameters (float64) and
o the outputs, whose rows are seats: row 2 e + k is agent k of game e. Between `pay` (rewards), `ask` (a seat is to act next) and
`finish` (the game is over) lie all rules of shoal.envs.multi_agent, so that a kernel knows only its game. All kernels are in this
one file because Numba's disk cache notices changes only in a kernel's own file, not in the functions it calls; only `draw`, which
never changes, is shared.

References: Kuhn poker (Kuhn 1950) with antes and bets of 1; connect four and tic-tac-toe as games of a line of k on an m x n board.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shoal.envs.builtin.kernel_random import Array, draw, jit

# o.meta
GAMES_ENDED, ROWS_ENDED, ILLEGAL = 0, 1, 2


class GameOut(NamedTuple):
    """What a kernel writes. B = 2 E rows."""

    obs: np.ndarray  # [B, size] float32
    mask: np.ndarray  # [B, A] bool
    reward: np.ndarray  # [B] float32
    discount: np.ndarray  # [B] float32
    first: np.ndarray  # [B] bool
    last: np.ndarray  # [B] bool
    valid: np.ndarray  # [B] bool
    acts: np.ndarray  # [B] bool
    alive: np.ndarray  # [B] bool: has decided something in this game
    owed: np.ndarray  # [B] float64: earned since the last decision
    row_return: np.ndarray  # [B] float64, of the running episode
    row_length: np.ndarray  # [B] int64
    row_returns: np.ndarray  # [B] float32: the first meta[ROWS_ENDED] are those of rows that just ended, in order
    row_lengths: np.ndarray  # [B] int64
    earned: np.ndarray  # [E, 2] float64: all rewards of the running game
    decisions: np.ndarray  # [E] int64
    ended: np.ndarray  # [E] int64: the first meta[GAMES_ENDED] are the games that just ended, ...
    returns: np.ndarray  # [E, 2] float64: ... their returns
    lengths: np.ndarray  # [E] int64: ... and lengths
    meta: np.ndarray  # [3] int64


@jit
def begin(o: GameOut) -> None:
    """Clear what one step says."""
    o.reward[:] = 0.0
    o.discount[:] = 1.0
    o.first[:] = False
    o.last[:] = False
    o.valid[:] = False
    o.acts[:] = False
    o.meta[GAMES_ENDED] = 0
    o.meta[ROWS_ENDED] = 0


@jit
def begin_all(o: GameOut) -> None:
    """Forget all games, before a reset."""
    begin(o)
    o.meta[ILLEGAL] = -1
    o.alive[:] = False
    o.owed[:] = 0.0
    o.row_return[:] = 0.0
    o.row_length[:] = 0
    o.earned[:] = 0.0
    o.decisions[:] = 0


@jit
def pay(o: GameOut, e: int, reward_0: float, reward_1: float) -> None:
    o.owed[2 * e] += reward_0
    o.owed[2 * e + 1] += reward_1
    o.earned[e, 0] += reward_0
    o.earned[e, 1] += reward_1


@jit
def settle(o: GameOut, row: int) -> None:
    """Close the last decision of a seat with all that it earned since."""
    o.valid[row] = True
    o.reward[row] = o.owed[row]
    o.row_return[row] += o.owed[row]
    o.row_length[row] += 1
    o.owed[row] = 0.0


@jit
def ask(o: GameOut, e: int, seat: int) -> None:
    """A seat is to act next. The caller writes its observation and mask."""
    row = 2 * e + seat
    if o.alive[row]:
        settle(o, row)
    else:
        o.alive[row] = True
        o.first[row] = True
        o.owed[row] = 0.0  # earned before any decision
    o.acts[row] = True
    o.decisions[e] += 1


@jit
def finish(o: GameOut, e: int) -> None:
    """The game is over. The caller starts the next."""
    for row in range(2 * e, 2 * e + 2):
        if o.alive[row]:
            settle(o, row)
            o.last[row] = True
            o.discount[row] = 0.0
            o.alive[row] = False
            n = o.meta[ROWS_ENDED]
            o.row_returns[n] = o.row_return[row]
            o.row_lengths[n] = o.row_length[row]
            o.row_return[row] = 0.0
            o.row_length[row] = 0
            o.meta[ROWS_ENDED] = n + 1
        o.owed[row] = 0.0
    n = o.meta[GAMES_ENDED]
    o.ended[n] = e
    o.returns[n] = o.earned[e]
    o.lengths[n] = o.decisions[e]
    o.earned[e] = 0.0
    o.decisions[e] = 0
    o.meta[GAMES_ENDED] = n + 1


@jit
def allowed(o: GameOut, row: int, action: int) -> bool:
    """Whether the action of a seat is legal; the first one that is not is reported."""
    if 0 <= action < o.mask.shape[1] and o.mask[row, action]:
        return True
    if o.meta[ILLEGAL] < 0:
        o.meta[ILLEGAL] = row
    return False


# Matrix games: both act at once. s = round. p = actions, rounds, payoffs of agent 0 [A, A], of agent 1 [A, A]; rows are agent 0's
# actions. A seat sees whether it is the first round, its own last action, and the other's.


@jit
def matrix_ask(o: GameOut, e: int, p: Array, action_0: int, action_1: int) -> None:
    actions = int(p[0])
    for seat in range(2):
        ask(o, e, seat)
        row = 2 * e + seat
        o.obs[row, :] = 0.0
        if action_0 < 0:
            o.obs[row, 0] = 1.0
        else:
            o.obs[row, 1 + (action_0 if seat == 0 else action_1)] = 1.0
            o.obs[row, 1 + actions + (action_1 if seat == 0 else action_0)] = 1.0


@jit
def matrix_reset(s: Array, rng: Array, p: Array, o: GameOut) -> None:
    begin_all(o)
    o.mask[:] = True
    for e in range(s.shape[1]):
        s[0, e] = 0
        matrix_ask(o, e, p, -1, -1)


@jit
def matrix_step(action: Array, s: Array, rng: Array, p: Array, o: GameOut) -> None:
    begin(o)
    actions, rounds = int(p[0]), int(p[1])
    for e in range(s.shape[1]):
        a, b = action[2 * e], action[2 * e + 1]
        if not (allowed(o, 2 * e, a) and allowed(o, 2 * e + 1, b)):
            return
        cell = 2 + a * actions + b
        pay(o, e, p[cell], p[cell + actions * actions])
        s[0, e] += 1
        if s[0, e] == rounds:
            finish(o, e)
            s[0, e] = 0
            a = b = -1
        matrix_ask(o, e, p, a, b)


# Kuhn poker. s = card of agent 0, of agent 1 (0 jack, 1 queen, 2 king), number of moves, first move, second move (0 pass, 1 bet).
# A seat sees its card, and for each of the first two moves whether it was a pass or a bet.


@jit
def kuhn_ask(o: GameOut, e: int, s: Array) -> None:
    seat = s[2, e] % 2
    ask(o, e, seat)
    row = 2 * e + seat
    o.obs[row, :] = 0.0
    o.obs[row, s[seat, e]] = 1.0
    for move in range(s[2, e]):
        o.obs[row, 3 + 2 * move + s[3 + move, e]] = 1.0


@jit
def kuhn_deal(s: Array, rng: Array, e: int) -> None:
    s[0, e] = int(draw(rng, e) * 3)
    s[1, e] = (s[0, e] + 1 + int(draw(rng, e) * 2)) % 3
    s[2, e] = s[3, e] = s[4, e] = 0


@jit
def kuhn_reset(s: Array, rng: Array, p: Array, o: GameOut) -> None:
    begin_all(o)
    o.mask[:] = True
    for e in range(s.shape[1]):
        kuhn_deal(s, rng, e)
        kuhn_ask(o, e, s)


@jit
def kuhn_step(action: Array, s: Array, rng: Array, p: Array, o: GameOut) -> None:
    begin(o)
    for e in range(s.shape[1]):
        moves = s[2, e]
        seat = moves % 2
        move = action[2 * e + seat]
        if not allowed(o, 2 * e + seat, move):
            return
        stake, winner = 0, 0  # how much agent `winner` wins; 0: the game continues
        before = s[2 + moves, e] if moves else -1
        if moves and before == 1:  # after a bet: a fold, or a showdown for 2
            stake = 1 if move == 0 else 2
            winner = 1 - seat if move == 0 else (0 if s[0, e] > s[1, e] else 1)
        elif moves and move == 0:  # two passes
            stake, winner = 1, 0 if s[0, e] > s[1, e] else 1
        if stake:
            won = float(stake if winner == 0 else -stake)
            pay(o, e, won, -won)
            finish(o, e)
            kuhn_deal(s, rng, e)
        else:
            s[3 + moves, e] = move
            s[2, e] = moves + 1
        kuhn_ask(o, e, s)


# Lines on a board: tic-tac-toe and connect four. s = cells (0 empty, 1 + agent), moves made. p = rows, columns, length of a line,
# 1 where pieces fall to the lowest free cell (an action is then a column, otherwise a cell).
# A seat sees its own pieces, then the other's, as the board is when it is to act.


@jit
def board_ask(o: GameOut, e: int, s: Array, p: Array) -> None:
    cells, columns, falls = int(p[0]) * int(p[1]), int(p[1]), p[3] != 0
    seat = s[cells, e] % 2
    ask(o, e, seat)
    row = 2 * e + seat
    for cell in range(cells):
        piece = s[cell, e]
        o.obs[row, cell] = piece == 1 + seat
        o.obs[row, cells + cell] = piece == 2 - seat
        if not falls or cell < columns:
            o.mask[row, cell] = piece == 0


@jit
def board_clear(s: Array, e: int) -> None:
    s[:, e] = 0


@jit
def board_line(s: Array, e: int, p: Array, cell: int) -> bool:
    """Whether the piece in this cell is part of a line."""
    rows, columns, length = int(p[0]), int(p[1]), int(p[2])
    y, x, piece = cell // columns, cell % columns, s[cell, e]
    for dy, dx in ((0, 1), (1, 0), (1, 1), (1, -1)):
        count = 1
        for way in (-1, 1):
            v, u = y + way * dy, x + way * dx
            while 0 <= v < rows and 0 <= u < columns and s[v * columns + u, e] == piece:
                count += 1
                v += way * dy
                u += way * dx
        if count >= length:
            return True
    return False


@jit
def board_reset(s: Array, rng: Array, p: Array, o: GameOut) -> None:
    begin_all(o)
    o.mask[:] = True
    for e in range(s.shape[1]):
        board_clear(s, e)
        board_ask(o, e, s, p)


@jit
def board_step(action: Array, s: Array, rng: Array, p: Array, o: GameOut) -> None:
    begin(o)
    cells, columns, falls = int(p[0]) * int(p[1]), int(p[1]), p[3] != 0
    for e in range(s.shape[1]):
        seat = s[cells, e] % 2
        cell = action[2 * e + seat]
        if not allowed(o, 2 * e + seat, cell):
            return
        if falls:
            while cell + columns < cells and s[cell + columns, e] == 0:
                cell += columns
        s[cell, e] = 1 + seat
        s[cells, e] += 1
        if board_line(s, e, p, cell):
            pay(o, e, 1.0 if seat == 0 else -1.0, -1.0 if seat == 0 else 1.0)
            finish(o, e)
            board_clear(s, e)
        elif s[cells, e] == cells:
            finish(o, e)
            board_clear(s, e)
        board_ask(o, e, s, p)


RESETS: dict[str, Any] = {"matrix": matrix_reset, "kuhn": kuhn_reset, "board": board_reset}
STEPS: dict[str, Any] = {"matrix": matrix_step, "kuhn": kuhn_step, "board": board_step}
