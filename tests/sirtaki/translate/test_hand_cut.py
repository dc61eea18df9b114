import pytest
from training_loops import HEAD

from sirtaki.errors import TranslationError
from sirtaki.translate import translate

CUT = """\
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.MSELoss()
for epoch in range(3):
    order = torch.randperm(len(X))
    for i in range(0, len(X), 8):
        chosen = order[i : i + 8]
        loss = criterion(model(X[chosen]), Y[chosen])
        loss.backward()
        optimizer.step()
        print(loss.item())
"""


def test_slices_of_a_loop_are_divided_and_permutations_agreed_on() -> None:
    after = translate(CUT).after
    assert "order = ranks.agreed(torch.randperm(len(X)))" in after
    assert "chosen = ranks.share(order[i : i + 8])" in after
    assert "print(ranks.average(loss.item()))" in after


def test_draws_are_divided() -> None:
    after = translate(CUT.replace("order[i : i + 8]", "torch.randint(len(X), (8,))")).after
    assert "chosen = ranks.share(torch.randint(len(X), (8,)))" in after


def test_parts_of_a_permutation_are_divided() -> None:
    cut = CUT.replace("for i in range(0, len(X), 8):", "for chosen in order.split(8):").replace(
        "        chosen = order[i : i + 8]\n", ""
    )
    assert "for chosen in map(ranks.share, order.split(8)):" in translate(cut).after


def test_a_whole_set_is_divided_where_it_is_used() -> None:
    whole = CUT.replace("X[chosen]", "X").replace("Y[chosen]", "Y").replace("        chosen = order[i : i + 8]\n", "")
    assert "loss = criterion(model(ranks.share(X)), ranks.share(Y))" in translate(whole).after


def test_a_loader_that_nobody_is_seen_to_train_on_is_refused() -> None:
    with pytest.raises(TranslationError, match="cannot see which loop trains on this loader"):
        translate(HEAD.replace("for x, y in loader:", "for x, y in strange(loader)():"))


def test_batches_that_are_not_found_are_refused() -> None:
    with pytest.raises(TranslationError, match="cannot find the loader"):
        translate(CUT.replace("X[chosen]", "make()").replace("Y[chosen]", "make()").replace("order[i : i + 8]", "0"))
