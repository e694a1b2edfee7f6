"""Compiling on first use. A stand-in compiler makes the cache's behaviour quick to see; the real one made the library
that all other tests use."""

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from accelcore_npu_emulator import build
from accelcore_npu_emulator import wheel as torch_npu_wheel

from accelcore.errors import BackendUnavailableError, ConfigurationError

COMPILER = """#!/bin/sh
case "$*" in *--version) echo "stand-in {version}"; exit;; esac
echo "$@" >> "{log}"
{extra}
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


class Wheel:
    def __init__(self, version):
        self.version = version

    def locate_file(self, path):
        return f"/wheel/{path}"


@pytest.fixture
def wheel(monkeypatch):
    """The torch_npu that seems to be installed."""
    installed = Wheel("2.13.0")
    monkeypatch.setattr(torch_npu_wheel, "distribution", lambda name: installed)
    return installed


@pytest.fixture
def compiler(tmp_path, monkeypatch, wheel):
    """Install a compiler that only notes its calls; call it to change it."""
    path = tmp_path / "bin" / "c++"
    path.parent.mkdir()
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def install(version="1.0", extra=""):
        path.write_text(COMPILER.format(version=version, log=tmp_path / "log", extra=extra))
        path.chmod(0o755)

    install()
    return install


def calls(tmp_path):
    log = tmp_path / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_the_libraries_are_made_once(compiler, tmp_path, capfd):
    folder = build.libraries()
    begin, end = capfd.readouterr().err.splitlines()
    assert "EMULATED" in begin
    assert "about ten seconds" in begin
    assert re.fullmatch(r"EMULATED: .* in \d+ seconds", end)
    assert folder.is_relative_to(tmp_path / "cache" / "accelcore")
    assert {path.name for path in folder.iterdir()} == {*build.LIBRARIES, "cann"}
    once = calls(tmp_path)
    assert len(once) == len(build.LIBRARIES)
    assert "-I/wheel/torch_npu/include" in once[0]
    assert build.libraries() == folder
    assert calls(tmp_path) == once
    assert not capfd.readouterr().err


def test_another_compiler_or_source_makes_another_build(compiler, tmp_path, monkeypatch):
    first = build.libraries()
    compiler(version="2.0")
    second = build.libraries()
    sources = tmp_path / "sources"
    sources.mkdir()
    for source in build._SOURCES.iterdir():
        (sources / source.name).write_bytes(source.read_bytes())
    (sources / "devices.cpp").write_text("// changed")
    monkeypatch.setattr(build, "_SOURCES", sources)
    assert len({first, second, build.libraries()}) == 3


def test_processes_that_build_at_once_do_not_disturb_each_other(compiler, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: build.libraries(), range(4)))
    [folder] = folders
    assert {path.name for path in folder.iterdir()} == {*build.LIBRARIES, "cann"}
    assert list(folder.parent.iterdir()) == [folder]


def test_a_failed_build_says_why_and_leaves_nothing(compiler, tmp_path):
    compiler(extra='echo "devices.cpp:1: error: it is Monday" >&2; exit 1')
    with pytest.raises(BackendUnavailableError, match="it is Monday"):
        build.libraries()
    assert list((tmp_path / "cache" / "accelcore" / "emulated-npu").iterdir()) == []
    compiler()
    assert build.libraries().is_dir()


@pytest.mark.parametrize("command", ["no-such-compiler-here", ""])
def test_without_a_compiler(wheel, monkeypatch, command):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(BackendUnavailableError, match=r"no C\+\+ compiler") as raised:
        build.libraries()
    assert "CXX" in raised.value.remedy


def test_a_compiler_with_options_and_one_that_cannot_be_read(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", f"{tmp_path / 'bin' / 'c++'} -DNAME='a b'")
    build.libraries()
    assert all(line.startswith("-DNAME=a b ") for line in calls(tmp_path))
    monkeypatch.setenv("CXX", "g++ 'unfinished")
    with pytest.raises(ConfigurationError, match="CXX"):
        build.libraries()


def test_a_cache_that_cannot_be_written(compiler, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(ConfigurationError, match="XDG_CACHE_HOME"):
        build.libraries()


def test_a_user_without_a_home_folder(compiler, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigurationError, match="HOME or XDG_CACHE_HOME"):
        build.libraries()


def test_a_relative_cache_is_ignored(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.libraries().is_relative_to(tmp_path / "home" / ".cache")


def test_others_cannot_write_the_libraries(compiler):
    folder = build.libraries()
    for path in (folder, *folder.iterdir()):
        assert not os.stat(path).st_mode & (stat.S_IWGRP | stat.S_IWOTH)
