"""Requirements of a run on the machine of its ranks: packages, and a GPU where one is needed."""

import importlib.util

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.resolved import Resolved


def check_requirements(resolved: Resolved, has_gpu: bool) -> None:
    """Raises ConfigError if this machine, on which the ranks will run, lacks something that they need."""
    facts = engine_named(resolved.engine.name)
    if resolved.train.dtype == "fp16" and not has_gpu and not facts.trains_fp16_on_cpu:
        raise ConfigError(
            "train.dtype is fp16, but this machine has no GPU, and DeepSpeed does not train in fp16 on a CPU",
            "use --set train.dtype=fp32 or bf16, or --engine ddp or fsdp",
        )
    for package in facts.packages:
        check_package(package, f"engine {resolved.engine.name}")
    if resolved.train.init is not None:
        check_package("safetensors", "train.init")


def check_package(package: str, user: str, extra: str = "train") -> None:
    """Raises ConfigError, with the command that installs it, if an optional package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{user} needs {package}, which is not installed", f"pip install 'hpc-gpt[{extra}]'")
