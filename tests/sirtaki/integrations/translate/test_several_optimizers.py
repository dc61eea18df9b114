"""Backward passes that reach parameters of an optimizer that does not step, and optimizers made in expressions.

Each script trains on 2 ranks as it does in one process, in float64, or is refused with a line and a reason.
"""

import re
from pathlib import Path

import pytest
from playing_jobs import left, play

from sirtaki.errors import TranslationError
from sirtaki.integrations.translate import translate
from sirtaki.integrations.translate.source import undefined_names

pytestmark = pytest.mark.timeout(600)

HEAD = """\
import functools
import numpy as np
import itertools
import torch
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(36, 5), torch.randn(36, 3))
loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
maker, critic = nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
"""
PLAIN = """\
maker_step = torch.optim.SGD(maker.parameters(), lr=0.05)
critic_step = torch.optim.SGD(critic.parameters(), lr=0.05)
"""
ADAM = PLAIN.replace("SGD", "Adam").replace("0.05", "0.01")
LOOP = "for epoch in range(2):\n    for i, (real, noise) in enumerate(loader):\n        made = maker(noise)\n"
TAIL = 'print("sum", sum(p.abs().sum().item() for net in (maker, critic) for p in net.parameters()))\n'
CRITICS = "(critic(made.detach()).mean() - critic(real).mean() + 0.1 * critic(real).square().mean()).backward()"
MAKERS = "(-critic(made).mean()).backward()"
BY_MODULE = f"critic.zero_grad(); {CRITICS}; critic_step.step(); maker.zero_grad(); {MAKERS}; maker_step.step()"
SUMS = "(critic(made.detach()).sum() - critic(real).sum()).backward()"
SLOPE = "slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]"


def script(body: str, optimizers: str = PLAIN, before: str = "") -> str:
    """`body`: lines of the loop, separated by `; `."""
    return f"{HEAD}{optimizers}{before}{LOOP}{''.join(f'        {line}' + chr(10) for line in body.split('; '))}{TAIL}"


def made_by(lines: str) -> str:
    return script(BY_MODULE, lines)


