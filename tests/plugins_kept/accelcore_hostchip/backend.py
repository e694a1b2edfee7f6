import psutil
import torch

from accelcore import Backend, Capabilities
from accelcore.jobs.collectives import NoCollectives
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers
from accelcore.precision.role import TorchPrecision
from accelcore.roles.compiler import NoCompiler
from accelcore.roles.runtime import Memory, TorchRuntime
from accelcore.scaling.dynamic import Scalers

CAN = Capabilities(autocast_dtypes=("bfloat16",), model_dtypes=("float32", "bfloat16"))


class HostRuntime(TorchRuntime):
    peak = 0

    def memory(self):
        used = psutil.Process().memory_info().rss
        self.peak = max(used, self.peak)
        return Memory(used, self.peak, psutil.virtual_memory().total)


def create(index):
    device, optimizers = torch.device("cpu"), Optimizers()  # torch's name of yours
    register_torch_optimizers(optimizers, fused=())
    return Backend(
        name="hostchip",
        index=index,
        emulated=False,
        capabilities=CAN,
        precision=TorchPrecision(device.type, CAN, "AutocastCPU"),
        scaler=Scalers(device),
        optimizers=optimizers,
        collectives=NoCollectives(),
        compiler=NoCompiler(),
        runtime=HostRuntime(device),
    )
