"""Random training scripts of one process, combined from parts, in float64.

Data sets are divided into batches of 12, and a last batch of 6, which are divisible by 2 and by 3 ranks.
"""

from __future__ import annotations

import random
import re

LOSSES = (
    "F.cross_entropy(out, y)",
    "F.mse_loss(out, t)",
    "F.mse_loss(out, t, reduction='sum') / len(x)",
    "F.mse_loss(out, t, reduction='sum')",
    "F.cross_entropy(out, y, label_smoothing=0.1)",
    "((out - t) ** 2).mean(1).mean()",
    "(F.cross_entropy(out, y, reduction='none') * mask).sum() / mask.sum().clamp(min=1.0)",
    "F.smooth_l1_loss(out[mask > 0.5], t[mask > 0.5])",
    "F.cross_entropy(out, y, weight=table)",
    "F.nll_loss(F.log_softmax(out, dim=1), y)",
    "torch.sqrt(F.mse_loss(out, t) + 1e-3)",
    "-F.log_softmax(out, -1).gather(1, y[:, None]).mean()",
    "F.kl_div(F.log_softmax(out, 1), F.softmax(t, 1), reduction='batchmean')",
    "F.binary_cross_entropy_with_logits(out[:, 0], mask)",
    "(1 - F.cosine_similarity(out, t, dim=1)).mean()",
    "F.mse_loss(out, t) + 0.1 * out.abs().mean()",
    "F.cross_entropy(out, y) + F.mse_loss(out, t)",
    "torch.logsumexp(out, dim=1).mean() - out.gather(1, y.unsqueeze(1)).squeeze(1).mean()",
    "(out - t).abs().max(dim=1).values.mean()",
    "F.cross_entropy(out, y, reduction='none').mean()",
    "(F.cross_entropy(out, y, reduction='none') * table[y]).sum() / table[y].sum()",
    "(F.mse_loss(out, t, reduction='none').mean(1) * torch.sigmoid(out[:, 0]).detach()).mean()",
    "torch.stack([F.mse_loss(out, t), F.l1_loss(out, t)]).mean()",
    "sum({'a': F.mse_loss(out, t), 'b': 0.1 * F.cross_entropy(out, y)}.values())",
    "0.5 * (F.mse_loss(out, t) + F.cross_entropy(out, y)) / 2",
    "F.mse_loss(out.softmax(-1), F.one_hot(y, 3).to(out.dtype))",
    "torch.einsum('bi,bi->b', out, t).pow(2).mean()",
    "torch.linalg.norm(out - t, dim=1).mean()",
    "F.cross_entropy(out, y) * 0.7 + (1 - 0.7) * out.pow(2).sum(dim=-1).mean()",
    "F.binary_cross_entropy(torch.sigmoid(out), (t > 0).double())",
    "F.hinge_embedding_loss(out[:, 1], mask * 2 - 1)",
    "F.margin_ranking_loss(out[:, 0], out[:, 1], mask * 2 - 1, margin=0.1)",
    "F.triplet_margin_loss(out, t, t.flip(1))",
    "F.mse_loss(out.reshape(-1), t.reshape(-1))",
    "F.mse_loss(out.mean(dim=1), t.mean(1))",
    "(mask[:, None] * (out - t) ** 2).sum(1).mean()",
    "torch.where(mask > 0.5, out[:, 0], t[:, 0]).pow(2).mean()",
)
NAMED_LOSSES = (
    "F.mse_loss(out, t) + out.std()",
    "F.cross_entropy(F.normalize(out) @ F.normalize(out).t(), torch.arange(len(out)))",
    "loss_fn(out, y)",
    "F.mse_loss(out - 0.5 * out.mean(0), t)",
    "F.mse_loss(out, t) / out.abs().max().detach()",
)
CRITERIA = (
    ("nn.CrossEntropyLoss()", "y"),
    ("nn.CrossEntropyLoss(weight=table)", "y"),
    ("nn.CrossEntropyLoss(ignore_index=0)", "y"),
    ("nn.MSELoss()", "t"),
    ("nn.MSELoss(reduction='sum')", "t"),
    ("nn.SmoothL1Loss(beta=0.5)", "t"),
    ("nn.L1Loss()", "t"),
    ("Focal()", "y"),
    ("nn.NLLLoss()", "y"),
    ("nn.KLDivLoss(reduction='batchmean')", "t"),
    ("F.cross_entropy", "y"),
    ("lambda out, y: F.cross_entropy(out, y)", "y"),
)
PENALTIES = (
    "1e-3 * sum(p.pow(2).sum() for p in {model}.parameters())",
    "1e-3 * sum(torch.norm(p) for p in {model}.parameters())",
)
HEAD = """\
n, batch_size, epochs = {n}, 12, {epochs}
g = torch.Generator().manual_seed({seed})
X, T = torch.randn(n, 4, generator=g), torch.randn(n, 3, generator=g)
Y = torch.randint(0, 3, (n,), generator=g)
M = (torch.arange(n) % 5 != 0).double()
val_X, val_Y = torch.randn(12, 4, generator=g), torch.randint(0, 3, (12,), generator=g)
table = torch.tensor([0.2, 1.0, 3.0])
"""
FOCAL = """\
class Focal(nn.Module):
    def forward(self, out, y):
        each = F.cross_entropy(out, y, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()
"""
METER = """\
class Meter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0
    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
    @property
    def avg(self):
        return self.sum / self.count
"""
ROWS = """\
class Rows(Dataset):
    def __len__(self):
        return n
    def __getitem__(self, i):
        return {"x": X[i], "y": Y[i], "t": T[i], "mask": M[i]}
"""
MODELS = {
    "sequential": ("", "nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))"),
    "module": (
        "class Net(nn.Module):\n    def __init__(self, width=5):\n        super().__init__()\n"
        "        self.body = nn.Linear(4, width)\n        self.norm = nn.LayerNorm(width)\n"
        "        self.head = nn.Linear(width, 3)\n    def forward(self, x):\n"
        "        h = F.relu(self.body(x))\n        return self.head(h + self.norm(h))\n",
        "Net()",
    ),
    "recurrent": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.rnn = nn.GRU(1, 4, batch_first=True)\n        self.head = nn.Linear(4, 3)\n"
        "    def forward(self, x):\n        h, _ = self.rnn(x[:, :, None])\n        return self.head(h[:, -1])\n",
        "Net()",
    ),
    "embedding": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.table = nn.Embedding(2, 5)\n        self.head = nn.Linear(5, 3, bias=False)\n"
        "    def forward(self, x):\n        return self.head(self.table((x > 0).long()).mean(1))\n",
        "Net()",
    ),
    "convolution": (
        "def make_model(width):\n    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, width, 2), nn.GELU(), "
        "nn.Flatten(), nn.Linear(3 * width, 3))\n",
        "make_model(3)",
    ),
    "weights that are drawn": (
        "def init(m):\n    if isinstance(m, nn.Linear):\n        nn.init.normal_(m.weight, std=0.3)\n"
        "        nn.init.zeros_(m.bias)\n",
        "nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 3)).apply(init)",
    ),
    "list of layers": (
        "class Net(nn.Module):\n    def __init__(self, *sizes):\n        super().__init__()\n"
        "        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])\n"
        "        self.scale = nn.Parameter(torch.ones(()))\n        self.unused = nn.Linear(2, 2)\n"
        "    def forward(self, x):\n        for layer in self.layers[:-1]:\n            x = torch.tanh(layer(x))\n"
        "        return self.scale * self.layers[-1](x)\n",
        "Net(4, 5, 5, 3)",
    ),
    "tied": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.encode = nn.Linear(4, 4, bias=False)\n        self.decode = nn.Linear(4, 4)\n"
        "        self.decode.weight = self.encode.weight\n"
        "    def forward(self, x):\n        return self.decode(F.elu(self.encode(x)))[:, :3]\n",
        "Net()",
    ),
}
OPTIMIZERS = (
    "torch.optim.SGD({params}, lr=0.05, momentum=0.9)",
    "torch.optim.Adam({params}, lr=0.01)",
    "torch.optim.AdamW({params}, lr=0.01, weight_decay=0.1)",
    "optim.RMSprop({params}, lr=1e-3)",
    "optim.SGD({params}, lr=0.05, nesterov=True, momentum=0.5, weight_decay=1e-3)",
    "Adam({params}, 1e-2)",
)
PARAMS = (
    "{model}.parameters()",
    "list({model}.parameters())",
    "[p for p in {model}.parameters() if p.requires_grad]",
    "filter(lambda p: p.requires_grad, {model}.parameters())",
    "[{{'params': [p for p in {model}.parameters() if p.ndim > 1]}}, "
    "{{'params': [p for p in {model}.parameters() if p.ndim <= 1], 'weight_decay': 0.0}}]",
)
SCHEDULERS = {
    "torch.optim.lr_scheduler.StepLR({optimizer}, step_size=1, gamma=0.5)": "epoch",
    "optim.lr_scheduler.CosineAnnealingLR({optimizer}, T_max=epochs)": "epoch",
    "torch.optim.lr_scheduler.LambdaLR({optimizer}, lambda step: min(1.0, (step + 1) / 3))": "step",
    "torch.optim.lr_scheduler.OneCycleLR({optimizer}, max_lr=0.05, total_steps=60)": "step",
    "torch.optim.lr_scheduler.ReduceLROnPlateau({optimizer}, patience=0)": "loss",
}
BY_LOADER = ("tuple", "enumerate", "batch", "dict", "zip", "next", "endless")
BY_HAND = ("permutation", "slices", "split", "draws", "function", "whole", "numpy")


