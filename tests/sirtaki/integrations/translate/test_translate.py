"""Translations of scripts: tables of scripts and results, and of rejected scripts."""

import pytest
from training_loops import HEAD, added

from sirtaki.errors import TranslationError
from sirtaki.integrations.translate import translate
from sirtaki.integrations.translate.source import Source
from sirtaki.integrations.translate.translation import free_name

METER = "class Meter:\n    def update(self, value, n):\n        self.value = value * n\nmeter = Meter()\n"
ACCURACY = "def accuracy(a, b):\n    return (a.argmax(1) == b).float().mean()\n"
RETURNS = (
    "def shown(loss, n):\n    if n == 0:\n        return n\n    if n == 1:\n        return loss.item()\n    return n\n"
)

# Code in the loop over batches, behind it or in front of the whole, and the lines that the translation adds for it.
ADDED: dict[str, tuple[dict[str, str], list[str]]] = {
    # numbers that are shown: the largest part that is a mean or a sum is put together
    "a number": ({"in_loop": "print(loss.item())"}, ["print(ranks.average(loss.item()))"]),
    "a product": ({"in_loop": "print(2 * loss)"}, ["print(ranks.average(2 * loss))"]),
    "a formatted one": ({"in_loop": "print(f'{loss.item():.3f}')"}, ["print(f'{ranks.average(loss.item()):.3f}')"]),
    "one of several": (
        {"in_loop": "print('%d %f' % (epoch, loss))"},
        ["print('%d %f' % (epoch, ranks.average(loss)))"],
    ),
    "a count": ({"in_loop": "print(x.size(0))"}, ["print(ranks.total(x.size(0)))"]),
    "in a list": ({"in_loop": "print([loss.item(), 1])"}, ["print([ranks.average(loss.item()), 1])"]),
    "a sum by a count": (
        {"in_loop": "print(y.sum().item() / len(y))"},
        ["print(ranks.average(y.sum().item() / len(y)))"],
    ),
    "a loss that is a sum": (
        {"in_loop": "print(F.mse_loss(model(x), x, reduction='sum').item())"},
        ["print(ranks.total(F.mse_loss(model(x), x, reduction='sum').item()))"],
    ),
    # numbers that are kept
    "in a list of the script": (
        {"in_loop": "kept.append(loss.item())", "before": "kept = []\n"},
        ["kept.append(ranks.average(loss.item()))"],
    ),
    "in an object": (
        {"in_loop": "meter.update(loss.item(), x.size(0))", "before": METER},
        ["meter.update(ranks.average(loss.item()), ranks.total(x.size(0)))"],
    ),
    "a mean added up": ({"in_loop": "total += loss.item()"}, ["total = ranks.average(total)"]),
    "a sum added up": ({"in_loop": "total += loss.item() * x.size(0)"}, ["total = ranks.total(total)"]),
    "hits added up": (
        {"in_loop": "total += (model(x).argmax(1) == y).sum().item()"},
        ["total = ranks.total(total)"],
    ),
    "a sum that is read in the loop": (
        {"in_loop": "total += loss.item()\nif total > 9:\n    break"},
        ["total += ranks.average(loss.item())"],
    ),
    "a sum over epochs": (
        {"in_loop": "everything += loss.item()", "before": "everything = 0.0\n"},
        ["everything += ranks.average(loss.item())"],
    ),
    # decisions
    "a shape": ({"in_loop": "if x.shape[1] == 4:\n    continue"}, []),
    "dimensions": ({"in_loop": "if x.dim() == 2:\n    continue"}, []),
    "a type": ({"in_loop": "if isinstance(x, list):\n    continue"}, []),
    "what is there": ({"in_loop": "if x is None:\n    continue"}, []),
    "an incomplete batch": (
        {"in_loop": "if x.shape[0] < 8:\n    continue"},
        ["if ranks.total(x.shape[0]) < 8:"],
    ),
    # output
    "a file": (
        {"behind": 'torch.save(model.state_dict(), "m.pt")'},
        ["if hvd.rank() == 0:", 'torch.save(model.state_dict(), "m.pt")'],
    ),
    "an open file": (
        {"behind": 'with open("log", "a") as log:\n    log.write("x")'},
        ['with open("log" if hvd.rank() == 0 else "/dev/null", "a") as log:'],
    ),
    "a file that is read": ({"behind": 'text = open("log").read()'}, []),
    "what communicates": (
        {"in_loop": "wandb.log({'loss': loss.item()})", "before": "import wandb\n"},
        ["ranks.on_root(wandb.log)({'loss': ranks.average(loss.item())})"],
    ),
    "a bar": (
        {"before": "from tqdm import tqdm\n", "behind": "for i in tqdm(range(3)):\n    pass"},
        ["for i in tqdm(range(3), disable=hvd.rank() != 0):"],
    ),
    "a loop that does not train": (
        {"behind": "hits = 0\nfor x, y in loader:\n    hits += (model(x).argmax(1) == y).sum().item()"},
        ["for x, y in ranks.whole(loader):", "hits = ranks.agreed(hits)"],
    ),
}


