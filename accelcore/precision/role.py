"""Contract of the role `precision`, its default by `torch.autocast`, and the precision contexts of a training."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from threading import local
from typing import Any, Protocol, TypeVar

import torch

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.precision.o1.autocast import O1Region, TorchRegion, listed_operators, torch_operators
from accelcore.precision.o1.table import Treatment
from accelcore.precision.policy import Policy
from accelcore.torch_internals import operator_name

__all__ = ["Autocast", "Contexts", "Precision", "TorchPrecision"]

Context = AbstractContextManager[object]

F = TypeVar("F", bound=Callable[..., Any])


class Precision(ABC):
    """Role of a backend for autocast and for the precision of fp32 products."""

    @abstractmethod
    def autocast(
        self, dtype: torch.dtype | None = None, *, enabled: bool = True, table: str = "torch"
    ) -> AbstractContextManager[object]:
        """Return a context in which eligible operators run in `dtype`; None is the device's preferred one.

        Enter it around the forward pass and the loss, not around backward. With `enabled=False` the context switches an
        outer autocast off. `table` names the lists of operators and their dtypes.

        A trainer creates one context and enters it in every step. So return an object with `__enter__` and `__exit__`,
        not the result of a function under `@contextmanager`, which can be entered only once.

        Raises:
            UnsupportedError: the backend does not declare `dtype` or `table`.
        """

    @abstractmethod
    def fp32(self, mode: str) -> AbstractContextManager[None]:
        """Return a context in which fp32 matrix products are exact (`"ieee"`) or fast (`"fast"`).

        `Capabilities.fast_fp32` names the fast format. The setting is that of the process, and is restored on leaving.
        Backward must run inside, too, so enter the context around whole steps. It can be entered once.

        Raises:
            UnsupportedError: unknown mode, or `"fast"` and the backend declares no `fast_fp32`.
        """

    @abstractmethod
    def table(self, name: str = "torch") -> frozenset[str]:
        """Return the operators that autocast intercepts under table `name`, such as `"aten::mm"`."""

    def prepare(self, dtype: torch.dtype) -> None:  # most devices have nothing to do
        """Prepare the device for a model whose parameters are in `dtype`."""

    def has_units(self, dtype: torch.dtype) -> bool:
        """Return whether the device has hardware for products in `dtype`, so that they are faster than in fp32."""
        return True

    def treatments(self) -> Mapping[str, Treatment]:
        """Return table O1's treatment of operators that only this device's autocast knows, for reports and the suite.

        Keys are names without overload, such as `"aten::mm"`.
        """
        return {}


class Declared(Protocol):
    """The fields of `Capabilities` that a precision reads."""

    @property
    def autocast_dtypes(self) -> tuple[str, ...]: ...

    @property
    def autocast_tables(self) -> tuple[str, ...]: ...

    @property
    def fast_fp32(self) -> str | None: ...


class TorchPrecision(Precision):
    """Precision through `torch.autocast` and `torch.set_float32_matmul_precision`.

    Args:
        device_type: torch's name of the device.
        capabilities: the backend's declaration.
        dispatch_key: the dispatcher key of this device's autocast kernels.
        fast_setting: torch's setting of fp32 products for `fp32="fast"`.
    """

    def __init__(self, device_type: str, capabilities: Declared, dispatch_key: str, fast_setting: str = "high") -> None:
        self._device_type, self._capabilities = device_type, capabilities
        self._dispatch_key, self._fast_setting = dispatch_key, fast_setting
        self._dtypes = {getattr(torch, name): name for name in capabilities.autocast_dtypes}

    def autocast(
        self, dtype: torch.dtype | None = None, *, enabled: bool = True, table: str = "torch"
    ) -> AbstractContextManager[object]:
        self._check_table(table)
        if dtype is None and self._dtypes:
            dtype = next(iter(self._dtypes))
        if enabled and dtype not in self._dtypes:
            raise UnsupportedError(
                f"autocast to {dtype} is not available on {self._device_type}",
                available=", ".join(self._capabilities.autocast_dtypes) or "none",
                remedy="choose one of these, or train in fp32" if self._dtypes else "train in fp32",
            )
        if not enabled:
            return torch.autocast(self._device_type, dtype=dtype, enabled=False)
        assert dtype is not None, "it is a declared dtype"
        region = O1Region if table == "O1" else TorchRegion
        return region(self._device_type, dtype, self._dispatch_key)

    def fp32(self, mode: str) -> AbstractContextManager[None]:
        known = ("ieee", "fast") if self._capabilities.fast_fp32 else ("ieee",)
        if mode not in known:
            raise UnsupportedError(
                f"fp32={mode!r} is not available on {self._device_type}",
                available=", ".join(known),
                remedy="remove fp32 to keep the present setting",
            )
        return self.products(fast=mode == "fast")

    def products(self, *, fast: bool) -> AbstractContextManager[None]:
        """Return the context of `fp32` for a valid mode. A device with other switches than torch's overrides this."""
        torch.get_float32_matmul_precision()  # raises now if it could not be restored later
        return self._switched(self._fast_setting if fast else "highest")

    def table(self, name: str = "torch") -> frozenset[str]:
        self._check_table(name)
        if name == "torch":
            return torch_operators(self._dispatch_key)
        return frozenset(
            operator_name(operator) for operator, treatment in listed_operators() if treatment is not Treatment.AS_IS
        )

    @contextmanager
    def _switched(self, setting: str) -> Iterator[None]:
        # The legacy setter on purpose: after a write through the new API, inductor's legacy reads raise.
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(setting)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def _check_table(self, name: str) -> None:
        if name not in self._capabilities.autocast_tables:
            raise UnsupportedError(
                f"there is no autocast table {name!r} on {self._device_type}",
                available=", ".join(self._capabilities.autocast_tables),
            )


