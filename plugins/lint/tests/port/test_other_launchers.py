"""Ranks of launchers that accelcore does not know: the script's own number chooses the device."""

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import read_project
from port_sources import written

RANKED = """import os
import torch
{first}
local_rank = {rank}
{second}
torch.distributed.init_process_group("nccl")
torch.cuda.set_device(local_rank)
device = torch.device(f"cuda:{{local_rank}}")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).to(local_rank), device_ids=[local_rank])
optimizer = torch.optim.SGD(net.parameters(), 0.1)
"""
MPI = "from mpi4py import MPI"
LAUNCHED = "int(os.environ['LOCAL_RANK'])"


def keeps_number(source):
    found = "torch.accelerator.set_device_index(local_rank)" in source
    assert found is ("accelcore" not in source)
    assert found is ("device_ids=[local_rank]" in source)
    return found


@pytest.mark.parametrize(
    ("first", "rank", "second", "kept"),
    [
        ("", LAUNCHED, "", False),
        ("", "int(os.environ['SLURM_LOCALID'])", "", False),
        ("", "int(os.environ['OMPI_COMM_WORLD_LOCAL_RANK'])", "", False),
        (MPI, "MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()", "", True),
        (MPI, LAUNCHED, "", True),
        ("from launcher import comm", "comm.Get_rank() % 4", "", True),
        ("", "int(os.environ['PMI_LOCAL_RANK'])", "", True),
        ("", "int(os.environ.get('PALS_LOCAL_RANKID', 0))", "", True),
        ("", "int(os.getenv('MPI_LOCALRANKID'))", "", True),
        ("", "int(os.environ['MV2_COMM_WORLD_LOCAL_RANK'])", "", True),
        ("", "int(os.environ['FLUX_TASK_LOCAL_ID'])", "", True),
        ("names = ['PMI_LOCAL_RANK', 'LOCAL_RANK']", "find(names)", "", True),
        ("", LAUNCHED, "os.environ['MASTER_ADDR'] = find()", True),
        ("os.environ['LOCAL_RANK'] = os.environ['OMPI_COMM_WORLD_LOCAL_RANK']", LAUNCHED, "", True),
        ("", LAUNCHED, "os.environ.setdefault('MASTER_ADDR', find())", True),
        ("", LAUNCHED, "os.environ['MASTER_ADDR'] = 'localhost'", False),
        ("os.environ.setdefault('LOCAL_RANK', '0')", LAUNCHED, "", False),
        ("found = os.environ['MASTER_ADDR'] == '10.0.0.1'", LAUNCHED, "", False),
    ],
)
def test_a_rank_of_another_launcher_keeps_its_number(first, rank, second, kept):
    outcome = port_source(RANKED.format(first=first, rank=rank, second=second), Level.ROLES)
    assert keeps_number(outcome.source) is kept
    assert (outcome.after, outcome.left) == (0, [])
    assert port_source(outcome.source, Level.ROLES).source == outcome.source


@pytest.mark.parametrize(("line", "kept"), [("os.getenv('PMI_LOCAL_RANK')", True), ("os.getenv('LOCAL_RANK')", False)])
def test_a_rank_from_another_file_of_the_program_keeps_its_number(tmp_path, line, kept):
    files = {
        "train.py": RANKED.format(first="import ranks", rank="ranks.own()", second=""),
        "ranks.py": f"import os\n\n\ndef own():\n    return int({line})\n",
    }
    paths = written(tmp_path, files)
    outcome = port_source(files["train.py"], Level.ROLES, read_project(paths).known(paths[0]))
    assert keeps_number(outcome.source) is kept


def test_a_process_that_the_script_starts_is_told_its_number():
    source = (
        "import os\nimport torch\nimport torch.multiprocessing as mp\n\n\ndef work(gpu, address):\n"
        "    os.environ['MASTER_ADDR'] = address\n    torch.cuda.set_device(gpu)\n    torch.ones(2).cuda(gpu)\n\n\n"
        "mp.spawn(work, ('a',), nprocs=2)\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert "accelcore.select(local_rank=gpu)" in outcome.source
    assert not outcome.left