@pytest.mark.lengthy
@pytest.mark.parametrize("name", ADDED)
def test_lines_that_a_translation_brings(name: str) -> None:
    where, lines = ADDED[name]
    found = added(**where)
    if "print(" in "".join(where.values()):
        assert "print = ranks.on_root(print)" in found
        found.remove("print = ranks.on_root(print)")
    assert found == lines


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("where", "line"),
    [
        (
            {"in_loop": "print(accuracy(model(x), y))", "before": ACCURACY},
            "print(ranks.average(accuracy(model(x), y)))",
        ),
        ({"in_loop": "print(shown(loss, epoch))", "before": RETURNS}, "print(ranks.average(shown(loss, epoch)))"),
        (
            {"in_loop": "if epoch:\n    shown = loss\nelse:\n    shown = 0 * loss\nprint(shown)"},
            "print(ranks.average(shown))",
        ),
        ({"behind": 'torch.save(model, "m")\nmodel = torch.load("m")'}, "hvd.barrier()  # rank 0 may be writing it"),
        ({"before": "import logging\n"}, "if hvd.rank() != 0:"),
        (
            {"before": 'import torch\ndevice = torch.device("cuda:0")\n'},
            'device = torch.device(f"cuda:{hvd.local_rank()}")',
        ),
        ({"before": 'import torch\ndevice = torch.device("cuda:0")\n'}, "torch.cuda.set_device(hvd.local_rank())"),
    ],
)
def test_a_line_that_is_among_those(where: dict[str, str], line: str) -> None:
    assert line in added(**where)


def test_the_computation_of_a_loss_is_unchanged_and_gradients_are_reduced_at_the_step() -> None:
    lines = added("extra = 0.0\nextra += F.mse_loss(model(x), x)\nextra.backward()")
    assert lines[-1].startswith("optimizer = ")
    assert "backward_passes_per_step=1_000_000" in lines[-1]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("body", "counted"),
    [
        ("loss.backward()\noptimizer.step()\nif epoch % 10 == 0:\n    print(epoch)", True),
        ("if amp:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\noptimizer.step()", True),
        ("if amp:\n    loss.backward()\n    optimizer.step()", True),
        ("loss.backward()\nif amp:\n    scaler.step(optimizer)\nelse:\n    optimizer.step()", True),
        ("loss.backward()\nfor each in [optimizer]:\n    each.step()", True),
        ("def closure():\n    loss.backward()\n    return loss\noptimizer.step(closure)", True),
        ("loss.backward()\nif epoch % 4 == 0:\n    optimizer.step()", False),
        ("last = (epoch + 1) % 4 == 0\nloss.backward()\nif last:\n    optimizer.step()", False),
        ("loss.backward()\nloss.backward()\noptimizer.step()", False),
        ("for part in range(2):\n    loss.backward()\noptimizer.step()", False),
    ],
)
def test_gradients_leave_in_the_backward_pass_only_where_a_step_follows_each(body: str, counted: bool) -> None:
    script = HEAD[: HEAD.index("        loss.backward()")] + "".join(f"        {line}\n" for line in body.splitlines())
    assert ("backward_passes_per_step" not in translate(script).after) == counted


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"

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
CHOSEN = "        chosen = order[i : i + 8]\n"

