"""Detect changes of the model and the optimizer that a trainer was prepared for, or did not make."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.errors import TrainingError, logger

# Compared in every window, for every parameter: without a Python frame for each.
_TRAINABLE, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")


class ModelSnapshot:
    """The model's parameters and the optimizer's groups, as they were when the trainer was prepared.

    `rest` frees what the strategy has gathered, so that the model has the parameters that are trained.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, rest: Callable[[], None]) -> None:
        self._model, self._optimizer, self._rest = model, optimizer, rest
        self._training, self._warned = model.training, False
        self._members = [list(group["params"]) for group in optimizer.param_groups]  # alive, so that ids stay theirs
        self._groups = self._groups_now()
        self._by_name = dict(model.named_parameters())
        self._parameters = list(self._by_name.values())
        self._trainable = list(map(_TRAINABLE, self._parameters))
        self._dtypes, self._strides = list(map(_DTYPE, self._parameters)), list(map(Tensor.stride, self._parameters))

    def check(self, *, warns: bool = False) -> None:
        """Raise TrainingError for a change of the known parameters or the optimizer's groups.

        If it `warns`, log once that the script has put the model into evaluation mode.
        """
        if warns and self._model.training is not self._training:
            self._training = self._model.training
            if not self._training and not self._warned:
                self._warned = True
                logger.warning(
                    "the model is trained in evaluation mode, without dropout, and with frozen BatchNorm statistics: "
                    "model.eval() was called. Call model.train() after an evaluation of your own, or loop over "
                    "trainer.evaluate(loader). If this is on purpose, call model.eval() before accel.trainer(...)"
                )
        if list(map(_DTYPE, self._parameters)) != self._dtypes:
            raise TrainingError(
                "the model was cast after its trainer was made",
                remedy="cast it before, or set precision=Policy(model_dtype=...)",
            )
        # Kernels walk a parameter, its master and its state side by side; `weight.data.t()` keeps the address.
        if list(map(Tensor.stride, self._parameters)) != self._strides:
            raise self._changed()
        if list(map(_TRAINABLE, self._parameters)) != self._trainable or self._groups_now() != self._groups:
            raise self._changed()

    def check_model(self) -> None:
        """Do what `check` does, and walk the whole model for new parameters."""
        self.check_refreshable()
        self.check()
        # A frozen parameter, too, has to be moved to the device, and to be the same on all ranks.
        if any(name not in self._by_name for name, _ in self._model.named_parameters()):
            raise self._changed()

    def check_refreshable(self) -> None:
        """Raise TrainingError for changes that `Trainer.refresh` cannot follow: replaced or unknown parameters."""
        self._rest()
        now = dict(self._model.named_parameters())
        gone = [name for name, parameter in self._by_name.items() if now.get(name) is not parameter]
        known = {id(held) for group in self._optimizer.param_groups for held in group["params"]}
        known |= set(map(id, self._by_name.values()))
        strange = [name for name, parameter in now.items() if id(parameter) not in known and parameter.requires_grad]
        if gone or strange:
            what = f"{gone[0]!r} was removed or replaced" if gone else f"{strange[0]!r} is new, and in no group"
            raise TrainingError(
                f"the model's parameters have changed since its trainer was made: {what}",
                remedy="make optimizer and trainer again. A parameter that was only added can be given to "
                "optimizer.add_param_group, or frozen by requires_grad_(False); then call trainer.refresh()",
            )

    def _groups_now(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _changed(self) -> TrainingError:
        said = []
        known = zip(self._by_name.items(), self._trainable, self._strides, strict=True)
        for (name, parameter), trainable, strides in known:
            if parameter.requires_grad != trainable:
                said.append(f"{name!r} was {'frozen' if trainable else 'unfrozen'}")
            if parameter.stride() != strides:
                said.append(f"{name!r} has another memory layout")
        said += [f"{name!r} is new" for name, _ in self._model.named_parameters() if name not in self._by_name]
        if self._groups_now() != self._groups:
            said.append("the optimizer has other parameters in its groups")
        changes = ", ".join(said[:3]) + (f", and {len(said) - 3} more" if len(said) > 3 else "")
        return TrainingError(
            f"the model or the optimizer has changed since its trainer was made: {changes}",
            remedy="call trainer.refresh() after a change: between two windows, and on all ranks of a job",
        )
