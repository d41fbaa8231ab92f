"""Configuration, paths and log records shared by the engine and ``lptctl``. Torch-free."""

from engine.config.models import MODELS, ModelConfig
from engine.config.paths import RunPaths, SweepPaths
from engine.config.records import CLOCK_FIELDS, StepRecord, append_event, append_step, read_lines, repair_tail
from engine.config.schema import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    TrainingConfig,
    ValidationConfig,
    canonical_json,
    dump_run,
    load_run,
    resolve_model,
    resolve_recipe,
)
from engine.strict import ConfigError, Problem, did_you_mean, from_dict, to_dict

__all__ = [
    "CLOCK_FIELDS",
    "MODELS",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Problem",
    "RecipeConfig",
    "RunConfig",
    "RunPaths",
    "RuntimeConfig",
    "StepRecord",
    "SweepPaths",
    "TrainingConfig",
    "ValidationConfig",
    "append_event",
    "append_step",
    "canonical_json",
    "did_you_mean",
    "dump_run",
    "from_dict",
    "load_run",
    "read_lines",
    "repair_tail",
    "resolve_model",
    "resolve_recipe",
    "to_dict",
]