def indented(lines: list[str], by: int = 1) -> list[str]:
    return [" " * 4 * by + line for line in lines]


class Drawn:
    """One random script. The same seed gives the same script."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seed, self.n, self.epochs = seed, rng.choice([24, 30, 36]), rng.choice([2, 3])
        self.style = rng.choice(["flat", "main", "functions", "class"])
        self.mine = "self." if self.style == "class" else ""
        self.model, self.optimizer = f"{self.mine}model", f"{self.mine}{rng.choice(['optimizer', 'opt'])}"
        self.batches = rng.choice(BY_LOADER if rng.random() < 0.7 else BY_HAND)
        self.accumulate = rng.choice([1, 1, 1, 2]) if self.batches not in ("next", "endless", "draws", "whole") else 1
        self.clip = rng.choice(["", "", "norm", "shown", "value", "total", "sometimes"])
        self.amp = rng.choice(["", "", "", "autocast", "scaler"])
        self.of_model, self.made = MODELS[rng.choice(list(MODELS))]
        self.schedule = rng.choice([*SCHEDULERS, "", "", "by hand"])
        self.log = rng.choice(["print", "running", "weighted", "list", "correct", "meter", "history", "tensors",
                               "every", "logging", "csv", "ema loss"])  # fmt: skip
        self.evaluation = rng.choice(["", "loop", "function", "set", "best", "stop"])
        self.saves = rng.choice(["", "", "end", "epoch", "resumed"])
        self.extra = rng.choice(["", "", "", "ema", "nan", "freeze", "manual", "accuracy", "two", "shape",
                                 "predictions", "confusion", "good enough", "norms", "recent", "resume"])  # fmt: skip
        self.form = rng.choice(
            ["", "", "", "loss function", "update function", "step function", "clip function", "micro"]
        )
        self.defs = [self.of_model, METER if self.log == "meter" else "", ROWS if self.batches == "dict" else ""]
        self.criterion = ""
        if rng.random() < 0.4:
            self.criterion, target = rng.choice(CRITERIA)
            self.loss = f"{self.mine}criterion(out, {target})"
            self.defs.append(FOCAL if "Focal" in self.criterion else "")
        else:
            self.loss = rng.choice(LOSSES if rng.random() < 0.95 else NAMED_LOSSES)
        if "sum" not in self.criterion and "sum') " not in self.loss + " " and rng.random() < 0.15:
            self.loss += " + " + rng.choice(PENALTIES).format(model=self.model)

    def text(self) -> str:
        """Return the text of the script."""
        imports = ["import csv", "import json", "import logging", "import os", "import sys",
                   "from collections import deque", "", "import numpy as np",
                   "import torch", "import torch.nn.functional as F", "from torch import nn, optim",
                   "from torch.optim import Adam", "from torch.utils.data import DataLoader, Dataset, TensorDataset",
                   "", f"torch.manual_seed({self.seed})", "torch.set_default_dtype(torch.float64)"]  # fmt: skip
        if self.batches == "numpy":
            imports.append(f"np.random.seed({self.seed})")
        head = HEAD.format(n=self.n, epochs=self.epochs, seed=self.seed).splitlines()
        if "loss_fn" in self.loss:
            self.defs.append("loss_fn = F.cross_entropy")
        body = getattr(self, f"_{self.style}")()  # may add definitions
        defs = [line for part in self.defs for line in part.splitlines()]
        if self.batches == "function":
            defs += ["def get_batch():", "    i = torch.randint(n, (batch_size,))", "    return X[i], Y[i], T[i], M[i]"]
        lines = [*imports, *head, *defs, *body]
        return "\n".join(self._squeezed(lines) if self.rng.random() < 0.4 else lines) + "\n"

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _build(self) -> list[str]:
        """Return lines that create model, optimizer, scheduler and loaders."""
        rng, opt = self.rng, self.optimizer
        lines = [f"{self.model} = {self.made}"]
        if rng.random() < 0.3:
            lines += [
                "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
                f"{self.model}.to(device)",
            ]
        if self.extra == "freeze":
            lines += [f"for p in list({self.model}.parameters())[:1]:", "    p.requires_grad_(False)"]
        params = rng.choice(PARAMS).format(model=self.model)
        made = rng.choice(OPTIMIZERS).format(params=params)
        if rng.random() < 0.15 and self.style != "class":
            self.defs.append(f"def make_optimizer(model):\n    return {made}\n")
            made = f"make_optimizer({self.model})"
        lines.append(f"{opt} = {made}")
        if self.criterion:
            lines.append(f"{self.mine}criterion = {self.criterion}")
        if self.schedule in SCHEDULERS:
            lines.append(f"{self.mine}scheduler = {self.schedule.format(optimizer=opt)}")
        if self.amp == "scaler":
            lines.append(f"{self.mine}scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)")
        if self.batches in BY_LOADER:
            data = "Rows()" if self.batches == "dict" else "TensorDataset(X, Y, T, M)"
            options = rng.choice(["shuffle=True", "shuffle=True, drop_last=True", "shuffle=False", "num_workers=0"])
            size = rng.choice(["batch_size=batch_size", "batch_size", "batch_size=12"])
            lines.append(f"{self.mine}loader = DataLoader({data}, {size}, {options})")
        if self.evaluation not in ("", "set"):
            lines.append(f"{self.mine}val_loader = DataLoader(TensorDataset(val_X, val_Y), batch_size=5)")
        if self.extra == "ema":
            lines.append(f"{self.mine}ema = [p.detach().clone() for p in {self.model}.parameters()]")
        if self.evaluation in ("best", "stop"):
            lines.append(f"{self.mine}best = 1e9")
        if self.extra == "two":
            half = f"list({self.model}.parameters())"
            lines[lines.index(f"{opt} = {made}")] = f"{opt} = torch.optim.SGD({half}[:1], lr=0.05)"
            lines.append(f"{self.mine}other = torch.optim.Adam({half}[1:], lr=0.01)")
        if self.extra == "resume":
            lines += [
                "if os.path.exists('end.pt'):",
                f"    {self.model}.load_state_dict(torch.load('end.pt')['model'])",
            ]
        if self.log == "history":
            lines.append(f"{self.mine}history = {{'loss': []}}")
        if self.log == "logging":
            lines.append("logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stdout, force=True)")
        return lines

    def _batch_lines(self) -> tuple[list[str], list[str]]:
        """Return the heads of loops around a step, without the epoch loop, and the lines that take a batch."""
        loader = f"{self.mine}loader"
        four = "x, y, t, mask"
        match self.batches:
            case "tuple":
                return [f"for {four} in {loader}:"], []
            case "enumerate":
                return [f"for i, ({four}) in enumerate({loader}):"], []
            case "batch":
                return [f"for batch in {loader}:"], [f"{four} = batch"]
            case "dict":
                return [f"for batch in {loader}:"], [
                    "x, y = batch['x'], batch['y']", "t, mask = batch['t'], batch['mask']"
                ]  # fmt: skip
            case "zip":
                return [f"for number, ({four}) in zip(range(100), {loader}):"], []
            case "next":
                return [f"it = iter({loader})", "for number in range(2):"], [f"{four} = next(it)"]
            case "endless":
                self.defs.append(
                    "def forever(loader):\n    while True:\n        for batch in loader:\n            yield batch\n"
                )
                return [f"stream = forever({loader})", "for number in range(2):"], [f"{four} = next(stream)"]
            case "permutation":
                return ["order = torch.randperm(n)", "for i in range(0, n, batch_size):"], [
                    "chosen = order[i : i + batch_size]", f"{four} = X[chosen], Y[chosen], T[chosen], M[chosen]",
                ]  # fmt: skip
            case "numpy":
                return ["order = np.random.permutation(n)", "for i in range(0, n, batch_size):"], [
                    "chosen = order[i : i + batch_size]", f"{four} = X[chosen], Y[chosen], T[chosen], M[chosen]",
                ]  # fmt: skip
            case "slices":
                return ["for i in range(0, n, batch_size):"], [
                    "x, y = X[i : i + batch_size], Y[i : i + batch_size]",
                    "t, mask = T[i : i + batch_size], M[i : i + batch_size]",
                ]
            case "split":
                return ["for chosen in torch.randperm(n).split(batch_size):"], [
                    f"{four} = X[chosen], Y[chosen], T[chosen], M[chosen]"
                ]
            case "draws":
                return ["for number in range(3):"], [
                    "chosen = torch.randint(0, n, (batch_size,))",
                    f"{four} = X[chosen], Y[chosen], T[chosen], M[chosen]",
                ]  # fmt: skip
            case "function":
                return ["for number in range(3):"], [f"{four} = get_batch()"]
        assert self.batches == "whole"
        return ["for number in range(2):"], []

    def _step(self) -> list[str]:
        """Return lines for forward, backward, and the optimizer's step."""
        rng, opt, model, scaled = self.rng, self.optimizer, self.model, self.amp == "scaler"
        loss = self.loss
        given = "x"
        if self.batches == "whole":
            for old, new in (("x", "X"), ("y", "Y"), ("t", "T"), ("mask", "M")):
                loss = re.sub(rf"\b{old}\b", new, loss)
            given = "X"
        forward = [f"out = {model}({given})", f"loss = {loss}"]
        if self.amp:
            forward = ["with torch.autocast('cpu', dtype=torch.bfloat16):", *indented(forward)]
        if self.extra == "nan":
            forward += ["if not torch.isfinite(loss):", "    raise RuntimeError('the loss is not finite')"]
        zero = rng.choice([f"{opt}.zero_grad()", f"{opt}.zero_grad(set_to_none=True)", f"{model}.zero_grad()"])
        back = f"{self.mine}scaler.scale(loss).backward()" if scaled else "loss.backward()"
        if self.accumulate > 1:
            back = back.replace("loss", f"(loss / {self.accumulate})", 1)
        ready, step = self._before_step(), [f"{opt}.step()"]
        if scaled:
            step = [f"{self.mine}scaler.step({opt})", f"{self.mine}scaler.update()"]
        if self.extra == "two":
            other = f"{self.mine}other"
            zero = f"{opt}.zero_grad(); {other}.zero_grad()"
            if scaled:
                step.insert(1, f"{self.mine}scaler.step({other})")
                ready = [f"{self.mine}scaler.unscale_({other})"] * bool(ready) + ready
            elif rng.random() < 0.3:
                step = [f"for each in ({opt}, {other}):", "    each.step()"]
            else:
                step.append(f"{other}.step()")
        if self.form == "clip function" and self.clip:
            self._define("look(model)", [line for line in ready if "scaler" not in line])
            ready = [line for line in ready if "scaler" in line] + [f"look({model})"]
        step += self._after_step()
        if self.extra == "manual":
            ready += [f"for p in {model}.parameters():", "    if p.grad is not None:", "        p.grad.mul_(0.5)"]
        apart = not self.amp and self.batches != "whole"
        if self.form == "loss function" and apart and not self.criterion:
            self._define("compute(model, x, y, t, mask)", [*forward[:2], "return out, loss"])
            forward[:2] = [f"out, loss = compute({model}, x, y, t, mask)"]
        if self.form == "micro" and self.batches != "whole" and self.accumulate == 1:
            parts = ["for x, y, t, mask in zip(x.chunk(2), y.chunk(2), t.chunk(2), mask.chunk(2)):",
                     *indented([*forward, back.replace("loss", "(loss / 2)", 1)])]  # fmt: skip
            return [zero, *parts, *ready, *step]
        if self.form in ("update function", "step function") and apart and not self.mine and self.extra != "two":
            if self.accumulate == 1 and self.form == "update function":
                self._define("update(model, optimizer, loss)", [zero, back, *ready, step[0]])
                return [*forward, f"update({model}, {opt}, loss)", *step[1:]]
            if self.accumulate == 1:
                self._define("advance(model, optimizer)", [*ready, step[0]])
                return [zero, *forward, back, f"advance({model}, {opt})", *step[1:]]
        if self.accumulate > 1:
            often = bool(ready) and not scaled and rng.random() < 0.3
            front, inside = (ready, step) if often else ([], [*ready, *step])
            head = f"if steps % {self.accumulate} == 0:"
            return [*forward, back, *front, "steps += 1", head, *indented([*inside, zero])]
        if rng.random() < 0.5:
            return [zero, *forward, back, *ready, *step]
        return [*forward, zero, back, *ready, *step]

    def _before_step(self) -> list[str]:
        """Return lines that read gradients before the step."""
        model = self.model
        unscale = [f"{self.mine}scaler.unscale_({self.optimizer})"] * (self.amp == "scaler" and bool(self.clip))
        return (
            unscale
            + {
                "": [],
                "norm": [f"nn.utils.clip_grad_norm_({model}.parameters(), 0.5)"],
                "shown": [f"norm = nn.utils.clip_grad_norm_({model}.parameters(), max_norm=0.5)", "print(float(norm))"],
                "sometimes": ["if epoch > 0:", f"    nn.utils.clip_grad_norm_({model}.parameters(), 0.5)"],
                "total": [
                    f"print(sum(p.grad.pow(2).sum() for p in {model}.parameters() if p.grad is not None).item())"
                ],
                "value": [f"torch.nn.utils.clip_grad_value_({model}.parameters(), 0.1)"],
            }[self.clip]
        )

    def _after_step(self) -> list[str]:
        """Return lines for a scheduler and for averaged parameters after the step."""
        lines = [f"{self.mine}scheduler.step()"] * (SCHEDULERS.get(self.schedule) == "step")
        if self.schedule == "by hand":
            lines += [f"for group in {self.optimizer}.param_groups:", "    group['lr'] *= 0.97"]
        if self.extra == "ema":
            lines += ["with torch.no_grad():", f"    for mean, p in zip({self.mine}ema, {self.model}.parameters()):",
                      "        mean.mul_(0.9).add_(p, alpha=0.1)"]  # fmt: skip
        return lines

    def _define(self, head: str, lines: list[str]) -> None:
        """Add a function that does not use the epoch."""
        names = {self.model: "model", self.optimizer: "optimizer", "epoch > 0": "True"}
        for old, new in names.items():
            lines = [line.replace(old, new) for line in lines]
        self.defs.append("\n".join([f"def {head}:", *indented(lines)]))

    def _logged(self) -> tuple[list[str], list[str], list[str]]:
        """Return logging lines: before an epoch's steps, after each step, and after all steps."""
        x, y, loss = ("X", "Y", "loss.item()") if self.batches == "whole" else ("x", "y", "loss.item()")
        extra = ["right = (out.argmax(1) == " + y + ").double().mean()", "print(f'accuracy {right.item():.6f}')"] * (
            self.extra == "accuracy"
        )
        before, each, after = {
            "print": ([], [f"print(epoch, {loss})"], []),
            "every": (
                ["shown = 0"],
                ["if shown % 2 == 0:", f"    print(f'step {{shown}} loss {{{loss}:.6f}}')", "shown += 1"],
                [],
            ),
            "running": (["running, seen = 0.0, 0"], [f"running += {loss}", "seen += 1"], ["print(running / seen)"]),
            "weighted": (
                ["total = 0.0", "seen = 0"],
                [f"total += {loss} * {x}.size(0)", f"seen += {x}.size(0)"],
                ["print(f'epoch {epoch} loss {total / seen:.8f} of {seen}')"],
            ),
            "list": (["losses = []"], [f"losses.append({loss})"], ["print(sum(losses) / len(losses), max(losses))"]),
            "tensors": (["losses = []"], ["losses.append(loss.detach())"], ["print(torch.stack(losses).mean())"]),
            "correct": (
                ["correct = 0", "seen = 0"],
                [f"correct += (out.argmax(dim=1) == {y}).sum().item()", f"seen += len({y})"],
                ["print(f'accuracy {100 * correct / seen:.4f}')"],
            ),
            "meter": (["meter = Meter()"], [f"meter.update({loss}, {x}.size(0))"], ["print(meter.avg)"]),
            "history": ([], [f"{self.mine}history['loss'].append({loss})"], [f"print({self.mine}history['loss'][-1])"]),
            "logging": ([], [f"logging.info('epoch %d loss %.8f', epoch, {loss})"], []),
            "csv": ([], ["with open('log.csv', 'a') as f:", f"    csv.writer(f).writerow([epoch, {loss}])"], []),
            "ema loss": (["smooth = 0.0"], [f"smooth = 0.9 * smooth + 0.1 * {loss}"], ["print(f'{smooth:.8f}')"]),
        }[self.log]  # fmt: skip
        if self.extra == "shape":
            extra = [f"print(tuple(out.shape), len({x}))"]
        elif self.extra == "predictions":
            before = [*before, "predicted, wanted = [], []"]
            extra = ["predicted.append(out.argmax(1))", f"wanted.append({y})"]
            after = [*after, "print((torch.cat(predicted) == torch.cat(wanted)).double().mean().item())"]
        elif self.extra == "confusion":
            before = [*before, "table_of = torch.zeros(3, 3)"]
            extra = [f"for a, b in zip({y}, out.argmax(1)):", "    table_of[a, b] += 1"]
            after = [*after, "print(table_of.diag().sum().item())"]
        elif self.extra == "good enough":
            extra = [f"if (out.argmax(1) == {y}).double().mean() > 0.8:", "    break"]
        elif self.extra == "norms":
            extra = [f"print(sum(p.grad.abs().max().item() for p in {self.model}.parameters() if p.grad is not None))"]
        elif self.extra == "recent":
            before = [*before, "recent = deque(maxlen=3)", "least = float('inf')"]
            extra = [f"recent.append({loss})", f"least = min(least, {loss})"]
            after = [*after, "print(np.mean(recent), least)"]
        if self.accumulate > 1:
            before = ["steps = 0", *before]
        return before, [*each, *extra], after

    def _evaluation(self) -> list[str]:
        """Return lines that compute `val` and `hits`."""
        loop = [
            f"{self.model}.eval()", "val, hits = 0.0, 0", "with torch.no_grad():",
            f"    for x, y in {self.mine}val_loader:", f"        out = {self.model}(x)",
            "        val += F.cross_entropy(out, y, reduction='sum').item()",
            "        hits += (out.argmax(1) == y).sum().item()", "val /= len(val_X)",
        ]  # fmt: skip
        if self.evaluation == "set":
            loop = [
                f"{self.model}.eval()", "with torch.no_grad():", f"    out = {self.model}(val_X)",
                "    val = F.cross_entropy(out, val_Y).item()", "    hits = (out.argmax(1) == val_Y).sum().item()",
            ]  # fmt: skip
        return loop

    def _epoch_end(self, evaluate: list[str]) -> list[str]:
        """Return lines after an epoch's steps: evaluation, scheduler and checkpoints."""
        lines = list(evaluate)
        if self.evaluation:
            lines.append("print(f'val {val:.8f} {hits}')")
        if self.schedule in SCHEDULERS and SCHEDULERS[self.schedule] == "epoch":
            lines += [f"{self.mine}scheduler.step()", f"print({self.mine}scheduler.get_last_lr()[0])"]
        if self.schedule in SCHEDULERS and SCHEDULERS[self.schedule] == "loss":
            lines.append(f"{self.mine}scheduler.step({'val' if self.evaluation else 'epoch'})")
        if self.saves in ("epoch", "resumed"):
            lines.append(f"torch.save({{'model': {self.model}.state_dict(), 'epoch': epoch}}, 'last.pt')")
        if self.evaluation in ("best", "stop"):
            better = f"val < {self.mine}best"
            lines += [
                f"if {better}:",
                f"    {self.mine}best = val",
                f"    torch.save({self.model}.state_dict(), 'best.pt')",
            ]
            if self.evaluation == "stop":
                lines += ["else:", "    break"]
        return lines

    def _end(self) -> list[str]:
        lines = []
        if self.log == "history":
            lines += ["with open('history.json', 'w') as f:", f"    json.dump({self.mine}history, f)"]
        if self.saves == "end":
            lines.append(
                f"torch.save({{'model': {self.model}.state_dict(), 'opt': {self.optimizer}.state_dict()}}, 'end.pt')"
            )
        if self.saves == "resumed":
            lines += ["kept = torch.load('last.pt', weights_only=True)", f"{self.model}.load_state_dict(kept['model'])",
                      "print('resumed', kept['epoch'])"]  # fmt: skip
        if self.extra == "ema":
            lines.append(f"print(sum(mean.sum() for mean in {self.mine}ema).item())")
        lines.append(f"print(sum(p.sum().item() for p in {self.model}.parameters()))")
        return lines

    # ── whole scripts ────────────────────────────────────────────────────────────────────────────────────────────

    def _epoch(self) -> list[str]:
        """Return lines of an epoch's steps, with logging."""
        heads, takes = self._batch_lines()
        before, each, after = self._logged()
        train = [f"{self.model}.train()"] if self.rng.random() < 0.7 else []
        return [*train, *before, *heads, *indented([*takes, *self._step(), *each]), *after]

    def _loop(self, epoch: list[str], evaluate: list[str]) -> list[str]:
        return [
            f"for epoch in range({self.rng.choice(['epochs', str(self.epochs)])}):",
            *indented([*epoch, *self._epoch_end(evaluate)]),
        ]

    def _flat(self) -> list[str]:
        evaluate = self._evaluation() if self.evaluation else []
        return [*self._build(), *self._loop(self._epoch(), evaluate), *self._end()]

    def _main(self) -> list[str]:
        return ["def main():", *indented(self._flat()), "if __name__ == '__main__':", "    main()"]

    def _functions(self) -> list[str]:
        """Return functions that train an epoch and evaluate, and their calls at top level or in main()."""
        shared = [self.model, self.optimizer]
        shared += ["criterion"] * bool(self.criterion) + ["scheduler"] * (self.schedule in SCHEDULERS)
        shared += ["scaler"] * (self.amp == "scaler") + ["loader"] * (self.batches in BY_LOADER)
        shared += (
            ["other"] * (self.extra == "two") + ["ema"] * (self.extra == "ema") + ["history"] * (self.log == "history")
        )
        names = ", ".join([*shared, "epoch"])
        build = self._build()
        train = ["def train_epoch(" + names + "):", *indented(self._epoch())]
        evaluate, call = [], []
        if self.evaluation:
            given = self.model + ", val_loader" * (self.evaluation != "set")
            evaluate = ["@torch.no_grad()"] * (self.rng.random() < 0.5)
            evaluate += [f"def evaluate({given}):", *indented([*self._evaluation(), "return val, hits"])]
            call = [f"val, hits = evaluate({given})"]
        rest = [*build, *self._loop([f"train_epoch({names})"], call), *self._end()]
        if self.rng.random() < 0.5:
            return [*train, *evaluate, "def main():", *indented(rest), "if __name__ == '__main__':", "    main()"]
        return [*train, *evaluate, *rest]

    def _class(self) -> list[str]:
        evaluate, call = [], []
        if self.evaluation:
            evaluate = ["def evaluate(self):", *indented([*self._evaluation(), "return val, hits"])]
            call = ["val, hits = self.evaluate()"]
        fit = [*self._loop(["self.train_epoch(epoch)"], call), *self._end()]
        methods = ["def __init__(self):", *indented(self._build()), "def train_epoch(self, epoch):",
                   *indented(self._epoch()), *evaluate, "def fit(self):", *indented(fit)]  # fmt: skip
        start = ["Trainer().fit()"]
        if self.rng.random() < 0.6:
            start = ["if __name__ == '__main__':", "    trainer = Trainer()", "    trainer.fit()"]
        return ["class Trainer:", *indented(methods), *start]

    def _squeezed(self, lines: list[str]) -> list[str]:
        """Return the lines with some statements joined on one line, and some blocks on the line of their head."""

        def depth(line: str) -> int:
            return len(line) - len(line.lstrip())

        def simple(line: str) -> bool:
            words = (
                "for ",
                "if ",
                "with ",
                "def ",
                "class ",
                "else:",
                "while ",
                "@",
                "return",
                "import ",
                "from ",
                "raise",
                "break",
            )
            return bool(line.strip()) and not line.strip().startswith(words) and not line.endswith((":", ","))

        joined: list[str] = []
        for line in lines:
            if (
                joined
                and simple(line)
                and simple(joined[-1])
                and depth(line) == depth(joined[-1])
                and self.rng.random() < 0.35
            ):
                joined[-1] += "; " + line.strip()
            else:
                joined.append(line)
        out: list[str] = []
        for place, line in enumerate(joined):
            alone = place + 1 >= len(joined) or depth(joined[place + 1]) < depth(line)
            into = out and out[-1].endswith(":") and depth(line) == depth(out[-1]) + 4 and out[-1] is joined[place - 1]
            if (
                alone
                and into
                and (simple(line) or line.strip() == "break")
                and not out[-1].strip().startswith("class ")
                and self.rng.random() < 0.6
            ):
                out[-1] += " " + line.strip()
            else:
                out.append(line)
        return out


def drawn(seed: int) -> str:
    """Return a random script."""
    return Drawn(seed).text()
