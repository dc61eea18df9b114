"""What programs may do, by name, and what is left out because it does not work yet."""

from enum import Enum


class Feature(Enum):
    """One thing that training scripts do; drawn programs use those that are switched on."""

    SEVERAL = "several optimizers"
    SHARED = "one parameter in two optimizers"
    UNWATCHED = "parameters in no optimizer"
    ACCUMULATION = "gradients of several backward passes"
    RAGGED = "a step before the last of these passes"
    LEFT_OUT = "a step left out"
    NULLED = "gradients set to None between backward() and step()"
    NULLED_EARLY = "the same while others are still to come"
    EDITED = "gradients changed between backward() and step()"
    EDITED_SYNCHRONIZED = "gradients changed between synchronize() and step()"
    EDITED_ON_SOME = "gradients changed on some ranks only"
    REPLACED_EARLY = "gradients replaced while others are still to come"
    TOO_EARLY = "gradients written while others are still to come, which is an error"
    SCALED = "losses scaled, and gradients divided by that"
    READ = "gradients looked at between backward() and step()"
    FROZEN = "parameters frozen while training"
    THAWED = "parameters thawed while training"
    GROUPS_ADDED = "parameter groups added while training"
    CLOSURES = "step(closure)"
    LBFGS = "LBFGS"
    EXCEPTIONS = "backward passes that raise"
    CHECKPOINTS = "activation checkpointing without reentrance"
    REENTRANT = "reentrant activation checkpointing"
    COMPILED = "compiled blocks"
    SPARSE = "sparse gradients"
    SPARSE_ADAM = "SparseAdam"
    SPARSE_AS_DENSE = "sparse_as_dense"
    JOIN = "uneven data"
    JOIN_SEVERAL = "uneven data for several optimizers"
    JOIN_SPARSE = "uneven data with sparse gradients"
    PROCESS_SETS = "optimizers of some ranks"
    EAGER = "eager operations between steps"
    EAGER_EARLY = "eager operations between backward() and step()"
    DTYPES = "the model's dtype changed"
    FORMATS = "the model's memory format or storage changed"
    REWRAPPED = "optimizers dropped and made anew"
    SAVED = "states saved and loaded"
    PLANS = "plans changed"
    UNUSED_SOMEWHERE = "parameters unused on some ranks"
    UNEVEN = "the same, while ranks wait for each other in other places"
    UNUSED = "parameters unused on all ranks"
    PARTS = "two backward passes that each touch a part"
    RETAINED = "two backward passes of one graph"
    PENALTY = "double backward"
    HOOKED = "tensor hooks of the user's own"
    BROADCAST = "parameters and optimizer state broadcast while training"
    FP16 = "compression"
    GROUPED = "groups="
    SUM = "op=Sum"
    SYNCHRONIZED_TWICE = "step() after synchronize() without skip_synchronize()"
    SMALL = "parameters without elements"
    SINGLE = "several dtypes"


NOT_YET: dict[Feature, str] = {
    Feature.COMPILED: "not tried",
}
"""What is not drawn because it is known to fail, and why."""

DRAWN = frozenset(Feature) - NOT_YET.keys()
