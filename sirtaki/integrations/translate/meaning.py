"""Analysis of a training script: which parts train, and which values would differ between ranks."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import libcst as cst
import libcst.helpers

from sirtaki.errors import TranslationError

from .source import (
    Edits,
    Flows,
    Site,
    Symbol,
    TrackedKind,
    argument,
    called_attribute,
    dotted,
    parameters,
    targets,
    walk,
)

Loop = cst.For | cst.CompFor


class Training:
    """The parts of a script that train.

    Attributes:
        loops: loops over data loaders whose body computes gradients, including comprehensions, in text order.
        other_loops: loops over data loaders whose body does not compute gradients.
        relays: loops in generators that yield a data loader's batches to a loop elsewhere.
        divided: data loaders that `loops` read. The translated script divides their data among the ranks.
    """

    def __init__(self, flows: Flows) -> None:
        self.flows = flows
        source = self.source = flows.source
        self._functions = self._that_train()
        self.loops: list[Loop] = []
        self.other_loops: list[Loop] = []
        self.relays = list(flows.relays)
        for loop in walk(source.module):
            if not isinstance(loop, cst.For | cst.CompFor) or loop in self.relays:
                continue
            if flows.holds(loop.iter, TrackedKind.LOADER) and not _counts(loop.iter):
                body = loop.body if isinstance(loop, cst.For) else source.parent(loop)
                (self.loops if self.trains(body) else self.other_loops).append(loop)
        self.reads = [
            call
            for call in source.all(cst.Call)
            if dotted(call.func) == "next" and flows.holds(call, TrackedKind.LOADER) and self._is_read_in_training(call)
        ]
        loaders = [site for loop in self.loops for site in flows.holds(loop.iter, TrackedKind.LOADER)]
        loaders += [site for call in self.reads for site in flows.holds(call, TrackedKind.LOADER)]
        self.divided = list(dict.fromkeys(loaders))

    def trains(self, node: cst.CSTNode) -> bool:
        """Return whether a part of the script (`node`) runs a backward pass, also in a function that it calls."""
        return any(
            called_attribute(call) == "backward"
            or any(self.source.name_of(function) in self._functions for function in self.flows.callees(call))
            for call in self.source.all(cst.Call, node)
        )

    def backward_passes(self, within: cst.CSTNode | None = None) -> list[cst.Call]:
        """Return the calls of `backward()` in a part of the script. None for the whole script."""
        return [call for call in self.source.all(cst.Call, within) if called_attribute(call) == "backward"]

    def steps(self) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
        """Yield each call that steps an optimizer, directly or through a gradient scaler, together
        with the optimizer.
        """
        for call in self.source.all(cst.Call):
            if called_attribute(call) != "step" or not isinstance(call.func, cst.Attribute):
                continue
            if self.flows.holds(call.func.value, TrackedKind.OPTIMIZER):
                yield call, call.func.value
            elif call.args and self.flows.holds(call.args[0].value, TrackedKind.OPTIMIZER):
                yield call, call.args[0].value

    def passes_are_counted(self) -> bool:
        """Return whether all optimizers step after each backward pass. Otherwise, gradients must be reduced only in
        `step()`.

        A backward pass may reach the parameters of any optimizer. For example, the generator's backward pass also
        reaches the discriminator. If an optimizer does not step after a pass, the script later clears the optimizer's
        gradients, or accumulates more gradients.
        """
        return all(self._all_step_after(call) for call in self.backward_passes())

    def _all_step_after(self, call: cst.Call) -> bool:
        """Return whether each optimizer steps between the backward pass `call` and the next one, in every branch of the
        code.
        """
        source = self.source
        waiting = {site for site in self.flows.made(TrackedKind.OPTIMIZER) if not self._is_made_later(site.call, call)}
        for step, optimizer in self.steps():
            if step.args and source.code(step.args[0].value) in source.function_of(call).split("."):
                # The argument of this step is a closure, which contains the backward pass.
                return waiting <= self._optimizers_of(step, optimizer, ())
        here: cst.CSTNode = source.statement(call)
        while not isinstance(here, cst.For | cst.While | cst.FunctionDef | cst.Module):
            block = source.parent(here)
            siblings = list(block.children) if isinstance(block, cst.IndentedBlock | cst.Module) else [here]
            for sibling in siblings[siblings.index(here) + 1 :]:
                if self.trains(sibling):
                    return False
                waiting -= self._stepped(sibling)
                if not waiting:
                    return True
            here = source.parent(here)
        return False

    def _stepped(self, node: cst.CSTNode, loops: tuple[cst.For, ...] = ()) -> set[Site]:
        """Return the optimizers that step in a part of the script (`node`), in whichever branch."""
        if isinstance(node, cst.FunctionDef | cst.ClassDef | cst.Try | cst.While):
            return set()
        if isinstance(node, cst.If):
            return self._stepped(node.body, loops) & (
                set() if node.orelse is None else self._stepped(node.orelse, loops)
            )
        if isinstance(node, cst.For):
            return self._stepped(node.body, (*loops, node))
        if isinstance(node, cst.BaseSuite | cst.Else | cst.With):
            return set[Site]().union(*(self._stepped(child, loops) for child in node.children))
        there = [each for each in self.steps() if self.source.contains(node, each[0])]
        return set[Site]().union(*(self._optimizers_of(*each, loops) for each in there))

    def _optimizers_of(self, step: cst.Call, optimizer: cst.BaseExpression, loops: tuple[cst.For, ...]) -> set[Site]:
        """Return the optimizers that the call `step` certainly steps.

        If a loop in `loops` binds the name of the optimizer, they are all optimizers over which the loop iterates. If
        the name can hold only one optimizer, it is this one.
        """
        sites = set(self.flows.holds(optimizer, TrackedKind.OPTIMIZER))
        symbol = self.source.symbol(optimizer)
        if any(self.source.symbol(name) == symbol for loop in loops for name in self.source.all(cst.Name, loop.target)):
            return sites
        return sites if len(sites) == 1 and not any(self._is_repeated(site.call, step, ()) for site in sites) else set()

    def _is_repeated(self, made: cst.CSTNode, step: cst.Call, within: tuple[cst.FunctionDef, ...]) -> bool:
        """Return whether the call `made`, which creates an optimizer, may have run several times before the call
        `step`.
        """
        for there in self.source.above(made):
            if self.source.contains(there, step):
                return False
            if isinstance(there, cst.For | cst.While | cst.BaseComp | cst.Lambda) or there in within:
                return True
            if isinstance(there, cst.FunctionDef):
                calls = [call for call in self.source.all(cst.Call) if there in self.flows.callees(call)]
                return len(calls) != 1 or self._is_repeated(calls[0], step, (*within, there))
        return False

    def _is_made_later(self, made: cst.Call, call: cst.Call) -> bool:
        """Return whether the call `made`, which creates an optimizer, runs only after the call `call` of `backward()`.

        This is known only if both are in the same function, and if no loop contains both.
        """
        source = self.source
        if source.function_of(made) != source.function_of(call) or source.line(made) <= source.line(call):
            return False
        loops = (there for there in source.above(call) if isinstance(there, cst.For | cst.While))
        return not any(source.contains(loop, made) for loop in loops)

    def loader_names(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return the names of data loaders in the expression over which a loop iterates: `loader` in
        `enumerate(tqdm(loader))`.

        If the expression is a name (`bar` with `bar = tqdm(loader)`), return the loaders in the value assigned to it.
        """
        if isinstance(node, cst.Call) and node.args:
            if node in self.flows.sites:
                return [node]
            return [name for arg in node.args for name in self.loader_names(arg.value)]
        if not self.flows.holds(node, TrackedKind.LOADER):
            return []
        symbol, found = self.source.symbol(node), list[cst.BaseExpression]()
        for assign in self.source.all(cst.Assign):
            value = assign.value
            if symbol is None or not any(self.source.symbol(target) == symbol for target in targets(assign)):
                continue
            wraps = isinstance(value, cst.Call) and value not in self.flows.sites and not self.flows.callees(value)
            if not wraps or dotted(value.func) == "iter":  # type: ignore[attr-defined]  # `value` is a call
                continue
            inner = self.loader_names(value) if not self._names(value, symbol) else []
            if not inner:
                raise TranslationError.of(
                    [(self.source.line(assign), f"hides the loader that is read: `{self.source.code(assign)}`")]
                )
            found += inner
        return found or [node]

    def _names(self, node: cst.CSTNode, symbol: Symbol) -> bool:
        return any(self.source.symbol(name) == symbol for name in self.source.all(cst.Name, node))

    def is_divided(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression may be a data loader whose data the translated script
        divides among the ranks.
        """
        return bool(set(self.flows.holds(node, TrackedKind.LOADER)) & set(self.divided))

    def epoch(self, loop: cst.CSTNode) -> str:
        """Return the variable of an enclosing loop that counts epochs; "" if there is no such loop."""
        counters = []
        for there in self.source.above(loop):
            if isinstance(there, cst.FunctionDef):
                names = [param.name.value for param in there.params.params]
                counters += [name for name in names if name == "epoch"]
                break
            if isinstance(there, cst.For) and isinstance(there.target, cst.Name) and _counts(there.iter):
                counters.append(there.target.value)
        counters = [name for name in counters if name != "_"]
        return next((name for name in counters if "epoch" in name.lower()), counters[0] if counters else "")

    # ── used by the constructor ──────────────────────────────────────────────────────────────────────────────────

    def _that_train(self) -> set[str]:
        found: set[str] = set()
        self._functions = found
        while True:
            more = {name for name, function in self.source.functions.items() if self.trains(function.body)}
            if more == found:
                return found
            found |= more

    def _is_read_in_training(self, call: cst.Call) -> bool:
        around = [there for there in self.source.above(call) if isinstance(there, cst.For | cst.While)]
        return any(self.trains(loop) for loop in around)


def _counts(node: cst.BaseExpression) -> bool:
    """Return whether an expression is a `range`, or a progress bar around a `range`."""
    if not isinstance(node, cst.Call):
        return False
    name = node.func.value if isinstance(node.func, cst.Name) else called_attribute(node)
    return name in ("range", "trange", "count") or (
        name in ("tqdm", "track") and any(_counts(a.value) for a in node.args)
    )


class Over(Enum):
    """How a value depends on the samples in a rank's part of a batch.

    It may have a row per sample, or be their mean or sum.
    """

    ALL = "the same on all ranks"
    ZERO = "nothing yet: a sum begins with it"
    WHOLE = "of the whole batch, since ranks have put it together"
    ROWS = "something of each sample, along the first axis"
    MASK = "true or false for each sample"
    PART = "something of each sample that a mask leaves, so ranks may have different numbers of them"
    COUNT = "a number of samples, equal on all ranks"
    SHAPE = "the shape of a batch"
    MEAN = "a mean over the samples"
    SUM = "a sum over the samples"
    UNKNOWN = "anything else"


SHARED = {Over.ALL, Over.ZERO, Over.WHOLE}
EACH = {Over.ROWS, Over.MASK}
REDUCED = {Over.MEAN, Over.SUM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Facts that the analysis `RankValues` has about the value of an expression on each rank.

    Attributes:
        over: how the value depends on the samples of a rank.
        sure: `over` was derived from the batch. If False, `over` is a guess from common usage.
        number: the value is a Python number, not a tensor.
        dims: minimum number of axes of the tensor, including the axis of the samples.
        container: the value may be a tuple, list or dictionary. The other attributes then describe its elements.
        items: one `Value` for each element of a tuple.
    """

    over: Over = Over.ALL
    sure: bool = True
    number: bool = False
    dims: int = 1
    container: bool = False
    items: tuple[Value, ...] = ()

    @property
    def own(self) -> bool:
        """Return whether the value differs between ranks."""
        return self.over not in SHARED or any(item.own for item in self.items)


ALL = Value()
BATCH = Value(over=Over.ROWS, container=True)
OWN = Value(over=Over.UNKNOWN)
COUNT = Value(over=Over.COUNT, number=True)
MEAN, SUM = Value(over=Over.MEAN), Value(over=Over.SUM)


def either(one: Value, other: Value) -> Value:
    """Return the facts about a variable that has one of two values, such as after an `if`."""
    if one == other:
        return one
    if not one.own and not other.own:
        return Value(over=one.over if one.over is other.over else Over.ALL, sure=one.sure and other.sure)
    if not other.own:
        return one
    if not one.own:
        return other
    if len(one.items) == len(other.items) > 0:
        return Value(items=tuple(either(a, b) for a, b in zip(one.items, other.items, strict=True)))
    kinds = {one.over, other.over}
    over = one.over if len(kinds) == 1 else Over.ROWS if kinds == EACH else Over.UNKNOWN
    return Value(
        over=over,
        sure=one.sure and other.sure,
        number=one.number and other.number,
        dims=min(one.dims, other.dims),
        container=one.container and other.container,
    )


def all_alike(values: Sequence[Value]) -> Value:
    """Return the facts (`Value`) about a container whose elements have these values."""
    own = [value for value in values if value.own]
    if not own:
        return ALL
    together = functools.reduce(either, own)
    return together if len(own) == len(values) else replace(together, sure=False)


def combined(operator: cst.CSTNode, left: Value, right: Value) -> Value:
    """Return the facts (`Value`) about the result of an element-wise arithmetic operation on two values."""
    own = [value for value in (left, right) if value.own]
    kinds, over = {value.over for value in own}, Over.UNKNOWN
    adds = isinstance(operator, cst.Add | cst.Subtract | cst.AddAssign | cst.SubtractAssign)
    if any(value.items for value in own):
        pass
    elif not own:
        over = Over.WHOLE if Over.WHOLE in (left.over, right.over) else Over.ALL
    elif kinds <= EACH:
        over = Over.MASK if kinds == {Over.MASK} and isinstance(operator, cst.BitAnd | cst.BitOr) else Over.ROWS
    elif kinds == {Over.PART}:
        over = Over.PART
    elif adds:
        if len(own) == 2 and len(kinds) == 1 and kinds <= REDUCED | {Over.COUNT}:
            over = left.over
        elif kinds == {Over.MEAN} or Over.ZERO in (left.over, right.over):
            over = own[0].over
    elif isinstance(operator, cst.Multiply | cst.MultiplyAssign):
        if len(own) == 1:
            over = own[0].over
        elif kinds == {Over.MEAN, Over.COUNT}:
            over = Over.SUM
    elif isinstance(operator, cst.Divide | cst.DivideAssign):
        if not right.own:
            over = left.over
        elif (left.over, right.over) == (Over.SUM, Over.COUNT):
            over = Over.MEAN
    return Value(
        over=over,
        sure=left.sure and right.sure,
        number=bool(own) and all(value.number for value in own),
        dims=max((value.dims for value in own), default=1),
    )


def collected(value: Value) -> Value:
    """Return the `Value` (what is known) of an element of a list comprehension whose element expression is `value`.

    An element may come from any iteration. A number of samples (COUNT) is therefore treated as a sum over samples, and
    a shape is unknown.
    """
    over = {Over.COUNT: Over.SUM, Over.SHAPE: Over.UNKNOWN}.get(value.over, value.over)
    return replace(value, over=over, items=tuple(collected(item) for item in value.items))


SAME_VALUE = {
    "item", "detach", "cpu", "cuda", "to", "clone", "float", "double", "half", "numpy", "tolist", "squeeze",
    "contiguous", "data", "mean_", "requires_grad_", "int", "long", "bfloat16", "type", "fill_", "zero_", "normal_",
    "uniform_",
}  # fmt: skip
STRUCTURE = {"ndim", "dtype", "device", "is_cuda", "requires_grad", "is_sparse", "grad_fn"}

SHOWS = {
    "print", "format", "info", "debug", "warning", "error", "log", "add_scalar", "add_scalars", "set_postfix", "write",
    "set_postfix_str", "set_description", "append", "extend", "update", "put",
}  # fmt: skip
"""Names of functions and methods, such as `print`, that show their arguments to the user or store them."""

ABOUT = {"isinstance", "type", "hasattr", "id", "callable", "range", "issubclass"}


ELEMENTWISE = {
    "abs", "exp", "log", "log2", "log10", "log1p", "expm1", "sqrt", "rsqrt", "pow", "square", "sigmoid", "tanh", "relu",
    "gelu", "silu", "softplus", "logsigmoid", "elu", "leaky_relu", "sin", "cos", "erf", "neg", "sign", "reciprocal",
    "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "where", "masked_fill", "nan_to_num", "add", "sub",
    "mul", "div", "lerp", "atan", "logit", "xlogy", "round", "floor", "ceil", "fmod", "dropout", "relu6", "mish",
}  # fmt: skip
"""Names of functions and methods that compute each element of the result from one element of each tensor."""

AXIS_AT = {
    "mean": 1, "sum": 1, "softmax": 1, "log_softmax": 1, "logsumexp": 1, "std": 1, "var": 1, "argmax": 1, "argmin": 1,
    "amax": 1, "amin": 1, "max": 1, "min": 1, "cumsum": 1, "prod": 1, "any": 1, "all": 1, "squeeze": 1, "unsqueeze": 1,
    "flip": 1, "gather": 1, "index_select": 1, "cat": 1, "concat": 1, "stack": 1, "flatten": 1, "norm": 2, "select": 1,
    "narrow": 1, "topk": 2, "sort": 1, "normalize": 2, "cosine_similarity": 2, "chunk": 2, "split": 2,
}  # fmt: skip
"""For functions along an axis: position of the argument that names the axis. Position 0 is the tensor."""

ALONG = {name: name in ("squeeze", "cat", "concat", "normalize", "cosine_similarity") for name in AXIS_AT}
"""For functions along an axis: whether they keep the samples of a batch separate without an axis argument."""

FEWER = {"logsumexp", "std", "var", "argmax", "argmin", "amax", "amin", "prod", "any", "all", "squeeze", "norm",
         "select", "cosine_similarity"}  # fmt: skip
PAIRS = {"max", "min", "topk", "sort"}
VIEWS = {"view", "reshape", "expand", "view_as", "expand_as", "reshape_as", "type_as"}
CREATES = {"zeros", "ones", "full", "rand", "randn", "empty", "randint", "normal"}
NUMPY_CREATES = CREATES | {"uniform", "random", "standard_normal"}
TENSOR_TYPE = re.compile(r"torch\.(cuda\.)?\w*Tensor")
SEQUENCES = {"LSTM", "GRU", "RNN", "MultiheadAttention", "Transformer", "TransformerEncoder", "TransformerEncoderLayer",
             "TransformerDecoder", "TransformerDecoderLayer"}  # fmt: skip
"""Names of modules whose inputs have the samples along the second axis by default."""

WEIGHED = {"crossentropy", "crossentropyloss", "nllloss"}
"""Names of losses that divide by the total weight of the targets. This weight differs between ranks."""

UNWEIGHTED = "cross entropy is taken to count all targets alike; where some are -100, give it `ignore_index=-100`"


class RankValues:
    r"""Analysis that follows values through a script. It records in `edits` where values of all ranks must be combined.

    This is an abstract interpreter. It runs the script with a `Value` instead of a number or tensor for every name and
    expression. A `Value` says how the result depends on the samples of a rank. All branches of an `if` are run, and if
    they give different values, the result is UNKNOWN. The body of each loop is run twice, because an iteration starts
    with the values of the previous iteration. Each function is run once for each combination of arguments. Example:

        for x, y in loader:                      x, y: ROWS, something of each sample
            each = (model(x) - y) ** 2           ROWS: a model is assumed to process each sample separately
            loss = each.mean()                   MEAN
            total += loss.item() * len(x)        MEAN * COUNT = SUM, not read in the loop
        print(total / len(data))                 the same on all ranks

    `total = ranks.total(total)` is inserted after the loop, because values that leave the computation must be equal on
    all ranks. If an UNKNOWN value is printed, the user gets a note. If a condition depends on it (`if x.max() > 3:
    break`), the script is refused.

    Gradients are averaged over ranks. Therefore the *mean over the ranks* of the losses must equal the loss of one
    process. (If all losses are sums, the sum over the ranks must.) This holds for a MEAN or SUM, a sum of MEANs, and a
    MEAN times a value that is equal on all ranks. If a MEAN or SUM is used in another way, it is combined over ranks at
    that place by `ranks.average` or `ranks.total`, through which gradients flow back to all ranks:

        torch.sqrt(each.mean())                  torch.sqrt(ranks.average(each.mean()))
        (each * mask).sum() / mask.sum()         (each * mask).sum() / ranks.average(mask.sum())
        F.mse_loss(out[mask], y[mask])           ranks.weighted(F.mse_loss)(out[mask], y[mask])

    Functions that mix samples (`z @ z.t()`, `each.topk(8)`) give UNKNOWN. A loss computed from such values is a loss of
    each rank's batch, and a note says so.

    Attributes:
        batches: expressions that are a rank's part of a batch. More may be added before `follow()`.
        losses: kinds of losses (means or sums) from which backward passes begin, each with a line.
    """

    def __init__(self, training: Training, edits: Edits, *, ranks: str) -> None:
        """Prepare the analysis. `ranks` is the name that the module `sirtaki.torch.ranks` has in
        the translated script.
        """
        self._training, self._flows, self._source = training, training.flows, training.source
        self._edits, self._ranks = edits, ranks
        self.batches: set[cst.CSTNode] = set()
        self.losses: dict[Over, int] = {}
        # Facts about each variable at the place that the interpreter has reached.
        self._env: dict[Symbol, Value] = {}
        self._wrapped: dict[cst.CSTNode, Over] = {}
        self._meant: set[cst.Call] = set()
        self._losses = {
            name.value
            for call in training.backward_passes()
            if isinstance(call.func, cst.Attribute)
            for name in self._source.all(cst.Name, call.func.value)
        }
        # Names of the script's functions that the interpreter is running with arguments that differ between ranks.
        self._calling: list[str] = []
        self._fresh: set[Symbol] = set()
        self._in_loop: list[cst.For] = []  # Training loops that the interpreter is in.
        self._branches = 0
        self._called: dict[tuple[str, tuple[Value, ...]], Value] = {}
        self._returned: list[Value] = []
        self._begun: dict[cst.Call, set[Value]] = {}  # {call of backward(): facts about its loss}
        self._models = {
            self._source.code(call.func.value)
            for call in self._source.all(cst.Call)
            if isinstance(call.func, cst.Attribute)
            and call.func.attr.value in ("parameters", "train", "eval", "zero_grad", "state_dict", "load_state_dict")
        }

    def follow(self) -> None:
        """Run the whole script in the abstract interpreter, and record where values must be combined over the ranks."""
        self._block(self._source.module)
        called = {name for name, _ in self._called}
        for name, function in self._source.functions.items():
            if name not in called and self._training.trains(function.body):
                self._function(function, {})
        for call, values in self._begun.items():
            assert isinstance(call.func, cst.Attribute)
            line, known = self._source.line(call), {value for value in values if value.over is not Over.ALL}
            for value in known:
                self.losses.setdefault(Over.SUM if value.over is Over.SUM else Over.MEAN, line)
            if not known or call.args or any(not v.sure or v.over not in REDUCED | {Over.WHOLE} for v in known):
                text = self._source.code(call.func.value)
                self._edits.note(
                    line,
                    f"`{text}` is not seen to be a mean or sum of what each sample gives: it stays a loss of each "
                    "rank's part of a batch, and need not train as one process does",
                )
        if any(
            site.kind is TrackedKind.LOADER and argument(site.call, "collate_fn") for site in self._flows.sites.values()
        ):
            self._edits.note(0, "where `collate_fn` pads, it does so for each rank's part of a batch")

    def _block(self, node: cst.CSTNode) -> None:
        for child in node.children:
            self._statement(child)

    def _statement(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.FunctionDef):
            if any(isinstance(there, cst.FunctionDef | cst.For | cst.While) for there in self._source.above(node)):
                self._closure(node)
            return
        if isinstance(node, cst.ClassDef | cst.Import | cst.ImportFrom):
            return
        if isinstance(node, cst.For):
            self._for(node)
        elif isinstance(node, cst.While):
            self._decide(node.test)
            for _ in range(2):
                self._block(node.body)
        elif isinstance(node, cst.If):
            self._if(node)
        elif isinstance(node, cst.Assign):
            self._assign(node)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self._put(node.target, self._value(node.value))
        elif isinstance(node, cst.AugAssign):
            self._add(node)
        elif isinstance(node, cst.Return):
            self._returned.append(ALL if node.value is None else self._value(node.value))
        elif isinstance(node, cst.Expr):
            self._value(node.value)
        elif isinstance(node, cst.Assert):
            self._decide(node.test)
        elif isinstance(node, cst.With):
            for item in node.items:
                self._value(item.item)
            self._block(node.body)
        elif not isinstance(node, cst.BaseExpression):
            self._block(node)

    def _closure(self, node: cst.FunctionDef) -> None:
        """Run the body of a nested function that trains, with the values of variables at its definition."""
        if self._training.trains(node.body):
            kept, self._returned = self._returned, []
            self._block(node.body)
            self._returned = kept

    def _for(self, loop: cst.For) -> None:
        trains = loop in self._training.loops
        value = self._value(loop.iter)
        # Interpret the body twice: the second run starts with the values of the previous iteration.
        for _ in range(2):
            self._put(loop.target, BATCH if trains else _element(value))
            if isinstance(loop.target, cst.Tuple) and (_is_enumerated(loop.iter) or _are_items(loop.iter)):
                self._put(loop.target.elements[1].value, BATCH if trains else value)
                self._put(loop.target.elements[0].value, ALL)
            if trains:
                self._in_loop.append(loop)
                outer, self._fresh, branches, self._branches = self._fresh, set(), self._branches, 0
                self._block(loop.body)
                self._fresh, self._branches = outer, branches
                self._in_loop.pop()
            else:
                self._block(loop.body)
        if loop.orelse is not None:
            self._block(loop.orelse)

    def _if(self, node: cst.If) -> None:
        self._decide(node.test)
        before = dict(self._env)
        self._branches += 1
        self._block(node.body)
        taken, self._env = self._env, before
        if node.orelse is not None:
            self._statement(node.orelse)
        self._branches -= 1
        for symbol, value in taken.items():
            self._env[symbol] = either(value, self._env.get(symbol, ALL))

    def _assign(self, node: cst.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            symbol = self._source.symbol(target.target)
            if symbol is not None and not self._branches:
                self._fresh.add(symbol)
            lasts = isinstance(target.target, cst.Attribute) or (
                isinstance(target.target, cst.Subscript) and not self._value(target.target.value).own
            )
            if lasts and value.number and value.over is not Over.COUNT:
                value = ALL if self._share(node.value) else OWN
            self._put(target.target, value)

    def _add(self, node: cst.AugAssign) -> None:
        value, symbol = self._value(node.value), self._source.symbol(node.target)
        there, differentiated = self._value(node.target), self._is_differentiated(node.target)
        if differentiated and Over.SUM in (kinds := {value.over, there.over}) and kinds - {Over.SUM, Over.ZERO}:
            self._edits.refuse(node, "adds to a sum over samples what is none: write both terms in one expression")
        if not value.own:
            if self._is_placed_by_samples(node.target):
                self._put(node.target, OWN)
            return
        of_this_batch = symbol is not None and symbol in self._fresh
        in_callee = bool(self._calling) and not self._in_loop and isinstance(node.target, cst.Name)
        if there.own or of_this_batch or in_callee or differentiated:
            joined = combined(node.operator, there, value) if there.own else replace(value, items=(), container=False)
            self._put(node.target, joined)
            return
        if value.over in REDUCED | {Over.COUNT} and (loop := self._sums_up_in(node)) is not None:
            name, function = self._source.code(node.target), self._function_for(value.over)
            self._edits.after(loop, f"{name} = {function}({name})")
            return
        if not self._share(node.value):
            line = self._source.line(node)
            self._edits.refuse(line, f"cannot tell whether `{self._source.code(node.value)}` is a mean or a sum")

    def _sums_up_in(self, node: cst.AugAssign) -> cst.For | None:
        """Return the loop in which `node` (`total += x`) accumulates a sum that may be combined over ranks after the
        loop.

        None if there is no such loop. The sum must be initialised before the loop, and must not be read inside it.
        """
        if not self._in_loop or not isinstance(node.target, cst.Name):
            return None
        loop, name = self._in_loop[-1], node.target.value
        if not self._source.contains(loop, node) or not isinstance(node.operator, cst.AddAssign):
            return None
        uses = [there for there in self._source.all(cst.Name, loop) if there.value == name]
        if uses != [node.target]:
            return None
        siblings = list(self._source.parent(loop).children)
        for sibling in siblings[: siblings.index(loop)]:
            for statement in sibling.children:
                if isinstance(statement, cst.Assign) and any(_assigns(target, name) for target in targets(statement)):
                    return loop
        return None

    def _function(self, function: cst.FunctionDef, given: dict[str, Value]) -> Value:
        """Return the facts (`Value`) about the result of a function of the script for the arguments `given`."""
        scope = self._source.name_of(function)
        names = [param.name.value for param in parameters(function)]
        key = (scope, tuple(given.get(name, ALL) for name in names))
        if scope in self._calling:
            return self._any(*given.values())
        if key in self._called:
            return self._called[key]
        for name in names:
            self._env[scope, name] = given.get(name, ALL)
        own = any(value.own for value in given.values())
        kept = (self._returned, self._fresh, self._in_loop, self._branches)
        self._returned, self._fresh, self._branches = [], set(), 0
        self._in_loop = []
        if own:
            self._calling.append(scope)
        self._block(function.body)
        if own:
            self._calling.pop()
        returned = self._returned
        self._returned, self._fresh, self._in_loop, self._branches = kept
        result = functools.reduce(either, returned) if returned else ALL
        self._called[key] = result
        return result

    # ── expressions ──────────────────────────────────────────────────────────────────────────────────────────────

    def _put(self, target: cst.BaseExpression, value: Value) -> None:
        """Record that `value` is assigned to `target`."""
        if isinstance(target, cst.Tuple | cst.List):
            for position, element in enumerate(target.elements):
                known = len(value.items) == len(target.elements)
                self._put(element.value, value.items[position] if known else _at(value, position))
        elif isinstance(target, cst.Subscript):
            if value.own or self._is_placed_by_samples(target):
                self._put(target.value, OWN)
        else:
            symbol = self._source.symbol(target)
            if symbol is not None:
                is_loss = value.over is Over.UNKNOWN and self._is_differentiated(target)
                self._env[symbol] = replace(value, over=Over.MEAN, sure=False) if is_loss else value

    def _is_placed_by_samples(self, node: cst.BaseExpression) -> bool:
        """Return whether an assignment's target has an index that depends on samples, such as `counts[label] += 1`."""
        return (
            isinstance(node, cst.Subscript)
            and self._any(*(self._value(part) for element in node.slice for part in _parts(element))).own
        )

    def _is_differentiated(self, node: cst.BaseExpression) -> bool:
        """Return whether a backward pass begins at the variable that `node` names."""
        return isinstance(node, cst.Name) and node.value in self._losses

    def _decide(self, test: cst.BaseExpression) -> None:
        """Change the script so that the condition `test` has the same value on all ranks.

        Values in it that differ between ranks are combined over ranks. If that is impossible, report that the script
        cannot be translated.
        """
        value = self._value(test)
        if value.own and not self._share(test):
            text = self._source.code(test)
            self._edits.refuse(test, f"ranks may decide differently, each by its own data: `{text}`")

    def _share(self, node: cst.BaseExpression) -> bool:
        """Edit an expression so that its means and sums are computed from the samples of all ranks.

        Return False if another part of the expression still differs between ranks.
        """
        value = self._value(node)
        if not value.own:
            return True
        literal = isinstance(node, cst.List | cst.Dict | cst.Tuple | cst.FormattedString)
        if value.over in REDUCED | {Over.COUNT} and not value.items and not literal:
            self._wrap(node, value.over)
            return True
        parts = [child for child in _parts(node) if self._value(child).own]
        if isinstance(node, cst.Name | cst.Lambda) or not parts:
            return False
        left = [part for part in parts if not self._share(part)]
        return not left

    def _wrap(self, node: cst.BaseExpression, over: Over) -> None:
        earlier = self._wrapped.setdefault(node, over)
        if (earlier is Over.MEAN) is not (over is Over.MEAN):
            self._edits.refuse(node, "is once a mean and once a sum, depending on the caller")
        self._edits.wrap(node, f"{self._function_for(over)}({{it}})")

    def _function_for(self, over: Over) -> str:
        """Return the code of the function in `sirtaki.torch.ranks` that combines the means, sums or counts of all
        ranks.
        """
        return f"{self._ranks}.average" if over is Over.MEAN else f"{self._ranks}.total"

    def _value(self, node: cst.BaseExpression) -> Value:
        """Return the facts (`Value`) about an expression."""
        if node in self.batches:
            return BATCH
        if isinstance(node, cst.Name):
            symbol = self._source.symbol(node)
            return ALL if symbol is None else self._env.get(symbol, ALL)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(node)
        if isinstance(node, cst.Call):
            return self._of_call(node)
        if isinstance(node, cst.Subscript):
            return self._of_subscript(node)
        if isinstance(node, cst.Integer | cst.Float):
            return Value(over=Over.ZERO) if float(node.value.replace("_", "").rstrip("jJ") or 0) == 0 else ALL
        if isinstance(node, cst.BinaryOperation):
            return self._of_operation(node)
        if isinstance(node, cst.UnaryOperation):
            inner = self._value(node.expression)
            kept = isinstance(node.operator, cst.Minus | cst.Plus) or inner.over is Over.MASK
            return inner if kept or not inner.own else OWN
        if isinstance(node, cst.IfExp):
            self._decide(node.test)
            return either(self._value(node.body), self._value(node.orelse))
        if isinstance(node, cst.Tuple | cst.List):
            items = tuple(self._value(element.value) for element in node.elements)
            return Value(items=items) if isinstance(node, cst.Tuple) else all_alike(items)
        if isinstance(node, cst.Dict):
            return all_alike([self._value(element.value) for element in node.elements])
        if isinstance(node, cst.Comparison):
            structural = all(isinstance(there.operator, cst.Is | cst.IsNot) for there in node.comparisons)
            parts = [self._value(part) for part in _parts(node)]
            each = bool(parts) and {part.over for part in parts if part.own} <= EACH and self._any(*parts).own
            return ALL if structural else Value(over=Over.MASK) if each else self._any(*parts)
        if isinstance(node, cst.NamedExpr):
            value = self._value(node.value)
            self._put(node.target, value)
            return value
        if isinstance(node, cst.Lambda):
            return ALL
        if isinstance(node, cst.ListComp | cst.GeneratorExp | cst.SetComp | cst.DictComp):
            return self._of_comprehension(node)
        value = self._any(*(self._value(part) for part in _parts(node)))
        return replace(value, number=isinstance(node, cst.FormattedString))

    def _of_operation(self, node: cst.BinaryOperation) -> Value:
        """Return the facts (`Value`) about the result of an arithmetic operation.

        Operands that must be computed from the whole batch are combined over ranks.
        """
        left, right = self._value(node.left), self._value(node.right)
        if isinstance(node.operator, cst.MatrixMultiply):
            return _multiplied(left, right)
        value = combined(node.operator, left, right)
        followed = all(there.over is not Over.UNKNOWN and not there.items for there in (left, right))
        if value.over is not Over.UNKNOWN or value.number or not followed:
            return value
        if isinstance(node.operator, cst.Divide) and left.over in REDUCED and right.over in REDUCED | {Over.COUNT}:
            self._wrap(node.right, Over.MEAN)
            return replace(value, over=Over.MEAN if left.over is right.over else left.over)
        return combined(node.operator, self._whole(node.left, left), self._whole(node.right, right))

    def _whole(self, node: cst.BaseExpression, value: Value) -> Value:
        """Edit a mean, sum or count of a rank's samples, if `node` is one, so that it is combined over all ranks.

        Return the facts about the edited expression.
        """
        if value.over not in REDUCED | {Over.COUNT}:
            return value
        self._wrap(node, value.over)
        return replace(value, over=Over.WHOLE)

    def _any(self, *values: Value) -> Value:
        """Return what is known of the result of an unknown function of these values."""
        return OWN if any(value.own for value in values) else ALL

    def _of_comprehension(self, node: cst.BaseComp) -> Value:
        element: cst.CompFor | None = node.for_in
        while element is not None:
            read = element in self._training.loops
            self._put(element.target, BATCH if read else _element(self._value(element.iter)))
            element = element.inner_for_in
        if isinstance(node, cst.DictComp):
            value = self._value(node.value)
            return replace(value, container=True) if value.over is Over.ROWS else self._any(value)
        assert isinstance(node, cst.ListComp | cst.GeneratorExp | cst.SetComp)
        return collected(self._value(node.elt))

    def _of_attribute(self, node: cst.Attribute) -> Value:
        symbol = self._source.symbol(node)
        if symbol is not None:
            return self._env.get(symbol, ALL)
        base, name = self._value(node.value), node.attr.value
        if not base.own or name in STRUCTURE:
            return ALL
        if name == "shape":
            return replace(base, over=Over.SHAPE, sure=base.over in EACH)
        if name == "loss":
            return replace(MEAN, sure=False)
        if name in ("values", "indices") and base.items:
            return base.items[0]
        known = name in SAME_VALUE or (base.over is Over.ROWS and name not in ("T", "H", "mT", "mH"))
        return base if known and not base.items else OWN

    def _of_subscript(self, node: cst.Subscript) -> Value:
        base, places = self._value(node.value), [element.slice for element in node.slice]
        first = places[0]
        alone = first.value if len(places) == 1 and isinstance(first, cst.Index) else None
        text = "" if alone is None else self._source.code(alone)
        if base.over is Over.SHAPE:
            return _at(base, int(text) if text.isdigit() else 1)
        if base.items and text.isdigit():
            return base.items[int(text)] if int(text) < len(base.items) else ALL
        index = self._any(*(self._value(name) for place in places for name in self._source.all(cst.Name, place)))
        if not base.own:
            return Value(over=Over.ROWS) if alone is not None and self._value(alone).over is Over.ROWS else index
        if base.over not in EACH:
            return base
        if alone is not None and self._value(alone).over is Over.MASK:
            return Value(over=Over.PART)
        if isinstance(alone, cst.SimpleString) or (base.container and alone is not None):
            return replace(base, container=False)
        whole = isinstance(first, cst.Slice) and first.lower is first.upper is None and first.step is None
        if whole or (isinstance(first, cst.Index) and isinstance(first.value, cst.Ellipsis)):
            return OWN if index.own else replace(base, dims=max(1, base.dims - len(places) + 1))
        return OWN

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _of_call(self, call: cst.Call) -> Value:
        """Return the facts (`Value`) about the result of a call."""
        if call in self._training.reads:
            return BATCH
        name = called_attribute(call) or (call.func.value if isinstance(call.func, cst.Name) else "")
        values = [self._value(arg.value) for arg in call.args]
        own = any(value.own for value in values)
        if isinstance(call.func, cst.Attribute):
            base = self._value(call.func.value)
            if name == "backward":
                self._begun.setdefault(call, set()).add(base)
                return ALL
            if base.own and not self._flows.callees(call):
                return self._of_method(call, name, base)
        if (
            name == "scale"
            and isinstance(call.func, cst.Attribute)
            and self._flows.holds(call.func.value, TrackedKind.SCALER)
        ):
            return values[0]
        if not own:
            for function in self._flows.callees(call):
                if self._training.trains(function.body) or not self._calling:
                    return self._function(function, {})
            base = self._value(call.func.value) if isinstance(call.func, cst.Attribute) else ALL
            return Value(over=Over.WHOLE) if any(value.over is Over.WHOLE for value in (base, *values)) else ALL
        own_function = bool(self._flows.callees(call) or self._flows.holds(call.func, TrackedKind.INSTANCE))
        if name in SHOWS and not own_function and name != "log":
            return self._shown(call, name, values)
        full = self._source.full_name(call.func)
        if name == "log" and not own_function and not full.startswith(("torch.", "numpy.", "math.")):
            return self._shown(call, name, values)
        if name in ABOUT:
            return ALL
        # `zip(*rows)` transposes `rows`, so that the facts about `rows` hold for the result, too.
        if name == "zip" and len(values) == 1 and call.args[0].star:
            return values[0]
        if name == "len" and values and values[0].over in REDUCED:
            return ALL  # Equal on all ranks: a list of means or sums has one element per batch.
        if name == "len" and values:
            return _at(replace(values[0], over=Over.SHAPE, sure=values[0].over in EACH), 0) if values[0].own else ALL
        if name in ("float", "int", "round") and self._source.is_builtin(full):
            return replace(values[0], number=True)
        if name == "sum" and self._source.is_builtin(full):
            return replace(values[0], items=()) if values[0].over in REDUCED else replace(SUM, sure=False)
        if full.startswith("numpy.") and name in NUMPY_CREATES and _has_batch_size(values):
            return Value(over=Over.ROWS, dims=2)
        if self._is_tensor_type(call.func) and values:
            return Value(over=Over.ROWS, dims=2) if _has_batch_size(values) else values[0]
        if full == "torch.autograd.Variable" and values:  # It returns its argument, a tensor, since PyTorch 0.4.
            return values[0]
        if full == "torch.autograd.grad":
            return self._of_slopes(call)
        loss = self._of_loss(call, full, name)
        if loss is not None:
            return loss
        functions = self._flows.callees(call)
        if functions:
            return self._of_own_function(call, functions, values)
        if full.startswith("torch."):
            known = self._of_tensors(call, name, [arg.value for arg in call.args], call.args)
            if known is not None:
                return known
        elif name in ("max", "min", "abs", "pow") and any(v.own and not v.number for v in values):
            return self._elementwise([arg.value for arg in call.args])
        elif self._is_model(call):
            kinds = {value.over for value in values if value.own and not value.items}
            over = Over.ROWS if kinds <= EACH else Over.PART
            return Value(over=over, dims=2) if kinds and (kinds <= EACH or kinds == {Over.PART}) else OWN
        # Combine the Python numbers among the arguments over ranks before this call. In the called function, no tensor
        # of the batch may be left to combine.
        if any(value.number and value.over is not Over.COUNT for value in values):
            pairs = zip(call.args, values, strict=True)
            left = [arg for arg, value in pairs if value.own and not self._share(arg.value)]
            return OWN if left else ALL
        return OWN

    def _is_tensor_type(self, node: cst.BaseExpression) -> bool:
        """Return whether `node` is a type such as `torch.FloatTensor`, or a name that always holds such a type."""
        if not dotted(node).endswith("Tensor"):
            return False
        symbol = self._source.symbol(node)
        given = [
            assign.value
            for assign in self._source.all(cst.Assign)
            if symbol is not None and any(self._source.symbol(target) == symbol for target in targets(assign))
        ]
        either_way = [(value.body, value.orelse) if isinstance(value, cst.IfExp) else (value,) for value in given]
        types = [part for parts in either_way for part in parts] or [node]
        return all(TENSOR_TYPE.fullmatch(self._source.full_name(part)) for part in types)

    def _of_slopes(self, call: cst.Call) -> Value:
        """Return what is known of the result of a call of `torch.autograd.grad`.

        The result has one gradient for each sample if the call differentiates by inputs, else gradients of parameters.
        """
        outputs, inputs = argument(call, "outputs", 0), argument(call, "inputs", 1)
        if outputs is None or inputs is None:
            return OWN
        value = self._value(outputs)
        if not self._value(inputs).own:
            self._edits.refuse(
                call,
                "gradients with respect to parameters are computed apart from `backward()`: each rank would go on with "
                f"those of its own part of the batch: `{self._source.code(call)}`",
            )
            return OWN
        apart = value.over is Over.SUM or (value.over in EACH and argument(call, "grad_outputs", 2) is not None)
        return Value(items=(Value(over=Over.ROWS, dims=2, sure=value.sure),)) if apart else OWN

    def _is_model(self, call: cst.Call) -> bool:
        """Return whether `call` calls a PyTorch module. Modules are assumed to process each sample separately."""
        made = self._flows.holds(call.func, TrackedKind.MODULE)
        for site in made:
            kind = site.name.rpartition(".")[2]
            where = self._source.text if kind.endswith("coder") else self._source.code(site.call)
            if kind in SEQUENCES and "batch_first=True" not in where:
                return False
        own = self._source.symbol(call.func) is not None and dotted(call.func) not in self._source.imported
        in_module = own and self._source.derives(self._source.class_of(call), "Module")
        return bool(made) or in_module or self._source.code(call.func) in self._models

    def _of_method(self, call: cst.Call, name: str, base: Value) -> Value:
        """Return the facts about the result of calling the method `name` on an object that differs between ranks."""
        # The result of these methods differs if the dictionary differs between ranks.
        if name in ("items", "values", "get", "keys"):
            return base
        if name in ("format", "append", "extend"):  # Methods of strings and lists, which tensors do not have.
            return self._shown(call, name, [self._value(arg.value) for arg in call.args])
        if name in ("item", "tolist", "numpy"):
            return replace(base, number=True, items=())
        if name in SAME_VALUE:
            return base
        if name in ("dim", "ndimension", "is_floating_point", "get_device"):
            return ALL
        if name in ("size", "numel", "nelement"):
            shape = replace(base, over=Over.SHAPE, sure=base.over in EACH)
            if name == "size" and not call.args:
                return shape
            return _at(shape, 0 if not call.args or self._source.code(call.args[0].value) == "0" else 1)
        assert isinstance(call.func, cst.Attribute)
        known = self._of_tensors(call, name, [call.func.value, *(arg.value for arg in call.args)], call.args)
        return OWN if known is None else known

    def _of_tensors(
        self, call: cst.Call, name: str, given: list[cst.BaseExpression], args: Sequence[cst.Arg]
    ) -> Value | None:
        """Return the facts about the result of a torch function or method, whose first argument is the tensor.

        None if the function is unknown.
        """
        value = self._value(given[0])
        if isinstance(given[0], cst.ListComp | cst.GeneratorExp) and name in ("stack", "cat", "array", "tensor"):
            over = self._value(given[0].for_in.iter).over
            return Value(over=over) if over in EACH else value if value.over in REDUCED else OWN
        if name in ("stack", "cat", "concat", "hstack", "vstack"):
            value = all_alike(value.items) if value.items else value
        values = [value, *map(self._value, given[1:])]
        own = [there for there in values if there.own]
        kinds, dims = {there.over for there in own}, max(there.dims for there in own)
        axis = argument(call, "dim") or argument(call, "axis")
        if axis is None and name in AXIS_AT and len(given) > AXIS_AT[name]:
            axis = given[AXIS_AT[name]]
        if name in ("mean", "sum"):
            return self._of_reduction(call, name, value, given, axis)
        if name in CREATES:
            counts = [there.items[0] if there.items else there for there in values]
            return Value(over=Over.ROWS, dims=2) if counts[0].over in (Over.COUNT, Over.SHAPE) else OWN
        if any(there.items for there in own):
            return OWN
        if name.endswith("_like"):
            return replace(value, over=Over.ROWS if value.over is Over.MASK else value.over)
        if name in ELEMENTWISE:
            return self._elementwise(given)
        if kinds <= REDUCED and len(kinds) == 1 and name in ("stack", "cat", "hstack", "unsqueeze", "reshape", "view"):
            return own[0]
        if name in ("eq", "ne", "lt", "gt", "le", "ge", "bool", "isnan", "logical_and", "logical_or", "logical_not"):
            return Value(over=Over.MASK) if kinds <= EACH else OWN
        if name == "masked_select" and kinds <= EACH:
            return Value(over=Over.PART)
        if name in VIEWS and value.over in EACH:
            first = self._value(given[1]) if len(given) > 1 else ALL
            kept = name.endswith("_as") or first.over in (Over.COUNT, Over.SHAPE)
            kept = kept or (len(given) > 1 and self._source.code(given[1]) in ("-1", "(-1,)"))
            return Value(over=Over.ROWS, dims=max(1, len(given) - 1)) if kept else OWN
        if not kinds <= EACH:
            return Value(over=Over.PART) if kinds == {Over.PART} and name in ("squeeze", "flatten") else OWN
        each = Value(over=Over.ROWS, dims=dims)
        if name in ("transpose", "swapaxes") and len(given) == 3:
            axes = [self._axes(there, dims) for there in given[1:]]
            return replace(each, dims=max(dims, 3)) if all(axes) else OWN
        if name == "permute":
            return replace(each, dims=len(given) - 1) if self._source.code(given[1]) == "0" else OWN
        if name in ("matmul", "bmm"):
            return each if name == "bmm" else _multiplied(values[0], values[1])
        if name == "einsum":
            return OWN
        if name == "flatten":
            return replace(each, dims=1 if axis is None else 2)
        if name in ALONG:
            if axis is None:
                return each if ALONG[name] else OWN
            if not self._axes(axis, dims + (name in ("unsqueeze", "stack"))):
                return OWN
            fewer = name in FEWER and argument(call, "keepdim") is None
            each = replace(each, dims=dims + 1 if name in ("unsqueeze", "stack") else max(1, dims - fewer))
            return Value(items=(each, each)) if name in PAIRS else each
        if self._source.full_name(call.func).startswith("torch.nn.functional.") and name not in ("pdist",):
            return OWN if axis is not None and not self._axes(axis, dims) else replace(each, dims=max(dims, 2))
        return None

    def _elementwise(self, given: Sequence[cst.BaseExpression]) -> Value:
        """Return the facts about an element-wise function of `given`.

        Means and sums in `given` are first combined over ranks.
        """
        values = [self._value(node) for node in given]
        kinds = {value.over for value in values if value.own}
        rest = kinds - REDUCED - {Over.COUNT}
        if not rest <= EACH and rest != {Over.PART}:
            return OWN
        return functools.reduce(
            lambda left, right: combined(cst.Power(), left, right),
            [self._whole(node, value) for node, value in zip(given, values, strict=True)],
            Value(over=Over.WHOLE),
        )

    def _of_reduction(
        self, call: cst.Call, name: str, value: Value, given: list[cst.BaseExpression], axis: cst.BaseExpression | None
    ) -> Value:
        """Return the facts about the result of `mean()` or `sum()`, over the samples or along other axes."""
        over = Over.MEAN if name == "mean" else Over.SUM
        if value.over in REDUCED:
            return value
        if axis is not None and self._axes(axis, value.dims):
            return replace(value, dims=max(1, value.dims - 1)) if value.over in EACH | {Over.PART} else OWN
        if axis is not None and self._source.code(axis) not in ("0", "None"):
            return replace(MEAN, over=over, sure=False) if value.over in EACH else OWN
        if value.over is Over.PART and axis is None and name == "mean":
            if call not in self._meant:
                self._meant.add(call)
                self._edits.change(call, lambda inner: _mean_of(f"{self._ranks}.mean({{it}})", inner))
            return MEAN
        followed = value.over in EACH or (value.over is Over.PART and name == "sum")
        return Value(over=over, sure=value.sure and followed)

    def _axes(self, node: cst.BaseExpression, dims: int) -> tuple[int, ...]:
        """Return the axes of a tensor that an expression names, such as 1 or (1, 2).

        Return () if the axis of the samples is among them.
        """
        text = self._source.code(node).strip("()[]").rstrip(",").replace(" ", "")
        try:
            axes = tuple(map(int, text.split(",")))
        except ValueError:
            return ()
        return axes if all(axis > 0 or -dims < axis < 0 for axis in axes) else ()

    def _of_loss(self, call: cst.Call, full: str, name: str) -> Value | None:
        """Return the facts about the result of a loss.

        It is a mean over samples unless the call specifies another reduction.
        """
        made = self._flows.holds(call.func, TrackedKind.LOSS)
        is_torchs = full.startswith("torch.nn.functional.") and (
            "loss" in name or "entropy" in name or name == "kl_div"
        )
        if not made and not is_torchs:
            named = "loss" in name.lower() or "criterion" in name.lower()
            return replace(MEAN, sure=False) if named and not self._flows.callees(call) else None
        kinds = {value.over for arg in call.args if (value := self._value(arg.value)).own or value.items}
        followed = bool(kinds) and (kinds <= EACH or kinds == {Over.PART})
        makers = [site.call for site in made] or [call]
        names = [site.name.rpartition(".")[2] for site in made] or [name]
        followed = followed and not any(
            there in ("ctc_loss", "CTCLoss", "AdaptiveLogSoftmaxWithLoss") for there in names
        )
        followed = followed and not any(argument(there, old) for there in makers for old in ("reduce", "size_average"))
        reductions = {self._reduction(there) for there in makers}
        if reductions == {"none"}:
            return Value(over=Over.PART if Over.PART in kinds else Over.ROWS) if followed else OWN
        if reductions == {"sum"}:
            return replace(SUM, sure=followed)
        if not reductions <= {"mean", "batchmean"}:
            return OWN
        if followed and any(there.replace("_", "").lower() in WEIGHED for there in names):
            weighted = any(
                argument(there, "weight", 0 if made else 2) or argument(there, "ignore_index") for there in makers
            )
            if weighted or "-100" in self._source.text:
                kinds = {Over.PART}
            else:
                self._edits.note(0, UNWEIGHTED)
        if followed and kinds == {Over.PART}:
            self._edits.wrap(call.func, f"{self._ranks}.weighted({{it}})")
        return replace(MEAN, sure=followed and (kinds != {Over.PART} or reductions == {"mean"}))

    def _reduction(self, call: cst.Call) -> str:
        given = argument(call, "reduction")
        return "mean" if given is None else self._source.code(given).strip("\"'")

    def _of_own_function(self, call: cst.Call, functions: list[cst.FunctionDef], values: list[Value]) -> Value:
        """Return the facts about the result of a function that the script defines.

        The abstract interpreter runs the function's body, unless all arguments are plain numbers.
        """
        is_module = any(self._source.derives(self._source.class_of(function), "Module") for function in functions)
        own = [value for value in values if value.own]
        if (
            all(value.number for value in own)
            and not is_module
            and not any(self._training.trains(function.body) for function in functions)
        ):
            for arg, value in zip(call.args, values, strict=True):
                if value.own and not self._share(arg.value):
                    self._edits.note(call, f"`{self._source.code(arg.value)}` is each rank's own")
            return ALL
        results = []
        for function in functions:
            given = {name: self._value(arg) for name, arg in self._flows.bound(call, function)}
            for arg in call.args:
                if not arg.star or not (starred := self._value(arg.value)).own:
                    continue
                for param in parameters(function):
                    if param.default is None and param.name.value != "self":
                        given.setdefault(param.name.value, _element(starred))
            results.append(self._function(function, given))
        result = functools.reduce(either, results)
        return OWN if is_module and not result.own and result.over is not Over.WHOLE else result

    def _shown(self, call: cst.Call, name: str, values: list[Value]) -> Value:
        for arg, value in zip(call.args, values, strict=True):
            if not value.own or self._share(arg.value):
                continue
            text = self._source.code(arg.value)
            if name in ("append", "extend", "update", "put") and isinstance(call.func, cst.Attribute):
                self._put(call.func.value, OWN)
            else:
                self._edits.note(call, f"`{text}` is shown as rank 0 has it")
        return ALL


def _has_batch_size(values: Sequence[Value]) -> bool:
    """Return whether one of `values` is the number of samples, or a shape that begins with it."""
    firsts = (value.items[0] if value.items else value for value in values)
    return any(first.over in (Over.COUNT, Over.SHAPE) for first in firsts)


def _element(value: Value) -> Value:
    """Return the facts about the elements that a loop over `value` yields."""
    if value.items:
        return all_alike(value.items)
    one_sample = value.over in EACH | {Over.PART} and not value.container
    return OWN if one_sample else replace(value, container=False)


def _at(value: Value, position: int) -> Value:
    """Return the facts about the element `position` of a tuple.

    In a tensor's shape, element 0 is the number of samples.
    """
    if value.over is not Over.SHAPE:
        return replace(value, items=(), container=False)
    if position:
        return ALL
    return COUNT if value.sure else Value(over=Over.SUM, number=True)


def _multiplied(left: Value, right: Value) -> Value:
    """Return the facts about a matrix product.

    Samples stay separate unless the product sums over the axis of the samples.
    """
    if not left.own and not right.own:
        return combined(cst.Multiply(), left, right)
    if left.over is not Over.ROWS or (right.own and right.over is not Over.ROWS):
        return OWN
    apart = not right.own or max(left.dims, right.dims) > 2
    return Value(over=Over.ROWS, dims=max(left.dims, right.dims, 2)) if apart else OWN


def _mean_of(template: str, call: cst.BaseExpression) -> cst.BaseExpression:
    """Replace `{it}` in a template by the tensor whose mean `call` computes (`x.mean()` or `torch.mean(x)`)."""
    assert isinstance(call, cst.Call)
    inner = call.args[0].value if call.args else call.func.value  # type: ignore[attr-defined]  # `func` is an attribute
    return cst.helpers.parse_template_expression(template, it=inner)


def _parts(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the direct sub-expressions of a node."""
    # Skip the name after the dot (attribute) or before the `=` (argument).
    if isinstance(node, cst.Attribute | cst.Arg):
        return [node.value]
    found: list[cst.BaseExpression] = []
    for child in node.children:
        if isinstance(child, cst.BaseExpression):
            found.append(child)
        else:
            found += _parts(child)
    return found


def _assigns(target: cst.BaseExpression, name: str) -> bool:
    return any(isinstance(node, cst.Name) and node.value == name for node in walk(target))


def _are_items(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Call) and called_attribute(node) == "items"


def _is_enumerated(node: cst.BaseExpression) -> bool:
    """Return whether `node`, over which a loop iterates, yields pairs of a counter and an element,
    as `enumerate` does.
    """
    if not isinstance(node, cst.Call) or not node.args:
        return False
    return dotted(node.func) == "enumerate" or (dotted(node.func) != "zip" and _is_enumerated(node.args[0].value))
