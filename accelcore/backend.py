"""A backend: what one device can do, and the way from there to a training."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from accelcore.roles.composition import Roles

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer
    from typing_extensions import Unpack

    from accelcore.training.options import TrainerOptions
    from accelcore.training.trainer import Trainer

__all__ = ["Backend"]


@dataclass(frozen=True, repr=False)
class Backend(Roles):
    """One device, ready to use. Made by `accelcore.select()`; its fields are those of `Roles`.

    A copy of it is itself, also in a copy of what holds it. It is pickled as its name and index, and selected by these
    where it is unpickled.
    """

    def trainer(self, model: nn.Module, optimizer: Optimizer, **options: Unpack[TrainerOptions]) -> Trainer:
        """Prepare a model and its optimizer for training here; `TrainerOptions` tells the options."""
        from accelcore.training.trainer import Trainer

        return Trainer(self, model, optimizer, **options)

    def replicate(self, module: nn.Module, **options: Any) -> nn.Module:
        """A module to call in a loop without a trainer: the ranks of a job train it as one.

        It is moved to the device. In a job of one process it is returned itself, else inside torch's
        DistributedDataParallel: every backward pass through that averages the gradients over ranks. For what is not a
        forward pass, such as saving or `module.parameters()`, go on using the module.

        Args:
            module: where ranks differ, rank 0's parameters and buffers are taken.
            options: DistributedDataParallel's, such as `find_unused_parameters=True`; alone they do nothing.

        Raises:
            UnsupportedError: the backend does not declare `"ddp"`, in a job of several ranks.
        """
        from accelcore.training.replicate import replicate

        return replicate(self, module, **options)

    def __copy__(self) -> Backend:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self

    def __reduce__(self) -> tuple[Callable[[str], Backend], tuple[str]]:
        # By name, as a pickle refers to it: what selects backends is made of them.
        return resolve_name("accelcore.selection:select"), (f"{self.name}:{self.index}",)
