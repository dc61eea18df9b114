"""Codecs of compressed gradients, and what a rank owes; test_compressed.py trains with them."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.comm.compress import Blockwise, Codec, Feedback, PowerSgd, Quantised, Rounded, TopK, codec_of, scheme_of
from sirtaki.comm.plan import compressor_name
from sirtaki.errors import ConfigError

CODECS = [Blockwise(), Blockwise(torch.float8_e4m3fn), Blockwise(block=7)]
FINEST = {torch.int8: 1 / 254, torch.float8_e4m3fn: 1 / 16}
"""Largest error of a number, relative to its block's largest value; for float8, relative to the number."""


@pytest.mark.parametrize("codec", CODECS)
@given(count=st.integers(0, 700), seed=st.integers(0, 99), decades=st.integers(-30, 30))
def test_decoded_numbers_are_close_to_the_originals(codec: Blockwise, count: int, seed: int, decades: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 10.0**decades
    packed = codec.pack(values)
    assert packed.dtype is torch.uint8
    assert packed.numel() == count + 4 * math.ceil(count / codec.block) == codec.pack(torch.zeros(count)).numel()
    there = torch.cat([torch.zeros(1, dtype=torch.uint8), packed])[1:]  # as it lies in a message, at any address
    back = codec.unpack(there, count)
    for block, restored in zip(values.split(codec.block), back.split(codec.block), strict=True):
        if block.numel():
            assert (restored - block).abs().max() <= 1.01 * FINEST[codec.dtype] * block.abs().max()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_numbers_stay_non_finite_and_affect_only_their_block(codec: Blockwise, value: float) -> None:
    values = torch.ones(3 * codec.block)
    values[codec.block + 1] = value
    back = codec.unpack(codec.pack(values), values.numel())
    assert not back[codec.block + 1].isfinite()
    assert torch.equal(back[: codec.block], torch.ones(codec.block))
    assert torch.equal(back[2 * codec.block :], torch.ones(codec.block))


def test_numbers_too_small_to_divide_by_are_decoded_as_zeros() -> None:
    values = torch.full((300,), 1e-42)
    assert not Blockwise().unpack(Blockwise().pack(values), 300).any()


ENCODED = {"int8": "1d1c4624cb0c", "fp8": "20177d9ffaac", "fp16": "cf8c49abd5d0", "bf16": "835705fe7f70"}
"""Hashes of encoded and decoded numbers before rows could be encoded together."""


@pytest.mark.parametrize("name", ENCODED)
def test_encodings_are_those_of_earlier_releases_and_the_same_for_rows_together(name: str) -> None:
    digest, codec = hashlib.sha256(), codec_of(name)
    assert isinstance(codec, Blockwise | Rounded)
    for count in (1, 255, 256, 5003):
        index = torch.arange(count)
        values = ((index * 7919) % 10007 - 5003).float() / 256 * 2.0 ** (index % 13)
        packed = codec.pack(values)
        decoded = codec.unpack(packed, count)
        digest.update(packed.numpy().tobytes() + decoded.numpy().tobytes())
        rows = torch.stack([values, -values, values.flip(0)])
        together = codec.pack(rows)
        assert torch.equal(together, torch.stack([codec.pack(row) for row in rows]))
        assert torch.equal(codec.unpack(together, count), torch.stack([codec.unpack(row, count) for row in together]))
        assert torch.equal(codec.unpack(together[1:2], count)[0], codec.unpack(together[1], count))
    assert digest.hexdigest().startswith(ENCODED[name])


def test_an_object_with_the_two_methods_is_a_codec() -> None:
    assert isinstance(Blockwise(), Codec)
    assert not isinstance(object(), Codec)


def test_residuals_are_kept_where_they_fit() -> None:
    before, now = Feedback(), Feedback()
    before.residuals |= {"kept": torch.ones(3), "other shape": torch.ones(2), "gone": torch.ones(1)}
    before.factors["kept[0:]"] = torch.ones(2, 1)
    now.residuals |= {"kept": torch.zeros(3), "other shape": torch.full((4,), 5.0), "new": torch.full((2,), 5.0)}
    lying = now.residuals["kept"]  # in a flat buffer, which is written in place
    now.load_state_dict(before.state_dict())
    before.residuals["kept"].zero_()
    assert torch.equal(lying, torch.ones(3))
    assert not now.residuals["other shape"].any()
    assert not now.residuals["new"].any()
    assert torch.equal(now.residuals["gone"], torch.ones(1))
    assert torch.equal(now.factors["kept[0:]"], torch.ones(2, 1))


@pytest.mark.parametrize("wrong", [lambda: TopK(0.0), lambda: TopK(1.5), lambda: TopK(math.nan), lambda: PowerSgd(0)])
def test_parts_and_ranks_out_of_range_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_numbers_are_within_half_a_digit_and_too_large_ones_saturate(dtype: torch.dtype) -> None:
    codec, largest = Rounded(dtype), torch.finfo(dtype).max
    values = torch.tensor([1.2345678, -3e-3, 7e4, -3e38, math.inf, -math.inf, math.nan])
    packed = codec.pack(values)
    assert packed.numel() == 2 * values.numel()
    back = codec.unpack(torch.cat([torch.zeros(1, dtype=torch.uint8), packed])[1:], values.numel())
    torch.testing.assert_close(back[:4], values[:4].clamp(-largest, largest), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert back[4:6].tolist() == [math.inf, -math.inf]
    assert back[6].isnan()


def test_codecs_have_one_name_each() -> None:
    names = {"TopK": "topk:0.01", " topk:.10": "topk:0.1", "powersgd": "powersgd:4", "PowerSGD:2": "powersgd:2"}
    assert {text: compressor_name(text) for text in names} == names
    assert scheme_of("topk:0.1") == TopK(0.1)
    assert scheme_of("powersgd:2") == PowerSgd(2)
    assert scheme_of("int8") == Quantised()
    assert {scheme_of(name) for name in ("fp16", "bf16", "fp8")} == {
        Quantised(Rounded(torch.float16)),
        Quantised(Rounded(torch.bfloat16)),
        Quantised(Blockwise(torch.float8_e4m3fn)),
    }


@pytest.mark.parametrize("text", ["int4", "", "int8:2", "topk:0", "topk:nan", "topk:", "topk:1.5", "powersgd:0.5"])
def test_an_unknown_codec_is_rejected_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="the compressor must be one of fp16, bf16, int8, fp8"):
        compressor_name(text)
