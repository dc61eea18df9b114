"""Every module has tests of its own: `X/y.py` those of `tests/X/test_y.py`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("autotune", "comm", "registry", "sirtaki", "bench/lib")

NEEDS_RAY = "needs Ray: tests/integrations/test_ray.py"

NOTHING_TO_TEST = {
    "comm/control/communicator.py": "a Protocol and its enums; tests/conformance has what they promise",
    "comm/gradients/pace.py": "an enum",
    "comm/sparse/hot_sums.py": "a Protocol",
    "registry/store.py": "a Protocol; every store is held to it by tests/conformance/store.py",
    "sirtaki/engine/reducer_options.py": "a record",
    "sirtaki/lightning.py": "needs Lightning: tests/integrations/test_lightning.py",
    "sirtaki/ray/answers.py": NEEDS_RAY,
    "sirtaki/ray/crew.py": NEEDS_RAY,
    "sirtaki/ray/elastic_rank.py": NEEDS_RAY,
    "sirtaki/ray/elastic_ranks.py": NEEDS_RAY,
    "sirtaki/ray/executor.py": NEEDS_RAY,
    "sirtaki/ray/fixed_ranks.py": NEEDS_RAY,
    "sirtaki/ray/rank_actor.py": NEEDS_RAY,
    "sirtaki/ray/slots.py": NEEDS_RAY,
    "sirtaki/ray/train.py": NEEDS_RAY,
    "sirtaki/optimizer/change.py": "records, and Protocols",
    "sirtaki/replay/job_model.py": "records",
    "sirtaki/run/call.py": "calls one function",
    "sirtaki/run/elastic/actions.py": "records",
    "sirtaki/run/elastic/policy.py": "a record",
    "sirtaki/watch/events.py": "records, and a class whose methods do nothing",
    "sirtaki/unit_sizes.py": "two constants",
}

THROUGH_OTHERS = {
    "bench/lib/bare.py",
    "bench/lib/contenders.py",
    "bench/lib/elastic/torchft_replica.py",
    "bench/lib/elastic/training.py",
    "bench/lib/gpu_models.py",
    "bench/lib/landscapes/contenders.py",
    "bench/lib/landscapes/families.py",
    "bench/lib/landscapes/landscape.py",
    "bench/lib/simulated_jobs.py",
    "sirtaki/engine/ddp_gradients.py",
    "sirtaki/engine/gradient_reducer.py",
    "sirtaki/engine/job.py",
    "sirtaki/engine/joining.py",
    "sirtaki/engine/membership.py",
    "sirtaki/engine/optimizer_gradients.py",
    "sirtaki/engine/process_end.py",
    "sirtaki/run/rank.py",
    "sirtaki/run/rank_environment.py",
    "sirtaki/torch/basics.py",
    "sirtaki/torch/process_sets.py",
}
"""Tested by programs of several ranks, or through others, but not yet by themselves. Nothing is added here."""


def modules() -> list[str]:
    """All of them, by their path from the root."""
    found = []
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            linked = any(folder.is_symlink() for folder in path.parents)
            module = str(path.relative_to(ROOT))
            if not linked and not path.name.startswith("__"):
                found.append(module)
    return found


def mirror(module: str) -> Path:
    """Where its tests are."""
    path = Path(module)
    return ROOT / "tests" / path.parent / f"test_{path.name}"


def test_every_module_has_its_mirror() -> None:
    left_out = NOTHING_TO_TEST.keys() | THROUGH_OTHERS
    missing = [module for module in modules() if module not in left_out and not mirror(module).is_file()]
    assert not missing, f"these want tests of their own, such as {mirror(missing[0]).relative_to(ROOT)}: {missing}"


def test_what_is_left_out_is_there_and_has_none() -> None:
    left_out = NOTHING_TO_TEST.keys() | THROUGH_OTHERS
    assert left_out <= set(modules())
    tested = [module for module in sorted(left_out) if mirror(module).exists()]
    assert not tested, f"take these off the list: {tested}"
