"""The tensors of a checkpoint by name: one safetensors file or several, FP8 dequantized.

FP8 weights become full precision at load, so scales of activations and of a quantized KV cache
have nothing to scale and are not read (NOT_READ).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .errors import UnsupportedModel, WeightsError
from .quantization import Fp8
from .spec import read_json

PLAIN = (torch.bfloat16, torch.float16, torch.float32)
SCALES = ("weight_scale_inv", "weight_scale")
NOT_READ = (
    *(".rotary_emb.inv_freq", ".input_scale", ".output_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale"),
)


class Tensors:
    """Knows all names at once, reads a tensor when it is taken.

    Files are mapped while they are read: `release()` now and then, or all of them stay resident.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, fp8: Fp8 | None) -> None:
        self.folder, self.dtype, self.fp8 = folder, dtype, fp8
        index = folder / "model.safetensors.index.json"
        where = read_json(index).get("weight_map") if index.exists() else {}
        if not isinstance(where, dict) or (index.exists() and not where):
            raise WeightsError(f"{index} has no weight_map: download it again")
        self._files: dict[str, safe_open] = {}
        self._shards: dict[str, str] = {}
        for shard in sorted(set(where.values())) or ["model.safetensors"]:
            names = set(_open(folder / shard).keys())
            absent = sorted(name for name, place in where.items() if place == shard)
            absent = [name for name in absent if name not in names]
            if absent:
                raise WeightsError(
                    f"{shard} in {folder} has no tensor {absent[0]}, which {index.name} places "
                    "there: download both again"
                )
            self._shards.update((name, shard) for name in names if where.get(name, shard) == shard)
        self._left = set(self._shards)

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def release(self) -> None:
        """Unmaps the files; what was taken stays."""
        self._files.clear()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor as `dtype`, where that is the file's a view of the file: clone what stays.

        Raises WeightsError if it is missing or has another shape.
        """
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            found = list(tensor.shape)
            raise WeightsError(f"tensor {name} is {found}, config.json implies {list(shape)}")
        scales = [name.removesuffix("weight") + scale for scale in SCALES]
        scale = next((one for one in scales if name.endswith(".weight") and one in self), None)
        if tensor.dtype == torch.float8_e4m3fn:
            if scale is None or self.fp8 is None:
                lacks = f"{self.folder} has no {scales[0]} or {scales[1]}"
                lacks = lacks if self.fp8 else "config.json has no quantization_config"
                raise WeightsError(f"tensor {name} is float8, but {lacks}")
            return dequantize(name, tensor, self._read(scale), self.fp8).to(self.dtype)
        if tensor.dtype not in PLAIN or scale is not None:
            kind = str(tensor.dtype).removeprefix("torch.") + (" with a scale" if scale else "")
            raise UnsupportedModel(f"tensor {name} is {kind}: only float8_e4m3fn is dequantized")
        return tensor.to(self.dtype)

    def check_all_taken(self) -> None:
        """A tensor that the decoder did not ask for is one that it does not know."""
        left = sorted(name for name in self._left if not name.endswith(NOT_READ))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise UnsupportedModel(
                f"tensor {left[0]}{more} in {self.folder} has no place in the model that "
                "config.json describes"
            )

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._shards:
            raise WeightsError(f"tensor {name} is missing in {self.folder}")
        self._left.discard(name)
        shard = self._shards[name]
        if shard not in self._files:
            self._files[shard] = _open(self.folder / shard)
        return self._files[shard].get_tensor(name)


def _open(path: Path) -> safe_open:
    if not path.exists():
        raise WeightsError(f"{path.name} is missing in {path.parent}: download it again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is damaged or truncated: {error}; download it again") from None


def dequantize(name: str, weight: torch.Tensor, scale: torch.Tensor, fp8: Fp8) -> torch.Tensor:
    """Float32 [out, in] of an FP8 weight with one scale, one per row, or one per block.

    Raises WeightsError when the scales do not fit the weight, UnsupportedModel if they are codes.
    """
    if scale.dtype not in PLAIN:
        raise UnsupportedModel(f"the scales of {name} are {scale.dtype}, not floats")
    wide, scale = weight.float(), scale.float()
    rows, columns = weight.shape
    if scale.numel() == 1:
        return wide.mul_(scale.reshape(()))
    if fp8.block is None and scale.shape in ((rows,), (rows, 1)):
        return wide.mul_(scale.reshape(rows, 1))
    high, across = fp8.block or (rows, columns)
    expected = (-(-rows // high), -(-columns // across))
    if fp8.block is None or scale.shape != expected:
        wanted = (
            f"blocks of {high} x {across} need {list(expected)}" if fp8.block else "one per row"
        )
        raise WeightsError(
            f"the scales of {name} {list(weight.shape)} are {list(scale.shape)}: {wanted}"
        )
    for row in range(expected[0]):  # scales spread over the whole weight would double the memory
        across_scales = scale[row].repeat_interleave(across)[:columns]
        wide[row * high : (row + 1) * high].mul_(across_scales)
    return wide
