import pytest

from sirtaki.errors import LaunchError
from sirtaki.run.call import answer_call, leave_call, take_result


def test_a_call_goes_out_and_each_ranks_result_comes_back(tmp_path):
    leave_call(tmp_path, sorted, ([2, 3, 1],), {"reverse": True})
    for rank in range(2):
        answer_call(tmp_path, rank)
        assert take_result(tmp_path, rank) == [3, 2, 1]


def test_a_missing_result_says_that_the_folder_must_be_shared(tmp_path):
    with pytest.raises(LaunchError, match=r"no result of rank 1 .* TMPDIR"):
        take_result(tmp_path, 1)
