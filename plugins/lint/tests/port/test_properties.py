"""What holds for every file: comments stay, a second run changes nothing, files without torch stay to the last byte."""

import io
import tokenize

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.rule import TODO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

STATEMENTS = [
    "torch.manual_seed(0)",
    "torch.cuda.manual_seed_all(0)",
    "torch.cuda.synchronize()",
    "torch.cuda.set_device(0)",
    "model = torch.nn.Linear(2, 2).cuda()",
    'x = torch.zeros(2, device="cuda")',
    'x = x.to("cuda:0") if torch.cuda.is_available() else x',
    "device = 'cuda'",
    'y = {"device": "cuda", "cuda": f"cuda:{x}"}',
    "s = torch.cuda.Stream()",
    "opt = torch.optim.AdamW(model.parameters(), 1e-3)",
    "with torch.cuda.amp.autocast():\n    loss = model(x)",
    "if x.is_cuda:\n    torch.cuda.empty_cache()",
    "if device == 'cuda':\n    x = x.cuda()\nelif x.is_cuda:\n    pass",
    "def f(a, d='cuda'):\n    return a.cuda(d)",
    "class A:\n    def cuda(self):\n        return self",
    "for x in range(2):\n    x = torch.ones(1).cuda(); torch.cuda.synchronize()",
    "print(torch.cuda.max_memory_allocated())",
    "import torch_npu",
    "from torch.cuda import amp",
    "torch = torch",
    "torch.backends.cudnn.deterministic = True",
    "torch.backends.cudnn.benchmark = False",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "T = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor\ny = T(2, 3).type(T)",
    "with torch.cuda.stream(s):\n    x = x.cuda()",
    "torch.cuda.current_stream().wait_stream(s)",
    "net = torch.nn.DataParallel(model.cuda())",
    "torch.cuda.set_device(which())",
    "torch.cuda.set_device(rank % torch.cuda.device_count())",
    "x = x.cuda(0)",
    "x = x.cuda(rank)",
    "x = torch.cuda.FloatTensor([1.0]).to('cuda:1')",
    "import torch.multiprocessing as mp\ndef work(rank):\n    torch.cuda.set_device(rank)\nmp.spawn(work)",
]
COMMENTS = st.sampled_from(["", "  # one", "  # cuda, two", "\t# three"])
LINE = st.tuples(st.sampled_from(STATEMENTS), COMMENTS, st.sampled_from(["", "# above\n", "\n\n", "\f\n"]))


def comments(source):
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def written(lines, end, last):
    blocks = []
    for statement, comment, above in lines:
        first, *rest = statement.split("\n")
        blocks.append(above + "\n".join([first + comment, *rest]))
    text = "import torch\n" + "\n".join(blocks) + ("\n" if last else "")
    return text.replace("\n", end)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(LINE, min_size=1, max_size=5), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.sampled_from(Level))
def test_comments_stay_and_a_second_run_changes_nothing(lines, end, last, level):
    source = written(lines, end, last)
    once = port_source(source, level).source
    compile(once, "ported", "exec")
    assert [text for text in comments(once) if not text.startswith(TODO)] == comments(source)
    assert port_source(once, level).source == once
    assert once.count("\n") == once.count(end)


REASONS = {
    "a device of its own": "torch.cuda.set_device(which())",
    "a rank by hand": "torch.cuda.set_device(rank % torch.cuda.device_count())",
    "a rank": 'rank = int(os.environ["LOCAL_RANK"])\ntorch.cuda.set_device(rank)',
    "an option": 'parser.add_argument("--gpu", type=int)\nargs = parser.parse_args()\nx = x.cuda(args.gpu)',
    "hidden devices": 'os.environ["CUDA_VISIBLE_DEVICES"] = "1"',
    "two devices": 'y = x.to("cuda:1")',
    "a backend": 'import accelcore\nbackend = accelcore.select("cpu")',
    "ranks": "def work(rank):\n    torch.cuda.set_device(rank)\n    return x.cuda(rank)\n\n\nmp.spawn(work)",
    "a first number": "x.to(torch.device('cuda:{}'.format(gpus[0]) if torch.cuda.is_available() else 'cpu'))",
    "ranks or a list": "def work(gpu):\n    torch.cuda.set_device(gpu)\n\n\nmp.spawn(work) if n else work(args.gpus)",
}
"""Lines by which a port decides about other lines. It rewrites many of them, so that a second run sees less."""

