"""Digests that are equal in every process, on every rank and machine: no `hash()`, no order of sets."""

import hashlib
import json
from collections.abc import Iterable


def digest(*parts: str) -> str:
    """SHA-256 of the parts, in hexadecimal; where one ends and the next begins counts."""
    sha = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        sha.update(b"%d:" % len(raw))
        sha.update(raw)
    return sha.hexdigest()


def canonical_json(data: object) -> str:
    """The one text of a JSON value: sorted keys, no spaces. NaN and infinity are refused (ValueError)."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def gradients_fingerprint(buffers: Iterable[tuple[str, Iterable[int]]]) -> str:
    """A digest of which gradients a job reduces, in whatever order they come: dtype and sizes of each flat buffer."""
    return digest("gradients", *sorted(canonical_json([dtype, sorted(sizes)]) for dtype, sizes in buffers))[:32]


def layout_fingerprint(sizes: Iterable[int], itemsize_bytes: int) -> str:
    """A digest of a gradient layout: explicit cuts fit a layout of equal fingerprint and no other."""
    return digest("layout", str(itemsize_bytes), *map(str, sizes))[:32]