DDP = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo", world_size=int(os.environ["WORLD_SIZE"]))
sampler = DistributedSampler(data, shuffle=True)
model = torch.nn.Linear(4, 2)
model = DDP(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in sampler:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
torch.save(model.module.state_dict(), "m.pt")
dist.destroy_process_group()
"""

# A script, what is replaced in it, and texts that are in what becomes of it.
AFTER: dict[str, tuple[str, tuple[str, str], list[str]]] = {
    "a loader that is trained on, and an optimizer": (
        HEAD,
        ("", ""),
        [
            "from torch.utils.data import DataLoader\nimport os\nimport sirtaki.torch as hvd\n",
            'os.environ.setdefault("SIRTAKI_UNUSED", "none")\nhvd.init()\n',
            "loader, test = ranks.divided(DataLoader(data, batch_size=8, shuffle=True)), DataLoader(others",
            "    loader.sampler.set_epoch(epoch)\n    for x, y in loader:\n",
            "torch.manual_seed(ranks.agreed(torch.initial_seed()))",
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
            "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n",
        ],
    ),
    "passes without an epoch": (
        HEAD,
        ("for epoch in range(3)", "while True"),
        ["loader.sampler.set_epoch(loader.sampler.epoch + 1)"],
    ),
    "gradients that are read": (
        HEAD,
        ("        optimizer.step()", f"        {CLIP}\n        optimizer.step()"),
        [
            f"        loss.backward()\n        optimizer.synchronize()\n        {CLIP}\n"
            "        with optimizer.skip_synchronize():\n            optimizer.step()\n"
        ],
    ),
    "gradients that are read in a branch": (
        HEAD,
        ("        optimizer.step()", f"        if epoch:\n            {CLIP}\n        optimizer.step()"),
        ["        optimizer.synchronize()\n        if epoch:\n", "        with optimizer.skip_synchronize():\n"],
    ),
    "gradients that are read although no step follows": (
        HEAD,
        ("        optimizer.step()", f"        {CLIP}\n        if epoch:\n            optimizer.step()"),
        [f"        optimizer.synchronize()\n        {CLIP}\n", "            with optimizer.skip_synchronize():\n"],
    ),
    "gradients that several optimizers' steps read": (
        HEAD,
        (
            "        optimizer.step()",
            f"        {CLIP}\n        for each in (optimizer, other):\n            each.step()",
        ),
        [
            f"        for each in (optimizer, other):\n            each.synchronize()\n        {CLIP}\n",
            "            with each.skip_synchronize():\n                each.step()\n",
        ],
    ),
    "gradients that a function reads": (
        HEAD.replace("for epoch", f"def clip():\n    {CLIP}\nfor epoch"),
        ("        optimizer.step()", "        clip()\n        optimizer.step()"),
        ["        optimizer.synchronize()\n        clip()\n", "        with optimizer.skip_synchronize():\n"],
    ),
    "a loss that is a sum": (HEAD, ("model(x), y)", 'model(x), y, reduction="sum")'), ["op=hvd.Sum)"]),
    "data parallel": (
        HEAD,
        ("optimizer = ", "model = torch.nn.DataParallel(model)\nhead = model.module.weight\noptimizer = "),
        ["head = model.weight", "model = torch.nn.Linear(4, 2)\nhead"],
    ),
    "a name that is taken": (
        HEAD + "ranks = 1\n",
        ("", ""),
        ["from sirtaki.torch import ranks as sirtaki_ranks", "sirtaki_ranks.divided("],
    ),
    "slices and a permutation": (
        CUT,
        ("", ""),
        [
            "order = ranks.agreed(torch.randperm(len(X)))",
            "chosen = ranks.share(order[i : i + 8])",
            "print(ranks.average(loss.item()))",
        ],
    ),
    "draws": (
        CUT,
        ("order[i : i + 8]", "torch.randint(len(X), (8,))"),
        ["chosen = ranks.share(torch.randint(len(X), (8,)))"],
    ),
    "parts of a permutation": (
        CUT.replace(CHOSEN, ""),
        ("for i in range(0, len(X), 8):", "for chosen in order.split(8):"),
        ["for chosen in map(ranks.share, order.split(8)):"],
    ),
    "a loader beside batches that are cut by hand": (
        CUT + "    for x, y in torch.utils.data.DataLoader(others):\n        wrong += (model(x) != y).sum().item()\n",
        ("", ""),
        ["for x, y in torch.utils.data.DataLoader(others):", "    wrong = ranks.agreed(wrong)\n"],
    ),
    "a whole set": (
        CUT.replace(CHOSEN, ""),
        ("[chosen]", ""),
        ["loss = criterion(model(ranks.share(X)), ranks.share(Y))"],
    ),
}


@pytest.mark.lengthy
@pytest.mark.parametrize("name", AFTER)
def test_each_kind_of_script_is_translated_as_expected(name: str) -> None:
    script, (old, new), texts = AFTER[name]
    after = translate(script.replace(old, new) if old else script).after
    for text in texts:
        assert text in after
    assert "DataParallel" not in after


def test_ranks_are_available_in_the_main_block_and_seeded_ones_need_no_seed() -> None:
    imports, _, rest = HEAD.partition("\n\n")
    inside = "def main():\n" + "".join(f"    {line}\n" for line in rest.splitlines())
    after = translate(f'{imports}\n\n{inside}\nif __name__ == "__main__":\n    main()\n').after
    assert 'if __name__ == "__main__":\n    hvd.init()\n' in after
    assert after.count("hvd.init()") == 1
    assert "initial_seed" not in translate(HEAD + "torch.manual_seed(0)\n").after
    assert free_name(Source("ranks = 1"), "ranks") == "sirtaki_ranks"


def test_a_translation_has_a_diff_and_notes_and_scripts_with_sirtaki_stay_unchanged() -> None:
    done = translate(HEAD)
    assert done.before == HEAD
    assert "+hvd.init()\n" in done.diff("train.py")
    assert any("learning rates stay" in text for _, text in done.notes)
    code = "import sirtaki.torch as hvd\nhvd.init()\n"
    assert (translate(code).after, translate(code).diff("train.py")) == (code, "")


def test_horovods_imports_change() -> None:
    before = "import horovod.torch as hvd\nfrom horovod.torch.elastic import run\nhvd.init()\n"
    assert translate(before).after == before.replace("horovod", "sirtaki")


def test_names_of_torch_distributed_become_ours_and_the_wrapper_is_removed() -> None:
    assert (
        translate(DDP).after
        == """\
import os
import torch
import sirtaki.torch as hvd
os.environ.setdefault("SIRTAKI_UNUSED", "none")
from torch.utils.data.distributed import DistributedSampler

hvd.init()
sampler = DistributedSampler(data, shuffle=True, num_replicas=hvd.size(), rank=hvd.rank())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for x in sampler:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    hvd.allreduce_(loss, op=hvd.Average)
torch.save(model.state_dict(), "m.pt")
hvd.shutdown()
"""
    )


def in_loop(code: str) -> str:
    return HEAD + "".join(f"        {line}\n" for line in code.splitlines())


CLOCK = f"import time\nbegun = time.time()\n{HEAD}        "
DIVIDED = r"line 7: .*cannot be divided"

REFUSED: dict[str, tuple[str, str]] = {
    "no backward pass": ("import torch\nprint(1)\n", "nowhere is `backward"),
    "no optimizer": (HEAD.replace("torch.optim.SGD(model.parameters(), lr=0.1)", "make()"), "no optimizer"),
    "a framework": (f"import lightning\n{HEAD}", "Lightning has its own ways"),
    "code in a text": (f"{HEAD}exec('1')\n", "cannot look into"),
    "processes": (f"import torch.multiprocessing as mp\n{HEAD}mp.spawn(f)\n", "starts or divides work itself"),
    "no import": (HEAD.replace("import torch\n", "", 1), "`import torch` is missing"),
    "an end by the clock": (f"{CLOCK}if time.time() - begun > 60:\n            break\n", "each by its own clock"),
    "an end by time that was spent": (
        f"{CLOCK}spent = time.time() - begun\n        if spent > 60:\n            break\n",
        "each by its own clock",
    ),
    "a decision by a rank's own data": (
        in_loop("if x.max() > 3:\n    continue"),
        "line 14: ranks may decide differently",
    ),
    "neither mean nor sum": (in_loop("total += x.abs().max().item()"), r"cannot tell whether `x\.abs"),
    "parameters of nobody": (HEAD.replace("model.parameters()", "get()"), "line 6: cannot tell whose parameters"),
    "one device for all": (f'import os\ndevice = "cuda:1"\n{HEAD}', "line 2"),
    "visible devices": (f'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\n{HEAD}', "line 2"),
    "a batch sampler": (HEAD.replace("batch_size=8, shuffle=True", "batch_sampler=own"), DIVIDED),
    "no batch size": (HEAD.replace("batch_size=8, shuffle=True", "shuffle=True"), DIVIDED),
    "batches of one": (HEAD.replace("batch_size=8, shuffle=True", "batch_size=1"), DIVIDED),
    "a tensor of as many rows as all ranks have": (
        HEAD.replace("batch_size=8", "batch_size=n").replace("loss = ", "noise = torch.randn(n, 4)\n        loss = "),
        "take that of the data",
    ),
    "a loader that nobody is seen to train on": (
        HEAD.replace("for x, y in loader:", "for x, y in strange(loader)():"),
        "cannot see which loop trains on this loader",
    ),
    "batches that are not found": (
        CUT.replace("X[chosen]", "make()").replace("Y[chosen]", "make()").replace("order[i : i + 8]", "0"),
        "cannot find the loader",
    ),
    "gradients that are read before a step elsewhere": (
        HEAD.replace("for epoch", "def advance():\n    optimizer.step()\nfor epoch").replace(
            "        optimizer.step()", f"        {CLIP}\n        advance()"
        ),
        "before a step that a function makes",
    ),
    "gradients that are computed and read without a step": (
        HEAD.replace("for epoch", f"def back(loss):\n    loss.backward()\n    {CLIP}\nfor epoch").replace(
            "        loss.backward()", "        back(loss)"
        ),
        "and makes no step",
    ),
    "gradients of sums that are read although no step may follow": (
        HEAD.replace("model(x), y)", 'model(x), y, reduction="sum")').replace(
            "        optimizer.step()", f"        {CLIP}\n        if epoch:\n            optimizer.step()"
        ),
        "where no step may follow",
    ),
    "a collective without a counterpart": (f"{DDP}dist.all_gather(a, b)\n", "line 19"),
    "a group": (f"{DDP}dist.all_reduce(a, group=g)\n", "line 19"),
    "one that does not wait": (f"{DDP}dist.all_reduce(a, async_op=True)\n", "line 19"),
    "another framework of Horovod's": ("import os\nimport horovod.keras as hvd\n", "line 2: `horovod.keras` has no"),
    "no Python": ("x = 1\ndef (:\n", "line 2: invalid Python"),
}


@pytest.mark.lengthy
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_scripts_are_rejected_with_line_and_reason(name: str) -> None:
    script, reason = REFUSED[name]
    with pytest.raises(TranslationError, match=reason):
        translate(script)


def test_clocks_that_decide_nothing_are_not_in_the_way() -> None:
    code = f"import time\nbegun = time.time()\n{HEAD}took = time.time() - begun\nif took > 60:\n    print(took)\n"
    assert "hvd.init()" in translate(code).after


NAMED: dict[str, tuple[str, str]] = {
    "gradients of a rank": (
        in_loop("if epoch:\n    optimizer.step()\nprint(model.weight.grad)").replace(
            "        optimizer.step()\n", "", 1
        ),
        "`model.weight.grad` is each rank's own until a step is made",
    ),
    "what is counted by samples": (
        HEAD.replace("for epoch", "counts = [0] * 3\nfor epoch") + "        counts[int(y[0])] += 1\nprint(counts)\n",
        "`counts` is shown as rank 0 has it",
    ),
    "a whole set": (
        CUT.replace(CHOSEN, "").replace("[chosen]", ""),
        "taken for all the data, and divided: `X`, `Y`",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_remaining_tasks_are_named(name: str) -> None:
    script, text = NAMED[name]
    assert any(text in note for _, note in translate(script).notes)


def test_a_loss_is_followed_into_a_function_of_any_name() -> None:
    update = "def update(loss):\n    loss.backward()\n    optimizer.step()\nfor epoch"
    before = "        loss.backward()\n        optimizer.step()\n"
    assert before in HEAD
    script = HEAD.replace(before, "        update(loss)\n").replace("for epoch", update)
    assert not any("is not seen to be" in note for _, note in translate(script).notes)


SHARED_LINES = """import time, torch
from torch.utils.data import DataLoader
class Trainer:
    def __init__(self, m): self.m = m; self.opt = torch.optim.SGD(m.parameters(), lr=0.1)  # both
    def fit(self, data):
        for x in DataLoader(data, batch_size=8):
            self.opt.zero_grad(); self.m(x).mean().backward(); self.opt.step()
"""


def test_statements_that_share_a_line_get_their_own_and_reasons_name_the_line_as_it_was() -> None:
    after = translate(SHARED_LINES).after
    begin = after[after.index("    def __init__") : after.index("    def fit")].splitlines()
    assert begin[:3] == [
        "    def __init__(self, m):  # both",
        "        self.m = m",
        "        self.opt = torch.optim.SGD(m.parameters(), lr=0.1)",
    ]
    assert "hvd.DistributedOptimizer(self.opt" in begin[4]
    both = translate(HEAD.replace("optimizer.step()", f"{CLIP}; optimizer.step()")).after
    assert f"optimizer.synchronize()\n        {CLIP}\n        with optimizer.skip_synchronize():" in both
    clock = "            if time.time() > 9: break\n"
    with pytest.raises(TranslationError, match="line 8: ranks may decide differently"):
        translate(SHARED_LINES + clock)
    horovod = "import horovod.torch as hvd; hvd.init()\nif hvd.rank(): print(1)\n"
    assert translate(horovod).after == horovod.replace("horovod", "sirtaki")
