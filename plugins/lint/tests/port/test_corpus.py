"""Each script of the corpus becomes what is committed, at each level, and trains as before."""

import corpus
import port_runs
import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.vendors import vendor_lines

torch = pytest.importorskip("torch")
pytest.importorskip("accelcore")

NEEDS_A_VENDOR = {
    ("apex_amp", Level.TORCH), ("apex_ddp", Level.TORCH), ("npu_fused", Level.TORCH),
    *(("two_devices", level) for level in Level),
}  # fmt: skip
"""What a level cannot free from its vendor; the report says so."""

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
QUICK = ("amp_scaler", "imagenet_style", "npu_fused", "plain_cuda")


def scripts_at(level):
    for name in corpus.NAMES:
        if (name, level) not in NEEDS_A_VENDOR and not name.startswith("ddp_spawn"):
            yield pytest.param(
                name, level, marks=[] if name in QUICK else [pytest.mark.full], id=f"{name}-{level.value}"
            )


def all_at(level):
    for name in corpus.NAMES:
        is_quick = name in QUICK and (level is Level.ROLES or name == "plain_cuda")
        yield pytest.param(name, level, marks=[] if is_quick else [pytest.mark.full], id=f"{name}-{level.value}")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")


@pytest.mark.parametrize(("name", "level"), [each for level in Level for each in all_at(level)])
def test_becomes_what_is_committed(name, level):
    source = corpus.source(name)
    outcome = port_source(source, level)
    assert outcome.source == corpus.expected(name, level)
    assert outcome.before == len(vendor_lines(source))
    assert outcome.after == len(vendor_lines(outcome.source))


@pytest.mark.full
@pytest.mark.parametrize("level", Level, ids=lambda level: level.value)
@pytest.mark.parametrize("name", corpus.NAMES)
def test_a_second_run_changes_nothing(name, level):
    once = corpus.expected(name, level)
    assert port_source(once, level).source == once


@pytest.mark.parametrize(("name", "level"), [each for level in Level for each in scripts_at(level)])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_trains_as_the_same_script_for_the_cpu(name, level, free_port):
    variables = {**LAUNCHED, "MASTER_PORT": str(free_port)} if name == "ddp_torchrun" else {}
    if name == "accelerate_loop":
        pytest.importorskip("accelerate")
    source = corpus.source(name)
    twin = source if name == "shadowed" else port_runs.cpu_twin(source)  # nothing in it is a vendor's
    if level is Level.TORCH:  # at this level autocast does nothing on the CPU, as CUDA's does
        twin = twin.replace('torch.autocast("cpu", torch.float16, )', 'torch.autocast("cpu", enabled=False)')
    expected = port_runs.losses(twin, name, variables=variables)
    ported = port_runs.losses(corpus.expected(name, level), name, variables=variables)
    assert ported == pytest.approx(expected, rel=1e-5)
    assert expected or name == "shadowed"


@pytest.mark.full
def test_four_vendor_lines_in_five_are_gone():
    outcomes = [port_source(corpus.source(name), Level.ROLES) for name in corpus.NAMES if name != "two_devices"]
    before, after = sum(each.before for each in outcomes), sum(each.after for each in outcomes)
    assert before > 100
    assert after <= before / 5
