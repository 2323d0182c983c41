"""Which file of a checkpoint has which tensor: safetensors files, whose heads are read alone.

This imports no torch and takes milliseconds, so it also tells before anything is started whether
files are missing, damaged or truncated.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from .errors import WeightsError
from .spec import read_json

INDEX_FILE = "model.safetensors.index.json"  #: says which file has which tensor, if there are more
SINGLE_FILE = "model.safetensors"


def find_tensor_files(folder: Path) -> dict[str, str]:
    """Return the name of the file that has each tensor of the checkpoint in `folder`.

    The index says it, or there is only one file. A file may repeat a tensor of another one; the
    index says which of them counts. Raises WeightsError if a file is missing, damaged, or other
    than the index says.
    """
    index = folder / INDEX_FILE
    weight_map: dict[str, str] = {}
    if index.exists():
        weight_map = read_json(index).get("weight_map") or {}
        if not weight_map or not isinstance(weight_map, dict):
            raise WeightsError(f"{index} has no weight_map: download it again")
    tensor_files: dict[str, str] = {}
    for file_name in sorted(set(weight_map.values())) or [SINGLE_FILE]:
        names = set(open_tensor_file(folder / file_name, framework="numpy").keys())
        placed_here = sorted(name for name, place in weight_map.items() if place == file_name)
        absent = [name for name in placed_here if name not in names]
        if absent:
            raise WeightsError(
                f"{file_name} in {folder} has no tensor {absent[0]}, which {INDEX_FILE} places "
                "there: download both again"
            )
        for name in names:
            if weight_map.get(name, file_name) == file_name:
                tensor_files[name] = file_name
    return tensor_files


def open_tensor_file(path: Path, framework: str) -> safe_open:
    """Open a file, whose tensors are then arrays of `framework`, "pt" or "numpy".

    Raises WeightsError if it is missing, damaged or truncated.
    """
    if not path.exists():
        raise WeightsError(f"{path.name} is missing in {path.parent}: download it again")
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is damaged or truncated: {error}; download it again") from None
