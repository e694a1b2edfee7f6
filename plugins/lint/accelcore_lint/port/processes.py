"""Processes that a script starts, as forks or for its DataLoader, and the functions that they run."""

from __future__ import annotations

import re
from functools import cached_property

import libcst as cst

from accelcore_lint.port.rule import Level
from accelcore_lint.port.syntax import argument, is_kept, text_of
from accelcore_lint.port.tree import Tree
from accelcore_lint.port.uses import FORKS
from accelcore_lint.port.walk import find

_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", "torch.multiprocessing.spawn.spawn")
_LAUNCHES = re.compile(r"(?i)launch|spawn|distribut|parallel|call_main")
"""Words in the names of functions that start ranks."""

_SUBMITS = re.compile(r"\b(submitit|simple_slurm|ray|dask|parsl)\b")
"""Packages that run functions of the script on other hosts, or in processes that they start."""

_STARTS = re.compile(r"(.*\.)?(Process|delayed|process_map|imap(_unordered)?|starmap(_async)?|map_async|apply_async)")
_POOL = re.compile(r"\w*Pool(Executor)?\(")
_OF_POOL = re.compile(r".*\.(map|apply|submit)")
"""Functions that take a function for another process; the last ones are a pool's, and others have them, too."""

_OF_LOADER = ("collate_fn", "worker_init_fn")
_IN_LOADER = re.compile(r"\bdef (__getitem__|__iter__)\b")
_USES_DEVICE = re.compile(r"cuda|npu|device|\bmodel|\bnet\b")
_ASKS_OR_USES = re.compile(
    r"is_available\(|device_count\(|current_device\(|\.(cuda|npu|to)\(|set_device|init_process_group"
)
_USERS = (cst.Call, cst.Comparison, cst.BaseStatement)
_SHOWS_RANK = re.compile(r"(\w+\.)*(print|debug|info|warning|(manual_)?seed(_all)?)")
_RANK = re.compile(
    r"None|-?\d+|int\(.*\)|([\w]+\.)*_?(local_?)?(rank|gpu|gpu_?id|device_?id|index|idx|i)", re.IGNORECASE
)


class Processes(Tree):
    """A file with the processes that it starts."""

    @cached_property
    def spawned(self) -> dict[str, str]:
        """Return the functions that the script starts as processes, with the name of their first parameter.

        Without those that it also calls with what may be no rank, such as a list of devices.
        """
        names = {text_of(call.args[0].value) for call in self.calls if self.name(call.func) in _SPAWNS and call.args}
        return {
            name: function.params.params[0].name.value
            for name in names
            if (function := self.functions.get(name)) is not None
            and function.params.params
            and all(_RANK.fullmatch(text_of(value)) for value in self._given_first(name))
        }

    def chooses_by_rank(self, function: cst.FunctionDef) -> bool:
        """Return whether a spawned function may choose its device by its rank, which it does not only show or compare.

        All processes share the current device otherwise.
        """
        rank = self.spawned[function.name.value]
        return any(self._may_choose(name) for name in find(function.body, cst.Name) if name.value == rank)

    def _may_choose(self, rank: cst.CSTNode) -> bool:
        inner = next(outer for outer in self.parents(rank) if isinstance(outer, _USERS))
        shows = isinstance(inner, cst.Call) and _SHOWS_RANK.fullmatch(text_of(inner.func)) is not None
        return not (shows or isinstance(inner, cst.Comparison))

    def _given_first(self, name: str) -> list[cst.BaseExpression]:
        calls = (call for call in self.calls if isinstance(call.func, cst.Name) and call.func.value == name)
        return [call.args[0].value for call in calls if call.args]

    @cached_property
    def spawns(self) -> bool:
        """Return whether the script starts processes that train."""
        return (
            any(
                (self.name(call.func) or "").startswith(
                    ("torch.multiprocessing.spawn", "torch.multiprocessing.start_proc")
                )
                or self._launches(call)
                for call in self.calls
            )
            or self.forks
        )

    @cached_property
    def submits(self) -> bool:
        """Return whether a package may run the script's functions in processes of its own, as ray does."""
        return any(_SUBMITS.search(text_of(node)) for node in self.imports)

    @cached_property
    def forks(self) -> bool:
        """Return whether the script starts processes that may be forks, in which CUDA fails once its parent used it."""
        named = FORKS.search(self.code) is not None or self.submits
        return bool(self.forking) or named or _USES_DEVICE.search(self.reached(self.started)[1]) is not None

    @cached_property
    def forking(self) -> list[cst.Call]:
        """Return the calls of `multiprocessing.Process`, pools of functions that use a device, and others that fork."""
        others, pools = FORKS.search(self.code), _USES_DEVICE.search(self.reached(self.started)[1])
        return [
            call
            for call in self.calls
            if (self.name(call.func) or "").endswith("multiprocessing.Process")
            or (others and FORKS.search(text_of(call)))
            or (pools and _POOL.match(f"{text_of(call.func).split('.')[-1]}("))
        ]

    def names_before_fork(self, around: list[cst.CSTNode], function: cst.FunctionDef | None) -> bool:
        """Return whether a device is only named where the process may fork afterwards.

        A function that only names it may run before. So may what a lambda of the module needs above it.
        """
        if not self.forks or (function is not None and _ASKS_OR_USES.search(text_of(function))):
            return False
        if function is None:
            return self.level is Level.TORCH and any(isinstance(each, cst.Lambda) for each in around)
        return function.name.value not in self.reached(self.started)[0] and is_kept(around)

    @cached_property
    def started(self) -> list[str]:
        """Return the module's functions that it passes to something that runs them in another process."""
        has_pool = _POOL.search(self.code)
        return [
            text_of(arg.value)
            for call in self.calls
            for arg in call.args
            if isinstance(arg.value, cst.Name)
            and arg.value.value in self.functions
            and (
                (arg.keyword is not None and arg.keyword.value in ("target", "initializer"))
                or _STARTS.fullmatch(text_of(call.func))
                or (has_pool and _OF_POOL.fullmatch(text_of(call.func)))
            )
        ]

    @cached_property
    def in_workers(self) -> set[str]:
        """Return the module's functions and classes that a process of the script's own, or of a DataLoader, may use."""
        given = [
            text_of(arg.value)
            for call in self.calls
            for arg in call.args
            if arg.keyword and arg.keyword.value in _OF_LOADER
        ]
        data = [name for name, made in self.defined.items() if _IN_LOADER.search(text_of(made))]
        return self.reached([*self.started, *given, *data])[0]

    def _launches(self, call: cst.Call) -> bool:
        """Return whether a launcher, such as detectron2's `launch`, runs a function of the file in other processes."""
        passes = any(text_of(arg.value) in self.functions for arg in call.args)
        is_launcher = _LAUNCHES.search(text_of(call.func).split(".")[-1]) is not None
        return is_launcher and (passes or argument(call, "num_machines") is not None)
