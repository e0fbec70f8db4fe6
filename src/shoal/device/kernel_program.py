"""A list of recorded kernels as one call: PyTorch's own interpreter runs them.

From Python a kernel of a small network takes a microsecond or more before it computes anything: arguments are parsed, converted
and matched with its declaration. The interpreter of TorchScript graphs does without: of 80 kernels of SAC's critics (64-64, batches
of 128) it needs two thirds of the time, of kernels on nothing but single numbers half. It runs the same kernels on the same memory
in the same order, so it computes the same bits. Nothing is compiled or optimised. A kernel that a graph cannot express is called
from Python, between two graphs; so are all kernels where PyTorch has no such interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

__all__ = ["Kernel", "program_of"]

MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}  # as graphs know them
NUMBERS = (torch.float32, torch.float64, torch.int64)  # of tensors whose kernels round a number as a tensor of one is rounded
INTERPRETED = hasattr(torch._C, "_create_function_from_graph")  # private in PyTorch, and TorchScript is deprecated: it may go


class Kernel(NamedTuple):
    """One kernel with its arguments."""

    function: Any
    """A torch.ops overload."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    into: tuple[torch.Tensor, ...] = ()
    """Where its results are copied to; none where the kernel writes to its arguments."""

    def __call__(self) -> None:
        result = self.function._op(*self.args, **self.kwargs)
        if self.into:
            for held, one in zip(self.into, results_of(result), strict=True):
                held.copy_(one)


def results_of(result: Any) -> list[torch.Tensor]:
    """What a kernel has made; gradients that were not asked for are None."""
    return [one for one in (result if isinstance(result, tuple | list) else (result,)) if one is not None]


def program_of(kernels: Sequence[Kernel]) -> Callable[[], None]:
    """Runs them one after the other."""
    if not INTERPRETED:
        return partial(_one_by_one, [_plain(kernel) for kernel in kernels])
    parts: list[Callable[[], Any]] = []
    graph: _Graph | None = None
    for kernel in kernels:
        graph = graph or _Graph()
        if graph.add(kernel):
            continue
        parts += [graph.program(), _plain(kernel)]
        graph = None
    parts += [] if graph is None else [graph.program()]
    return parts[0] if len(parts) == 1 else partial(_one_by_one, parts)


def _plain(kernel: Kernel) -> Callable[[], Any]:
    return kernel.__call__ if kernel.into else partial(kernel.function._op, *kernel.args, **kernel.kwargs)


def _one_by_one(parts: Sequence[Callable[[], Any]]) -> None:
    for part in parts:
        part()


class _Graph:
    """A TorchScript graph without inputs and results: its tensors are constants, and kernels write into them."""

    def __init__(self) -> None:
        self._graph: Any = torch._C.Graph()
        self._tensors: dict[int, Any] = {}
        self._kept: list[torch.Tensor] = []  # as long as their ids mean them
        self._numbers: dict[tuple[Any, torch.dtype], torch.Tensor] = {}

    def program(self) -> Callable[[], None]:
        """Runs the kernels that were added."""
        self._graph.registerOutput(self._graph.insertConstant(None))
        function = torch._C._create_function_from_graph("kernels", self._graph)
        optimises, optimise = torch._C._get_graph_executor_optimize, torch._C._set_graph_executor_optimize

        def run() -> None:
            before = optimises()
            optimise(False)  # of this thread: the graph runs as it is
            try:
                function()
            finally:
                optimise(before)

        return run

    def add(self, kernel: Kernel) -> bool:
        """Whether the graph can express it; if not it stays as it was."""
        schema = kernel.function._schema
        given = dict(zip((argument.name for argument in schema.arguments), kernel.args, strict=False)) | dict(kernel.kwargs)
        dtypes = {one.dtype for one in kernel.args if isinstance(one, torch.Tensor)}
        if kernel.into and [str(one.type) for one in schema.returns] != ["Tensor"] * len(kernel.into):
            return False  # some of its results were not asked for
        try:
            inputs = [self._value(given.get(one.name, one.default_value), one.type, dtypes) for one in schema.arguments]
        except (KeyError, TypeError):
            return False
        node = self._node(schema.name, inputs, [one.type for one in schema.returns])
        if node.schema() != str(schema):  # it is found by its arguments, and a namesake takes the same
            node.destroy()
            return False
        for held, made in zip(kernel.into, node.outputs(), strict=True) if kernel.into else ():
            self._node("aten::copy_", [self._tensor(held), made, self._graph.insertConstant(False)], [None])
        return True

    def _node(self, name: str, inputs: list[Any], types: Sequence[Any]) -> Any:
        node = self._graph.create(name, inputs, len(types))
        for output, kind in zip(node.outputs(), types, strict=True):
            if kind is not None:
                output.setType(kind)
        self._graph.insertNode(node)
        return node

    def _value(self, value: Any, kind: Any, dtypes: set[torch.dtype]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, int | float) and str(kind) in ("Tensor", "Optional[Tensor]"):
            return self._tensor(self._number(value, dtypes))
        if isinstance(value, list | tuple) and (not value or isinstance(value[0], torch.Tensor)):
            return self._node("prim::ListConstruct", [self._tensor(one) for one in value], [kind]).output()
        if isinstance(value, torch.memory_format):
            value = MEMORY_FORMATS[value]
        return self._graph.insertConstant(list(value) if isinstance(value, tuple) else value)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        known = self._tensors.get(id(tensor))
        if known is None:
            known = self._tensors[id(tensor)] = self._graph.insertConstant(tensor)
            self._kept.append(tensor)
        return known

    def _number(self, value: float, dtypes: set[torch.dtype]) -> torch.Tensor:
        """A number in the place of a tensor, rounded as the kernel rounds it."""
        (dtype,) = dtypes if len(dtypes) == 1 else (None,)
        if dtype not in NUMBERS or (dtype is torch.int64 and not isinstance(value, int)):
            raise TypeError(f"{value} beside tensors of {dtypes}")
        return self._numbers.setdefault((value, dtype), torch.tensor(value, dtype=dtype))
