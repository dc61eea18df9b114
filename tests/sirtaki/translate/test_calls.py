from training_loops import added


def test_numbers_are_put_together_where_something_keeps_them() -> None:
    lines = added("kept.append(loss.item())", before="kept = []\n")
    assert lines == ["kept.append(ranks.average(loss.item()))"]


def test_numbers_are_put_together_before_a_class_of_the_script_keeps_them() -> None:
    meter = "class Meter:\n    def update(self, value, n):\n        self.value = value * n\nmeter = Meter()\n"
    lines = added("meter.update(loss.item(), x.size(0))", before=meter)
    assert lines == ["meter.update(ranks.average(loss.item()), ranks.total(x.size(0)))"]


def test_functions_of_the_script_are_followed_inside() -> None:
    lines = added(
        "print(accuracy(model(x), y))", before="def accuracy(a, b):\n    return (a.argmax(1) == b).float().mean()\n"
    )
    assert lines[-1] == "print(ranks.average(accuracy(model(x), y)))"


def test_a_reduction_says_what_a_loss_is_over_a_batch() -> None:
    lines = added("print(F.mse_loss(model(x), x, reduction='sum').item())")
    assert lines[-1] == "print(ranks.total(F.mse_loss(model(x), x, reduction='sum').item()))"
