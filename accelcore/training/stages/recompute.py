"""Activation checkpointing and offloading of parts of a model."""

from __future__ import annotations

from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.training.activations import ActivationStorage, Recompute
from accelcore.training.modules import check_parts, chosen
from accelcore.training.plan import Plan

__all__ = ["ActivationCheckpointing"]


class ActivationCheckpointing:
    """Recomputes or offloads the activations of chosen modules, until the trainer is gone."""

    def __init__(self) -> None:
        self._installed: list[tuple[ActivationStorage, nn.Module]] = []

    def check(self, plan: Plan) -> None:
        recompute, offload = plan.options["checkpoint"], plan.options["offload"]
        if recompute is not None and not isinstance(recompute, Recompute):
            check_parts(recompute, "checkpoint")
        if offload is not None:
            check_parts(offload, "offload")
            able = plan.backend.capabilities
            if not (able.streams and able.pinned_memory):
                raise UnsupportedError(
                    f"offload= is not available on {plan.backend.name}",
                    why="the backend does not declare streams and pinned memory",
                    remedy="leave offload out; checkpoint= saves memory on every device",
                )
        if recompute is not None and plan.options["graph"]:
            raise ConfigurationError(
                "checkpoint= with graph=True",
                why="recomputation repeats the random numbers of the forward pass, which a graph cannot do",
                remedy="leave one of the two out",
            )
        self._parts(plan)

    def apply(self, plan: Plan) -> None:
        self.remove()
        save = plan.options["checkpoint"].save if isinstance(plan.options["checkpoint"], Recompute) else ()
        recomputed, offloaded = self._parts(plan)
        for module in dict.fromkeys((*recomputed, *offloaded)):
            recompute = module in recomputed
            storage = ActivationStorage(
                plan.backend.device, recompute=recompute, save=save if recompute else (), offload=module in offloaded
            )
            storage.install(module)
            self._installed.append((storage, module))

    def remove(self) -> None:
        """Undo it, so that the modules keep their activations on the device."""
        for storage, module in self._installed:
            storage.remove(module)
        self._installed.clear()

    def __del__(self) -> None:
        self.remove()

    def _parts(self, plan: Plan) -> tuple[dict[nn.Module, None], dict[nn.Module, None]]:
        """Return the modules to recompute and the modules to offload, in order."""
        recompute, offload = plan.options["checkpoint"], plan.options["offload"]
        parts = recompute.parts if isinstance(recompute, Recompute) else recompute
        return (
            {} if parts is None else dict.fromkeys(chosen(plan.model, parts, "checkpoint")),
            {} if offload is None else dict.fromkeys(chosen(plan.model, offload, "offload")),
        )
