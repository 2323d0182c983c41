"""The tensors of a checkpoint by name: one safetensors file or several, FP8 dequantized.

FP8 weights become full precision at load, so scales of activations and of a quantized KV cache
have nothing to scale and are not read (`NOT_READ`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from .errors import UnsupportedModel, WeightsError
from .quantization import Fp8Format
from .weight_files import find_tensor_files, open_tensor_file

PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  #: types that need no scale
SCALE_NAMES = ("weight_scale_inv", "weight_scale")  #: instead of "weight"
#: ends of names that may be in a checkpoint, and have no place in the decoder
NOT_READ = (
    ".rotary_emb.inv_freq",
    ".input_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)


class CheckpointTensors:
    """Knows all names at once, reads a tensor when it is taken.

    Files are mapped while they are read. Whoever takes tensors should call `release` now and then,
    or all files stay in memory. `check_all_taken` at the end finds what nobody asked for.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, fp8: Fp8Format | None) -> None:
        """Reads the names in `folder`; tensors will be of `dtype`, FP8 ones scaled as `fp8` says.

        Raises WeightsError if a file is missing, damaged, or other than the index says.
        """
        self.folder = folder
        self.dtype = dtype
        self.fp8 = fp8
        self._files: dict[str, safe_open] = {}  #: files that are mapped now
        self._shard_of = find_tensor_files(folder)  #: tensor -> the file that has it
        self._not_taken = set(self._shard_of)

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def release(self) -> None:
        """Lets go of the files. Each is unmapped once no view of it (`take`) is left."""
        self._files.clear()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the tensor as `dtype`; `shape` is what config.json implies.

        Where `dtype` is the file's own, the result is a view, which keeps the whole file mapped
        after `release` too: the caller should copy what it keeps.

        Raises WeightsError if it is missing or has another shape, and UnsupportedModel if it is of
        a type that is not read.
        """
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"tensor {name} is {list(tensor.shape)}, config.json implies {list(shape)}"
            )
        scale_name = self._scale_of(name)
        if tensor.dtype == torch.float8_e4m3fn:
            return self._dequantize(name, tensor, scale_name)
        if tensor.dtype not in PLAIN_DTYPES or scale_name is not None:
            kind = str(tensor.dtype).removeprefix("torch.")
            if scale_name is not None:
                kind += " with a scale"
            raise UnsupportedModel(f"tensor {name} is {kind}: only float8_e4m3fn is dequantized")
        return tensor.to(self.dtype)

    def _scale_of(self, name: str) -> str | None:
        """Returns the name of a weight's scales; None if the checkpoint has none."""
        if not name.endswith(".weight"):
            return None
        stem = name.removesuffix("weight")
        for scale in SCALE_NAMES:
            if stem + scale in self:
                return stem + scale
        return None

    def _dequantize(self, name: str, tensor: torch.Tensor, scale_name: str | None) -> torch.Tensor:
        if self.fp8 is None:
            raise WeightsError(
                f"tensor {name} is float8, but config.json has no quantization_config"
            )
        if scale_name is None:
            stem = name.removesuffix("weight")
            expected = " or ".join(stem + scale for scale in SCALE_NAMES)
            raise WeightsError(f"tensor {name} is float8, but {self.folder} has no {expected}")
        return dequantize(name, tensor, self._read(scale_name), self.fp8).to(self.dtype)

    def check_all_taken(self) -> None:
        """Raises UnsupportedModel for a tensor that was not taken: the decoder does not know it."""
        left = sorted(name for name in self._not_taken if not name.endswith(NOT_READ))
        if not left:
            return
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise UnsupportedModel(
            f"tensor {left[0]}{more} in {self.folder} has no place in the model that "
            "config.json describes"
        )

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._shard_of:
            raise WeightsError(f"tensor {name} is missing in {self.folder}")
        self._not_taken.discard(name)
        shard = self._shard_of[name]
        if shard not in self._files:
            self._files[shard] = open_tensor_file(self.folder / shard, framework="pt")
        return self._files[shard].get_tensor(name)


def dequantize(
    name: str, weight: torch.Tensor, scale: torch.Tensor, fp8: Fp8Format
) -> torch.Tensor:
    """Returns float32 [out, in] of an FP8 weight with one scale, one per row, or one per block.

    `name` is for messages. Raises WeightsError when the scales do not fit the weight, and
    UnsupportedModel if the scales are quantized themselves.
    """
    if scale.dtype not in PLAIN_DTYPES:
        raise UnsupportedModel(f"the scales of {name} are {scale.dtype}, not floats")
    wide = weight.float()
    scale = scale.float()
    rows, columns = weight.shape
    if scale.numel() == 1:
        return wide.mul_(scale.reshape(()))
    if fp8.block_shape is None:
        if scale.shape not in ((rows,), (rows, 1)):
            raise _misfit(name, weight, scale, "one per row")
        return wide.mul_(scale.reshape(rows, 1))
    block_rows, block_columns = fp8.block_shape
    blocks = (-(-rows // block_rows), -(-columns // block_columns))
    if scale.shape != blocks:
        expected = f"blocks of {block_rows} x {block_columns} need {list(blocks)}"
        raise _misfit(name, weight, scale, expected)
    # block row by block row: scales spread over the whole weight would double the memory
    for index in range(blocks[0]):
        row_scales = scale[index].repeat_interleave(block_columns)[:columns]
        wide[index * block_rows : (index + 1) * block_rows].mul_(row_scales)
    return wide


def _misfit(name: str, weight: torch.Tensor, scale: torch.Tensor, expected: str) -> WeightsError:
    return WeightsError(
        f"the scales of {name} {list(weight.shape)} are {list(scale.shape)}: {expected}"
    )