DECIDED = """
x = x.cuda(0)
net = torch.nn.Linear(2, 2).cuda()
net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[rank])
loader = torch.utils.data.DataLoader([x], pin_memory=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
noise = torch.cuda.FloatTensor([1.0])
scaler = torch.cuda.amp.GradScaler()
memory = torch.cuda.max_memory_allocated(0)


def test{name}(net):
    with torch.cuda.amp.autocast():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return net(torch.ones(2).cuda(0))


"""


@pytest.mark.parametrize(
    ("reason", "level"),
    [
        pytest.param(reason, level, marks=[] if (row + column) % len(Level) == 0 else pytest.mark.full)
        for row, reason in enumerate(REASONS)
        for column, level in enumerate(Level)
    ],
)
def test_a_second_run_changes_nothing_though_the_first_rewrote_its_reason(reason, level):
    head = "import torch\nimport torch.multiprocessing as mp\n"
    source = head + DECIDED.format(name="_before") + REASONS[reason] + "\n" + DECIDED.format(name="_after")
    once = port_source(source, level)
    again = port_source(once.source, level)
    assert once.source != source
    assert again.source == once.source
    assert len(again.left) >= len(once.left) > 0 or not once.left


def test_a_comment_below_a_removed_line_stays():
    source = "import torch\n\ntorch.manual_seed(0)\ntorch.cuda.manual_seed_all(0)\n# of the host\nprint(1)\n"
    assert port_source(source, Level.TORCH).source == source.replace("torch.cuda.manual_seed_all(0)\n", "")


def test_a_line_that_an_earlier_run_left_stays_and_is_reported():
    source = "import torch\nx = torch.ones(2).cuda()\nside = torch.cuda.CUDAGraph(1)\n"
    once = port_source(source, Level.ROLES)
    again = port_source(once.source, Level.ROLES)
    assert [note.text for note in again.left] == [note.text for note in once.left] != []
    kept = once.source.replace("torch.cuda.CUDAGraph(1)", "x.cuda()")
    assert port_source(kept, Level.ROLES).source == kept
    looked_at = "\n".join(line for line in kept.split("\n") if "TODO" not in line)
    assert "side = x.to(accel.device)" in port_source(looked_at, Level.ROLES).source


def test_a_comment_above_the_first_line_is_not_written_twice():
    source = "import torch_npu\nimport torch\nx = torch_npu.npu_rms_norm(torch.ones(2))\n"
    once = port_source(source, Level.ROLES).source
    assert once.startswith("# TODO(accelcore)")
    assert port_source(once, Level.ROLES).source == once


@pytest.mark.parametrize("level", Level, ids=lambda level: level.value)
@pytest.mark.parametrize(
    "source",
    [
        "import os\r\nprint('cuda')\r\n",
        "x = {'cuda': 1}\n\tif_true = 1",
        "def f():\n\treturn 'cuda'\n\f\n# torch without an import",
        "\n\n\n",
        "",
        "import torch\nprint(torch.nn.Linear(2,2) )  # nothing of a vendor's",
    ],
)
def test_a_file_with_nothing_to_port_stays_to_the_last_byte(source, level):
    assert port_source(source, level).source == source


@pytest.mark.parametrize("level", Level, ids=lambda level: level.value)
def test_a_question_that_an_earlier_run_left_keeps_a_type_of_tensor_in_a_later_one(level):
    source = (
        "import torch\n\n\ndef main(x, device):\n    if device == 'cuda':\n        x = x.cuda()\n"
        "    elif x.is_cuda:\n        pass\n"
        "    T = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor\n"
        "    return x, T(2, 3).type(T)\n"
    )
    once = port_source(source, level).source
    assert "T(2, 3).type(T)" in once
    assert port_source(once, level).source == once


@pytest.mark.parametrize("level", Level, ids=lambda level: level.value)
@pytest.mark.parametrize("move", ["x = x.cuda(args.gpu)", "def f(a, d='cuda'):\n    return a.cuda(d)"])
def test_a_move_to_a_number_that_may_be_none_decides_alike_in_a_second_run(move, level):
    source = f"import torch\n{move}\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\ns = torch.cuda.CUDAGraph()\n"
    once = port_source(source, level).source
    assert " is not None else " in once
    assert port_source(once, level).source == once
