"""How the kernels are built, kept and found again: each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from accelcore_cpu.kernels import compiler, store

from accelcore.errors import ConfigurationError

STEP = """
import torch
import accelcore

accel = accelcore.select("cpu")
member = torch.nn.Parameter(torch.ones(3))
member.grad = torch.ones(3)
told = [choice.route for choice in accel.optimizers.explain("lamb") if choice.chosen]
optimizer = accel.optimizers.create("lamb", [member], lr=0.5)
optimizer.step()
print(*told, optimizer.route, "lamb" in accel.capabilities.native_optimizers, round(member[0].item(), 6))
"""
ANSWER = "native native True 0.5\n"


def start(folder, script=STEP, **environment):
    environment = {**os.environ, "ACCEL_KERNEL_CACHE": str(folder), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder, script=STEP, **environment):
    process = start(folder, script, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


def test_two_processes_can_build_at_once_and_a_third_builds_nothing(tmp_path):
    folder = tmp_path / "kernels"
    both = [start(folder) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, ANSWER), err
        assert err.count("building the optimizers' kernels") <= 1
    assert len(list(folder.iterdir())) == 1, "one library, and nothing that was left behind"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert run(folder) == (ANSWER, "")


@pytest.mark.parametrize("damage", ["cut off", "changed", "of others"])
def test_a_library_that_is_not_whole_or_not_ours_is_built_anew(tmp_path, damage):
    run(tmp_path)
    (library,) = tmp_path.iterdir()
    content = library.read_bytes()
    if damage == "cut off":
        library.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        library.write_bytes(content[:-1] + b"!")
    else:
        library.chmod(0o777)
    out, err = run(tmp_path)
    assert out == ANSWER
    assert "building the optimizers' kernels" in err
    (library,) = tmp_path.iterdir()
    assert library.read_bytes() == content
    assert library.stat().st_mode & 0o022 == 0


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path):
    run(tmp_path)
    tmp_path.chmod(0o777)
    out, err = run(tmp_path)
    assert out == ANSWER
    assert "others can write to" in err


def test_a_folder_that_cannot_be_used_costs_a_build_and_no_more(tmp_path):
    (tmp_path / "file").touch()
    out, err = run(tmp_path / "file" / "kernels")
    assert out == ANSWER
    assert "cannot be kept" in err


def test_without_a_compiler_the_formula_serves_and_says_so(tmp_path):
    out, err = run(tmp_path, CXX="/nowhere/c++")
    assert out == "formula formula False 0.5\n"
    assert "CXX='/nowhere/c++' cannot be run" in err


def test_a_compiler_that_fails_is_told_of_once_and_the_formula_serves(tmp_path):
    script = STEP + 'print(accel.optimizers.explain("lamb")[0].reason); accel.optimizers.create("lamb", [member])'
    out, err = run(tmp_path, script, CXX="false")
    assert out.startswith("native formula True 0.5\nthe C++ compiler failed")
    assert err.count("optimizers run without the kernels") == 1
    assert not list(tmp_path.iterdir())


def test_nothing_is_built_before_an_optimizer_is_made(tmp_path):
    script = """
        import accelcore
        accel = accelcore.select("cpu")
        accel.optimizers.explain("lamb")
        accel.optimizers.create
    """
    assert run(tmp_path, script) == ("", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("named", ["relative/path", "."])
def test_a_folder_has_to_be_named_by_its_whole_path(monkeypatch, named):
    monkeypatch.setenv("ACCEL_KERNEL_CACHE", named)
    with pytest.raises(ConfigurationError, match="ACCEL_KERNEL_CACHE"):
        store.folder()


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("ACCEL_KERNEL_CACHE", "")
    assert store.folder().parts[-2:] == ("accelcore", "kernels")


@pytest.mark.parametrize("named", ["", "/nowhere/c++", "/"])
def test_a_compiler_that_cannot_be_run_is_named(monkeypatch, named):
    monkeypatch.setenv("CXX", named)
    assert f"CXX={named!r} cannot be run" in compiler.missing_compiler()
