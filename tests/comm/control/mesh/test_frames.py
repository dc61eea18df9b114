import pytest

from sirtaki.comm.control.mesh_links import HEADER_BYTES, MAX_PAYLOAD_BYTES, Header, Kind, decode, encode
from sirtaki.errors import CommError


def test_a_header_survives_its_way() -> None:
    header = encode(Kind.POST, context=2**64 - 1, sequence=2**32 - 1, tag=7, length=MAX_PAYLOAD_BYTES)
    assert len(header) == HEADER_BYTES
    expected = Header(Kind.POST, 7, 2**32 - 1, 2**64 - 1, MAX_PAYLOAD_BYTES)
    assert decode(bytearray(b"xx" + header), 2) == expected


@pytest.mark.parametrize(
    "wrong", [b"GET / HTTP/1.1\r\nHost: sirtaki\r\n", encode(Kind.DATA, length=MAX_PAYLOAD_BYTES + 1)]
)
def test_what_is_no_frame_is_refused_before_anything_is_allocated(wrong: bytes) -> None:
    with pytest.raises(CommError, match="no frame"):
        decode(bytearray(wrong), 0)
