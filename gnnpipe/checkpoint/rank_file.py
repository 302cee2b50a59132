"""One rank's part of a checkpoint: a file of tensors in the safetensors format.

A file holds the length of the header (8 bytes, little endian), the header (JSON: dtype, shape and
place of each tensor by name), and the bytes of the tensors. Nothing in a file can run code, and
tensors are written and read one by one, without a copy of them all
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gnnpipe.errors import InputError
from gnnpipe.files import open_plain

RANK_FILE_END = ".safetensors"
MAX_HEADER_BYTES = 1 << 28
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Place of one tensor on disk."""

    path: Path
    offset: int
    """Position of the first byte in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Return the tensor, on the CPU."""
        try:
            tensor = torch.empty(self.shape, dtype=self.dtype)
            with open_plain(self.path) as file:
                file.seek(self.offset)
                count = file.readinto(_bytes_of(tensor))
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise InputError(f"{self.path}: cannot be read ({error})") from None
        if count != tensor.nbytes:
            raise InputError(f"{self.path}: is cut short")
        return tensor


def write_rank_file(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write ``tensors`` to the new file ``path``, down to its disk; return the SHA-256 of the file.

    Raises ``OSError`` for a fault of the disk, ``TypeError`` for a type without a name in the
    format.
    """
    # The largest items first, so that every tensor starts at a multiple of its item size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header, end = {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is {tensor.dtype}, which a checkpoint cannot hold")
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for data in (len(text).to_bytes(8, "little"), text):
            file.write(data)
            digest.update(data)
        for _, tensor in ordered:
            view = _bytes_of(tensor.detach().cpu().contiguous())
            file.write(view)
            digest.update(view)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name; ``InputError`` if the header does not fit the file."""
    try:
        with open_plain(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length).decode())
            size_bytes = path.stat().st_size
        found = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
            is_plain = all(type(n) is int and n >= 0 for n in (start, end, *shape))
            if not is_plain or math.prod(shape) * dtype.itemsize != end - start:
                raise ValueError(f"{name!r} is not described as it should be")
            if 8 + length + end > size_bytes:
                raise ValueError(f"cut short, {name!r} is not in it")
            found[name] = StoredTensor(path, 8 + length + start, dtype, shape)
        return found
    except (OSError, LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def checksum_of(path: Path) -> str:
    """Return the SHA-256 of a file; raise ``OSError`` or ``ValueError`` if it cannot be read."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data