ALIKE = {
    "module.zero_grad()": script(BY_MODULE),
    "optimizer.zero_grad()": script(BY_MODULE.replace(".zero_grad", "_step.zero_grad"), ADAM),
    "gradients are cleared by hand": script(
        f"for p in critic.parameters():;     p.grad = None; {CRITICS}; critic_step.step(); "
        f"for p in maker.parameters():;     if p.grad is not None:;         p.grad.zero_(); {MAKERS}; maker_step.step()"
    ),
    "gradients are never cleared": script(f"{CRITICS}; critic_step.step(); {MAKERS}; maker_step.step()"),
    "the generator first": script(
        f"maker.zero_grad(); {MAKERS}; maker_step.step(); critic.zero_grad(); {CRITICS}; critic_step.step()", ADAM
    ),
    "the critic is frozen meanwhile": script(
        f"critic.requires_grad_(True); critic.zero_grad(); {CRITICS}; critic_step.step(); "
        f"critic.requires_grad_(False); maker.zero_grad(); {MAKERS}; maker_step.step()"
    ),
    "several steps of the critic": script(
        f"for _ in range(2):;     critic.zero_grad();     {CRITICS};     critic_step.step(); "
        f"if i % 2 == 0:;     maker.zero_grad();     {MAKERS};     maker_step.step()"
    ),
    "clipped": script(
        f"critic.zero_grad(); {CRITICS}; nn.utils.clip_grad_norm_(critic.parameters(), 0.1); critic_step.step(); "
        f"maker.zero_grad(); {MAKERS}; nn.utils.clip_grad_norm_(maker.parameters(), 0.1); maker_step.step()"
    ),
    "sums": script(
        f"critic.zero_grad(); {SUMS}; critic_step.step(); maker.zero_grad(); (-critic(made).sum()).backward(); "
        "maker_step.step()",
        PLAIN.replace("0.05", "0.005"),
    ),
    "a gradient penalty": script(
        f"critic.zero_grad(); mixed = (0.3 * real + 0.7 * made.detach()).requires_grad_(); {SLOPE}; "
        "loss = critic(made.detach()).mean() - critic(real).mean() + ((slope.norm(dim=1) - 1) ** 2).mean(); "
        f"loss.backward(); critic_step.step(); maker.zero_grad(); {MAKERS}; maker_step.step()"
    ),
    "actor and critic": script(
        "critic.zero_grad(); maker.zero_grad(); (noise.sum(1, keepdim=True) - critic(real)).pow(2).mean().backward(); "
        "(-(maker(noise).mean(1, keepdim=True) * critic(maker(noise)))).mean().backward(); critic_step.step(); "
        "maker_step.step()"
    ),
    "a teacher that is trained": script(
        "maker.zero_grad(); F.mse_loss(made, real).backward(); maker_step.step(); critic.zero_grad(); "
        "F.mse_loss(critic(real), maker(noise).mean(1, keepdim=True)).backward(); critic_step.step()"
    ),
    "a function for both": script(
        "update(critic, critic_step, -critic(real).mean()); update(maker, maker_step, -critic(maker(noise)).mean())",
        before="def update(net, step, loss):\n    net.zero_grad()\n    loss.backward()\n    step.step()\n",
    ),
    "a list of optimizers": script(
        "for number, (net, step) in enumerate(zip((critic, maker), steps)):;     net.zero_grad(); "
        "    loss = -critic(real).mean() if number == 0 else -critic(maker(noise)).mean();     loss.backward(); "
        "    step.step()",
        before="steps = [critic_step, maker_step]\n",
    ),
    "an optimizer of all beside those of each": script(
        f"{BY_MODULE}; both.zero_grad(); F.mse_loss(critic(maker(noise)), noise[:, :1]).backward(); both.step()",
        ADAM,
        before="both = torch.optim.SGD(itertools.chain(maker.parameters(), critic.parameters()), lr=0.05)\n",
    ),
    "losses of several terms and legacy tensors": script(
        "batch_size = real.shape[0]; valid = Tensor(batch_size, 1).fill_(1.0); "
        "fake = Tensor(np.zeros((batch_size, 1))); "
        "critic_step.zero_grad(); real_loss = criterion(critic(Variable(real)), valid); "
        "fake_loss = criterion(critic(made.detach()), fake); loss = (real_loss + fake_loss) / 2; loss.backward(); "
        "critic_step.step(); maker_step.zero_grad(); loss = criterion(critic(made), valid); loss.backward(); "
        "maker_step.step()",
        before="from torch.autograd import Variable\ncriterion = nn.MSELoss()\ncuda = torch.cuda.is_available()\n"
        "Tensor = torch.cuda.DoubleTensor if cuda else torch.DoubleTensor\n",
    ),
    "a scheduler": script(
        f"{BY_MODULE}; plan.step()", before="plan = torch.optim.lr_scheduler.StepLR(maker_step, 2)\n"
    ),
    "made in a generator expression": made_by(
        "maker_step, critic_step = (torch.optim.SGD(net.parameters(), lr=0.05) for net in (maker, critic))\n"
    ),
    "made in a comprehension of a dictionary": script(
        BY_MODULE.replace("critic_step", "steps['c']").replace("maker_step", "steps['m']"),
        "pairs = {'m': maker, 'c': critic}\n"
        "steps = {name: torch.optim.SGD(net.parameters(), lr=0.05) for name, net in pairs.items()}\n",
    ),
    "made in a function": made_by(
        "def make(net):\n    return torch.optim.SGD(net.parameters(), lr=0.05)\n"
        "maker_step, critic_step = make(maker), make(critic)\n"
    ),
    "made in a loop": script(
        BY_MODULE.replace("critic_step", "steps[1]").replace("maker_step", "steps[0]"),
        "steps = []\nfor net in (maker, critic):\n    steps.append(torch.optim.SGD(net.parameters(), lr=0.05))\n",
    ),
    "parameters of a comprehension": script(
        f"both.zero_grad(); {MAKERS}; both.step()",
        "both = torch.optim.SGD(itertools.chain(*[net.parameters() for net in (maker, critic)]), lr=0.05)\n",
    ),
    "parameters of a comprehension whose name is another's later": script(
        f"both.zero_grad(); {MAKERS}; both.step()",
        "params = [p for net in (maker, critic) for p in net.parameters()]\nboth = torch.optim.SGD(params, lr=0.05)\n",
        before="for net in (maker,):\n    pass\n",
    ),
}
SHOWN = ("module.zero_grad()", "made in a generator expression", "gradients are never cleared", "sums", "clipped",
         "a function for both", "parameters of a comprehension whose name is another's later")  # fmt: skip
