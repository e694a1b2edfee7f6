"""`accelcore doctor` and the kernels that are known to be wrong."""

from __future__ import annotations

from accelcore.known_faults import TORCH_FAULTS

PLUGIN = """
@hookimpl
def accelcore_known_faults():
    from accelcore.known_faults import KnownFault

    words = dict(package="torch", what="it adds wrongly", instead="a loop", reference="page 1", seen="")
    left = KnownFault("another", versions=">=2", **{**words, "instead": "nothing: use the host"})
    return [KnownFault("a kernel", versions=">=2", **words), KnownFault("an old one", versions="<1", **words), left]
"""


def test_those_of_the_installed_versions_and_of_usable_backends_are_shown(machine):
    machine.fakes.backend("mine", after=PLUGIN)
    machine.fakes.backend("away", after=PLUGIN, available=False, count=0, reason="no device", remedy="buy one")
    code, report, text = machine.doctor()
    assert code == 0, "a kernel that is avoided is nothing broken"
    found = {(fault["backend"], fault["kernel"]): fault for fault in report["faults"]}
    assert {kernel for backend, kernel in found if backend == ""} == {
        fault.kernel for fault in TORCH_FAULTS if fault.applies
    }
    assert {kernel for backend, kernel in found if backend == "mine"} == {"a kernel", "another"}
    assert {backend for backend, _ in found} == {"", "cpu", "mine"}
    assert found["mine", "a kernel"] == {
        "backend": "mine", "kernel": "a kernel", "package": "torch", "installed": report["versions"]["torch"],
        "versions": ">=2", "what": "it adds wrongly", "instead": "a loop", "reference": "page 1", "seen": "",
        "findings": "", "unusable": "",
    }  # fmt: skip
    avoided = sum(not fault["instead"].startswith("nothing") for fault in report["faults"])
    count = len(report["faults"])
    assert f"\nknown kernel bugs: {count}; {avoided} are avoided, {count - avoided} others affect " in text
    assert "not set (" not in text, "nor does it count variables that are not set"
    assert "it adds wrongly" not in text, "the first command of a newcomer lists no bugs"
    assert text.index("known kernel bugs") < text.index("\nselect()\n"), "the choice and the verdict come last"


def test_a_plugin_whose_answer_is_no_list_of_faults_is_broken(machine):
    for number, answer in enumerate(("'sgd is wrong'", "[3]", "1 / 0")):
        code = f"@hookimpl\ndef accelcore_known_faults():\n    return {answer}\n"
        machine.fakes.backend(f"mine{number}", after=code)
    code, report, _ = machine.doctor()
    assert (code, report["broken"]) == (1, [f"backend mine{number}" for number in range(3)])
    assert not [fault for fault in report["faults"] if fault["backend"].startswith("mine")]
