"""Files of one program: questions that stay because a line in another file, or a library, knows CUDA only."""

from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import read_project
from port_sources import imported, written

LEVELS = pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
MPI = "from mpi4py import MPI\n\n\ndef send(comm, p):\n    comm.{}\n"
RUN = "import torch\nfrom tools.helpers import f\n\nd = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
BY_RANK = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = f'{comm.Get_rank() % 8}'\n"


@LEVELS
@pytest.mark.parametrize(
    ("tools", "kept"),
    [
        ("import horovod.torch as hvd\n", True),
        ("from horovod import torch as hvd\n", True),
        ("try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None\n", False),
        ("import horovod.tensorflow as hvd\n", False),
        (BY_RANK.replace("8}'", "8}'; print(os.environ['CUDA_VISIBLE_DEVICES'])"), True),
        (BY_RANK.replace("comm.Get_rank()", "args.gpu"), False),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = os.environ['SLURM_LOCALID']\n", "at level torch"),
        (MPI.format("Allreduce(MPI.IN_PLACE, p.grad)"), True),
        (MPI.format("Allreduce(MPI.IN_PLACE, p.grad.numpy())"), False),
        (MPI.format("bcast(p.grad)"), False),
    ],
)
def test_all_questions_stay_in_a_program_whose_tensors_another_device_cannot_exchange(tmp_path, level, tools, kept):
    kept = kept is True or (bool(kept) and level is Level.TORCH)  # the other level sets the variables of all vendors
    lines = (
        "import torch\n\n\ndef dev():\n    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n\n\n"
        "def build(model, wanted):\n    use = wanted and torch.cuda.is_available()\n"
        "    count = torch.cuda.device_count()\n    if use:\n        model = model.cuda()\n    return model, count\n"
    )
    files = {"train.py": f"import helpers\nfrom jobs import start\n{lines}", "jobs.py": "from tools import start\n"}
    paths = written(
        tmp_path, files | {"tools.py": f"import torch\n{tools}\n\ndef start():\n    pass\n", "helpers.py": ""}
    )
    outcome = port_source(files["train.py"], level, read_project(paths).known(paths[0]))
    assert len(outcome.left) == (3 if kept else 0)
    assert outcome.source.count("torch.cuda.") == outcome.source.count("TODO") == (3 if kept else 0)
    assert "model.cuda()" not in outcome.source
    alone = port_source(tools + lines, level)
    assert (len(alone.left) >= 3) is kept


def test_questions_stay_beside_a_file_that_hides_devices_by_rank_and_is_not_ported(tmp_path):
    source = (
        "import torch\nimport tools\n\nprint(torch.ones(1, device='cuda' if torch.cuda.is_available() else 'cpu'))\n"
    )
    paths = written(tmp_path, {"train.py": source, "tools.py": BY_RANK})
    kept = [port_source(source, Level.ROLES, read_project(given).known(paths[0])) for given in (paths[:1], paths)]
    assert [bool(outcome.left) for outcome in kept] == [True, False]


@pytest.mark.parametrize(("rank", "kept"), [("os.environ['LOCAL_RANK']", False), ("str(args.cuda + local_rank)", True)])
def test_ranks_whose_devices_are_hidden_take_the_current_device(tmp_path, rank, kept):
    files = {
        "train.py": (
            f"import os\nimport torch\nimport tools\n\nos.environ['CUDA_VISIBLE_DEVICES'] = {rank}\n"
            "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nx = torch.ones(1).cuda()\n"
        ),
        "tools.py": "import torch\n\n\ndef made():\n    return torch.ones(1).cuda()\n",
        "spawned.py": (
            "import os\nimport torch\n\n\ndef work(rank):\n    os.environ['CUDA_VISIBLE_DEVICES'] = str(rank)\n"
            "    x = torch.ones(1).cuda()\n\n\nif __name__ == '__main__':\n    torch.multiprocessing.spawn(work)\n"
        ),
    }
    paths = written(tmp_path, files)
    project = read_project(paths)
    ported = {path.name: port_source(path.read_text(), Level.ROLES, project.known(path)) for path in paths}
    assert not any("accelcore.select(" in outcome.source for outcome in ported.values())
    assert (ported["tools.py"].left, ported["spawned.py"].left) == ([], [])
    train = ported["train.py"]
    assert bool(train.left) is kept
    assert ("is_available() else 'cpu'" in train.source) is kept
    for path in paths:
        path.write_text(ported[path.name].source)
    again = port_source(train.source, Level.ROLES, read_project(paths).known(paths[0]))
    assert again.source == train.source