"""Scripts that run in every run of the tests."""

STEPS = "fast = [p - 0.1 * g for p, g in zip(maker.parameters(), slopes)]"
REFUSED = {
    "sums that are never cleared": (
        script(f"{SUMS}; critic_step.step(); (-critic(made).sum()).backward(); maker_step.step()"),
        "gradients of sums are added up over steps",
    ),
    "an inner loop": (
        script(
            f"slopes = torch.autograd.grad(F.mse_loss(made, real), list(maker.parameters()), create_graph=True); "
            f"{STEPS}; maker.zero_grad(); F.mse_loss(F.linear(noise, *fast), real).backward(); maker_step.step()"
        ),
        "gradients with respect to parameters are computed apart",
    ),
    "a package of inner loops": (script(BY_MODULE, "import higher\n" + PLAIN), "`higher` trains in inner loops"),
    "functional gradients": (
        script(f"torch.func.grad(lambda x: x.sum())(noise); {BY_MODULE}"),
        r"computes gradients apart from `backward\(\)`",
    ),
    "an update by hand": (
        script(f"{BY_MODULE}; with torch.no_grad():;     for p in critic.parameters():;         p -= 0.1 * p.grad"),
        "changes a parameter by its gradient without an optimizer",
    ),
    "an update in place by hand": (
        script(f"{BY_MODULE}; for p in critic.parameters():;     p.data.add_(p.grad, alpha=-0.1)"),
        "changes a parameter by its gradient without an optimizer",
    ),
    "an update by hand of named gradients": (
        script(
            f"{BY_MODULE}; for p in critic.parameters():;     slope = p.grad.data;     p.data.add_(slope, alpha=-0.1)"
        ),
        "changes a parameter by its gradient without an optimizer",
    ),
    "an update that is assigned": (
        script(f"{BY_MODULE}; for p in critic.parameters():;     p.data = p.data - 0.1 * p.grad"),
        "changes a parameter by its gradient without an optimizer",
    ),
    "an optimizer of another package": (
        made_by(
            "from lion import Lion\nmaker_step = Lion(maker.parameters())\n" + PLAIN.splitlines()[1] + "\n"
        ).replace("maker.zero_grad()", "maker_step.zero_grad()"),
        "cannot tell which optimizer of torch.optim `maker_step` is",
    ),
    "an optimizer of a variable class": (
        made_by("Kind = getattr(torch.optim, 'SGD')\nmaker_step, critic_step = Kind(maker.parameters()), None\n"),
        "no optimizer of torch.optim is made",
    ),
    "made in a lambda": (
        script(
            BY_MODULE.replace(".zero_grad", "_step.zero_grad"),
            "make = lambda net: torch.optim.SGD(net.parameters(), lr=0.05)\n"
            "maker_step, critic_step = make(maker), make(critic)\n",
        ),
        "cannot tell which optimizer",
    ),
    "parameters of a lambda": (
        script(BY_MODULE, "get = lambda net: net.parameters()\n" + PLAIN.replace("critic.parameters()", "get(critic)")),
        "cannot tell whose parameters",
    ),
    "no Python": (script(BY_MODULE) + "return 3\n", "invalid Python: 'return' outside function"),
}


def reduced_in_step(code: str) -> bool:
    return "backward_passes_per_step=1_000_000" in translate(code).after


@pytest.mark.parametrize("name", REFUSED)
def test_scripts_that_cannot_train_as_one_process_are_rejected_with_line_and_reason(name: str) -> None:
    code, reason = REFUSED[name]
    with pytest.raises(TranslationError, match=reason) as refusal:
        translate(code)
    assert all(0 < line <= len(code.splitlines()) for line, _ in refusal.value.obstacles)


