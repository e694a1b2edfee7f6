"""How the kernels are built, kept and found again: each case in a fork of its own."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
from accelcore_cpu.kernels import compiler, store
from accelcore_cpu.kernels import library as kernels

import accelcore
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


COPY = """#!{python} -IS
import pathlib, shlex, shutil, subprocess, sys

if "-o" not in sys.argv:
    sys.exit(subprocess.call([*shlex.split({compiler!r}), *sys.argv[1:]]))
if "-c" in sys.argv:
    pathlib.Path(sys.argv[-1]).touch()
else:
    shutil.copy({library!r}, sys.argv[-1])
"""


@pytest.fixture(scope="module")
def begin(fork, tmp_path_factory):
    """Start a script, with a folder for kernels, in a fork."""

    def begin(folder, script=STEP, **environment):
        path = tmp_path_factory.mktemp("script") / "script.py"
        path.write_text(script)
        return fork(path, ACCEL_KERNEL_CACHE=str(folder), **environment)

    return begin


def end(process):
    done = process.finish()
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def run(begin):
    """What a script writes, to stdout and to stderr."""
    return lambda *arguments, **environment: end(begin(*arguments, **environment))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A compiler that gives what this process has built: what is tested is that it ran, and what is kept of it."""
    folder = tmp_path_factory.mktemp("compiler")
    library = Path(shutil.copy(kernels.load()._name, folder))
    script = folder / "quick"
    compiler = os.environ.get("CXX", "c++")
    script.write_text(COPY.format(python=sys.executable, compiler=compiler, library=str(library)))
    script.chmod(0o700)
    return str(script)


@pytest.fixture(scope="module")
def built(begin, tmp_path_factory, quick):
    """A folder that two processes have built into at once."""
    folder = tmp_path_factory.mktemp("built") / "kernels"
    for process in [begin(folder, CXX=quick) for _ in range(2)]:
        out, err = end(process)
        assert out == ANSWER, err
        assert err.count("building the optimizers' kernels") <= 1
    return folder


@pytest.fixture
def folder(built, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(built, tmp_path / "kernels"))


def test_two_processes_can_build_at_once_and_a_third_builds_nothing(run, built, quick):
    (library,) = built.iterdir()  # and nothing that was left behind
    assert int(library.stem.split("-")[1]) in (0, 256, 512), "bytes of prefetch, as measured"
    assert built.stat().st_mode & 0o777 == 0o700
    assert run(built, CXX=quick) == (ANSWER, "")