class _Repeated:
    """Context that can be entered several times at once, also by several threads: each entry makes a new context."""

    def __init__(self, create: Callable[[], Context]) -> None:
        self._create, self._entered = create, local()
        self._first = [create()]  # raises now what the first entry would raise

    def __enter__(self) -> object:
        try:
            context = self._first.pop()
        except IndexError:  # it was entered, here or in another thread
            context = self._create()
        returned = context.__enter__()
        self._entered.__dict__.setdefault("contexts", []).append(context)
        return returned

    def __exit__(self, *error: object) -> bool | None:
        context: Any = self._entered.contexts.pop()
        swallows: bool | None = context.__exit__(*error)
        return swallows


class Autocast(_Repeated):
    """Context of a backend's autocast. As a decorator, it makes each call of a function run in a context of its own.

    It can be entered several times at once: calls may be recursive, or run in several threads. Generators and
    coroutines are refused, because code that runs between their parts would be cast, too.
    """

    def __call__(self, function: F) -> F:
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_kind(function) for is_kind in kinds):
            raise ConfigurationError(
                f"autocast cannot decorate the generator or coroutine {getattr(function, '__name__', function)!s}",
                why="autocast would also hold outside of it, between its parts",
                remedy="enter `with accel.autocast():` inside of it, around parts without yield or await",
            )

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            with self._create():
                return function(*arguments, **options)

        return call  # type: ignore[return-value]


def fastest_dtype(precision: Precision, names: Iterable[str]) -> torch.dtype | None:
    """Return the first of the declared autocast dtypes that the device has hardware for; None if fp32 is fastest."""
    return next(filter(precision.has_units, (getattr(torch, name) for name in names)), None)


class Contexts:
    """Precision contexts of a training run.

    Attributes:
        make_region: returns a new context for a forward pass and its loss.
        region: such a context that can be entered repeatedly.
        arithmetic: the context of a backward pass and of an update, which can be entered repeatedly.
    """

    # No attribute refers to the trainer: a reference cycle would keep the device's memory until garbage collection.
    def __init__(self, precision: Precision, policy: Policy, fp32: str | None) -> None:
        dtype = getattr(torch, policy.autocast) if policy.autocast else None
        self.make_region: Callable[[], Context] = (
            nullcontext if dtype is None else partial(precision.autocast, dtype, table=policy.table)
        )
        self.region: Context = self.make_region()
        self.arithmetic: Context = nullcontext()
        if fp32 is not None:
            products = partial(precision.fp32, fp32)
            self.arithmetic = _Repeated(products)
            self.make_region = partial(_both, products, self.make_region)
            self.region = _Repeated(self.make_region)


@contextmanager
def _both(make_outer: Callable[[], Context], make_inner: Callable[[], Context]) -> Iterator[None]:
    with make_outer(), make_inner():
        yield
