"""Checks the rules of `ExpectConfig` in a compiled step: value, limit, collective, user's line."""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp

from zerojax.config import ExpectConfig
from zerojax.forecasting import roles
from zerojax.forecasting.program_rules.rule_results import (
    CheckedRule,
    Violation,
    checked_rule,
)
from zerojax.forecasting.program_rules.sharding_effects import effect_of, users_rules
from zerojax.forecasting.step_contents import SentArray, StepContents
from zerojax.operators.context import SCOPE as ATTENTION
from zerojax.operators.marks import marked_reads
from zerojax.optim.matrices import SCOPE as MATRICES
from zerojax.placement.device_mesh import MODEL, PASS_AXES, STAGE
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.table import shared_axes
from zerojax.plan.counts import padded_elements
from zerojax.plan.make import Plan
from zerojax.plan.wire import leaf_transfers
from zerojax.tracing import trees
from zerojax.tracing.reads import line_of_read

MB, GB, GIB = 1e6, 1e9, 2**30
_FLOATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CODES = ("u8", "s8", "f8e4m3fn", "f8e5m2")
_REDUCTIONS = ("all-reduce", "reduce-scatter")
_BITS = re.compile(r"(?:f|bf)(\d+)$")
_NEARLY = 0.25
"""Share of a parameter by which gathers may exceed the plan's: padding and scales of codes."""


def check_rules(
    contents: StepContents, plan: Plan, expected: ExpectConfig
) -> tuple[CheckedRule, ...]:
    """Checks every rule that is set.

    Args:
      contents: of the compiled step.
      plan: of the same step, on the same mesh.
      expected: the rules.

    Raises:
      ValueError: a rule cannot be checked in this program.
    """
    step = _Step(contents, plan, expected)
    return tuple(getattr(step, name)() for name in expected.names)


