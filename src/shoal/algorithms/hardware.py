"""Where tensors live and what is done there: `--device` and the switches under `--gpu`.

Nothing here imports torch before it is needed: the command line reads it. The switches count on a GPU only: on a CPU convolutions
always run channels-last and Adam is always one fused kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceName", "GpuConfig", "Hardware", "choose"]

DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class GpuConfig:
    """What is done on a GPU; a CPU does none of it."""

    bf16: bool = True
    """Compute convolutional networks in bfloat16; parameters, losses and the optimiser stay in float32."""
    channels_last: bool = True
    """Let the channels of a pixel lie side by side in convolutional networks."""
    compile: bool = False
    """Let torch.compile fuse the learner's network and, in the device architecture, the environment's step."""
    graphs: bool = True
    """Capture what is the same every time (an inference batch, a learner's update) as a CUDA graph."""
    pinned: bool = True
    """Lock the learner's staging buffers in memory and copy them to the GPU on a stream of their own."""
    fused: bool = True
    """Let Adam be one kernel, not one for each of its operations."""
    together: bool = False
    """Let an inference server and its one learner share a process, a thread each: weights stay on the GPU, inference goes first."""
    actors: bool = False
    """Let actors that have a policy of their own infer on the GPU too; each holds a context there."""
    core_each: bool = True
    """Keep every actor on a core of its own, where there are about as many actors as cores."""


@dataclass(frozen=True)
class Hardware:
    """Where a learner, an inference server or the device architecture computes."""

    name: str = "cpu"
    """cpu or cuda."""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    index: int | None = None
    """Which GPU, where there is a choice; None: the one that PyTorch takes."""

    def at(self, number: int) -> Hardware:
        """The GPU of the `number`-th of several learners: they take them in turns."""
        if not self.on_gpu:
            return self
        import torch

        return replace(self, index=number % torch.cuda.device_count())

    def enter(self) -> None:
        """Let this thread's kernels go to that GPU, where one was named."""
        if self.index is not None:
            import torch

            torch.cuda.set_device(self.index)

    @property
    def on_gpu(self) -> bool:
        return self.name == "cuda"

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.name) if self.index is None else torch.device(self.name, self.index)

    def precision(self, convolutional: bool) -> AbstractContextManager[Any]:
        """In what the network is computed."""
        import torch

        if self.on_gpu and self.gpu.bf16 and convolutional:
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()


def choose(name: DeviceName, gpu: GpuConfig, *, worth: bool) -> Hardware:
    """What `--device` means on this machine. `auto` takes a GPU where there is one and it is `worth` it."""
    if name == "cpu":
        return Hardware("cpu", gpu)
    import torch

    # Asks the driver's library and leaves the driver itself alone: a process that has touched it cannot be forked.
    found = torch.cuda.device_count() > 0
    if name == "cuda" and not found:
        raise ConfigError("--device cuda: PyTorch finds no GPU here; use --device cpu (or auto), or install PyTorch for CUDA")
    return Hardware("cuda" if found and (worth or name == "cuda") else "cpu", gpu)
