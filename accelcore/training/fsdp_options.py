"""How a model is divided among ranks: the options of `parallel=FSDP(...)`."""

from __future__ import annotations

from dataclasses import dataclass

from accelcore.errors import ConfigurationError
from accelcore.training.modules import Parts, check_parts

__all__ = ["FSDP"]


@dataclass(frozen=True)
class FSDP:
    """Parameters, gradients and optimizer state divided among the ranks, by torch's `fully_shard`.

    A *group* is what is gathered, and freed again, at once: each module that `wrap` chooses, and what is left with the
    model itself. A module that shares a parameter with the rest of the model stays with it. Every rank has to run a
    chosen module, or none: ranks that gather different groups wait for each other.

    Attributes:
        wrap: the modules that are groups of their own: those of a type, or of several, or those for which a function
            returns True. None: the items of each `nn.ModuleList`, such as the blocks of a transformer.
        reshard_after_forward: whether a group is freed after its forward pass and gathered again for its backward
            pass (ZeRO-3), or kept until then (ZeRO-2). The group of the model itself is always kept, for its backward
            pass comes next.
        cpu_offload: whether the shards, and with them gradients and the optimizer's state, are kept in the memory of
            the host, where the optimizer then works, too.

    Raises:
        ConfigurationError: `wrap` chooses no modules; another option is neither True nor False.
    """

    wrap: Parts | None = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if self.wrap is not None:
            check_parts(self.wrap, "wrap")
        for name in ("reshard_after_forward", "cpu_offload"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name}={getattr(self, name)!r} is neither True nor False")
