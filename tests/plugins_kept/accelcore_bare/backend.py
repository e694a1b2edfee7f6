import torch
import torch.distributed as dist

from accelcore import Backend, Capabilities
from accelcore.errors import UnsupportedError
from accelcore.jobs.collectives import Collectives, TorchCollectives
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers
from accelcore.precision.role import Precision, TorchPrecision
from accelcore.roles.compiler import Compiler
from accelcore.roles.runtime import Memory, Runtime, TorchRuntime
from accelcore.scaling.contract import LossScaler
from accelcore.scaling.dynamic import GradScaler, Scalers

CAN = Capabilities(
    autocast_dtypes=("bfloat16",),
    model_dtypes=("float32", "bfloat16"),
    process_groups=("bareccl",),
    parallel=("none", "ddp"),
)


def group(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


if "bareccl" not in dist.Backend.backend_list:
    dist.Backend.register_backend("bareccl", group, devices=["cpu"])


class BarePrecision(Precision):
    def __init__(self):
        self.inner = TorchPrecision("cpu", CAN, "AutocastCPU")

    def autocast(self, dtype=None, *, enabled=True, table="torch"):
        return self.inner.autocast(dtype, enabled=enabled, table=table)

    def fp32(self, mode):
        return self.inner.fp32(mode)

    def table(self, name="torch"):
        return self.inner.table(name)


class BareScaler(LossScaler):
    def __init__(self, where, how):
        self.inner = GradScaler(where, how)

    def scale(self, loss):
        return self.inner.scale(loss)

    def unscale_(self, optimizer, gradients=None, any_rank=None):
        self.inner.unscale_(optimizer, gradients, any_rank)

    def step(self, optimizer, gradients=None, any_rank=None):
        self.inner.step(optimizer, gradients, any_rank)

    def update(self, find_bad=None, *, captured=False):
        self.inner.update(find_bad, captured=captured)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class BareCollectives(Collectives):
    def __init__(self, device):
        super().__init__()
        self.inner = TorchCollectives(device, "bareccl")

    @property
    def rank(self):
        return self.inner.rank

    @property
    def world_size(self):
        return self.inner.world_size

    def init(self, launch, *, timeout=None):
        self.inner.init(launch, timeout=timeout)

    def all_reduce(self, tensor, op="sum"):
        return self.inner.all_reduce(tensor, op)

    def broadcast(self, tensor, src=0):
        return self.inner.broadcast(tensor, src)

    def barrier(self):
        self.inner.barrier()

    def cpu_group(self):
        return self.inner.cpu_group()

    def close(self):
        self.inner.close()


class BareCompiler(Compiler):
    def compile(self, module, options):
        raise UnsupportedError("bare compiles nothing", remedy="leave compile out")


class BareRuntime(Runtime):
    def __init__(self, device):
        self.inner = TorchRuntime(device)
        self.peak = 0

    @property
    def device(self):
        return self.inner.device

    def synchronize(self):
        pass

    def seed(self, n, *, deterministic=False, same=None):
        self.inner.seed(n, deterministic=deterministic, same=same)

    def rng_state(self):
        return self.inner.rng_state()

    def set_rng_state(self, state):
        return self.inner.set_rng_state(state)

    def memory(self):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[1]) * 4096
        self.peak = max(used, self.peak)
        return Memory(used=used, peak=self.peak, total=2**44)


def create(index):
    device, optimizers = torch.device("cpu"), Optimizers()
    register_torch_optimizers(optimizers, fused=())
    return Backend(
        name="bare",
        index=index,
        emulated=False,
        capabilities=CAN,
        precision=BarePrecision(),
        scaler=Scalers(device, BareScaler),
        optimizers=optimizers,
        collectives=BareCollectives(device),
        compiler=BareCompiler(),
        runtime=BareRuntime(device),
    )
