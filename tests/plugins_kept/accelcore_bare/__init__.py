"""A backend whose roles have the abstract methods of the contracts and nothing else."""

from accelcore import Probe, hookimpl


@hookimpl
def accelcore_probe():
    return Probe("bare", True, priority=-1, count=1, exclusive=False, api=1)


@hookimpl
def accelcore_create_backend(name, index):
    if name != "bare":
        return None
    from accelcore_bare.backend import create

    return create(index)
