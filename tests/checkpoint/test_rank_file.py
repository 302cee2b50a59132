"""A rank's file holds every type and shape, and a damaged or forged one is an ``InputError``."""

import json

import pytest
import torch

from gnnpipe.checkpoint.rank_file import checksum_of, read_header, write_rank_file
from gnnpipe.errors import InputError

TENSORS = {
    "weight/a": torch.arange(12.0).view(3, 4).t(),  # not contiguous
    "optimizer/a/step": torch.tensor(3.0),
    "rows/none/0": torch.empty(0, 8),
    "rows/view/0": torch.randn(1000, 7, dtype=torch.float64)[:500],
    "half": torch.randn(5).to(torch.bfloat16),
    "draws/0": torch.arange(9, dtype=torch.uint8),
    "is": torch.tensor([True, False]),
    "vertices/0": torch.arange(5),
}


def test_tensors_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "rank-0.safetensors"
    assert write_rank_file(path, TENSORS) == checksum_of(path)
    stored = read_header(path)
    assert stored.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        found = stored[name].read()
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor), name
        assert stored[name].offset % tensor.itemsize == 0, "libraries of the format map the file"
    assert path.stat().st_size < sum(t.nbytes for t in TENSORS.values()) + 2000, "views alone"


def test_a_type_without_a_name_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"a is torch.complex64, which a checkpoint cannot hold"):
        write_rank_file(tmp_path / "file", {"a": torch.ones(1, dtype=torch.complex64)})


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"data_offsets": [0, 400]}, "is not described"),
        ({"data_offsets": [4, 12], "shape": [2]}, "cut short"),
        ({"data_offsets": [-8, 0]}, "is not described"),
        ({"data_offsets": [0]}, "cannot be read"),
        ({"shape": [1 << 80], "data_offsets": [0, 1 << 82]}, "cut short"),
        ({"shape": [-1, -2]}, "is not described"),
        ({"shape": [True, 2]}, "is not described"),
        ({"shape": 2}, "cannot be read"),
        ({"dtype": "F31"}, "cannot be read"),
        (3, "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_forged_header_is_refused(entry, text, tmp_path):
    path = tmp_path / "rank-0.safetensors"
    sound = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = {"a": sound | entry} if isinstance(entry, dict) else {"a": entry}
    content = json.dumps(header if entry is not None else [1]).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    with pytest.raises(InputError, match=text):
        read_header(path)


def test_an_empty_tensor_of_a_size_that_no_tensor_has(tmp_path):
    path = tmp_path / "rank-0.safetensors"
    content = json.dumps({"a": {"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]}})
    path.write_bytes(len(content).to_bytes(8, "little") + content.encode())
    with pytest.raises(InputError, match="cannot be read"):
        read_header(path)["a"].read()