GROUPS = (
    "import torch\nif torch.cuda.is_available():\n    torch.distributed.init_process_group('nccl')\n"
    "elif torch.backends.mps.is_available():\n    rank = 0\n    torch.distributed.init_process_group('gloo')\n"
)


@pytest.mark.parametrize(
    ("launcher", "kept"),
    [(BY_RANK, True), (GROUPS, True), (GROUPS.replace("elif torch.backends.mps.is_available()", "else"), False)],
)
def test_questions_stay_in_a_file_that_the_script_of_such_a_program_imports(tmp_path, launcher, kept):
    files = {
        "train.py": "import torch\n\n\ndef dev():\n    return 'cuda' if torch.cuda.is_available() else 'cpu'\n",
        "launch.py": f"import train\n{launcher}",
    }
    paths = written(tmp_path, files)
    outcome = port_source(files["train.py"], Level.TORCH, read_project(paths[:1]).known(paths[0]))
    assert ("torch.cuda.is_available()" in outcome.source) is kept
    assert [note.line for note in outcome.left] == ([5] if kept else [])


ENGINE = (
    "import torch\n\n\nclass Engine:\n    def __init__(self, use_gpu=True):\n"
    "        self.use_gpu = torch.cuda.is_available() and use_gpu\n"
)
SOFTMAX = (
    "from engine import Engine\n\n\nclass Softmax(Engine):\n    def step(self, x):\n        {}\n        return x\n"
)
ABOVE = "if self.use_gpu:\n            print(x)\n            x = x.cuda()"


@LEVELS
@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (ABOVE, True),
        ("x = x.cuda() if self.use_gpu else x", True),
        (ABOVE.replace("use_gpu", "on_gpu"), False),
        (ABOVE.replace("x.cuda()", "x.half()"), False),
        (f"self.use_gpu = torch.cuda.is_available()\n        {ABOVE}", False),
        (f"{ABOVE.replace('self.use_gpu', 'on_gpu')}\n        self.again(x, on_gpu=self.use_gpu)", True),
        (f"{ABOVE.replace('self.use_gpu', 'on_gpu')}\n        self.again(x, on_gpu=self.on_gpu)", False),
        (f"use_gpu = x.dim() > 1\n        {ABOVE.replace('self.', '')}", False),
        (ABOVE.replace("self.use_gpu", "use_gpu.cuda.is_available()"), False),
        (ABOVE.replace("self.use_gpu", "'use_gpu:' in x.names"), False),
    ],
)
def test_a_flag_stays_that_a_file_of_the_program_asks_and_that_is_not_ported(tmp_path, level, line, kept):
    files = {"engine.py": ENGINE, "softmax.py": SOFTMAX.format(line), "run.py": "import softmax\n"}
    paths = written(tmp_path, files)
    outcome = port_source(ENGINE, level, read_project(paths[:1]).known(paths[0]))
    assert ("self.use_gpu = torch.cuda.is_available()" in outcome.source) is kept
    assert [note.text.split()[0] for note in outcome.left] == (["softmax.py"] if kept else [])
    assert not port_source(ENGINE, level, read_project(paths).known(paths[0])).left
    options = "import argparse\nimport engine\nimport torch\nparser = argparse.ArgumentParser()\n"
    options += "parser.add_argument('--use_gpu', default=torch.cuda.is_available())\nargs = parser.parse_args()\n"
    (tmp_path / "run.py").write_text(f"import softmax\n{options}")
    outcome = port_source(options, level, read_project(paths[2:]).known(paths[2]))
    assert ("default=torch.cuda.is_available()" in outcome.source) is kept


@LEVELS
@pytest.mark.parametrize(("line", "kept"), [("model.cuda()", True), ("model.run(x.cuda())", False)])
def test_an_option_stays_under_which_another_file_moves_objects_of_the_projects_own(tmp_path, level, line, kept):
    train = (
        "import argparse\nimport torch\nfrom infer import encode\nfrom net import Net\n\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--cuda', default=torch.cuda.is_available())\n"
        "args = parser.parse_args()\nmodel = Net()\nencode(model, use_cuda=args.cuda)\n"
    )
    files = {
        "train.py": train,
        "infer.py": f"import torch\n\n\ndef encode(model, x, use_cuda=True):\n    if use_cuda:\n        {line}\n",
        "net.py": "import torch\n\n\nclass Net:\n    def cuda(self):\n        self.net.cuda()\n",
    }
    paths = written(tmp_path, files)
    ported = port_source(train, level, read_project(paths).known(paths[0])).source
    assert ("default=torch.cuda.is_available()" in ported) is kept


