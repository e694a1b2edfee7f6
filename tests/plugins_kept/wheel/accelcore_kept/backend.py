from contextlib import nullcontext
from functools import partial

import torch

from accelcore import Backend, Capabilities
from accelcore.errors import ConfigurationError
from accelcore.jobs.collectives import TorchCollectives
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers
from accelcore.precision.role import TorchPrecision
from accelcore.roles.compiler import Compiled, TorchCompiler
from accelcore.roles.runtime import Memory, TorchRuntime
from accelcore.scaling.dynamic import GradScaler, Scalers

CAN = Capabilities(
    autocast_dtypes=("bfloat16",),
    model_dtypes=("float32", "bfloat16"),
    fast_fp32="fp32",
    native_optimizers=("adam", "adamw"),
    compilers=("inductor",),
    process_groups=("gloo",),
    parallel=("none", "ddp"),
)


class KeptPrecision(TorchPrecision):
    def products(self, *, fast):
        return nullcontext()

    def treatments(self):
        return {}

    def has_units(self, dtype):
        return False


class KeptScaler(GradScaler):
    trusts_kernels = False

    def __init__(self, device, settings, *, collectives):
        super().__init__(device, settings)
        self.collectives = collectives

    def check(self, gradients, multiplier):
        return self.collectives.all_reduce(super().check(gradients, multiplier), "max")


class KeptRuntime(TorchRuntime):
    peak = 0

    def memory(self):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[1]) * 4096
        self.peak = max(used, self.peak)
        return Memory(used=used, peak=self.peak, total=2**44)

    def synchronize(self):
        pass


class KeptCompiler(TorchCompiler):
    def check(self, options):
        if options.get("mode") == "kept":
            raise ConfigurationError("there is no mode 'kept'", remedy="leave it out")
        super().check(options)

    def compile(self, module, options):
        compiled = super().compile(module, options)
        assert isinstance(compiled, Compiled)
        return compiled


def create(index):
    device, optimizers = torch.device("cpu"), Optimizers()
    register_torch_optimizers(optimizers, fused=("adam", "adamw"), prefers_foreach=False)
    collectives = TorchCollectives(device, "gloo", records={"KEPT_RECORDS": "1"})
    return Backend(
        name="kept",
        index=index,
        emulated=False,
        capabilities=CAN,
        precision=KeptPrecision("cpu", CAN, "AutocastCPU", fast_setting="high"),
        scaler=Scalers(device, partial(KeptScaler, collectives=collectives)),
        optimizers=optimizers,
        collectives=collectives,
        compiler=KeptCompiler(lambda: None),
        runtime=KeptRuntime(device),
    )
