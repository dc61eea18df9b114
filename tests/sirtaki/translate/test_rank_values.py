import pytest
from training_loops import added

from sirtaki.errors import TranslationError


def test_a_sum_that_nobody_reads_in_the_loop_is_put_together_behind_it() -> None:
    assert added("total += loss.item()") == ["total = ranks.average(total)"]
    assert added("total += loss.item() * x.size(0)") == ["total = ranks.total(total)"]
    assert added("total += (model(x).argmax(1) == y).sum().item()") == ["total = ranks.total(total)"]


def test_a_sum_that_is_read_in_the_loop_is_put_together_each_time() -> None:
    assert added("total += loss.item()\nif total > 9:\n    break") == ["total += ranks.average(loss.item())"]


def test_a_sum_over_epochs_is_not_put_together_twice() -> None:
    lines = added("everything += loss.item()", before="everything = 0.0\n")
    assert lines == ["everything += ranks.average(loss.item())"]


def test_what_a_loss_is_made_of_is_left_alone() -> None:
    assert added("extra = 0.0\nextra += F.mse_loss(model(x), x)\nextra.backward()")[-1].startswith("optimizer = ")


def test_a_decision_that_ranks_may_take_differently_is_refused() -> None:
    with pytest.raises(TranslationError, match=r"line 14: ranks may decide differently"):
        added("if x.max() > 3:\n    continue")


def test_what_cannot_be_told_a_mean_from_a_sum_is_refused() -> None:
    with pytest.raises(TranslationError, match=r"cannot tell whether `x\.abs"):
        added("total += x.abs().max().item()")


def test_each_branch_is_followed() -> None:
    lines = added("if epoch:\n    shown = loss\nelse:\n    shown = 0 * loss\nprint(shown)")
    assert lines[-1] == "print(ranks.average(shown))"


def test_each_return_of_a_function_counts() -> None:
    first, last = "    if n == 0:\n        return n\n", "    return n\n"
    function = f"def shown(loss, n):\n{first}    if n == 1:\n        return loss.item()\n{last}"
    assert added("print(shown(loss, epoch))", before=function)[-1] == "print(ranks.average(shown(loss, epoch)))"
