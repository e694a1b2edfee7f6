"""What a lie is, and how one is told."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass, field

from accelcore_cpu.backend import create

from accelcore import Probe, hookimpl

LIES = {}


@dataclass
class Lie:
    """A broken promise.

    Attributes:
        name: what it is called.
        tell: makes the lying backend out of an honest one.
        test: `Class.test` of the suite that notices.
        says: what it has to say.
        arguments: the parameters with which it does.
        around: makes the context in which the test runs, if the lie is not told by the backend.
        told_by: the installed backend that tells it to several ranks; empty where one process is enough.
    """

    name: str
    tell: object
    test: str
    says: str
    arguments: dict = field(default_factory=dict)
    told_by: str = ""
    around: object = nullcontext

    @hookimpl
    def accelcore_probe(self):
        return Probe(self.name, available=True, reason="it says so", count=1, exclusive=False)

    @hookimpl
    def accelcore_create_backend(self, name, index):
        return dataclasses.replace(self.tell(create()), name=name) if name == self.name else None


def lie(test, *, says, needs=None, **arguments):
    """Add a lie, unless it is about something for which torch lacks the feature `needs`."""

    def note(tell):
        told = Lie(tell.__name__, tell, test, says, arguments)
        if needs is None or needs.present:
            LIES[tell.__name__] = told
        return told

    return note


def replaced(backend, role, **methods):
    """The backend with methods of one role replaced; each is given the honest role first."""
    honest = getattr(backend, role)
    liar = copy.copy(honest)
    for name, method in methods.items():
        setattr(liar, name, lambda *args, _method=method, **kwargs: _method(honest, *args, **kwargs))
    return dataclasses.replace(backend, **{role: liar})


def declaring(backend, **declaration):
    return dataclasses.replace(backend, capabilities=dataclasses.replace(backend.capabilities, **declaration))
