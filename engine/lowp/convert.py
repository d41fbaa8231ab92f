"""The seam: swap Linear layers for low-precision ones by module path."""

from __future__ import annotations

import fnmatch
import os
import re
from dataclasses import dataclass

import torch
from torch import nn

from engine.config import ConfigError, Problem, RecipeConfig
from engine.lowp.linear import LowpLinear, LowpOptions, LowpState
from engine.lowp.scheme import LinearScheme

BLOCK = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What :func:`convert` did."""

    state: LowpState
    """Shared by every swapped layer."""
    layers: tuple[str, ...]
    """Module paths of the swapped layers, in model order."""
    skipped: tuple[str, ...]
    """Module paths of the Linear layers left alone."""


def matches(pattern: str, fqn: str, class_name: str) -> bool:
    """Tell whether a pattern names a module.

    ``re:EXPR`` is a regular expression matched from the start of the module path; anything else is a shell glob over
    the whole path (``layers.*.attention.wq``, ``*``) or the module's class name (``Linear``).
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], fqn) is not None
    return pattern == class_name or fnmatch.fnmatchcase(fqn, pattern)


def _interprets() -> bool:
    """Tell whether Triton runs kernels on a CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def convert(
    model: nn.Module,
    recipe: RecipeConfig,
    *,
    scheme: LinearScheme | None = None,
    options: LowpOptions | None = None,
) -> Conversion:
    """Swap the targeted Linear layers of ``model`` in place; Parameters stay the same objects.

    ``scheme`` replaces the one of the recipe's switches (used to prove that the swap itself changes nothing).

    Raises:
        ConfigError: if no layer matches, a pattern matches nothing, a layer's size is no multiple of 32, or a CPU is
            asked for packed GEMMs.
    """
    scheme = scheme or LinearScheme.from_switches(recipe.switches)
    linears = {fqn: m for fqn, m in model.named_modules() if isinstance(m, nn.Linear)}
    problems = []
    for index, pattern in enumerate(recipe.targets):
        if not any(matches(pattern, fqn, type(m).__name__) for fqn, m in linears.items()):
            problems.append(
                Problem(
                    path=("recipe", "targets", index),
                    message=f'"{pattern}" matches no Linear layer',
                    hint="the model has " + ", ".join(list(linears)[:8]) + (", ..." if len(linears) > 8 else ""),
                )
            )
    chosen = [
        fqn
        for fqn, m in linears.items()
        if any(matches(p, fqn, type(m).__name__) for p in recipe.targets)
        and not any(matches(p, fqn, type(m).__name__) for p in recipe.ignore)
    ]
    if not problems and not chosen:
        problems.append(Problem(path=("recipe", "ignore"), message="ignores every layer that targets name"))
    for fqn in chosen:
        m = linears[fqn]
        if m.in_features % BLOCK or m.out_features % BLOCK:
            problems.append(
                Problem(
                    path=("recipe", "targets"),
                    message=f"{fqn} is {m.out_features}x{m.in_features}; both sizes must be multiples of {BLOCK}, "
                    "the number of values that share a scale",
                    hint=f'add "{fqn}" to recipe.ignore or change the model\'s sizes',
                )
            )
    device = linears[chosen[0]].weight.device if chosen else torch.device("cpu")
    if options is not None and options.gemm == "packed" and device.type == "cpu" and not _interprets():
        problems.append(
            Problem(
                path=("runtime", "gemm"),
                message='"packed" needs a GPU; the kernels for packed operands do not run on a CPU',
                hint="use auto or qdq",
            )
        )
    if problems:
        raise ConfigError(problems)
    state = LowpState(recipe.switches.hadamard, device=device)
    for fqn in chosen:
        parent, _, name = fqn.rpartition(".")
        swapped = LowpLinear(linears[fqn], fqn=fqn, scheme=scheme, state=state, options=options)
        setattr(model.get_submodule(parent), name, swapped)
    return Conversion(state=state, layers=tuple(chosen), skipped=tuple(f for f in linears if f not in chosen))
