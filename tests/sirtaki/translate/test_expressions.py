import pytest
from training_loops import added


@pytest.mark.parametrize(
    ("shown", "becomes"),
    [
        ("loss.item()", "ranks.average(loss.item())"),
        ("2 * loss", "ranks.average(2 * loss)"),
        ("f'{loss.item():.3f}'", "f'{ranks.average(loss.item()):.3f}'"),
        ("'%d %f' % (epoch, loss)", "'%d %f' % (epoch, ranks.average(loss))"),
        ("x.size(0)", "ranks.total(x.size(0))"),
        ("[loss.item(), 1]", "[ranks.average(loss.item()), 1]"),
        ("y.sum().item() / len(y)", "ranks.average(y.sum().item() / len(y))"),
    ],
)
def test_the_largest_part_that_is_a_mean_or_a_sum_is_put_together(shown: str, becomes: str) -> None:
    assert f"print({becomes})" in added(f"print({shown})")


@pytest.mark.parametrize("test", ["x.shape[1] == 4", "x.dim() == 2", "isinstance(x, list)", "x is None"])
def test_the_structure_of_a_batch_is_the_same_on_all_ranks(test: str) -> None:
    assert added(f"if {test}:\n    continue") == []


def test_a_batch_that_is_not_complete_is_so_for_all() -> None:
    assert added("if x.shape[0] < 8:\n    continue") == ["if ranks.total(x.shape[0]) < 8:"]