@LEVELS
@pytest.mark.parametrize(("test", "kept"), [("not x.is_cuda", True), ("x.dim() > 1", False)])
@pytest.mark.parametrize(("folder", "below"), [("ops", True), ("../ops", False)])
def test_a_question_stays_above_a_function_for_the_cpu_that_gets_the_rest(tmp_path, level, test, kept, folder, below):
    train = "import torch\n\n\ndef dev():\n    return 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    ops = f"import conv_cpu\n\n\ndef conv(x):\n    if {test}:\n        return conv_cpu.forward(x)\n"
    paths = written(tmp_path, {"kit/train.py": train, f"kit/{folder}/conv.py": ops})
    outcome = port_source(train, level, read_project(paths[:1]).known(paths[0]))
    assert ("torch.cuda" in outcome.source) is (kept and below)


@pytest.mark.parametrize(("folder", "kept"), [("src/", True), ("", True), ("other/", False)])
def test_a_package_in_src_is_of_the_program_of_a_script_beside_it(tmp_path, folder, kept):
    helpers = "import horovod.torch\nimport torch\n"
    files = {"scripts/run.py": RUN, f"{folder}tools/helpers.py": helpers}
    paths = written(tmp_path, files)
    ported = port_source(RUN, Level.TORCH, read_project(paths).known(paths[0])).source
    assert ("torch.cuda.is_available()" in ported) is kept


@LEVELS
@pytest.mark.parametrize(
    ("engine", "moved"), [(ENGINE, True), ("from torch import nn\n", True), ("import numpy as np\n", False)]
)
def test_moves_are_ported_in_a_file_whose_torch_only_another_file_imports(tmp_path, level, engine, moved):
    source = SOFTMAX.format(ABOVE)
    paths = written(tmp_path, {"softmax.py": source, "engine.py": engine, "run.py": "import softmax\n"})
    ported = port_source(source, level, read_project(paths[:1]).known(paths[0])).source
    assert port_source(source, level).source == source
    assert (ported == source) is not moved
    if moved:
        with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("meta")):
            made = imported(ported, engine=mock.Mock(Engine=object)).Softmax()
            made.use_gpu = True
            assert made.step(torch.ones(2)).device.type == "meta"


@pytest.mark.parametrize("starts", ["torch.multiprocessing.spawn(work, nprocs=2)", "print(work)"])
def test_a_file_that_another_one_imports_asks_for_no_device_on_import(tmp_path, starts):
    source = (
        f"import torch\n\n\ndef work(x):\n    return x.cuda()\n\n\ndef launch():\n    {starts}\n\n\n"
        "def loss(x):\n    return x.cuda(non_blocking=True)\n"
    )
    paths = written(tmp_path, {"misc.py": source, "train.py": "import misc\nimport torch\nmisc.launch()\n"})
    ported = port_source(source, Level.TORCH, read_project(paths).known(paths[0])).source
    with mock.patch.object(torch.accelerator, "current_accelerator") as asked:
        imported(ported)
    assert "cuda" not in ported
    assert not asked.called


@pytest.mark.parametrize(
    ("made", "forks"),
    [("class Worker(mp.Process):\n", True), ("class Worker(Process):\n", True), ("class Worker(Thread):\n", False)],
)
@pytest.mark.parametrize("apart", [True, False])
def test_a_script_with_a_class_of_processes_asks_for_a_device_in_functions_only(tmp_path, made, forks, apart):
    workers = f"import multiprocessing as mp\n\n\n{made}    def run(self):\n        work()\n\n\n"
    source = "import sys\nimport torch\n{}\n\n\ndef loss(x):\n    return x.cuda()\n\n\nprint(loss(sys.argv), loss(1))\n"
    script = source.format("import workers" if apart else workers)
    paths = written(tmp_path, {"train.py": script, "workers.py": workers})
    ported = port_source(script, Level.TORCH, read_project(paths).known(paths[0])).source
    assert ("\ndevice = torch.accelerator" in ported) is not forks
    assert ("\n    device = torch.accelerator" in ported) is forks


