"""Recurrent cores between torso and heads: ``forward(x [T, B, F], state, first [T, B]) -> outputs, state, states``.

State is a dict of tensors ``[B, H]`` ({} for none). Where ``first`` is set an episode starts, and the state is put to 0
BEFORE that step is processed. ``states`` is the state after every step, ``[T, B, H]``: what is needed to evaluate the
true final observation of a truncated episode, which is not part of the sequence. Under autocast the recurrence stays in
float32: the errors of one step would enter all later ones.

The LSTM's input projection is one matrix product over all T x B; only the recurrence is a loop. Its gradient is written
out by hand (`_Recurrence`): the local derivatives of all steps are computed at once, and the gradient of the recurrent
weights is one product over all steps instead of T small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LSTMCore", "PassThrough", "State", "in_float32"]

State = dict[str, Tensor]


def in_float32(compute: Callable[..., Tensor], x: Tensor, *more: Any) -> Tensor:
    """compute(x, *more), in float32 under autocast too: bfloat16 has two to three digits."""
    if not (torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")):
        return compute(x, *more)
    with torch.autocast(x.device.type, enabled=False):
        return compute(x.float(), *more)


class PassThrough(nn.Module):
    """The core of a feed-forward net: no state, features unchanged."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.features = inputs

    def initial_state(self, B: int) -> State:
        return {}

    def forward(self, x: Tensor, state: State, first: Tensor | None) -> tuple[Tensor, State, State]:
        return x, state, {}

    def step(self, x: Tensor, state: State, first: Tensor | None) -> tuple[Tensor, State]:
        return x, state


class LSTMCore(nn.Module):
    """One LSTM layer. Gates lie in the order cell, input, forget, output; the forget gate starts open (bias 1)."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.features = size
        self.weight_x = nn.Parameter(torch.empty(4 * size, inputs))
        self.weight_h = nn.Parameter(torch.empty(4 * size, size))
        self.bias = nn.Parameter(torch.zeros(4 * size))
        for gate in range(4):
            rows = slice(gate * size, (gate + 1) * size)
            nn.init.orthogonal_(self.weight_x.data[rows])
            nn.init.orthogonal_(self.weight_h.data[rows])
        self.bias.data[2 * size : 3 * size] = 1.0

    def initial_state(self, B: int) -> State:
        """Zeros."""
        zero = torch.zeros(B, self.features, device=self.bias.device)
        return {"h": zero, "c": zero.clone()}

    def forward(self, x: Tensor, state: State, first: Tensor | None) -> tuple[Tensor, State, State]:
        """Process a sequence; ``first=None`` means that no episode starts in it."""
        gates = F.linear(x, self.weight_x, self.bias).to(self.bias.dtype)  # under autocast too
        keep = None if first is None else (~first).unsqueeze(-1).to(gates.dtype)
        hs, cs = _recur(gates, self.weight_h, state["h"], state["c"], keep)
        return hs, {"h": hs[-1], "c": cs[-1]}, {"h": hs, "c": cs}

    def step(self, x: Tensor, state: State, first: Tensor | None) -> tuple[Tensor, State]:
        """One step ``[B, F]``, for acting."""
        h, c = state["h"], state["c"]
        if first is not None:
            keep = (~first).unsqueeze(-1).to(h.dtype)
            h, c = h * keep, c * keep
        gates = F.linear(x, self.weight_x, self.bias)
        gates = in_float32(torch.addmm, gates, h, self.weight_h.t())
        cell, rest = gates.split([self.features, 3 * self.features], 1)
        enter, forget, out = torch.sigmoid(rest).chunk(3, 1)
        c = torch.addcmul(forget * c, enter, torch.tanh(cell))
        h = out * torch.tanh(c)
        return h, {"h": h, "c": c}


class _Recurrence(torch.autograd.Function):
    """(gates [T, B, 4H], weight [4H, H], h0, c0, keep [T, B, 1] or None) -> hs, cs [T, B, H]."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, h0: Tensor, c0: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        T, B, _ = gates.shape
        H = weight.shape[1]
        acts = torch.empty_like(gates)
        hs, cs = gates.new_empty(T, B, H), gates.new_empty(T, B, H)
        turned = weight.t()
        h, c = h0, c0
        for t in range(T):
            if keep is not None:
                h, c = h * keep[t], c * keep[t]
            act, h_new, c_new = acts[t], hs[t], cs[t]
            torch.addmm(gates[t], h, turned, out=act)
            act[:, :H].tanh_()
            act[:, H:].sigmoid_()
            cell, enter, forget, out = act.chunk(4, 1)
            torch.mul(forget, c, out=c_new).addcmul_(enter, cell)
            torch.tanh(c_new, out=h_new).mul_(out)
            h, c = h_new, c_new
        ctx.save_for_backward(acts, hs, cs, weight, h0, c0, keep)
        ctx.set_materialize_grads(False)
        return hs, cs

    @staticmethod
    def backward(ctx: Any, d_hs: Tensor | None, d_cs: Tensor | None) -> tuple[Tensor | None, ...]:
        acts, hs, cs, weight, h0, c0, keep = ctx.saved_tensors
        T, B, H = hs.shape
        h_prev, c_prev = torch.cat([h0[None], hs[:-1]]), torch.cat([c0[None], cs[:-1]])
        if keep is not None:
            h_prev, c_prev = h_prev.mul_(keep), c_prev.mul_(keep)
        through_c, through_h, onto_c, carry = _local_derivatives(acts, cs, c_prev)
        if keep is not None:
            carry = carry * keep
        d_gates = torch.empty_like(acts)
        d_h, d_c = torch.zeros_like(h0), torch.zeros_like(c0)
        for t in range(T - 1, -1, -1):
            if d_hs is not None:
                d_h = d_h + d_hs[t]
            d_c = torch.addcmul(d_c, d_h, onto_c[t])
            if d_cs is not None:
                d_c = d_c + d_cs[t]
            step = d_gates[t].view(B, 4, H)
            torch.mul(through_c[t], d_c.unsqueeze(1), out=step[:, :3])
            torch.mul(through_h[t], d_h, out=step[:, 3])
            d_c = d_c * carry[t]
            d_h = torch.mm(d_gates[t], weight)
            if keep is not None:
                d_h.mul_(keep[t])
        d_weight = d_gates.flatten(0, 1).t() @ h_prev.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return d_gates, d_weight, d_h, d_c, None


_recur: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]] = _Recurrence.apply


def _local_derivatives(acts: Tensor, cs: Tensor, c_prev: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per step: d gates (cell, input, forget) / d c, d gate (output) / d h, d c / d h, d c / d c_prev."""
    T, B, H = cs.shape
    cell, enter, forget, out = acts.view(T, B, 4, H).unbind(2)
    tanh_c = cs.tanh()
    slope = torch.stack([(1 - cell * cell) * enter, enter * (1 - enter) * cell, forget * (1 - forget) * c_prev], 2)
    return slope, out * (1 - out) * tanh_c, (1 - tanh_c * tanh_c) * out, forget
