"""Losses of all forms train translated scripts as they train one process, or the translation names them.

Scripts are run as they are and, translated, on 2 and 3 ranks, in float64: parameters may differ by the order of sums.
"""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playing_jobs import left, play

from sirtaki.errors import TranslationError
from sirtaki.integrations.translate import Translation
from sirtaki.integrations.translate import translate as uncached_translate

translate: Callable[[str], Translation] = functools.cache(uncached_translate)

pytestmark = pytest.mark.timeout(600)

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
labels = torch.randint(0, 3, (24,))
data = TensorDataset(torch.randn(24, 4), labels, torch.randn(24, 3), (torch.arange(24) % 5 == 0).double())
table = torch.tensor([0.2, 1.0, 3.0])
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, batch_size=12, shuffle=True)
"""
FOCAL = """\
class Focal(nn.Module):
    def forward(self, out, y):
        each = F.cross_entropy(out, y, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()
focal = Focal()
"""
MASKED = "def masked(each, mask):\n    return (each * mask).sum() / mask.sum().clamp(min=1.0)\n"
EACH = "each = ((out - t) ** 2).mean(1)"
KEEP = f"keep = mask > 0.5; {EACH}"
CENTRED = "a = out[:, 0] - out[:, 0].mean(); b = t[:, 0] - t[:, 0].mean()"

# (in front, loss), separated by `; ` into lines
EQUAL = {
    "cross entropy": ("", "loss = F.cross_entropy(out, y)"),
    "class weights": ("criterion = nn.CrossEntropyLoss(weight=table)\n", "loss = criterion(out, y)"),
    "class weights of a function": ("", "loss = F.cross_entropy(out, y, weight=table, label_smoothing=0.1)"),
    "class weights of a likelihood": ("", "loss = F.nll_loss(F.log_softmax(out, dim=1), y, table)"),
    "an ignored class": ("criterion = nn.CrossEntropyLoss(ignore_index=0)\n", "loss = 0.5 * criterion(out, y)"),
    "ignored targets": ("labels[::5] = -100\n", "loss = F.cross_entropy(out, y)"),
    "weights with probabilities": ("", "loss = F.cross_entropy(out, F.softmax(t, dim=1), weight=table)"),
    "a sum": ("", "loss = F.mse_loss(out, t, reduction='sum') / 50"),
    "a sum by the samples": ("", "loss = F.mse_loss(out, t, reduction='sum') / x.size(0)"),
    "each sample's": ("", f"{EACH}; loss = each.mean()"),
    "a mask's mean": ("", f"{EACH}; loss = (each * mask).sum() / mask.sum()"),
    "a mask's mean that is never by zero": (MASKED, f"{EACH}; loss = masked(each, mask) + 0.1 * out.pow(2).mean()"),
    "a mask's mean by a little more": ("", f"{EACH}; loss = (each * mask).sum() / (mask.sum() + 1e-8)"),
    "what a mask leaves": ("", f"{KEEP}; loss = each[keep].mean()"),
    "a loss of what a mask leaves": ("", "keep = mask > 0.5; loss = F.mse_loss(out[keep], t[keep])"),
    "weights of classes by hand": ("", f"{EACH}; w = table[y]; loss = (each * w).sum() / w.sum()"),
    "weights that are learned": ("", f"{EACH}; w = torch.sigmoid(out[:, 0]); loss = (each * w).sum() / w.sum()"),
    "the root of a mean": ("", "loss = torch.sqrt(F.mse_loss(out, t))"),
    "a correlation": ("", f"{CENTRED}; loss = 1 - (a * b).sum() / (a.pow(2).sum().sqrt() * b.pow(2).sum().sqrt())"),
    "a spread": ("", "loss = F.mse_loss(out, t) - 0.1 * ((out - out.mean(0)) ** 2).mean(0).sqrt().mean()"),
    "a sum and a penalty": ("", "loss = F.mse_loss(out, t, reduction='sum') + model[0].weight.pow(2).sum()"),
    "a module's": (FOCAL, "loss = focal(out, y)"),
    "terms that are added up": ("", "loss = 0.0; loss += F.mse_loss(out, t); loss += 0.1 * out.abs().mean()"),
    "a product with what a mask leaves": ("", f"{KEEP}; loss = F.cross_entropy(out, y) * each[keep].mean()"),
    "a list of terms": ("", "terms = [F.mse_loss(out, t), F.l1_loss(out, t)]; loss = sum(terms) / len(terms)"),
    "picked likelihoods": ("", "loss = -F.log_softmax(out, -1).gather(1, y[:, None]).mean()"),
    "a mean times a count": ("", "loss = F.mse_loss(out, t) * len(x)"),
    "a product": ("", "loss = F.mse_loss(out, t) * F.cross_entropy(out, y)"),
}

NAMED = {
    "in-batch negatives": "z = F.normalize(out); loss = F.cross_entropy(z @ z.t(), torch.arange(len(z)))",
    "distances between samples": "loss = torch.cdist(out, out).mean()",
    "pairs": "loss = (out[None] - out[:, None]).abs().mean()",
    "parts of a sequence of samples": "loss = F.mse_loss(out[:-1], t[1:])",
    "a norm over all samples": "loss = torch.norm(out - t)",
    "what a library has computed": "loss = strange(out, y).loss",
    "mined samples": f"{EACH}; loss = each.topk(3).values.mean()",
    "the largest": f"{EACH}; loss = each.max()",
    "a deviation": "loss = F.mse_loss(out, t) + out.std()",
    "over the samples": "loss = torch.logsumexp(out, dim=0).mean()",
    "other samples' order": "loss = F.mse_loss(out, t[torch.randperm(len(t))])",
    "a function that is not there": "loss = strange(out, t)",
    "halves of a batch": "loss = (out[:2] * out[2:4]).mean()",
    "a reduction that is not known": "loss = F.mse_loss(out, t, reduction=how)",
}


def script(front: str, loss: str, *, accumulate: int = 1, clip: bool = False) -> str:
    lines = ["out = model(x)", *loss.split("; "), f"(loss / {accumulate}).backward()" if accumulate > 1 else ""]
    step = ["nn.utils.clip_grad_norm_(model.parameters(), 1.0)"] * clip + ["optimizer.step()", "optimizer.zero_grad()"]
    if accumulate > 1:
        lines += [f"if (i + 1) % {accumulate} == 0:", *(f"    {line}" for line in step)]
    else:
        lines += ["loss.backward()", *step]
    loop = "".join(f"        {line}\n" for line in lines if line)
    shown = "        print(epoch, loss.item())\n"
    head = "for epoch in range(2):\n    for i, (x, y, t, mask) in enumerate(loader):\n"
    return f"{HEAD}{front}{head}{loop}{shown}"


def drawn(seed: int) -> str:
    """Draw a script with a random loss that can be translated."""
    rng = random.Random(seed)

    def term() -> str:
        each = rng.choice(
            [
                "((out - t) ** 2).sum(1)",
                "F.smooth_l1_loss(out, t, reduction='none').mean(dim=1)",
                "torch.abs(out - t).amax(1)",
                "F.cross_entropy(out, y, reduction='none')",
                "(1 - F.cosine_similarity(out, t))",
            ]
        )
        weight = rng.choice(["mask", "table[y]", "torch.sigmoid(out[:, 1])", "(y != 0).double()"])
        return rng.choice(
            [
                f"{each}.mean()",
                f"{each}.sum() / len(x)",
                f"({each} * {weight}).mean()",
                f"({each} * {weight}).sum() / {weight}.sum()",
                f"({each} * {weight}).sum() / {weight}.sum().clamp(min=1.0)",
                f"{each}[mask > 0.5].mean()",
                f"{each}[mask > 0.5].sum() / (mask > 0.5).sum()",
                f"torch.sqrt({each}.mean() + 0.1)",
                f"torch.log1p({each}.sum())",
                f"0.1 * {each}.sum() / torch.sqrt({weight}.sum() + 1)",
                "F.cross_entropy(out, y, weight=table)",
                "F.nll_loss(F.log_softmax(out, 1), y, ignore_index=1)",
                f"{weight}.sum() / {each}.sum()",
            ]
        )

    parts = [term() for _ in range(rng.randint(1, 3))]
    together = rng.choice([" + ".join(f"{rng.choice([0.3, 1.0])} * {part}" for part in parts), " * ".join(parts)])
    return script("", f"loss = {together}", accumulate=rng.choice([1, 2]), clip=rng.random() < 0.3)


DRAWN = {f"drawn-{seed}": drawn(seed) for seed in range(60)}
SHORT = {name: script(*EQUAL[name]) for name in EQUAL}
LONG = DRAWN | {
    f"{name}-accumulated": script(*EQUAL[name], accumulate=2, clip=number % 2 == 0) for number, name in enumerate(EQUAL)
}


def named(translation: Translation) -> list[int]:
    return [line for line, text in translation.notes if "is not seen to be a mean or sum" in text]


@pytest.mark.lengthy
@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_a_loss_that_can_be_followed_is_promised(name: str) -> None:
    assert named(translate((SHORT | LONG)[name])) == []


@pytest.mark.lengthy
@pytest.mark.parametrize("name", NAMED)
def test_a_loss_that_mixes_samples_or_is_unknown_is_named_with_its_line(name: str) -> None:
    text = script("", NAMED[name])
    (line,) = named(translate(text))
    assert text.splitlines()[line - 1].strip() == "loss.backward()"


def test_a_sum_over_samples_to_which_something_else_is_added_later_is_refused() -> None:
    text = script("", "loss = F.mse_loss(out, t, reduction='sum'); loss += model[0].weight.pow(2).sum()")
    with pytest.raises(TranslationError, match="line 18: adds to a sum over samples what is none"):
        translate(text)


def _played(folder: Path, scripts: dict[str, str], mpiexec: list[str]) -> Callable[[str, int], dict[str, Any]]:
    """Return a function that runs scripts on demand, original ones in one process and translated ones on ranks."""
    files = {name: f"{number}.py" for number, name in enumerate(scripts)}

    @functools.cache
    def results(ranks: int) -> Path:
        code = folder / f"code-{ranks}"
        code.mkdir()
        for name, text in scripts.items():
            (code / files[name]).write_text(text if ranks == 1 else translate(text).after)
        play(folder / str(ranks), ranks, [code / file for file in files.values()], mpiexec)
        return folder / str(ranks)

    return lambda name, ranks: left(results(ranks), files[name].removesuffix(".py"), 0)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, mpiexec: list[str]) -> Callable[[str, int], dict[str, Any]]:
    return _played(tmp_path_factory.mktemp("short"), SHORT, mpiexec)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory, mpiexec: list[str]) -> Callable[[str, int], dict[str, Any]]:
    return _played(tmp_path_factory.mktemp("long"), LONG, mpiexec)


def check(played: Callable[[str, int], dict[str, Any]], name: str, ranks: int) -> None:
    before, after = played(name, 1), played(name, ranks)
    assert before["trained"]
    for now, then in zip(after["trained"], before["trained"], strict=False):
        assert now.numpy() == pytest.approx(then.numpy(), rel=1e-9, abs=1e-11)
    assert [float(word) for word in after["printed"].split()] == pytest.approx(
        [float(word) for word in before["printed"].split()], rel=1e-9
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.integration)])
@pytest.mark.parametrize("name", SHORT)
def test_translated_losses_train_and_print_like_one_process(
    short: Callable[[str, int], dict[str, Any]], name: str, ranks: int
) -> None:
    check(short, name, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", LONG)
def test_a_drawn_loss_or_one_that_is_accumulated_trains_as_one_process_does(
    long: Callable[[str, int], dict[str, Any]], name: str, ranks: int
) -> None:
    check(long, name, ranks)
