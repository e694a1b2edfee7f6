"""What installed distributions require, against what is installed."""

from __future__ import annotations

from pathlib import Path

import pytest


def install(machine, name, version="1.0", *requires, raw=b""):
    """Put a distribution without code on the machine's path, before every installed one."""
    site = machine.folder / f"site-of-{name}-{version}"
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (metadata / "METADATA").write_bytes("\n".join(lines).encode() + b"\n" + raw)
    machine.sites.insert(0, str(site))


def require(machine, module, requirement):
    """Let a fake plugin's distribution require something."""
    (metadata,) = Path(machine.fakes.modules[module]).glob("*.dist-info/METADATA")
    metadata.write_text(f"{metadata.read_text()}Requires-Dist: {requirement}\n")


def toaster(machine, **probe):
    """A backend whose vendor's distribution is called toaster-runtime."""
    return machine.fakes.backend("toaster", distributions=("toaster-runtime",), **probe)


def misfits(report, name="toaster", kind="backends"):
    (found,) = (entry["misfits"] for entry in report[kind] if entry["name"] == name)
    return found


def test_a_runtime_that_does_not_fit_is_shown_beside_its_backend_with_a_command(machine):
    toaster(machine)
    install(machine, "toaster-runtime", "2.0", "engine==2.13.0")
    install(machine, "engine", "2.11.0+cpu")
    code, report, text = machine.doctor()
    assert code == report["exit_code"] == 1
    assert report["broken"] == ["versions for backend toaster"]
    assert misfits(report) == ["toaster-runtime 2.0 requires engine==2.13.0, and engine 2.11.0+cpu is installed"]
    assert "toaster" in report["usable"], "that is for its probe to say"
    assert misfits(report, "cpu") == []
    assert f"      does not fit: {misfits(report)[0]}\n      what to do: install versions" in text
    assert text.rstrip().endswith("broken: versions for backend toaster")


def test_a_backend_that_cannot_work_here_and_does_not_fit_is_both(machine):
    toaster(machine, available=False, count=0, reason="no toaster", remedy="buy one")
    install(machine, "toaster-runtime", "2.0", "engine>=3")
    code, report, _ = machine.doctor()
    assert code == 1
    (misfit,) = misfits(report)
    assert misfit == "toaster-runtime 2.0 requires engine>=3, and engine is not installed"
    assert "toaster" not in report["usable"]


def toasters(machine, cases):
    """For each case (a requirement, a version, raw metadata) a backend with a runtime and an engine of its own."""
    for number, (requirement, installed, *raw) in enumerate(cases):
        machine.fakes.backend(f"toaster{number}", distributions=(f"runtime{number}",))
        install(machine, f"runtime{number}", "2.0", requirement.replace("ngine", f"ngine{number}"), raw=b"".join(raw))
        install(machine, f"engine{number}", installed)


def test_what_is_no_misfit(machine):
    cases = [
        ("engine==2.13.0", "2.13.0+cpu"),
        ("engine>=2.11,<2.14", "2.13.0+cu130"),
        ("engine>=2.13", "2.14.0rc1"),
        ("Engine ~= 2.13", "2.13.1"),
        ("engine", "0.1"),
        ("engine[fast]>=1", "1"),
        ("engine==9; python_version < '3'", "1"),
        ("engine==9; extra == 'fast'", "1"),
        ("engine @ https://example.org/engine.whl", "1"),
    ]
    toasters(machine, cases)
    code, report, _ = machine.doctor()
    found = {case: misfits(report, f"toaster{number}") for number, case in enumerate(cases)}
    assert found == {case: [] for case in cases}
    assert code == 0


def test_what_is_a_misfit(machine):
    cases = [
        ("engine==2.13.0", "2.13.1"),
        ("engine==2.13.0+cpu", "2.13.0"),
        ("engine>=2.13", "2.13.0rc1"),
        ("engine<2.13", "2.13.0+cpu"),
        ("engine==9; python_version > '3'", "1"),
    ]
    toasters(machine, cases)
    code, report, _ = machine.doctor()
    for number, (_, installed) in enumerate(cases):
        (misfit,) = misfits(report, f"toaster{number}")
        assert misfit.endswith(f"and engine{number} {installed} is installed")
    assert code == 1


def test_a_vendor_s_distribution_that_is_not_installed_requires_nothing(machine):
    toaster(machine)
    code, report, _ = machine.doctor()
    assert misfits(report) == []
    assert code == 0


def test_what_plugins_extensions_and_accelcore_itself_require_counts_too(machine):
    plugin = machine.fakes.backend("toaster")
    require(machine, plugin, "accelcore>=9,<10")
    extension = machine.fakes.install("", extensions=["faster"])
    require(machine, extension, "gone")
    install(machine, "accelcore", "0.1.0", "torch>=99")
    code, report, text = machine.doctor()
    assert code == 1
    assert report["broken"] == [
        "versions for accelcore",
        "versions for backend toaster",
        "versions for extension faster",
    ]
    for found, required in [
        (report["misfits"], "torch>=99"),
        (misfits(report), "accelcore<10,>=9"),
        (misfits(report, "faster", "extensions"), "gone"),
    ]:
        (misfit,) = found
        assert f"requires {required}, and" in misfit
    assert "does not fit: accelcore 0.1.0 requires torch>=99, and torch 2." in text


def test_a_broken_plugin_s_versions_are_checked_all_the_same(machine):
    module = machine.fakes.install("raise ImportError('undefined symbol')", backends=["rotten"])
    require(machine, module, "torch==1.0")
    _, report, _ = machine.doctor()
    (misfit,) = misfits(report, "rotten")
    assert "requires torch==1.0, and torch 2." in misfit
    assert report["broken"] == ["backend rotten", "versions for backend rotten"]


def test_metadata_that_cannot_be_read_is_reported(machine):
    cases = [
        ("engine (==", "1"),
        ("engine; no_such_marker == '1'", "1"),
        ("engine; os_name ~= 'x'", "1"),
        ("engine>=1", "as built by Bob"),
        ("engine", "1", b"Summary: \xff\xfe\n"),
        ("engine \x1b[31m", "1"),
    ]
    toasters(machine, cases)
    code, report, text = machine.doctor()
    for number, case in enumerate(cases):
        (misfit,) = misfits(report, f"toaster{number}")
        assert "cannot be read" in misfit, case
        assert f"runtime{number}" in misfit, case
    assert code == 1
    assert "\x1b" not in text


@pytest.mark.parametrize("content", [b"", b"Summary: \xff\xfe\n"], ids=["empty", "no-text"])
def test_a_plugin_whose_own_metadata_cannot_be_read_is_no_traceback(machine, content):
    module = machine.fakes.backend("toaster")
    (metadata,) = Path(machine.fakes.modules[module]).glob("*.dist-info/METADATA")
    metadata.write_bytes(content)
    machine.no_torch()
    done = machine.run("doctor")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "cannot be read" in done.stdout or "cannot be found or asked" in done.stderr
