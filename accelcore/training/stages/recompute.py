"""Recompute: parts of the model keep less for their backward pass, or keep it in the memory of the host."""

from __future__ import annotations

from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.training.activations import Keeping, Recompute
from accelcore.training.modules import check_parts, chosen
from accelcore.training.plan import Plan

__all__ = ["Recomputing"]


class Recomputing:
    """Chooses how the parts of a model keep what their backward pass needs; takes it back when the trainer is gone."""

    def __init__(self) -> None:
        self._installed: list[tuple[Keeping, nn.Module]] = []

    def check(self, plan: Plan) -> None:
        recompute, offload = plan.options["checkpoint"], plan.options["offload"]
        if recompute is not None and not isinstance(recompute, Recompute):
            check_parts(recompute, "checkpoint")
        if offload is not None:
            check_parts(offload, "offload")
            able = plan.backend.capabilities
            if not (able.streams and able.pinned_memory):
                raise UnsupportedError(
                    "offload: nothing can wait beside this device",
                    why=f"{plan.backend.name} does not declare streams and pinned memory",
                    remedy="leave offload out; checkpoint= saves memory on every device",
                )
        if recompute is not None and plan.options["graph"]:
            raise ConfigurationError(
                "checkpoint= with graph=True",
                why="what is computed anew needs the random numbers of before, and a graph cannot go back to them",
                remedy="leave one of both out",
            )
        self._parts(plan)

    def apply(self, plan: Plan) -> None:
        self.remove()
        save = plan.options["checkpoint"].save if isinstance(plan.options["checkpoint"], Recompute) else ()
        again, away = self._parts(plan)
        for module in dict.fromkeys((*again, *away)):
            recompute = module in again
            keeping = Keeping(
                plan.backend.device, recompute=recompute, save=save if recompute else (), offload=module in away
            )
            keeping.install(module)
            self._installed.append((keeping, module))

    def remove(self) -> None:
        """Let the modules keep what torch keeps."""
        for keeping, module in self._installed:
            keeping.remove(module)
        self._installed.clear()

    def __del__(self) -> None:
        self.remove()

    def _parts(self, plan: Plan) -> tuple[dict[nn.Module, None], dict[nn.Module, None]]:
        """The modules that are computed anew, and those that offload what they keep, in order."""
        recompute, offload = plan.options["checkpoint"], plan.options["offload"]
        parts = recompute.parts if isinstance(recompute, Recompute) else recompute
        return (
            {} if parts is None else dict.fromkeys(chosen(plan.model, parts, "checkpoint")),
            {} if offload is None else dict.fromkeys(chosen(plan.model, offload, "offload")),
        )