class _Step:
    """A step and its rules; a method for each rule, by the name of its field."""

    def __init__(self, contents: StepContents, plan: Plan, expected: ExpectConfig):
        self._contents, self._plan, self._expected = contents, plan, expected
        self._leaves = plan.placement.leaves

    # --- gathers ------------------------------------------------------------------------------

    @functools.cached_property
    def _gathers(self) -> list[SentArray]:
        return [one for one in self._contents.sent if one.kind == "all-gather"]

    def no_gather(self) -> CheckedRule:
        patterns = self._expected.no_gather
        chosen = {
            name: pattern
            for name in self._leaves
            # Of several patterns that match, the first is named; in a dict the last assignment
            # stays.
            for pattern in reversed(patterns)
            if any(re.search(pattern, row) for row in self._rows(name))
        }
        for pattern in patterns:
            # A pattern that matches nothing would always be kept, so a wrong name must be an
            # error.
            if pattern not in chosen.values() and not any(
                re.search(pattern, row) for name in self._leaves for row in self._rows(name)
            ):
                raise ValueError(
                    f"expect.no_gather: {pattern!r} matches no parameter; names are such as "
                    f"{', '.join(list(self._leaves)[:3])}"
                )
        limit = f"allowed is none of {', '.join(patterns)}"
        found = []
        for one in self._gathers:
            whole = [
                name for name in one.parameters if name in chosen and self._is_whole(one, name)
            ]
            if whole:
                found.append(
                    Violation(
                        rule="no_gather",
                        found=f"{_names(whole)} gathered whole, {_mb(one.num_bytes)}",
                        limit=limit,
                        collective=one.describe(),
                        line=one.line,
                        remedy="split it by mesh.rules, look its rows up (lookup: owners), or use "
                        "zero=0",
                    )
                )
        return checked_rule("no_gather", f"{len(found)} of {len(chosen)} gathered", limit, found)

    def _rows(self, name: str) -> tuple[str, ...]:
        """Returns the names under which a user knows the parameter `name`: `name` itself and, if it
        is a stack of layers, the names of the stack's rows."""
        return (name, *self._plan.stacks.get(name, ()))

    def _is_whole(self, one: SentArray, name: str) -> bool:
        """Returns whether a gather gives a device all numbers of a parameter, or of its layer."""
        leaf = self._leaves[name]
        # Devices along `stage` hold other layers, so a layer is whole without a gather over it.
        split = {*shared_axes(self._plan.mesh, leaf.stored_spec)} - {STAGE}
        # A stack is gathered layer by layer, and a whole layer is what the rule forbids.
        size = trees.num_elements(leaf.shape[leaf.stack_dims :])
        return split <= {*one.axis.split("+")} or (
            len(one.parameters) == 1 and one.elements >= size
        )

    def max_gather_mb(self) -> CheckedRule:
        most = self._expected.max_gather_mb
        assert most is not None
        limit = f"allowed are {most:g} MB outside of the plan's own gathers"
        unplanned = [one for one in self._gathers if self._why_unplanned(one) is not None]
        found = [
            Violation(
                rule="max_gather_mb",
                found=f"{self._why_unplanned(one)}, {_mb(one.num_bytes)} each time",
                limit=limit,
                collective=one.describe(),
                line=one.line,
                remedy="remove the constraint or the use at this line that needs it whole, or "
                "change its rule in mesh.rules",
            )
            for one in unplanned
            if one.num_bytes > most * MB
        ]
        largest = max((one.num_bytes for one in unplanned), default=0)
        return checked_rule("max_gather_mb", _mb(largest), limit, found)

    def _why_unplanned(self, one: SentArray) -> str | None:
        """Returns text that says which array an all-gather gathers beyond the plan. Returns None if
        the plan gathers the array, if the array holds codes, or if the gather is in the scope
        `ATTENTION` or `MATRICES`."""
        # These gathers belong to the way attention and matrices are split, and plans count them
        # apart.
        if ATTENTION in one.scope or MATRICES in one.scope or self._is_coded(one):
            return None
        if not one.parameters:
            return f"an array of {one.role} gathered"
        for name in one.parameters:
            leaf = self._leaves.get(name)
            if leaf is None:
                continue
            # A gather over other axes than those of ZeRO is one that the compiler added.
            others = set(one.axis.split("+")) - {*leaf.zero_axes, "none"}
            if leaf.zero_dim is None or others:
                over = f" over {', '.join(sorted(others))}" if others else ""
                return f"parameter {name} gathered{over}, which the plan does not do"
        times = self._times_gathered.get(one.parameters, 0.0)
        # Parameters that are gathered together are gathered as often as the one that is read most.
        allowed = max(self._planned_times(name) for name in one.parameters)
        if times > allowed + _NEARLY:
            return (
                f"{_names(one.parameters)} gathered {times:.3g} times per step, "
                f"{allowed:.3g} times by the plan"
            )
        return None

    def _is_coded(self, one: SentArray) -> bool:
        """Returns whether an array has a dtype of `_CODES` and the plan sends codes of any
        parameter."""
        return one.dtype in _CODES and any(
            leaf.codes
            or leaf.wire_codes
            or leaf.delta_codes
            or leaf.gradient_codes
            or leaf.eight_bits
            for leaf in self._leaves.values()
        )

    @functools.cached_property
    def _times_gathered(self) -> dict[tuple[str, ...], float]:
        """{names of parameters that are gathered together: times per step that all their elements
        are gathered}."""
        counts: dict[tuple[str, ...], int] = collections.Counter()
        for one in self._gathers:
            counts[one.parameters] += one.times * one.elements
        # Gathers may fetch parts, so the number of whole gathers is a quotient of elements.
        return {
            names: count
            / sum(padded_elements(self._plan.placement, self._leaves[n]) for n in names)
            for names, count in counts.items()
            if names and all(name in self._leaves for name in names)
        }

    def _planned_times(self, name: str) -> float:
        """Returns how many times per step the plan gathers a parameter: the all-gathers of its
        plan, times the number of places that read the parameter."""
        transfers = leaf_transfers(self._plan, self._leaves[name])
        times = math.fsum(one.times for one in transfers if one.kind == "all-gather")
        # A parameter that is read in several places is gathered at each of them.
        return times * max(1, self._reads[name])

    @functools.cached_property
    def _reads(self) -> collections.Counter[str]:
        return collections.Counter(
            read.name for read in marked_reads(self._plan.traced.forward.jaxpr)
        )

    # --- bytes --------------------------------------------------------------------------------

    def max_wire_gb(self) -> CheckedRule:
        return self._bytes("max_wire_gb", self._contents.wire_bytes, "", self._contents.sent)

    def max_network_gb(self) -> CheckedRule:
        # Without a card nothing says where a node ends.
        if self._contents.network_bytes is None:
            raise ValueError(
                "expect.max_network_gb: which devices share a node is not known here; give gpu= "
                "(or --gpu) and devices=, or leave the rule out"
            )
        sent = self._contents.sent
        return self._bytes("max_network_gb", self._contents.network_bytes, " between nodes", sent)

    def _bytes(self, rule: str, value: int, where: str, sent: Sequence[SentArray]) -> CheckedRule:
        most = getattr(self._expected, rule)
        shown, limit = f"{value / GB:.4g} GB", f"allowed are {most:g} GB per device and step"
        found = []
        if value > most * GB:
            largest = max(sent, key=lambda one: one.num_bytes * one.times)
            found = [
                Violation(
                    rule=rule,
                    found=f"a device sends {shown}{where}, most of it {_what(largest)}",
                    limit=limit,
                    collective=largest.describe(),
                    line=largest.line,
                    remedy="use fewer microbatches, a lower ZeRO stage or wire codes, or raise the "
                    "limit",
                )
            ]
        return checked_rule(rule, shown, limit, found)

    def max_peak_gib(self) -> CheckedRule:
        most, peak = self._expected.max_peak_gib, self._contents.peak / GIB
        assert most is not None
        shown, limit = f"{peak:.4g} GiB", f"allowed are {most:g} GiB per device"
        found = []
        if peak > most:
            remedy = (
                "use a higher ZeRO stage, more microbatches, remat or offload (zerojax plan RUN)"
            )
            largest = self._contents.largest
            values = ", ".join(
                f"{one.role} {one.shape} ({one.num_bytes / GIB:.3g} GiB)" for one in largest
            )
            found = [
                Violation(
                    rule="max_peak_gib",
                    found=f"the step needs {shown} at its peak"
                    + f"; the largest temporary values then are {values}" * bool(values),
                    limit=limit,
                    # The values are sorted, so the first line is of the largest value that has
                    # one.
                    line=next((one.line for one in largest if one.line), None),
                    remedy=remedy,
                )
            ]
        return checked_rule("max_peak_gib", shown, limit, found)

    # --- gradients and activations ------------------------------------------------------------

    def gradients_in(self) -> CheckedRule:
        wanted = self._expected.gradients_in
        assert wanted is not None
        bits = jnp.finfo(_FLOATS[wanted]).bits
        limit = f"gradients are summed in {_FLOATS[wanted]} or wider"
        narrow: dict[str, list[str]] = collections.defaultdict(list)
        # The plan's dtypes are checked first: they hold for a parameter wherever it is summed.
        for leaf in self._leaves.values():
            for dtype in _sum_dtypes(self._plan, leaf):
                if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < bits:
                    narrow[dtype].append(leaf.name)
        sums = [one for one in self._contents.sent if _is_gradient_sum(one)]
        found = []
        for dtype, names in narrow.items():
            example = next((one for one in sums if set(one.parameters) & set(names)), None)
            # A gradient that is summed with others has no name of its own; the largest sum is an
            # example.
            example = example or max(sums, key=lambda one: one.num_bytes, default=None)
            found.append(
                Violation(
                    rule="gradients_in",
                    found=f"gradients of {_names(names)} summed over devices in {dtype}",
                    limit=limit,
                    collective=None if example is None else example.describe(),
                    line=None if example is None else example.line,
                    remedy="set reduce_dtype=fp32 and no wire.gradients, or loosen the rule",
                )
            )
        # Where the plan itself is narrow every sum is, and each would be reported a second time.
        for one in [] if narrow else sums:
            width = _BITS.match(one.dtype)
            # A sum of one number, such as the norm, is no gradient.
            if width and int(width[1]) < bits and one.elements > 1:
                found.append(
                    Violation(
                        rule="gradients_in",
                        found=f"an array of gradients, {_mb(one.num_bytes)}, summed in {one.dtype}",
                        limit=limit,
                        collective=one.describe(),
                        line=one.line,
                        remedy="cast the parameter and the values to float32 at this line, or use "
                        "precision=fp32",
                    )
                )
        dtypes = {
            dtype for leaf in self._leaves.values() for dtype in _sum_dtypes(self._plan, leaf)
        }
        return checked_rule("gradients_in", ", ".join(sorted(dtypes)) or "no sums", limit, found)

    def max_replicated_mb(self) -> CheckedRule:
        most = self._expected.max_replicated_mb
        assert most is not None
        limit = f"allowed are {most:g} MB"
        replicated = [one for one in self._contents.sent if _is_replicated(one)]
        found = [
            Violation(
                rule="max_replicated_mb",
                found=f"every device along {one.axis} holds the whole of an array of {one.role}, "
                f"{_mb(one.num_bytes)}",
                limit=limit,
                collective=one.describe(),
                line=one.line,
                remedy=_replication_remedy(one),
            )
            for one in replicated
            if one.num_bytes > most * MB
        ]
        largest = max((one.num_bytes for one in replicated), default=0)
        return checked_rule("max_replicated_mb", _mb(largest), limit, found)

    # --- rules, loops, attention --------------------------------------------------------------

    def rules_split(self) -> CheckedRule:
        plan, limit = self._plan, "every rule splits a parameter, or exempts one from a later rule"
        all_rules = users_rules(plan)
        size = plan.mesh.shape[MODEL]
        found = [
            Violation(
                rule="rules_split",
                found=f"rule {pattern!r} {why}",
                limit=limit,
                line=line_of_read(plan.traced.forward.jaxpr, names),
                remedy=remedy,
            )
            for place, (pattern, _) in enumerate(all_rules)
            for why, remedy, names in [effect_of(place, all_rules, plan, size)]
            if why
        ]
        kept = len(all_rules) - len(found)
        return checked_rule("rules_split", f"{kept} of {len(all_rules)} rules", limit, found)

    def layer_loops(self) -> CheckedRule:
        most = self._expected.layer_loops
        assert most is not None
        limit = f"allowed are {most} loop{'s' * (most > 1)}, and no layers outside of loops"
        layers = self._contents.layers
        loops = [one for one in layers if one.is_loop]
        found = [
            Violation(
                rule="layer_loops",
                found=f"{one.num_layers} layers ({one.title}) run outside of loops"
                + f" ({one.why})" * bool(one.why),
                limit=limit,
                line=one.line,
                remedy="use one loop (jax.lax.scan, nnx.scan, roll=true, unroll=false)",
            )
            for one in layers
            if not one.is_loop
        ]
        if not layers:
            found.append(
                Violation(
                    rule="layer_loops",
                    found="no loop over layers",
                    limit=limit,
                    remedy="stack the layers and scan them, or leave the rule out",
                )
            )
        if len(loops) > most:
            titles = "; ".join(f"{one.num_layers} x {one.title}" for one in loops)
            found.append(
                Violation(
                    rule="layer_loops",
                    found=f"{len(loops)} loops over layers: {titles}",
                    limit=limit,
                    line=loops[-1].line,
                    remedy="join the loops, or raise the limit",
                )
            )
        count = f"{len(loops)} loop{'s' * (len(loops) != 1)}"
        return checked_rule("layer_loops", count, limit, found)

    def fused_attention(self) -> CheckedRule:
        contents, limit = self._contents, "attention runs in kernels that store no scores"
        # On CPUs the rule could only fail.
        if not contents.on_gpus:
            raise ValueError(
                "expect.fused_attention: CPUs have no kernel of attention; give gpu= (or --gpu) "
                "and devices=, or leave the rule out"
            )
        found = [
            Violation(
                rule="fused_attention",
                found=f"scores {list(one.shape)} in {one.dtype} are stored, {_mb(one.num_bytes)}",
                limit=limit,
                line=one.line,
                remedy="use zerojax.attention or attention=cudnn, with sizes that the kernel "
                "supports (zerojax plan names the reason)",
            )
            for one in contents.scores
        ]
        # Without a kernel and without scores there may be no attention at all, and the rule hides
        # that.
        if not found and not contents.attention_kernels:
            found.append(
                Violation(
                    rule="fused_attention",
                    found="the step calls no kernel of attention",
                    limit=limit,
                    remedy="use zerojax.attention, or leave the rule out of models without "
                    "attention",
                )
            )
        return checked_rule(
            "fused_attention", f"{contents.attention_kernels} calls of kernels", limit, found
        )


