import pytest
from training_loops import HEAD, added

from sirtaki.errors import TranslationError
from sirtaki.translate import translate


def test_an_optimizer_is_wrapped_behind_where_it_is_made() -> None:
    after = translate(HEAD).after
    assert (
        """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""
        in after
    )


def test_gradients_are_reduced_before_they_are_read() -> None:
    code = HEAD.replace(
        "        optimizer.step()",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()",
    )
    assert (
        """\
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
"""
        in translate(code).after
    )


def test_gradients_that_are_read_in_the_line_of_the_step_are_refused() -> None:
    line = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()"
    with pytest.raises(TranslationError, match="put it on a line of its own"):
        translate(HEAD.replace("optimizer.step()", line))


def test_accumulated_gradients_are_reduced_at_the_step() -> None:
    lines = added("total += 1\nloss.backward()")
    assert any("backward_passes_per_step=1_000_000" in line for line in lines)


def test_gradients_of_sums_are_summed() -> None:
    assert "op=hvd.Sum)" in translate(HEAD.replace("model(x), y)", 'model(x), y, reduction="sum")')).after


def test_parameters_of_nobody_are_refused() -> None:
    with pytest.raises(TranslationError, match=r"line 6: cannot tell whose parameters"):
        translate(HEAD.replace("model.parameters()", "get()"))
