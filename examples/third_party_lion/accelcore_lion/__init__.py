"""The optimizer Lion for every backend. This module must be light."""

from accelcore import hookimpl


@hookimpl
def accelcore_register_optimizers(backend, registry):
    from accelcore_lion.lion import Lion  # only now is torch needed

    registry.register("lion", "foreach", Lion, priority=10, memory="any")
