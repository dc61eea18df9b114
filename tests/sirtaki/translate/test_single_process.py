import pytest
from training_loops import HEAD, added

from sirtaki.errors import TranslationError
from sirtaki.translate import translate


def test_only_what_is_trained_on_is_divided() -> None:
    after = translate(HEAD).after
    assert "loader, test = ranks.divided(DataLoader(data, batch_size=8, shuffle=True)), DataLoader(others" in after
    assert "    loader.sampler.set_epoch(epoch)\n    for x, y in loader:\n" in after


def test_other_loops_see_all_data_and_agree_on_what_they_count() -> None:
    lines = added(behind="hits = 0\nfor x, y in loader:\n    hits += (model(x).argmax(1) == y).sum().item()")
    assert lines == ["for x, y in ranks.whole(loader):", "hits = ranks.agreed(hits)"]


def test_passes_are_counted_where_no_epoch_is() -> None:
    after = translate(HEAD.replace("for epoch in range(3)", "while True")).after
    assert "loader.sampler.set_epoch(loader.sampler.epoch + 1)" in after


def test_unseeded_ranks_agree_on_a_seed() -> None:
    assert "torch.manual_seed(ranks.agreed(torch.initial_seed()))" in translate(HEAD).after
    assert "initial_seed" not in translate(HEAD + "torch.manual_seed(0)\n").after


@pytest.mark.parametrize("options", ["batch_sampler=own", "shuffle=True", "batch_size=1"])
def test_loaders_without_batches_to_divide_are_refused(options: str) -> None:
    with pytest.raises(TranslationError, match=r"line 7: .*cannot be divided"):
        translate(HEAD.replace("batch_size=8, shuffle=True", options))


def test_a_tensor_of_as_many_rows_as_all_ranks_have_is_refused() -> None:
    code = HEAD.replace("batch_size=8", "batch_size=size").replace(
        "loss = ", "noise = torch.randn(size, 4)\n        loss = "
    )
    with pytest.raises(TranslationError, match="take that of the data"):
        translate(code)
