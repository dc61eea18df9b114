"""What travels smaller comes back as it was, and what cannot be made smaller is left alone."""

import pytest
import torch

from sirtaki.torch.compression import Compression, Compressor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (torch.int8, torch.int64, torch.bool, torch.complex64)


def there_and_back(compressor: type[Compressor], tensor: torch.Tensor) -> tuple[torch.dtype, torch.Tensor]:
    """The dtype on the wire, and what comes out."""
    wire, context = compressor.compress(tensor)
    assert wire.shape == tensor.shape
    return wire.dtype, compressor.decompress(wire, context)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
def test_nothing_is_done_where_nothing_is_asked_for(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3).to(dtype)
    assert there_and_back(Compression.none, tensor)[1] is tensor


@pytest.mark.parametrize(
    ("compressor", "wire"), [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)]
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_travel_in_two_bytes(compressor: type[Compressor], wire: torch.dtype, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.0, -0.5], [0.0, 256.0]], dtype=dtype)
    travelled, back = there_and_back(compressor, tensor)
    assert travelled is wire
    assert back.dtype is dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("compressor", [Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("dtype", OTHERS)
def test_what_is_no_float_travels_as_it_is(compressor: type[Compressor], dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 0, 1]).to(dtype)
    travelled, back = there_and_back(compressor, tensor)
    assert travelled is dtype
    assert torch.equal(back, tensor)


def test_the_two_give_up_different_things() -> None:
    large, fine = torch.tensor([1e30]), torch.tensor([1.0 + 2**-9])
    assert torch.isinf(there_and_back(Compression.fp16, large)[1])
    assert there_and_back(Compression.bf16, large)[1].item() == pytest.approx(1e30, rel=0.01)
    assert torch.equal(there_and_back(Compression.fp16, fine)[1], fine)
    assert not torch.equal(there_and_back(Compression.bf16, fine)[1], fine)


def test_empty_and_strided_tensors_keep_their_shape() -> None:
    for tensor in (torch.empty(0, 3), torch.arange(6.0).reshape(2, 3).t(), torch.tensor(2.0)):
        assert torch.equal(there_and_back(Compression.fp16, tensor)[1], tensor)


def test_the_base_is_nothing_to_use() -> None:
    with pytest.raises(NotImplementedError):
        Compressor.compress(torch.ones(1))
    with pytest.raises(NotImplementedError):
        Compressor.decompress(torch.ones(1), None)
