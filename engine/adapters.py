"""LoRA adapters of a checkpoint: what their files say, before any engine loads them.

An adapter is a folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`.
Only the JSON file is read whole, and no torch is needed. vLLM computes adapters; our own engine
does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import UnsupportedModel, WeightsError
from .spec import fingerprint, read_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What an engine and its peers need to know of an adapter."""

    rank: int  #: The inner size of its matrices.
    fingerprint: bytes  #: Tells two adapters apart, as `spec.fingerprint` tells two models.


def read_adapter(folder: Path) -> AdapterFacts:
    """Reads an adapter's settings, and looks whether its weights are there.

    Raises WeightsError where a file is missing or damaged, and UnsupportedModel for what adapters of
    PEFT may be and vLLM does not compute.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise WeightsError(f"{name} is missing in {folder}: give a folder as PEFT saves it")
    settings = read_json(folder / CONFIG_FILE)
    unsupported = _why_unsupported(settings)
    if unsupported:
        raise UnsupportedModel(f"the adapter in {folder} {unsupported}")
    rank = settings.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise WeightsError(f"{folder / CONFIG_FILE}: r is {rank!r}, and must be a number from 1")
    return AdapterFacts(rank, fingerprint(folder, CONFIG_FILE))


def _why_unsupported(settings: dict[str, object]) -> str:
    """Returns why vLLM cannot compute an adapter, behind "the adapter"; empty if it can (pure)."""
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        return f"is of the kind {kind}, and only LORA is served"
    if settings.get("use_dora"):
        return "uses DoRA, which vLLM does not compute"
    if settings.get("modules_to_save"):
        return "replaces whole modules (modules_to_save): merge it into its model's weights"
    if settings.get("bias", "none") != "none":
        return "changes biases: merge it into its model's weights"
    return ""
