"""Known kernel bugs: affected versions, symptom, workaround.

Listed are kernels that compute a wrong result without an error, or that make the device unusable. Bugs of torch that
many backends meet are below; a plugin lists the bugs of its device in the hook `accelcore_known_faults`. The tests
check every entry against the installed version. This module does not import torch, because `accelcore doctor` shows the
table without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

CANNOT_AVOID = "nothing"
"""Beginning of `KnownFault.instead` if accelcore has no workaround, before what a script can do."""


@dataclass(frozen=True)
class KnownFault:
    """Kernel that computes a wrong result without an error, or makes the device unusable for the process.

    Attributes:
        kernel: the kernel, as users call it.
        package: the distribution that contains it.
        versions: the affected versions, as pip writes them (`">=2.10,<2.14"`).
        what: the symptom, in one sentence without its full stop.
        instead: accelcore's workaround, likewise; if there is none, "nothing: " and what a script can do.
        reference: a description of the bug; a URL if there is one.
        seen: the version and device with which we reproduced it; empty if we did not.
        findings: a regular expression of what the conformance suite says of operators with this bug. The suite then
            reports the bug instead of a failure. Empty if the suite sees nothing of it.
        unusable: a regular expression of the suite's samples, as it names them, that make the device unusable for the
            rest of the process. The suite does not run them, and reports the bug. Empty if there are none.
    """

    kernel: str
    package: str
    versions: str
    what: str
    instead: str
    reference: str
    seen: str
    findings: str = ""
    unusable: str = ""

    @property
    def installed(self) -> str | None:
        """Installed version of the package; None if it is not installed."""
        try:
            return _version(self.package)
        except PackageNotFoundError:
            return None

    @property
    def applies(self) -> bool:
        """Whether the installed version is affected."""
        installed = self.installed
        return installed is not None and _is_among(installed, self.versions)

    def __str__(self) -> str:
        return f"{self.what} ({self.package} {self.versions}: {self.reference})"


@cache
def _version(package: str) -> str:
    # Each backend asks for the same packages, and `version` parses all of their metadata.
    return version(package)


@cache
def _is_among(installed: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet  # imported late: it takes longer than this module

    return SpecifierSet(versions).contains(installed, prereleases=True)


# Most bugs of torch are in every version that accelcore supports.
_bug = partial(KnownFault, package="torch", versions=">=2.7", reference="tests/fault_probes.py")

FP16_EPSILON = _bug(
    kernel="torch.optim.Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad by loop and foreach, fp16",
    what="the squares of small gradients and an eps of 1e-8 are both 0 in fp16, and the update divides by them: "
    "parameters become inf or NaN in one step",
    instead="the route is refused for such a request, and the fused kernel or the formula taken, where there is one",
    reference="https://github.com/pytorch/pytorch/issues/147437",
    seen="torch 2.7.1, 2.10.0, 2.11.0, 2.13.0, 2.15.0, CPU",
)
SKIPPED_FIRST_STEP = _bug(
    kernel="torch.optim.SGD(fused=True) with momentum",
    what="a first step that is skipped for an overflow leaves momentum that was never written, and the next step uses "
    "it",
    instead="our route to the same kernel begins with momentum that is 0",
    reference="https://github.com/LibreYOLO/libreyolo/pull/771",
    seen="torch 2.7.1, 2.10.0, 2.11.0, 2.13.0, 2.15.0, CPU",
)
BACKWARD_UNDER_AUTOCAST = _bug(
    kernel="torch.compile, backward of a model that was called under autocast",
    what="all of backward is computed in low precision, also what forward computed in fp32",
    instead='compiled models are called with the setting backward_pass_autocast="off"',
    reference="https://github.com/pytorch/pytorch/issues/153044",
    seen="torch 2.7.1, 2.10.0, 2.11.0, 2.13.0, 2.15.0, CPU",
)
AUTOCAST_IN_CACHE = _bug(
    kernel="torch.compile, a model that is called without gradients under autocast in two dtypes",
    versions=">=2.7,<2.13",
    what="the key of the cache of compiled graphs has no dtype of autocast: the model computes in the dtype of the "
    "first compilation, also in later processes",
    instead="compiled models are called under autocast without that cache (enable_autograd_cache=False)",
    reference="https://github.com/pytorch/pytorch/pull/181564",
    seen="torch 2.11.0, CPU and NVIDIA H200",
)
GUARDS_BY_DICT = _bug(
    kernel="torch.compile, parameters whose requires_grad changes between calls",
    versions=">=2.7,<2.12",
    what="code that was compiled for a frozen parameter serves after its release: the parameter gets no gradient and "
    "is never trained",
    instead="compiled models are called with the setting skip_tensor_guards_with_matching_dict_tags=False",
    reference="https://github.com/pytorch/pytorch/issues/139476",
    seen="torch 2.7.1, 2.10.0, 2.11.0, CPU",
)
CAST_WITHOUT_GRADIENT = _bug(
    kernel="torch.autocast, weights that were first used under no_grad",
    versions="<2.11",
    what="autocast keeps the cast without a gradient: such a weight gets none later in the same region",
    instead="nothing: under torch's table, evaluate outside of the region; table O1 is right",
    seen="torch 2.7.1 and 2.10.0, CPU",
)
HERMITIAN_OUT = _bug(
    kernel="torch.fft.ihfftn and ihfft2 of one dimension, with out=",
    what="the tensor given as out= is returned as it was: nothing is written to it",
    instead="nothing: use the result, not out=",
    seen="torch 2.7.1, 2.13.0, 2.15.0, CPU",
)
UNSEEN_UPDATE = _bug(
    kernel="torch.optim.SGD, Adam, AdamW and Adagrad with fused=True",
    what="a step leaves the version of the parameters, so that backward through values of before the step is a wrong "
    "gradient instead of an error",
    instead="our route to the same kernels increments the version",
    seen="torch 2.7.1, 2.10.0, 2.11.0, 2.13.0, 2.15.0, CPU",
)
GELU_OF_INFINITY = _bug(
    kernel="gelu on the CPU, on a processor with AVX-512",
    what="oneDNN's kernel returns NaN for +inf",
    instead='nothing: approximate="tanh" is right',
    seen="torch 2.13.0 and 2.15.0, in fp32, bf16 and fp16",
    findings=r"nn\.functional\.gelu, \w+, .*with inf: .* 0 is wrong in .*",
)
ATTENTION_OF_NAN = _bug(
    kernel="scaled_dot_product_attention on the CPU",
    what="a row is 0 instead of NaN if its scores are NaN and the keys are fewer than a vector of the processor has "
    "elements (8 in fp32 with AVX2), and if under is_causal its scores are all -inf",
    instead="nothing: the form SDPBackend.MATH is right",
    seen="torch 2.13.0 and 2.15.0",
    findings=r"nn\.functional\.scaled_dot_product_attention, .*with (-?inf|NaN): result 0 .*: 0 instead of nan .*",
)
SUMS_OF_ROWS = _bug(
    kernel="layer_norm (also with fp32 weights), embedding, embedding_bag and indexing on the CPU, backward, bf16, fp16"
    "; convolution of many images, backward, fp16, and bf16 on a processor without AVX-512",
    what="the gradients of their parameters are summed over the rows in the dtype of the input: in bf16 the sum stands "
    "still after some hundred rows, in fp16 after some thousand",
    instead="the CPU backend replaces these kernels for autocast and for models in low precision, if torch has "
    "torch.library.get_kernel; the kernels of other backends on the host stay",
    seen="torch 2.13.0: of 100,000 gradients of 1 the sum is 512 with two threads",
    findings=r"gradient of layer_norm over rows, b?float16, .*the gradient 1 is wrong in .*",
)
SUMS_AT_PLACES = _bug(
    kernel="index_select of a vector, take, adaptive_avg_pool2d to more points and replication pad on the CPU, "
    "backward, bf16 and fp16",
    what="the gradients that belong to one element are summed in the dtype of the input: of equal ones, the sum stands "
    "still after 256 in bf16, and after 2,048 in fp16",
    instead="nothing: compute it in fp32, or index by x[places], whose gradients the CPU backend sums in fp32",
    seen="torch 2.13.0: of 20,000 gradients of 1 the sum is 256",
)
ELU_OF_SMALL = _bug(
    kernel="elu, selu and celu on the CPU, fp32",
    versions="<2.10",
    what="they compute exp(x) - 1, so that small negative numbers lose digits: at -1e-7 the result is off by 19 %",
    instead="nothing: torch.where(x > 0, x, torch.expm1(x)) is right",
    seen="torch 2.7.1",
    findings=r"nn\.functional\.(elu|selu|celu), float32, .*with small numbers: result 0 is wrong in .*",
)
TORCH_FAULTS = (
    FP16_EPSILON, SKIPPED_FIRST_STEP, BACKWARD_UNDER_AUTOCAST, AUTOCAST_IN_CACHE, GUARDS_BY_DICT,
    CAST_WITHOUT_GRADIENT, HERMITIAN_OUT, UNSEEN_UPDATE, GELU_OF_INFINITY, ATTENTION_OF_NAN, SUMS_OF_ROWS,
    SUMS_AT_PLACES, ELU_OF_SMALL,
)  # fmt: skip
"""Bugs of torch on every device, and of its kernels on the host, by which other backends than the CPU's may compute."""
