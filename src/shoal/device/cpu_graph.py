"""Recorded functions on a CPU: what CUDA graphs are to a GPU. The kernels that a function runs are recorded once and replayed.

    minibatch ──copied──▶ fixed tensors ──▶ the same kernels in the same order, on the memory they had when they were recorded

PyTorch's Python, its autograd and its allocator take longer than the kernels of a small network. A recording keeps only the
kernels: views were made when it was recorded, results go to the memory they went to then, and a backward pass is kernels like any
other. So it computes the same bits. The first calls run as they are, one is recorded, later ones are replayed. Numbers in the
arguments are part of their shape: where one of them changes with every call nothing is ever recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shoal.device.graph_inputs import rebuilt, shape_of
from shoal.device.kernel_program import Kernel, program_of, results_of

__all__ = ["RecordedFunction"]

KINDS = (torch.Tensor,)  # what may change between calls; a number that does is another recording
WARM_UPS = 20           # calls of one shape before it is recorded: for fewer it is not worth it
MAX_SHAPES = 4          # of a function's arguments that are remembered; further ones run as they are
MAX_BYTES = 64 << 20    # of a recording: kernels of larger networks take so long that nothing is gained
FACTORY = ("dtype", "layout", "device", "pin_memory")  # arguments of kernels that an output in place of a result makes needless


class RecordedFunction:
    """Calls `function(given, *constants)`; `given` is a tree of dataclasses, dictionaries, tensors and numbers.

    The next call overwrites the memory of what it returns. A function that reads a number of a tensor is never recorded.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._shapes: dict[Any, RecordedShape] = {}
        self._last: tuple[Any, RecordedShape] | None = None  # the phases of an update have the same arguments

    def __call__(self, given: Any, *constants: Any) -> Any:
        if self._last is not None and self._last[0] is given:
            return self._last[1].run(given, constants)
        tensors: list[torch.Tensor] = []
        key = shape_of(given, tensors, KINDS)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) == MAX_SHAPES:
                self._shapes = {key: shape for key, shape in self._shapes.items() if shape.recordings}
            shape = RecordedShape(self._function)
            if len(self._shapes) < MAX_SHAPES:
                self._shapes[key] = shape
        shape.take(tensors)
        self._last = given, shape
        return shape.run(given, constants)

    def forget(self) -> None:
        """Nothing that was recorded is true any more: tensors that the function uses lie elsewhere."""
        self._shapes, self._last = {}, None


class RecordedShape:
    """The fixed tensors for arguments of one shape, and a recording on them for each set of constants."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.recordings: dict[tuple[Any, ...], Recording | None] = {}  # None: it cannot be recorded
        self._calls = 0
        self._tensors: list[torch.Tensor] = []
        self._held: list[torch.Tensor] = []
        self._given: Any = None  # with the fixed tensors in it

    def take(self, tensors: list[torch.Tensor]) -> None:
        """The tensors of arguments that `run` will be called with."""
        self._tensors = tensors
        if self._held:
            torch._foreach_copy_(self._held, tensors)

    def run(self, given: Any, constants: tuple[Any, ...]) -> Any:
        if self._given is None:
            self._calls += 1
            if self._calls <= WARM_UPS:
                return self._function(given, *constants)
            self._held = [tensor.clone() for tensor in self._tensors]
            self._given = rebuilt(given, iter(self._held), KINDS)
        if constants in self.recordings:
            recording = self.recordings[constants]
            return self._function(self._given, *constants) if recording is None else recording.replay()
        recorder = Recorder()
        with recorder:
            result = self._function(self._given, *constants)
        self.recordings[constants] = Recording(recorder, result) if recorder.faithful else None
        return result


class Recording:
    """Kernels with their arguments, and what the function has returned: it lies in the memory of the last ones."""

    def __init__(self, recorder: Recorder, result: Any) -> None:
        self._run, self._result = program_of(recorder.kernels), result

    def replay(self) -> Any:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():  # nothing asks for a gradient
            self._run()
        return self._result


class Recorder(TorchDispatchMode):
    """Sees every kernel that runs, in forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch says no types here
        self.kernels: list[Kernel] = []
        self.faithful = True  # a replay would compute the same of other numbers
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. To protect it from PyTorch's compiler, PyTorch would import that: it takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.faithful &= not _depends_on_numbers(func, args)
        if self.faithful:
            held_args, held_kwargs = tree_map_only(torch.Tensor, self._held, (args, kwargs or {}))
            self._record(func, held_args, held_kwargs, result)
        return result

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        effect = _effect(func)
        if effect == "view":
            return  # of memory that stays where it is
        if effect == "write":
            self.kernels.append(Kernel(func, args, kwargs))
            return
        if func is torch.ops.aten.relu.default:  # which is this, and has no kernel that writes to given memory without a copy
            func, args = torch.ops.aten.clamp_min.default, (*args, 0)
        results = [self._held(one) for one in results_of(result)]
        self._bytes += sum(one.untyped_storage().nbytes() for one in results)
        self.faithful &= self._bytes <= MAX_BYTES
        into = _writing_to(func, len(results))
        if into is None:
            self.kernels.append(Kernel(func, args, kwargs, tuple(results)))
            return
        kernel, names = into
        takes = {one.name for one in kernel._schema.arguments}  # a sum takes a dtype with its memory, an empty tensor does not
        given = {name: value for name, value in kwargs.items() if name in takes}
        self.kernels.append(Kernel(kernel, args, {**given, **dict(zip(names, results, strict=True))}))

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without its history. The tensor itself is kept as long as its id means it."""
        known = self._seen.get(id(tensor))
        if known is None:
            known = self._seen[id(tensor)] = tensor, tensor.detach()
        return known[1]


def _depends_on_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it reads a number, or the shape of its result depends on numbers, as that of a mask's rows does."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


@cache
def _effect(func: Any) -> str:
    """Whether a kernel writes to its arguments, gives a view of them, or makes new tensors."""
    infos = [one.alias_info for one in (*func._schema.returns, *func._schema.arguments) if one.alias_info is not None]
    if any(info.is_write for info in infos):
        return "write"
    return "view" if any(one.alias_info is not None for one in func._schema.returns) else "new"


@cache
def _writing_to(func: Any, results: int) -> tuple[Any, tuple[str, ...]] | None:
    """The same kernel with memory for its results as further arguments, and their names."""
    wanted = [(one.name, str(one.type)) for one in func._schema.arguments if one.name not in FACTORY]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = tuple(one.name for one in other._schema.arguments if one.is_out)
        rest = [(one.name, str(one.type)) for one in other._schema.arguments if not one.is_out and one.name not in FACTORY]
        if len(outs) == results and rest == wanted:
            return other, outs
    return None
