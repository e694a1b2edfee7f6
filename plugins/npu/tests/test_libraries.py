from __future__ import annotations

import pytest
from accelcore_npu import libraries


@pytest.fixture
def cann(tmp_path, monkeypatch):
    """A complete installation, and the environment that its set_env.sh makes."""
    home = tmp_path / "ascend-toolkit"
    for part in ("runtime", "compiler", "opp", "lib64"):
        (home / part).mkdir(parents=True)
    for name in libraries.LIBRARIES:
        (home / "lib64" / name).touch()
    (home / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\npath=/x\n")
    monkeypatch.setattr(libraries, "_CACHE", tmp_path / "ld.so.cache")
    return {
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "LD_LIBRARY_PATH": f"/nowhere:{home / 'lib64'}:",
    }


def test_a_complete_installation_has_no_fault(cann):
    assert libraries.cann_fault(cann) is None
    assert libraries.cann_version(cann) == "8.5.0"


@pytest.mark.parametrize("value", [None, "", "/nowhere"])
def test_without_an_installation(cann, value):
    environ = {name: text for name, text in {**cann, "ASCEND_HOME_PATH": value}.items() if text is not None}
    reason, remedy = libraries.cann_fault(environ)
    assert "ASCEND_HOME_PATH" in reason
    assert "set_env.sh" in remedy
    assert libraries.cann_version(environ) is None


@pytest.mark.parametrize("value", ["", "/nowhere"])
def test_without_operators(cann, value):
    reason, remedy = libraries.cann_fault({**cann, "ASCEND_OPP_PATH": value})
    assert "ASCEND_OPP_PATH" in reason
    assert "set_env.sh" in remedy


@pytest.mark.parametrize("part", ["runtime", "compiler"])
def test_without_a_part(cann, tmp_path, part):
    (tmp_path / "ascend-toolkit" / part).rmdir()
    assert f"has no {part}" in libraries.cann_fault(cann)[0]


@pytest.mark.parametrize("name", libraries.LIBRARIES)
def test_a_library_that_is_missing_is_named(cann, tmp_path, name):
    (tmp_path / "ascend-toolkit" / "lib64" / name).unlink()
    reason, remedy = libraries.cann_fault(cann)
    assert f"lacks {name}" in reason
    assert "repair" in remedy
    assert libraries.missing_libraries(cann) == [name]


def test_libraries_that_are_there_and_not_on_the_path_need_set_env_only(cann):
    reason, remedy = libraries.cann_fault({**cann, "LD_LIBRARY_PATH": ""})
    assert "libhccl.so" in reason
    assert "not on LD_LIBRARY_PATH" in reason
    assert remedy.startswith("source the set_env.sh")


def test_a_library_that_the_linker_knows_is_found_without_a_path(cann, tmp_path):
    libraries._CACHE.write_bytes(b"ld.so\0" + b"\0".join(name.encode() for name in libraries.LIBRARIES) + b"\0/x\0")
    assert libraries.missing_libraries({**cann, "LD_LIBRARY_PATH": ""}) == []


def test_an_installation_without_a_version_has_none(cann, tmp_path):
    (tmp_path / "ascend-toolkit" / "ascend_toolkit_install.info").write_text("path=/x\n")
    assert libraries.cann_version(cann) is None


def test_the_libraries_are_those_that_torch_npu_is_linked_to():
    """Read from the wheel where it is installed: the dynamic section names them."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        paths = [path for path in files("torch-npu") or [] if path.name == "libtorch_npu.so"]
    except PackageNotFoundError:
        pytest.skip("torch-npu is not installed")
    content = paths[0].locate().read_bytes()
    for name in libraries.LIBRARIES:
        assert f"\0{name}\0".encode() in content
