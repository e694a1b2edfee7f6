"""What holds for every file: comments stay, a second run changes nothing, files without torch stay to the last byte."""

import io
import tokenize

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.model import TODO
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
