"""Ascend910A saturates and raises a flag; Ascend910B writes inf and nan. torch_npu's own scaler on both."""

import math

import pytest

jobs = pytest.importorskip("kernel_jobs", reason="torch_npu is not installed", exc_type=ImportError)

OLD, NEW = {"ACCEL_EMULATED_SOC": "Ascend910A"}, {"ACCEL_EMULATED_SOC": "Ascend910B2"}


def test_float16_saturates_and_raises_the_flag(results):
    [seen] = results(jobs.saturation, **OLD)
    assert seen == {
        "inf and nan": False,
        "product": [65504.0, -65504.0, 600.0],
        "flag": True,
        "read twice": True,
        "checked": True,
        "cleared": False,
        "sum in place": [65504.0],
        "cast": [65504.0, -65504.0],
        "matmul": 65504.0,
        "nan": [0.0],
        "nan raises": True,
    }


def test_a_mask_is_no_overflow(results):
    [(scores, probabilities, flag)] = results(jobs.saturated_masks, **OLD)
    assert scores == [1.0, 2.0, -65504.0]
    assert probabilities[2] == 0
    assert math.isclose(sum(probabilities), 1, rel_tol=1e-3)
    assert not flag


@pytest.mark.parametrize("soc", [OLD, NEW], ids=["saturating", "inf and nan"])
@pytest.mark.parametrize("kind", ["npu", "torch"])
def test_an_overflow_skips_one_step_and_halves_the_scale(results, kind, soc):
    [history] = results(jobs.scaled_steps, kind, 4, 2.0**10, 1, **soc)
    assert [scale for scale, _, _ in history] == [1024.0, 512.0, 512.0, 512.0]
    assert [moved for _, moved, _ in history] == [True, False, True, True]
    assert all(finite for _, _, finite in history)


@pytest.mark.parametrize("soc", [OLD, NEW], ids=["saturating", "inf and nan"])
@pytest.mark.parametrize("kind", ["npu", "torch"])
def test_the_kth_check_sees_an_injected_overflow(results, kind, soc):
    [history] = results(jobs.scaled_steps, kind, 4, ACCEL_EMULATED_FAULTS="overflow@3", **soc)
    assert [scale for scale, _, _ in history] == [1024.0, 1024.0, 512.0, 512.0]
    assert [moved for _, moved, _ in history] == [True, True, False, True]


def test_the_check_of_a_saturating_part_waits(results):
    [(launches, waits)] = results(jobs.check_costs, **OLD)
    assert launches == {"npu::npu_get_float_status": 1, "aten::mul_.Tensor": 3}
    assert waits == 1
    [(launches, waits)] = results(jobs.check_costs, **NEW)
    assert launches == {"aten::_amp_foreach_non_finite_check_and_unscale_": 1}
    assert waits == 0


@pytest.mark.parametrize(
    ("saturates", "variables"),
    [
        (True, {"ACCEL_EMULATED_SOC": "Ascend910B"}),
        (True, NEW | {"INF_NAN_MODE_FORCE_DISABLE": "1"}),
        (False, {"ACCEL_EMULATED_SOC": "Ascend950PR_9599"}),
        (False, {"ACCEL_EMULATED_SOC": "Ascend910_9391"}),
    ],
    ids=lambda value: str(value),
)
def test_the_part_and_the_variable_decide_as_torch_npu_has_it(results, saturates, variables):
    [(says_infinite, product)] = results(jobs.overflow, **variables)
    assert says_infinite is not saturates
    assert product == (65504.0 if saturates else math.inf)