@pytest.mark.lengthy
def test_a_translation_defines_each_name_that_it_uses() -> None:
    for name, code in ALIKE.items():
        assert undefined_names(translate(code).after) == set(), name


def test_names_that_nothing_defines_are_found_in_every_scope() -> None:
    text = (
        "import os\nfrom sys import path as where\n"
        "def f(a, *b, c=outer, **d):\n    global made\n    made = a\n    return [e for e in b if e != missing], made\n"
        "class C(Base):\n    x = 1\n    def g(self):\n        return x\n"
        "print({k: v for k, v in os.environ.items()}, where, __name__, net)\n"
        "pairs = [net for net in where]\nlate()\ndef late():\n    return later()\ndef later():\n    return os\n"
        "try:\n    import torch\nexcept ImportError as err:\n    raise SystemExit(err)\n"
    )
    assert undefined_names(text) == {"outer", "missing", "Base", "x", "net", "late"}


def test_imports_of_a_translation_precede_the_added_lines() -> None:
    head, rest = script(BY_MODULE).split("import torch\n", 1)
    wrapped = translate(f"{head}class Before:\n    pass\nimport torch\nimport os\n{rest}").after
    assert undefined_names(wrapped) == set()
    assert wrapped.index("import os\n") < wrapped.index("os.environ")
    late = translate(script(BY_MODULE, before="import json\n")).after  # behind the loader, which is divided
    assert undefined_names(late) == set()
    assert late.index("import sirtaki.torch") < late.index("ranks.divided")


def test_gradients_are_reduced_in_backward_passes_only_if_all_optimizers_step_after_each() -> None:
    together = f"{MAKERS}; critic_step.step(); maker_step.step(); critic_step.zero_grad(); maker_step.zero_grad()"
    each = f"{MAKERS}; for step in (critic_step, maker_step):;     step.step();     step.zero_grad()"
    later = PLAIN.splitlines()[0] + "\n"
    assert not reduced_in_step(script(together))
    assert not reduced_in_step(script(each))
    assert not reduced_in_step(
        script(f"maker_step.zero_grad(); {MAKERS}; maker_step.step()", later) + PLAIN.replace("_step", "_later")
    )
    assert reduced_in_step(script(BY_MODULE))
    assert reduced_in_step(script(f"{MAKERS}; critic_step.step(); if i % 2:;     maker_step.step()"))
    assert reduced_in_step(ALIKE["a function for both"])
    assert reduced_in_step(ALIKE["made in a function"])


def test_losses_of_these_forms_are_seen_to_be_means_and_sums() -> None:
    for name in ("losses of several terms and legacy tensors", "a gradient penalty", "actor and critic", "sums"):
        assert not [note for line, note in translate(ALIKE[name]).notes if line], name


NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def assert_alike(names: tuple[str, ...], folder: Path, ranks: int, mpiexec: list[str]) -> None:
    for kind in ("before", "after"):
        (folder / kind).mkdir()
    for number, name in enumerate(names):
        (folder / "before" / f"{number}.py").write_text(ALIKE[name])
        (folder / "after" / f"{number}.py").write_text(translate(ALIKE[name]).after)
    for job, size, kind in (("one", 1, "before"), ("several", ranks, "after")):
        play(folder / job, size, [folder / kind / f"{number}.py" for number in range(len(names))], mpiexec)
    for number, name in enumerate(names):
        wanted, found = (
            [float(word) for word in NUMBER.findall(left(folder / job, str(number), 0)["printed"])]
            for job in ("one", "several")
        )
        assert len(wanted) == 1, name
        assert found == pytest.approx(wanted, rel=1e-10), name


def test_two_models_train_against_each_other_as_in_one_process(tmp_path: Path, mpiexec: list[str]) -> None:
    assert_alike(SHOWN, tmp_path, 2, mpiexec)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_of_them_train_as_in_one_process(ranks: int, tmp_path: Path, mpiexec: list[str]) -> None:
    assert_alike(tuple(ALIKE), tmp_path, ranks, mpiexec)
