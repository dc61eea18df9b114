"""What is said of gradients that were changed before they were reduced."""

REMEDY = (
    "call optimizer.synchronize() before you change gradients, and optimizer.step() inside `with "
    "optimizer.skip_synchronize():`"
)
WRITTEN_ELSEWHERE = f"another rank has written a gradient before it was reduced; {REMEDY}"
WRITTEN_ELSEWHERE_BEFORE = f"another rank has written a gradient in the iteration before this one; {REMEDY}"


def written(name: str, late: str) -> str:
    """The gradient of parameter `name` was written; that of `late` did not come, empty = all have come."""
    why = f", which ends with step() because {late} had no gradient in this backward pass" if late else ""
    return f"the gradient of {name} was written before it was reduced{why}; {REMEDY}"
