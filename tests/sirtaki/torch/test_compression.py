"""Compressed tensors are decompressed correctly, and incompressible ones are unchanged."""

import pytest
import torch

from sirtaki.torch.compression import Compression, Compressor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (torch.int8, torch.int64, torch.bool, torch.complex64)


def there_and_back(compressor: type[Compressor], tensor: torch.Tensor) -> tuple[torch.dtype, torch.Tensor]:
    """Return the dtype that is sent, and the decompressed tensor."""
    wire, context = compressor.compress(tensor)
    assert wire.shape == tensor.shape
    return wire.dtype, compressor.decompress(wire, context)


@pytest.mark.parametrize(
    ("compressor", "wire"),
    [(Compression.none, None), (Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)],
)
@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
def test_floats_are_sent_in_two_bytes_on_request_and_nothing_else_changes(
    compressor: type[Compressor], wire: torch.dtype | None, dtype: torch.dtype
) -> None:
    for tensor in (torch.tensor([[1, 0, 1], [1, 0, 0]]).to(dtype).t(), torch.empty(0, 3, dtype=dtype)):
        travelled, back = there_and_back(compressor, tensor)
        assert travelled is (wire if wire is not None and dtype in FLOATS else dtype)
        assert back.dtype is dtype
        assert torch.equal(back, tensor)


def test_the_two_give_up_different_things() -> None:
    large, fine = torch.tensor([1e30]), torch.tensor([1.0 + 2**-9])
    assert torch.isinf(there_and_back(Compression.fp16, large)[1])
    assert there_and_back(Compression.bf16, large)[1].item() == pytest.approx(1e30, rel=0.01)
    assert torch.equal(there_and_back(Compression.fp16, fine)[1], fine)
    assert not torch.equal(there_and_back(Compression.bf16, fine)[1], fine)


def test_the_base_is_nothing_to_use() -> None:
    with pytest.raises(NotImplementedError):
        Compressor.compress(torch.ones(1))
    with pytest.raises(NotImplementedError):
        Compressor.decompress(torch.ones(1), None)