@LEVELS
@pytest.mark.parametrize(
    ("reads", "sets", "kept"),
    [
        ("args.device", "pass", True),
        ("args.kind", "pass", False),
        ("args.device", "args.device = pick()", False),
        ("args.device", "parser.add_argument('--device')", False),
        ("args.device", "parser.add_argument('--device', type=str, default='cpu')", True),
    ],
)
def test_a_model_stays_where_a_configuration_may_have_its_batches(tmp_path, level, reads, sets, kept):
    files = {
        "train.py": "import solver\nimport torch\n\n\ndef run(args, model):\n    if torch.cuda.is_available():\n"
        "        model.cuda()\n    solver.Solver(args).train(model)\n",
        "solver.py": f"class Solver:\n    def __init__(self, args):\n        {sets}\n        self.device = {reads}\n",
    }
    paths = written(tmp_path, files)
    outcome = port_source(files["train.py"], level, read_project(paths).known(paths[0]))
    assert ("if torch.cuda.is_available():" in outcome.source) is kept
    assert [note.line for note in outcome.left] == ([6] if kept else [])


@LEVELS
@pytest.mark.parametrize(
    ("type_", "kept"),
    [
        ("kind = torch.cuda.LongTensor if cuda else torch.LongTensor", True),
        ("if cuda:\n        kind = torch.cuda.LongTensor\n    else:\n        kind = torch.LongTensor", True),
        ("self.kinds = torch.cuda if cuda else torch", True),
        ("kind = torch.LongTensor if cuda else torch.IntTensor", False),
    ],
)
def test_a_flag_stays_by_which_another_file_names_a_type_of_tensor(tmp_path, level, type_, kept):
    files = {
        "train.py": "import torch\nfrom batches import pad\n\n\ndef main(args):\n"
        "    args.cuda = torch.cuda.is_available() and not args.no_cuda\n    return pad(3, args.cuda)\n",
        "batches.py": f"import torch\n\n\ndef pad(size, cuda=True):\n    {type_}\n    return make(kind, size)\n",
    }
    paths = written(tmp_path, files)
    ported = port_source(files["train.py"], level, read_project(paths).known(paths[0])).source
    assert ("torch.cuda.is_available()" in ported) is kept


@pytest.mark.parametrize(("asked", "kept"), [("x.is_cuda", False), ("is_cuda", True)])
def test_a_flag_called_is_cuda_is_not_what_a_tensor_of_another_file_answers(tmp_path, asked, kept):
    files = {
        "train.py": "import torch\nfrom batches import pad\n\n\ndef main(x, args):\n"
        "    is_cuda = torch.cuda.is_available() and not args.no_cuda\n    return pad(x, is_cuda)\n",
        "batches.py": "import torch\n\n\ndef pad(x, is_cuda):\n"
        f"    return (kind := torch.cuda.LongTensor if {asked} else torch.LongTensor)\n",
    }
    paths = written(tmp_path, files)
    ported = port_source(files["train.py"], Level.ROLES, read_project(paths).known(paths[0])).source
    assert ("torch.cuda.is_available()" in ported) is kept


HYDRA = """import hydra
import torch
from solver import Solver


@hydra.main(config_path="conf")
def main(args):
    model = torch.nn.Linear(2, 2)
    {move}
    Solver(args).train(model)


main()
"""
MOVE = "if torch.cuda.is_available():\n        model.cuda()"
OPTION = "import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--device', default='cuda')\n"


@LEVELS
@pytest.mark.parametrize(
    ("move", "reads", "other", "kept"),
    [
        (MOVE, "args.device", f"{OPTION}\nif __name__ == '__main__':\n    print(parser.parse_args())\n", True),
        (MOVE, "args.device", OPTION, False),
        (MOVE, "args.train.device", "", True),
        (MOVE, "args['device']", "", True),
        (MOVE, "args['device']", "args['device'] = 'cuda'\n", False),
        (MOVE, "args.get('device')", "", True),
        (MOVE, "args.kind", "", False),
        ("use = torch.cuda.is_available()\n    if use:\n        model.cuda()", "args.device", "", True),
        ("if torch.cuda.is_available() and not args.slow:\n        model.cuda()", "args.device", "", True),
        ("model = model.cuda() if torch.cuda.is_available() else model", "args.device", "", True),
        ("if torch.cuda.is_available():\n        model.to('cuda')", "args.device", "", True),
    ],
)
def test_options_of_another_program_give_this_one_no_device(tmp_path, level, move, reads, other, kept):
    files = {
        "train.py": HYDRA.format(move=move),
        "solver.py": "from evaluate import *\n\n\nclass Solver:\n    def __init__(self, args):\n"
        f"        self.device = {reads}\n",
        "evaluate.py": f"import torch\n{other}",
    }
    paths = written(tmp_path, files)
    outcome = port_source(files["train.py"], level, read_project(paths).known(paths[0]))
    assert ("torch.cuda.is_available()" in outcome.source) is kept