def test_a_library_that_is_not_whole_is_built_anew(run, folder, quick):
    (library,) = folder.iterdir()
    content = library.read_bytes()
    library.write_bytes(content[: len(content) // 2])
    out, err = run(folder, CXX=quick)
    assert out == ANSWER
    assert "building the optimizers' kernels" in err
    (library,) = folder.iterdir()
    assert library.read_bytes() == content


def test_a_library_that_another_process_replaces_at_once_is_used_all_the_same(run, tmp_path, quick):
    replaced = (
        "from accelcore_cpu.kernels import store\n"
        "keep = store.keep\n"
        "store.keep = lambda *arguments: keep(*arguments).unlink()\n"
    )
    out, err = run(tmp_path / "kernels", replaced + STEP, CXX=quick)
    assert out == ANSWER, err


@pytest.mark.parametrize("damage", ["cut off", "changed", "of others", "in a folder of others", "of another build"])
def test_what_is_not_whole_or_not_ours_is_not_found(tmp_path, damage):
    (tmp_path / "built").write_bytes(b"a library")
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    library = store.keep(folder, "key", tmp_path / "built", 512)
    assert store.find(folder, "key") == (library, 512)
    assert library.stat().st_mode & 0o022 == 0
    if damage == "cut off":
        library.write_bytes(b"a lib")
    elif damage == "changed":
        library.write_bytes(b"a librarx")
    elif damage == "of others":
        library.chmod(0o777)
    elif damage == "in a folder of others":
        folder.chmod(0o777)
    assert store.find(folder, "another" if damage == "of another build" else "key") is None


def test_a_library_takes_the_place_of_one_that_was_damaged(tmp_path):
    for content in (b"first", b"second"):
        (tmp_path / "built").write_bytes(content)
        library = store.keep(tmp_path, "key", tmp_path / "built", 0)
    assert [path for path in tmp_path.iterdir() if path.suffix == ".so"] == [library]
    assert library.read_bytes() == b"second"


@pytest.mark.parametrize("fault", ["others can write to", "cannot be written to", "Not a directory"])
def test_a_folder_that_the_user_named_and_that_cannot_be_used_is_refused_at_once(monkeypatch, tmp_path, fault):
    if fault == "others can write to":
        tmp_path.chmod(0o777)
    elif fault == "cannot be written to":
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    else:
        (tmp_path / "file").touch()
        tmp_path /= "file/kernels"
    monkeypatch.setenv("ACCEL_KERNEL_CACHE", str(tmp_path))
    with pytest.raises(ConfigurationError, match=rf"ACCEL_KERNEL_CACHE=.*cannot be used.*{fault}"):
        accelcore.select("cpu")


def test_a_named_folder_with_kernels_may_be_read_only(run, folder, quick):
    read_only = "import os; os.access = lambda path, mode: not mode & os.W_OK\n"  # root may write anywhere
    assert run(folder, read_only + STEP, CXX=quick) == (ANSWER, "")


def test_a_cache_that_cannot_be_used_costs_a_build_and_no_more(run, tmp_path, quick):
    (tmp_path / "file").touch()
    out, err = run("", CXX=quick, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert out == ANSWER
    assert "cannot be kept" in err


def test_without_a_home_folder_the_kernels_are_built_and_not_kept(run, quick):
    """As in a container that runs as a user whom its list of users does not have."""
    nobody = (
        "import os, pwd\npwd.getpwuid = {}.__getitem__\ndel os.environ['HOME']\nos.environ.pop('XDG_CACHE_HOME', 0)"
    )
    out, err = run("", nobody + STEP, CXX=quick)
    assert out == ANSWER
    assert "cannot be kept" in err


def test_without_a_compiler_the_formula_serves_and_says_so(run, tmp_path):
    out, err = run(tmp_path, CXX="/nowhere/c++")
    assert out == "formula formula False 0.5\n"
    assert "CXX='/nowhere/c++' cannot be run" in err


def test_a_compiler_that_fails_is_told_of_once_and_the_formula_serves(run, tmp_path):
    """And is not run before an optimizer is made: until then it looks as if the kernels could be built."""
    script = STEP + 'print(accel.optimizers.explain("lamb")[0].reason); accel.optimizers.create("lamb", [member])'
    out, err = run(tmp_path, script, CXX="false")
    assert out.startswith("native formula True 0.5\nthe C++ compiler failed")
    assert err.count("optimizers run without the kernels") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("named", ["relative/path", "."])
def test_a_folder_has_to_be_named_by_its_whole_path(monkeypatch, named):
    monkeypatch.setenv("ACCEL_KERNEL_CACHE", named)
    with pytest.raises(ConfigurationError, match="ACCEL_KERNEL_CACHE"):
        accelcore.select("cpu")


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("ACCEL_KERNEL_CACHE", "")
    assert store.folder().parts[-2:] == ("accelcore", "kernels")


@pytest.mark.parametrize("named", ["", "/nowhere/c++", "/"])
def test_a_compiler_that_cannot_be_run_is_named(monkeypatch, named):
    monkeypatch.setenv("CXX", named)
    assert f"CXX={named!r} cannot be run" in compiler.missing_compiler()


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of this kind")
@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512", "sapphirerapids", "znver1"])
def test_whole_vectors_are_multiplied_and_added_in_one_instruction(tmp_path, monkeypatch, processor):
    flags = [f"-march={processor}" if flag == "-march=native" else flag for flag in compiler.FLAGS]
    monkeypatch.setattr(compiler, "FLAGS", flags)
    written = tmp_path / "kernels.s"
    compiler.compile_one(Path(compiler.__file__).with_name("kernels.cpp"), written, "-S")
    vectors, scalars = (len(re.findall(rf"vfn?madd\d+{kind}[sd]\b", written.read_text())) for kind in "ps")
    assert vectors > scalars
