from accelcore import KnownFault, Probe, hookimpl


@hookimpl
def accelcore_probe():
    return Probe("kept", True, "the host", priority=-1, count=1, exclusive=False, api=1, environment=("KEPT",))


@hookimpl
def accelcore_create_backend(name, index):
    if name != "kept":
        return None
    from accelcore_kept.backend import create

    return create(index)


@hookimpl
def accelcore_register_optimizers(backend, registry):
    if backend.name == "kept":
        from accelcore_kept.optimizers import KeptSGD

        registry.register("keptsgd", "kept", KeptSGD, priority=30, supports=lambda request: None, memory="any")


@hookimpl
def accelcore_known_faults():
    return (
        KnownFault(
            kernel="kept_mm",
            package="accelcore-kept",
            versions="<0.1",
            what="nothing",
            instead="nothing",
            reference="0",
            seen="",
        ),
    )
