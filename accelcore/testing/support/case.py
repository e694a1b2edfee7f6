"""One operator on one sample: on a device in all its forms, and on the CPU in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accelcore.testing.support.decompositions import Unique
from accelcore.testing.support.expected import Expected
from accelcore.testing.support.found import (
    ALONE,
    BOUNDS,
    ENDS,
    EQUAL,
    INFINITE,
    LARGE,
    MANY,
    OF_GRADIENT,
    REPEATED,
    Found,
    Variant,
    is_refusal,
    says_fallback,
)
from accelcore.testing.support.host_kernels import HostKernels
from accelcore.testing.support.layouts import (
    BEHIND,
    EMPTY,
    LAYOUTS,
    MARKED,
    TO_RESIZE,
    beside,
    drawn_weights,
    given_as_out,
    memory_differs,
    memory_of,
    placed,
    same_but_for_rounding,
    tensors,
    wide,
)
from accelcore.testing.support.rounding import Rounding
from accelcore.testing.support.samples import (
    CHOOSES,
    CONVERTS,
    DENSE_OUT,
    HOST_ARGUMENTS,
    IGNORES_OUT,
    NOT_UNIQUE,
    OF_ELEMENTS,
    READS_MEMORY,
    ROUNDED_OUT,
    SAMPLED,
    TIED,
    in_place,
    is_comparable,
    tolerance,
)
from accelcore.testing.support.usable import check_usable
from accelcore.testing.support.whole import independent
from accelcore.testing.support.wrapped import Twice

_UNCOUNTED = "it does not count as a change, of which autograd has to know"


@dataclass
class Case:
    """One variant of an operator's sample, in all its forms.

    Attributes:
        found: where the findings go.
        device: where to run it.
        name: the operator.
        of: the variant.
    """

    found: Found
    device: torch.device
    name: str
    of: Variant
    _memory: list[tuple[bool, bool]] = field(default_factory=list)
    _written: list[int] = field(default_factory=list)  # arguments that the operator writes to, as running statistics

    def run(self) -> None:
        if not is_comparable(self.name, self.of.dtype, self.of.arguments):
            return
        exact = wide(self.of.arguments, self.of.dtype)
        try:
            given = placed(exact, torch.device("cpu"), "", graph=True)
            right = self._results(given)
            if self.of.what != "of expanded memory":
                self._written = [n for n, pair in enumerate(_pairs(given, exact)) if not same_but_for_rounding(*pair)]
            right = self._independent(exact, right) + self._arguments_after(given)
            memory = self._memory
        except Exception:  # noqa: BLE001  torch's kernels raise errors of any kind: the sample does not fit
            return
        if self.of.layout == MARKED and self._written:
            return  # torch resolves the mark into a copy, and the operator writes there
        once = not self.of.dtype.is_floating_point or self.of.what in ("of no elements", MANY)
        rounded = cache(partial(self._all_rounded, exact, range(1 if once else 3), len(right)))
        further = cache(partial(self._all_rounded, exact, range(3, 3 if once else 11), len(right)))
        overflowed = cache(partial(self._overflowed, exact))

        def of(number: int, results: Callable[[], list[Any]]) -> list[Tensor]:
            return [each[number][1] for each in results()]

        def one_of(number: int, results: Callable[[], list[Any]]) -> Tensor | None:
            return results()[number][1] if len(results()) == len(right) else None

        expected = [
            Expected(
                part,
                tensor,
                self.of.dtype,
                tolerance(self.name, many=self._adds_up(part)),
                partial(one_of, number, overflowed),
                self.of.what != LARGE and (self.of.what not in INFINITE or not part.startswith("the gradient")),
                () if self.of.what in (EQUAL, BOUNDS) else (partial(of, number, rounded), partial(of, number, further)),
            )
            for number, (part, tensor) in enumerate(right)
        ]
        images = any(tensor.dim() in (4, 5) for tensor in tensors(self.of.arguments))
        one = self.of.what or self.name in READS_MEMORY
        for layout in (self.of.layout,) if one else LAYOUTS if images else LAYOUTS[:-1]:
            begin = layout
            if self.of.aside and layout in ("", LAYOUTS[-1]) and self.name not in READS_MEMORY:
                begin = f"{layout}, {BEHIND}".removeprefix(", ")
            self._check(layout or "as it is", expected, partial(self._on_device, begin), memory, begin)
        values = [each for each in expected if each.part.startswith("result")]
        if values and self.of.what in REPEATED and any(leaf.requires_grad for leaf in tensors(self.of.arguments)):
            self._check(", ".join(filter(None, ("under no_grad", self.of.layout))), values, self._without_graph)
        if self.of.what in ("of one element", MANY, "of expanded memory", *ALONE) and not self.of.writes:
            return
        if self.of.what != "broadcast" and in_place(self.of.info) is not None:
            kind = exact[0][0].dtype  # a comparison in place writes 0 and 1 in the tensor's own dtype
            written = [each if each.right.dtype == kind else each.cast(kind) for each in values]
            for layout in ("",) if self.name in READS_MEMORY else (BEHIND, "strided", "transposed"):
                where = "in place " + (layout if layout in LAYOUTS[1:] else "as it is")
                works = partial(self._works, self._in_place, exact)
                self._check(where, written, partial(self._in_place, self._placed(layout)), works=works)
            if self.of.dtype == torch.float32 and len(expected) > len(values):
                op = in_place(self.of.info)
                changed = partial(self._results, op=lambda one, *others, **named: op(one.clone(), *others, **named))
                on_device = partial(changed, self._placed("", graph=True))
                self._check("in place with gradients", expected, on_device, works=partial(self._works, changed, exact))
        if self.of.info.supports_out and self.name not in IGNORES_OUT:
            usual = self.of.dtype == torch.float32 and not self.of.what and self.name in {*SAMPLED} - {*DENSE_OUT}
            more = ("transposed", *TO_RESIZE) if usual else ()
            layouts = ("strided", "transposed", EMPTY) if self.of.writes else (self.of.out, *more)
            for layout in dict.fromkeys(layouts):
                self._check_out("with out=", values, exact, layout=layout)
            answers = bool(values) and all(each.right.dtype == torch.bool for each in values)
            if usual and not answers:  # what torch refuses is refused, or right
                self._check_out("with out= of whole numbers", values, exact, refused=True, dtype=torch.int64)
            if usual and self._fits_its_input(exact, values):
                self._check_out("with out= beside its input", values, exact, refused=True, shifted=True)
            if answers and (self.name not in ROUNDED_OUT or self.of.dtype in (torch.int64, torch.bool)):  # 0 and 1
                numbers = [each.cast(torch.uint8) for each in values]
                self._check_out("with out= of another dtype", numbers, exact, dtype=torch.uint8)
            elif self.of.dtype in (torch.bfloat16, torch.float16) and not self.of.what:
                self._check_out("with out= of another dtype", values, self.of.arguments, dtype=torch.float32)
            if self._fits_its_input(exact, values):
                self._check_out("with out= its input", values, exact, onto=True)

    def _independent(self, exact: Any, right: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the results, of whole numbers those by other kernels."""
        if self.of.dtype.is_floating_point or not right:
            return right
        parts, results = zip(*right, strict=True)
        usual = self.of.what not in (LARGE, ENDS)
        others = independent(self.name, self.of.info, self.of.dtype, exact, list(results), usual=usual)
        return [*zip(parts, others, strict=True)]

    def _adds_up(self, part: str) -> bool:
        """Return whether a number may be a sum of thousands."""
        alone = type(self.of.info).__name__ in OF_ELEMENTS and part.startswith("result")
        return self.of.what == OF_GRADIENT or (self.of.what == MANY and not alone)

    def _fits_its_input(self, exact: Any, values: list[Expected]) -> bool:
        """Return whether torch lets the operator write its result onto its first argument."""
        elementwise = type(self.of.info).__name__ in OF_ELEMENTS or isinstance(self.of.info, Twice)
        if not elementwise or len(values) != 1:
            return False
        return bool((values[0].right.shape, values[0].right.dtype) == (exact[0][0].shape, exact[0][0].dtype))

    def _placed(self, layout: str, *, graph: bool = False) -> Any:
        moved, options = placed(self.of.arguments, self.device, layout, graph=graph)
        return (moved[0], *self.of.arguments[0][1:]) if self.name in HOST_ARGUMENTS else moved, options

    def _check_out(self, form: str, values: Any, given: Any, refused: bool = False, **options: Any) -> None:
        out: Callable[[Any], Any] = partial(self._out, **options)
        works = partial(self._works, out, given)
        if not (refused and works()):
            self._check(form, values, lambda: out(self._placed("")), works=lambda: refused or works())

    def _works(self, form: Callable[[Any], Any], arguments: Any) -> bool:
        try:
            form(placed(arguments, torch.device("cpu"), ""))
        except AssertionError:
            return True  # a result that is wrong on the CPU is wrong
        except Exception:  # noqa: BLE001  torch refuses this form of the sample
            return False
        return True

    def _on_device(self, layout: str) -> list[tuple[str, Tensor]]:
        given = self._placed(layout, graph=True)
        found = self._results(given, layout)
        for number, (one, other) in enumerate(_pairs(given, self.of.arguments)):
            kept = (
                number in self._written
                or self.of.what == "of expanded memory"
                or same_but_for_rounding(one.cpu(), other)
            )
            assert kept, f"it changes its argument {number}"
        return found

    def _without_graph(self) -> list[tuple[str, Tensor]]:
        given, options = self._placed(self.of.layout, graph=True)
        with torch.no_grad():
            found = tensors(self.of.info.op(*given, **options))
        return [(f"result {number}", tensor) for number, tensor in enumerate(found)]

    def _rounded(self, exact: Any, rounding: Rounding) -> list[tuple[str, Tensor]]:
        moved = rounding.inputs(exact)
        with rounding:
            found = self._results(placed(moved, torch.device("cpu"), "", graph=True))
        return self._independent(exact, found)

    def _all_rounded(self, exact: Any, seeds: Iterable[int], count: int) -> list[list[tuple[str, Tensor]]]:
        """Return the results when rounding errors moved each number, once a seed; none if they cannot be compared."""
        found = []
        try:
            for seed in seeds:
                torch.default_generator.manual_seed(seed)  # a result that is drawn is another one each time
                rounding = Rounding(self.of.dtype, seed, watch=self.of.what == LARGE)
                found.append(self._rounded(exact, rounding))
                if rounding.draws or rounding.overflows or len(found[-1]) != count:  # what overflows may also vanish
                    return []
        except Exception:  # noqa: BLE001  torch's kernels raise errors of any kind
            return []
        return found

    def _overflowed(self, exact: Any) -> list[tuple[str, Tensor]]:
        """Return the results if numbers that are too large for the dtype become infinite; none if there are none."""
        rounding = Rounding(self.of.dtype, 0, watch=True)
        found = self._rounded(exact, rounding)
        return found if rounding.overflows else []

    def _results(self, arguments: Any, layout: str = "", op: Any = None) -> list[tuple[str, Tensor]]:
        """Return the operator's tensors, and the gradients of a weighted sum of them."""
        given, options = arguments
        leaves = [leaf for leaf in tensors((given, options)) if leaf.requires_grad]
        result = tensors((op or self.of.info.op)(*given, **options))
        self._memory = memory_of(result, (given, options))
        one, two = (
            ("the gradient", "the second derivative") if self.of.what == OF_GRADIENT else ("result", "the gradient")
        )
        found = [(f"{one} {number}", tensor.detach().clone()) for number, tensor in enumerate(result)]
        roots = [tensor for tensor in result if tensor.requires_grad]
        if leaves and roots:
            alike = self.of.what == "of expanded memory"  # as the gradients of a sum are
            shapes = [(torch.Size([1] * root.dim()) if alike else root.shape, root) for root in roots]
            drawn = [(drawn_weights(shape, root.dtype), root) for shape, root in shapes]
            moved = [(placed(each, to.device, layout) if layout else each.to(to.device), to) for each, to in drawn]
            weights = [each.expand(root.shape) for each, root in moved]
            before, passes = list[Tensor](), partial(torch.autograd.grad, roots, leaves, allow_unused=True)
            # Two passes through one graph change nothing of each other. The oracle, in float64, needs one.
            if not layout and self.of.what in REPEATED and {leaf.dtype for leaf in leaves} != {torch.float64}:
                before = tensors(passes([-each for each in weights], retain_graph=True))
            kept = [each.clone() for each in before]
            grads = passes(weights)
            assert all(map(same_but_for_rounding, before, kept)), (
                "a second backward pass changes the gradients of the first"
            )
            found += [(f"{two} {n}", grad) for n, grad in enumerate(grads) if grad is not None]
        return found + self._arguments_after(arguments)

    def _arguments_after(self, arguments: Any) -> list[tuple[str, Tensor]]:
        given = tensors(arguments)
        return [(f"argument {number}", given[number].detach().clone()) for number in self._written]

    def _in_place(self, arguments: Any) -> list[tuple[str, Tensor]]:
        (target, *given), options = arguments
        with torch.no_grad():
            place = target.view_as(target)  # as_strided_ takes the tensor elsewhere
            before, version = beside(place), target._version
            returned = in_place(self.of.info)(target, *given, **options)
        assert returned is target, "it returns another tensor"
        assert target._version > version or self.name not in SAMPLED, _UNCOUNTED
        assert torch.equal(beside(place), before), "it wrote beside the tensor"
        return [("result 0", target)]

    def _out(
        self,
        arguments: Any,
        *,
        onto: bool = False,
        shifted: bool = False,
        dtype: torch.dtype | None = None,
        layout: str = "",
    ) -> list[tuple[str, Tensor]]:
        given, options = arguments
        with torch.no_grad():
            where = BEHIND if self.name in DENSE_OUT else layout or self.of.out
            unwritten = partial(given_as_out, layout=where, dtype=dtype)
            written = given[0] if onto else pytree.tree_map(unwritten, self.of.info.op(*given, **options))
            if shifted:  # by an element
                memory = given[0].new_zeros(given[0].numel() + 1)
                given = (memory[:-1].view(given[0].shape).copy_(given[0]), *given[1:])
                written = memory[1:].view(given[0].shape)
            before = [beside(each) for each in tensors(written)]
            returned = self.of.info.op(*given, **options, out=written)
        for one, other, kept in zip(tensors(returned), tensors(written), before, strict=True):
            assert one.data_ptr() == other.data_ptr(), "it returns another tensor"
            assert torch.equal(beside(other), kept), "it wrote beside the tensor"
        return [(f"result {number}", tensor) for number, tensor in enumerate(tensors(written))]

    def _check(
        self,
        form: str,
        expected: list[Expected],
        run: Callable[[], Any],
        memory: Any = (),
        begin: str = "",
        works: Callable[[], bool] = lambda: True,
    ) -> None:
        """Note what is wrong with the results of a form, if it `works` on the CPU: torch refuses some forms."""
        behind = BEHIND if BEHIND in begin else ""
        where = ", ".join(
            filter(None, (self.name, str(self.of.dtype).removeprefix("torch."), form, self.of.what, behind))
        )
        if self.found.leaves_out(where):
            return
        try:
            kernels = HostKernels(self.device)
            watched = kernels if form == "as it is" and self.device.type != "cpu" else nullcontext()
            with warnings.catch_warnings(record=True) as said, watched:
                warnings.simplefilter("always")
                results = run()
        except AssertionError as error:
            if works():
                self.found.note(f"{where}: {error}", self.of.arguments)
            return
        except Exception as error:  # noqa: BLE001  a device raises errors of any kind
            text = " ".join((str(error).strip() or repr(error)).splitlines()[:2])[:200]
            usual = self.of.what in ("", "broadcast") and form in ("as it is", "in place as it is", "with out=")
            rare = not usual or any(not tensor.numel() for tensor in tensors(self.of.arguments))
            refuses = rare or is_refusal(error)
            check_usable(self.device, where)
            finding = f"{where}: {type(error).__name__}: {text}"
            if works():
                self.found.refused.append(finding) if refuses else self.found.note(finding, self.of.arguments)
            return
        self.found.on_host |= kernels.names | {self.name for each in said if says_fallback(str(each.message))}
        if len(results) != len(expected):
            if works():
                self.found.note(f"{where}: {len(results)} tensors instead of {len(expected)}", self.of.arguments)
            return
        if form == "as it is" and self.name not in CONVERTS and self._same_strides():
            for (part, tensor), each, own, of_cpu in zip(results, expected, self._memory, memory, strict=False):
                floating = self.of.dtype.is_floating_point and each.right.dtype.is_floating_point
                kinds = (self.of.dtype, torch.float64) if floating else (each.right.dtype, each.right.dtype)
                if (tensor.dtype, each.right.dtype) == kinds:  # or it is a conversion, which may or may not be a copy
                    for difference in memory_differs(own, of_cpu):
                        self.found.note(f"{where}: {part} {difference}", self.of.arguments)
        for (part, tensor), each in zip(results, expected, strict=True):
            said_wrong = each.differs_in_form(tensor)
            unique = self.name not in NOT_UNIQUE or isinstance(self.of.info, Unique)
            if not said_wrong and unique and not self._is_tied(part):
                said_wrong = each.differs(tensor)
            self.found.compared += 1
            if said_wrong and works():
                self.found.note(f"{where}: {part} {said_wrong}", self.of.arguments)

    def _is_tied(self, part: str) -> bool:
        """Return whether a result is an index of numbers of which several are equal, or a gradient at that index."""
        alike = not self.of.dtype.is_floating_point or self.of.what in (MANY, "of expanded memory")
        if self.of.what == "of expanded memory" and self.name in CHOOSES and part.startswith("the gradient"):
            return True
        return alike and part == TIED.get(self.name) and not self.of.arguments[1].get("stable")

    def _same_strides(self) -> bool:
        """Return whether the oracle's arguments lie in memory as the sample's do."""
        pairs = _pairs(self.of.arguments, wide(self.of.arguments, self.of.dtype))
        return all(one.layout != torch.strided or one.stride() == other.stride() for one, other in pairs)


def _pairs(arguments: Any, others: Any) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(tensors(arguments), tensors(others), strict=True)