def _sum_dtypes(plan: Plan, leaf: LeafPlacement) -> set[str]:
    """Returns the names of the dtypes in which the plan sums the gradient of a parameter over
    devices; an empty set for a frozen parameter."""
    if leaf.frozen:
        return set()
    transfers: Callable[[], Iterator[str]] = lambda: (  # noqa: E731
        one.dtype
        for one in leaf_transfers(plan, leaf)
        if one.num_bytes
        and one.phase in ("backward", "after")
        # An all-to-all of bytes sends the codes of a gradient, which are summed after they arrive.
        and (one.kind in _REDUCTIONS or (one.kind == "all-to-all" and one.dtype == "uint8"))
    )
    return set(transfers())


def _is_gradient_sum(one: SentArray) -> bool:
    return one.role == roles.GRADIENTS and one.kind in _REDUCTIONS


def _is_replicated(one: SentArray) -> bool:
    """Returns whether a collective makes an array of activations or of the batch whole on every
    device: an all-gather over any axis, or an all-reduce over one of `PASS_AXES`."""
    if one.role not in (roles.ACTIVATIONS, roles.BATCH):
        return False
    over_batch = bool({*one.axis.split("+")} & {*PASS_AXES})
    return one.kind == "all-gather" or (one.kind == "all-reduce" and over_batch)


def _replication_remedy(one: SentArray) -> str:
    if ATTENTION in one.scope:
        return "set context_parallel to ring or ulysses, which gather no keys and values"
    return "keep it split along the batch or the sharded dimension at this line"


def _what(one: SentArray) -> str:
    return f"{one.role} of {_names(one.parameters)}" if one.parameters else one.role


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / MB:.4g} MB"
