"""What a communicator may be told of algorithms, retries and time: hccl refuses at its first use what it cannot be."""

import pytest

jobs = pytest.importorskip("configuration_jobs", reason="torch_npu is not installed", exc_type=ImportError)

TAKEN = [
    {},
    {"hccl_algo": "level0:NA;level1:ring"},
    {"hccl_algo": "allreduce=level0:NA;level1:NHR / allgather=level0:NA;level1:H-D_R"},
    {"hccl_algo": "level0:fullmesh; level1:NHR; level2:NB; level3:pairwise"},
    {"hccl_algo": "nonsense=level1:ring"},  # HCCL passes over an operator that it does not know
    {"hccl_retry_enable": "L0:0,L1:1,L2:0", "hccl_retry_params": "MaxCnt:5,HoldTime:5000, IntervalTime:5000"},
    {"hccl_buffer_size": 1, "group_name": "custom", "hccl_buffer_name": "shared", "hccl_exec_timeout": 500},
]
REFUSED = {
    "hcclAlgo": [
        {"hccl_algo": text}
        for text in (
            "a" * 1700,
            "ring",
            "level0",
            "level0:",
            "level0:Ring",
            "level1:ring;",
            ";level1:ring",
            "level0:NA;;level1:ring",
            "level4:ring",
            "level1:ring;level1:NHR",
            "allreduce=",
            "=level1:ring",
            "level1:ring/level1:NHR",
            "allreduce=level1:ring/level1:NHR",
            "allreduce=level1:ring/allgather=level1:star",
        )
    ],
    "hcclRetryEnable": [{"hccl_retry_enable": text} for text in (",L1:1", "L1:1,", "L0:0,L1:1,L2:0,L3:1")],
    "hcclRetryParams": [
        {"hccl_retry_params": text}
        for text in ("5", "MaxCnt:0, HoldTime:0, IntervalTime:0", "MaxCnt:1, HoldTime:60001, IntervalTime:0")
    ],
    "hcclBufferSize": [{"hccl_buffer_size": 0}],
}


@pytest.mark.parametrize("variables", [{}, {"ROOTINFO_SUBCOMM_ENABLE": "1"}], ids=["rooted", "split"])
def test_a_configuration_is_taken_or_refused_as_by_hccl(results, variables):
    refused = [(name, config) for name, configs in REFUSED.items() for config in configs]
    for told in results(jobs.told_of_configurations, TAKEN + [config for _, config in refused], ranks=2, **variables):
        assert told[: len(TAKEN)] == [2.0] * len(TAKEN)
        for (name, config), text in zip(refused, told[len(TAKEN) :], strict=True):
            assert f'EMULATED: hccl refuses {name}="' in str(text), (config, text)


def test_a_group_waits_as_long_as_it_is_told(results):
    told, _ = results(jobs.told_of_time, 1, ranks=2)
    assert "waiting for rank 1" in told


@pytest.mark.parametrize(
    ("name", "text"), [("HCCL_EXEC_TIMEOUT", "soon"), ("HCCL_CONNECT_TIMEOUT", "0"), ("HCCL_ALGO", "level0:NA;level1")]
)
def test_an_invalid_variable_is_named(results, name, text):
    [told] = results(jobs.told_of_variable, **{name: text})
    assert f'EMULATED: hccl refuses {name}="{text}"' in str(told)


def test_no_limit_and_algorithms_for_all(results):
    assert results(jobs.told_of_variable, HCCL_EXEC_TIMEOUT="0", HCCL_ALGO="level0:NA;level1:H-D_R") == [1.0]
