"""Requirements of a run on the machine of its ranks: packages, and a folder to offload to."""

import importlib.util
import os
import platform
from pathlib import Path

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.resolved import Resolved


def check_requirements(resolved: Resolved, has_gpu: bool) -> None:
    """Raises ConfigError if this machine, on which the ranks will run, lacks something that they need."""
    engine, facts = resolved.engine, engine_named(resolved.engine.name)
    if resolved.train.dtype == "fp16" and not has_gpu and not facts.trains_fp16_on_cpu:
        raise ConfigError(
            "train.dtype is fp16, but this machine has no GPU, and DeepSpeed does not train in fp16 on a CPU",
            "use --set train.dtype=fp32 or bf16, or --engine ddp or fsdp",
        )
    if facts.package is not None:
        check_package(*facts.package, f"engine {engine.name}")
    if engine.offload_path is not None:
        check_offload_path(engine.offload_path)


def check_package(package: str, extra: str, user: str) -> None:
    """Raises ConfigError, with the command that installs it, if an optional package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{user} needs {package}, which is not installed", f"pip install 'hpc-gpt[{extra}]'")


def check_offload_path(path: str) -> None:
    """Raises ConfigError unless engine.offload_path is a folder on this machine that can be written."""
    if not Path(path).is_dir():
        raise ConfigError(
            f"engine.offload_path is {path}, but there is no such folder on {platform.node()}",
            "name a folder on every node's NVMe disk, or leave it out to offload to the host's memory",
        )
    if not os.access(path, os.W_OK):
        raise ConfigError(f"engine.offload_path {path} cannot be written", "name a folder that you can write")
