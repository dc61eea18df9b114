"""What is known of a value in a script: whether it is the same on all ranks, and if not, what it is over a batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import libcst as cst


class Over(Enum):
    """What a value of a rank is over the samples of its part."""

    ALL = "the same on all ranks"
    MEAN = "a mean"
    SUM = "a sum"
    UNKNOWN = "something else"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What is known of an expression.

    Attributes:
        over: see there.
        number: it is Python's, not a tensor.
        count: it counts samples, as `x.size(0)` does.
        shape: it is the shape of a batch.
        items: of a tuple.
    """

    over: Over = Over.ALL
    number: bool = False
    count: bool = False
    shape: bool = False
    items: tuple[Value, ...] = ()

    @property
    def own(self) -> bool:
        """It differs between ranks."""
        return self.over is not Over.ALL or any(item.own for item in self.items)


ALL = Value()
BATCH = Value(over=Over.UNKNOWN)
COUNT = Value(over=Over.SUM, number=True, count=True)


def either(one: Value, other: Value) -> Value:
    """What is one or the other."""
    if one == other or not other.own:
        return one
    if not one.own:
        return other
    if len(one.items) == len(other.items) > 0:
        return Value(items=tuple(either(a, b) for a, b in zip(one.items, other.items, strict=True)))
    over = one.over if one.over is other.over else Over.UNKNOWN
    return Value(over=over, number=one.number and other.number, count=one.count and other.count)


def all_alike(values: Sequence[Value]) -> Value:
    """Of a container of such values."""
    own = [value for value in values if value.own]
    return functools.reduce(either, own) if own else ALL


def combined(operator: cst.CSTNode, left: Value, right: Value) -> Value:
    """Of an arithmetical operation."""
    if not left.own and not right.own:
        return ALL
    over = Over.UNKNOWN
    kinds = (left.over, right.over)
    if isinstance(operator, cst.Add | cst.Subtract | cst.AddAssign | cst.SubtractAssign):
        if left.over is right.over or (Over.MEAN in kinds and Over.ALL in kinds):
            over = Over.MEAN if Over.MEAN in kinds else left.over
    elif isinstance(operator, cst.Multiply | cst.MultiplyAssign):
        if Over.ALL in kinds:
            over = left.over if right.over is Over.ALL else right.over
        elif set(kinds) == {Over.MEAN, Over.SUM}:
            over = Over.SUM
    elif isinstance(operator, cst.Divide | cst.DivideAssign):
        if right.over is Over.ALL:
            over = left.over
        elif kinds == (Over.SUM, Over.SUM):
            over = Over.MEAN
    number = all(value.number for value in (left, right) if value.own)
    return Value(over=over, number=number, count=left.count and right.count)


def collected(value: Value) -> Value:
    """In a list: a count of samples there is a number like others, and no shape."""
    return replace(value, count=False, items=tuple(collected(item) for item in value.items))
