"""Where roles compute: `--device` and the switches under `--gpu`.

The command line reads this module, so it imports torch only where it is needed. The switches matter on a GPU only: on a CPU
convolutions always run channels-last and Adam is always one fused kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import ConfigError
from shoal.options import Options

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceName", "GpuConfig", "Hardware", "choose_device"]

DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class GpuConfig(Options):
    """What roles do on a GPU; without one these switches change nothing."""

    section = "gpu"

    bf16: bool = True
    """Compute convolutional networks in bfloat16; parameters, losses and the optimiser stay in float32."""
    channels_last: bool = True
    """Store the channels of a pixel side by side in convolutional networks."""
    compile: bool = False
    """Fuse the learner's network and, in the device architecture, the environment's step with torch.compile."""
    graphs: bool = True
    """Replay inference batches and learner updates as CUDA graphs."""
    pinned: bool = True
    """Page-lock the learner's staging buffers and copy them to the GPU on a separate stream."""
    fused: bool = True
    """Run Adam as one kernel instead of one for each of its operations."""
    together: bool = False
    """Run an inference server and its one learner as threads of one process: weights stay on the GPU, inference has priority."""
    actors: bool = False
    """Run the policies of actors on the GPU too (actor_learner, async_gradients); each actor holds a CUDA context."""
    core_each: bool = True
    """Pin every actor to its own core if there are about as many actors as cores."""


@dataclass(frozen=True)
class Hardware:
    """Where a learner, a worker, an inference server or the device architecture computes."""

    name: str = "cpu"
    """cpu or cuda."""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    index: int | None = None
    """Which GPU, if there are several; None is PyTorch's default."""

    def at(self, number: int) -> Hardware:
        """The hardware of learner `number`: learners are dealt out over the GPUs in turn."""
        if not self.on_gpu:
            return self
        import torch

        return replace(self, index=number % torch.cuda.device_count())

    def enter(self) -> None:
        """Make this GPU the current one of the calling thread, if `index` names one."""
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
        """The context in which a network is computed: bfloat16 autocast, or float32."""
        import torch

        if self.on_gpu and self.gpu.bf16 and convolutional:
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()


def choose_device(name: DeviceName, gpu: GpuConfig, *, worth: bool) -> Hardware:
    """What `--device` means on this machine. `auto` takes a GPU if there is one and it is `worth` it."""
    if name == "cpu":
        return Hardware("cpu", gpu)
    import torch

    # device_count asks NVML and does not initialise CUDA: a process with CUDA initialised cannot be forked.
    found = torch.cuda.device_count() > 0
    if name == "cuda" and not found:
        raise ConfigError("--device cuda: PyTorch finds no GPU here; use --device cpu (or auto), or install PyTorch for CUDA")
    return Hardware("cuda" if found and (worth or name == "cuda") else "cpu", gpu)
