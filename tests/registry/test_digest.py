"""Digests are equal in every process, and differ where anything does."""

import math
import subprocess
import sys

import pytest

from sirtaki.registry.graph import canonical_json, digest, gradients_fingerprint, layout_fingerprint


def test_where_a_part_ends_counts() -> None:
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")
    assert digest("ab", "c") != digest("ab", "c", "")
    assert digest() != digest("")
    assert digest("1:a") != digest("a")
    assert len(digest("x")) == 64


def test_any_text_has_a_digest() -> None:
    assert digest("Réseau") != digest("Reseau")
    assert digest("\ud800") != digest("\ud801")  # no valid UTF-8, as names of files may be
    assert digest("é") != digest("Ã©")


def test_digests_do_not_change_from_process_to_process_nor_from_release_to_release() -> None:
    # Entries of earlier releases are found by them.
    assert digest("key", "a")[:16] == "c04202bff8d9b8ca"
    assert layout_fingerprint([3, 5, 7], 4) == "96983cb03d5d00a34fd2ed103f5a2f82"
    assert gradients_fingerprint([("float32", [3, 1, 2])]) == "d88c3e263b366f25eef5e5a383716f4f"
    script = "from sirtaki.registry.graph import *; print(layout_fingerprint({3, 5, 7}, 4)[:8], digest('key', 'a'))"
    runs = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env).stdout
        for env in ({"PYTHONHASHSEED": "1", "PYTHONPATH": "."}, {"PYTHONHASHSEED": "2", "PYTHONPATH": "."})
    }
    assert len(runs) == 1


def test_one_json_value_has_one_text() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5,null]}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            canonical_json([number])


def test_gradients_have_one_fingerprint_in_whatever_order_they_come() -> None:
    one = gradients_fingerprint([("float32", [3, 1, 2]), ("float16", [7])])
    assert one == gradients_fingerprint([("float16", [7]), ("float32", [1, 2, 3])])
    assert len(one) == 32
    for other in (
        [("float32", [3, 1, 2])],
        [("float32", [3, 1]), ("float16", [7])],
        [("float32", [3, 1, 2, 2]), ("float16", [7])],
        [("float16", [3, 1, 2]), ("float32", [7])],
        [("float32", [31, 2]), ("float16", [7])],
    ):
        assert gradients_fingerprint(other) != one


def test_a_layouts_fingerprint_knows_order_and_size_of_elements() -> None:
    one = layout_fingerprint([1, 2, 3], 4)
    assert one == layout_fingerprint((size for size in (1, 2, 3)), 4)
    assert len(one) == 32
    assert (
        len({one, layout_fingerprint([1, 3, 2], 4), layout_fingerprint([1, 2, 3], 2), layout_fingerprint([12, 3], 4)})
        == 4
    )
