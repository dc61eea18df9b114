import pytest
from training_loops import HEAD

from sirtaki.errors import TranslationError
from sirtaki.translate import translate


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import torch\nprint(1)\n", "nowhere is `backward"),
        (HEAD.replace("torch.optim.SGD(model.parameters(), lr=0.1)", "make()"), "no optimizer"),
        (f"import lightning\n{HEAD}", "Lightning has its own ways"),
        (f"{HEAD}exec('1')\n", "cannot look into"),
        (f"import torch.multiprocessing as mp\n{HEAD}mp.spawn(f)\n", "starts or divides work itself"),
        (HEAD.replace("import torch\n", "", 1), "`import torch` is missing"),
    ],
)
def test_what_cannot_be_is_said(code: str, reason: str) -> None:
    with pytest.raises(TranslationError, match=reason):
        translate(code)


@pytest.mark.parametrize(
    "ending",
    [
        "if time.time() - begun > 60:\n            break",
        "spent = time.time() - begun\n        if spent > 60:\n            break",
    ],
)
def test_training_that_ends_by_the_clock_is_refused(ending: str) -> None:
    with pytest.raises(TranslationError, match="each by its own clock"):
        translate(f"import time\nbegun = time.time()\n{HEAD}        {ending}\n")


def test_clocks_that_decide_nothing_are_not_in_the_way() -> None:
    code = f"import time\nbegun = time.time()\n{HEAD}took = time.time() - begun\nif took > 60:\n    print(took)\n"
    assert "hvd.init()" in translate(code).after
