"""The whole configuration of one run, frozen: what ``run.json`` holds. Torch-free.

Two parts: fields that change results (their canonical JSON gives the run id) and ``runtime``, which does not enter
the id (device, threads, logging).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.config.models import MODELS, ModelConfig
from engine.recipes.table import Switches, resolve
from engine.strict import ConfigError, Problem, did_you_mean, from_dict, to_dict

SCHEMA_VERSION = 1


def _at_least(obj: Any, minimum: float, *names: str) -> list[Problem]:
    """Return a problem for each named field that is below ``minimum`` or not finite."""
    out = []
    for name in names:
        value = getattr(obj, name)
        if not (value >= minimum and math.isfinite(value)):
            out.append(Problem(path=(name,), message=f"{value} must be at least {minimum:g}"))
    return out


def _raise(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeConfig:
    """The recipe of a run: its name, its switches in full, and the layers it applies to."""

    name: str
    """Canonical name of the recipe table row."""
    switches: Switches
    """All switches, resolved; overriding one in the sweep file keeps the name and changes the run id."""
    targets: tuple[str, ...] = ("*",)
    """Module paths (globs, or ``re:`` regular expressions) of the Linear layers to quantise."""
    ignore: tuple[str, ...] = ("output", r"re:.*\.router\.gate")
    """Module paths to leave alone, same syntax; wins over ``targets``."""

    def __post_init__(self) -> None:
        problems = [dataclasses.replace(p, path=("switches", *p.path)) for p in self.switches.problems()]
        for name in ("targets", "ignore"):
            for index, pattern in enumerate(getattr(self, name)):
                if pattern.startswith("re:"):
                    try:
                        re.compile(pattern[3:])
                    except re.error as error:
                        problems.append(
                            Problem(path=(name, index), message=f'"{pattern}" is no regular expression: {error}')
                        )
        if not self.targets:
            problems.append(Problem(path=("targets",), message="empty; a recipe needs at least one pattern"))
        _raise(problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where tokens come from. ``path`` and ``digest`` are filled in at launch, when the corpus has been prepared."""

    source: tuple[str, ...] = ("stdlib",)
    """``stdlib`` (the running Python's standard library), files, globs, ``.jsonl`` files, or one prepared folder."""
    tokenizer: str = "byte"
    """``byte``, or ``bpe:N`` for a byte-level BPE of N entries trained on the corpus; ignored for a prepared folder."""
    text_key: str = "text"
    """Key that holds the text in JSONL records."""
    val_fraction: float = 0.05
    """Share of the documents held out for validation, chosen by a hash of each document's text."""
    path: str | None = None
    """Prepared token folder, absolute or relative to the run directory. Not part of the run id."""
    digest: str | None = None
    """Digest of the prepared folder; the engine refuses other data. Not part of the run id."""

    def __post_init__(self) -> None:
        problems = []
        if not self.source:
            problems.append(
                Problem(path=("source",), message="empty; expected stdlib, files, globs or a prepared folder")
            )
        if not 0.0 < self.val_fraction < 1.0:
            problems.append(Problem(path=("val_fraction",), message=f"{self.val_fraction} must lie between 0 and 1"))
        if self.tokenizer != "byte":
            match = re.fullmatch(r"bpe:(\d+)", self.tokenizer)
            if match is None:
                problems.append(
                    Problem(
                        path=("tokenizer",),
                        message=f'"{self.tokenizer}" is neither "byte" nor "bpe:N"',
                        hint="e.g. bpe:2048",
                    )
                )
            elif not 257 <= int(match[1]) <= 2**20:
                problems.append(
                    Problem(path=("tokenizer",), message=f"a BPE of {match[1]} entries; expected 257 to 1048576")
                )
        _raise(problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay."""

    name: Literal["adamw"] = "adamw"
    """Optimiser class."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only (norm gains and biases are not decayed)."""
    warmup_fraction: float = 0.1
    """Linear warm-up as a fraction of the run's steps."""
    min_lr_factor: float = 0.1
    """Learning rate at the last step as a fraction of the peak (cosine decay)."""
    max_grad_norm: float | None = 1.0
    """Global L2 norm to clip gradients to; null does not clip."""

    def __post_init__(self) -> None:
        problems = _at_least(self, 0.0, "lr", "eps", "weight_decay", "warmup_fraction", "min_lr_factor")
        for name in ("warmup_fraction", "min_lr_factor"):
            if getattr(self, name) > 1.0:
                problems.append(Problem(path=(name,), message=f"{getattr(self, name)} is a fraction; expected 0 to 1"))
        for index, beta in enumerate(self.betas):
            if not 0.0 <= beta < 1.0:
                problems.append(Problem(path=("betas", index), message=f"{beta} must be at least 0 and below 1"))
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            problems.append(
                Problem(
                    path=("max_grad_norm",),
                    message=f"{self.max_grad_norm} must be above 0",
                    hint="null turns clipping off",
                )
            )
        _raise(problems)


_MAX_STEPS = 10**9
"""More than any run has; a number above it is a slip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Steps, batch and compute dtype."""

    steps: int
    """Optimizer steps of the run."""
    seq_len: int = 256
    """Tokens of one sequence."""
    global_batch_size: int = 8
    """Sequences of one optimizer step, over all ranks and micro-batches."""
    local_batch_size: int = 8
    """Sequences of one micro-batch on one rank."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of activations and of unquantised GEMMs; parameters and optimizer state are float32."""

    def __post_init__(self) -> None:
        problems = _at_least(self, 1, "steps", "seq_len", "global_batch_size", "local_batch_size")
        if self.steps > _MAX_STEPS:
            problems.append(
                Problem(path=("steps",), message=f"{self.steps} is too many; expected at most {_MAX_STEPS}")
            )
        if not problems and self.global_batch_size % self.local_batch_size:
            problems.append(
                Problem(
                    path=("global_batch_size",),
                    message=f"{self.global_batch_size} is not divisible by local_batch_size {self.local_batch_size}",
                    hint="their ratio is the number of gradient-accumulation steps",
                )
            )
        if not problems and (self.seq_len * self.local_batch_size) % 32:
            problems.append(
                Problem(
                    path=("seq_len",),
                    message=f"seq_len {self.seq_len} x local_batch_size {self.local_batch_size} = "
                    f"{self.seq_len * self.local_batch_size} tokens is not a multiple of 32",
                    hint="wgrad quantises blocks of 32 tokens",
                )
            )
        _raise(problems)

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches of one optimizer step on one rank (one rank so far)."""
        return self.global_batch_size // self.local_batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch_size * self.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """Held-out evaluation: before step 1, every ``every`` steps, and after the last step."""

    every: int = 50
    """Optimizer steps between evaluations; 0 evaluates only before the first and after the last step."""
    batches: int = 8
    """Micro-batches of one evaluation, the same ones each time."""

    def __post_init__(self) -> None:
        _raise([*_at_least(self, 0, "every"), *_at_least(self, 1, "batches")])


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Rotating checkpoints. Cadence does not change results, so it is not part of the run id."""

    every: int = 50
    """Optimizer steps between checkpoints; a checkpoint is also written at a clean stop and after the last step."""
    keep: int = 2
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        _raise(_at_least(self, 1, "every", "keep"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """How a run is executed; not part of the run id."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes the GPU when there is one."""
    threads: int | None = None
    """CPU threads of the engine. Null lets the launcher choose; it is then frozen in run.json, because the thread count
    changes the order of floating-point sums and so the bits of a resumed run."""
    log_every: int = 1
    """Optimizer steps between StepRecords; step 1 and the last step are always logged."""
    tensorboard: bool = True
    """Write event files next to metrics.jsonl."""
    save_packed: bool = False
    """Keep wgrad's activations between forward and backward as packed MXFP4 (4.25 bits a value); changes no result."""
    gemm: Literal["auto", "qdq", "packed"] = "auto"
    """GEMMs on dequantised values (``qdq``), or on packed operands, which ``auto`` takes where the GPU multiplies MXFP4
    natively. Like the threads, it changes the order of floating-point sums."""

    def __post_init__(self) -> None:
        problems = _at_least(self, 1, "log_every")
        if self.threads is not None:
            problems += _at_least(self, 1, "threads")
        _raise(problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that defines a run. ``run.json`` is this tree as JSON; the engine reads nothing else."""

    version: int = SCHEMA_VERSION
    """Version of this layout."""
    sweep: str
    """Name of the sweep; a folder below RUNS. Not part of the run id's hash."""
    run_id: str
    """Readable slug of the swept keys plus 8 hex digits of the identity; folder below the sweep's."""
    seed: int
    """Seeds initial weights, data order, stochastic rounding, Hadamard draws. Same seed, same weights and batches."""
    recipe: RecipeConfig
    """What is quantised, and how."""
    model: ModelConfig
    """Shape of the model, resolved."""
    training: TrainingConfig
    """Steps, batch, dtype."""
    data: DataConfig = field(default_factory=DataConfig)
    """Corpus and tokeniser."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimiser and schedule."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoint cadence."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """Device, threads, logging."""

    def __post_init__(self) -> None:
        problems = []
        if self.version != SCHEMA_VERSION:
            problems.append(
                Problem(
                    path=("version",), message=f"{self.version} is not the layout of this engine ({SCHEMA_VERSION})"
                )
            )
        if not 0 <= self.seed < 2**63:
            problems.append(Problem(path=("seed",), message=f"{self.seed} must lie in 0 .. 2^63 - 1"))
        needed = 256 if self.data.tokenizer == "byte" else int(self.data.tokenizer.removeprefix("bpe:"))
        if self.model.vocab_size < needed and self.data.path is None:
            problems.append(
                Problem(
                    path=("model", "vocab_size"),
                    message=f"{self.model.vocab_size} is smaller than the tokeniser's vocabulary of {needed}",
                    hint=f"set model.vocab_size to at least {needed}",
                )
            )
        _raise(problems)

    def identity(self) -> dict[str, Any]:
        """Return the part that changes results, as plain JSON values."""
        tree: dict[str, Any] = {name: json.loads(_identity_json(getattr(self, name))) for name in _IDENTITY_SECTIONS}
        return {**tree, "seed": self.seed, "version": self.version}

    def identity_hash(self) -> str:
        """Return 8 hex digits of the SHA-256 of the canonical JSON of :meth:`identity`."""
        parts = [f'"seed":{self.seed}', f'"version":{self.version}']
        parts += [f'"{name}":{_identity_json(getattr(self, name))}' for name in _IDENTITY_SECTIONS]
        return hashlib.sha256(f"{{{','.join(sorted(parts))}}}".encode()).hexdigest()[:8]


_IDENTITY_SECTIONS = ("recipe", "model", "training", "data", "optimizer", "validation")


@functools.lru_cache(maxsize=4096)
def _identity_json(section: Any) -> str:
    """Return a section's part of the identity; cached, because the runs of a sweep share most sections."""
    tree = to_dict(section)
    if isinstance(section, DataConfig):
        del tree["path"], tree["digest"]
    return canonical_json(tree)


def canonical_json(value: Any) -> str:
    """Serialise with sorted keys and no spaces, so that equal configurations give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def resolve_recipe(value: Any) -> dict[str, Any]:
    """Expand ``"lpt"`` or ``{"name": "lpt", "scale_mode": "uos", "ignore": [...]}`` to the full recipe mapping.

    Keys beside ``name``, ``targets`` and ``ignore`` override the preset's switches; an already resolved mapping (with
    ``switches``) passes through.
    """
    given = {"name": value} if isinstance(value, str) else dict(value)
    if "switches" in given:
        return given
    row = resolve(given.get("name", ""))
    switches = to_dict(row.switches)
    out: dict[str, Any] = {"name": row.name, "switches": switches}
    problems = []
    for key, item in given.items():
        if key in ("targets", "ignore"):
            out[key] = item
        elif key in switches:
            switches[key] = item
        elif key != "name":
            known = ["name", "targets", "ignore", *switches]
            hint = did_you_mean(key, known) or "known keys: " + ", ".join(known)
            problems.append(Problem(path=(key,), message="unknown key", hint=hint, on_key=True))
    _raise(problems)
    return out


def resolve_model(value: Any) -> dict[str, Any]:
    """Expand ``"llama3_nano"`` or ``{"name": "llama3_nano", "n_layers": 2}`` to a full model mapping."""
    given = {"name": value} if isinstance(value, str) else dict(value)
    name = given.get("name")
    if name not in MODELS:
        hint = did_you_mean(str(name), MODELS)
        known = "known models: " + ", ".join(MODELS)
        raise ConfigError([Problem(path=("name",), message=f'unknown model "{name}"', hint=f"{hint} {known}".strip())])
    return {**to_dict(MODELS[name]), **given}


def load_run(text: str) -> RunConfig:
    """Parse the text of a ``run.json``.

    Raises:
        ConfigError: if the JSON or the configuration is invalid.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError([Problem(path=(), message=f"run.json is no JSON: {error}")]) from error
    return from_dict(RunConfig, tree)


def dump_run(config: RunConfig) -> str:
    """Return the text of ``run.json``."""
    return json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n"
