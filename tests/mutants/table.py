"""Lines of Sirtaki that are made wrong on purpose, and the tests that notice."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """What is made wrong: text that is there once, what stands there instead, and who notices.

    Attributes:
        file: below `sirtaki/`.
        tests: below `tests/`; a part of tests' names may follow, as for `pytest -k`.
    """

    what: str
    file: str
    right: str
    wrong: str
    tests: str


BUFFERS, SCHEDULE = "comm/gradients/buffers.py", "comm/gradients/schedule.py"
SYNCHRONISER, ITERATION = "comm/gradients/synchroniser.py", "comm/gradients/iteration.py"
REDUCER, CHECKS = "engine/reducing/reducer.py", "engine/reducing/checks.py"
OVERLAP, CHECKPOINTS, STATE = "torch/overlap.py", "torch/elastic/checkpoints.py", "torch/elastic/state.py"
MESH, RENDEZVOUS = "comm/control/mesh.py", "comm/control/mesh_rendezvous.py"

OF_BUFFERS, OF_SCHEDULE = "comm/gradients/test_buffers.py", "comm/gradients/test_schedule.py"
OF_SYNCHRONISER, OF_ITERATION = "comm/gradients/test_synchroniser.py", "comm/gradients/test_iteration.py"
OF_OVERLAP, PUT_OFF = "sirtaki/torch/test_overlap.py", "sirtaki/torch/test_put_off_updates.py"
OF_MESH, MEETING = "comm/control/test_mesh.py", "comm/control/test_meeting.py"
OF_CHECKPOINTS, EDITS = "sirtaki/torch/elastic/test_checkpoints.py", "sirtaki/torch/test_gradient_edits.py"
TRAINING = "sirtaki/torch/test_optimizer.py"


def wrong_in(file: str, tests: str, lines: dict[str, tuple[str, str]]) -> list[Mutant]:
    """Mutants of one file that the same tests notice, by what is made wrong: the right text and the wrong one."""
    return [Mutant(what, file, *line, tests) for what, line in lines.items()]


DEVICE, NCCL, STAGED, ROUTER = (
    "comm/device.py",
    "comm/nccl_streams/transport.py",
    "comm/transports/staged.py",
    "comm/router.py",
)
STREAM_ORDER, ON_GPUS = "comm/nccl_streams/test_stream_order.py", "comm/nccl_streams/test_on_fake_gpus.py"

MUTANTS = (
    # ── streams of a GPU ─────────────────────────────────────────────────────────────────────────────────────────
    *wrong_in(
        DEVICE,
        STREAM_ORDER,
        {
            "the default stream counts as none": (
                "            if self._latest_stream is not None:",
                "            if self._latest_stream:",
            ),
            "the default stream is wrapped as an external one": ("if raw == 0:  # which", "if raw is None:  # which"),
            "memory returns before the default stream waits for packing": (
                "            self._noticed.add(raw)",
                "            self._noticed |= {raw} - {0}",
            ),
            "packing does not wait for what was launched": (
                "            self._side.wait_stream(self._outer)\n            with",
                "            with",
            ),
            "memory is not kept until it was packed": (
                "            self._stash.append((event, list(tensors)))",
                "            self._stash.append((event, []))",
            ),
            "a stream is handed out twice": ("not in self._own_streams:", "not in set():"),
            "a helper thread uses GPU 0": (
                "        torch.cuda.set_device(self.torch_device)\n",
                "",
            ),
            "a helper thread invalidates a graph capture": (
                "ctypes.c_int(CAPTURE_MODE_THREAD_LOCAL)",
                "ctypes.c_int(0)",
            ),
            "an error of CUDA is left behind": ("library.cudaGetLastError()", "library"),
            "host memory is pageable": ('device="cpu", pin_memory=True)', 'device="cpu")'),
        },
    ),
    *wrong_in(
        NCCL,
        STREAM_ORDER,
        {
            "several communicators though NCCL does not know their order": (
                "_set_too_late = torch.cuda.is_initialized() and",
                "_set_too_late = False and",
            ),
            "a unit does not wait for its packing": ("            device.order_after(packed)\n", ""),
            "the update does not wait for a unit": (
                "        self._device.order_after(self._end)\n        return True",
                "        return True",
            ),
            "older releases: the result is not ordered": (
                "        if work is not None:\n            work.wait()",
                "        if work is not None:\n            pass",
            ),
            "an NCCL that cannot start ends the job": (
                "            self.problem = self.problem or str(err)",
                "            raise",
            ),
            "a driver's version that PyTorch does not tell": (
                "cuda_driver=driver_version(),",
                "cuda_driver=torch._C._cuda_getDriverVersion(),",
            ),
        },
    ),
    *wrong_in(
        STAGED,
        STREAM_ORDER,
        {
            "threads that copy do not prepare for the GPU": ("worker.put(device.enter_thread)", "pass"),
            "the way back is not awaited": ("        self._device.order_after(self.back)\n", ""),
            "a copy out does not wait for packing": (
                "            device.order_after(packed)\n            device.launch(copy_, away, here)",
                "            device.launch(copy_, away, here)",
            ),
        },
    ),
    *wrong_in(
        BUFFERS,
        STREAM_ORDER,
        {
            "gradients are not aligned": ("piece = alignment(device, wire.itemsize)", "piece = 1"),
            "what the user keeps on a GPU is overwritten": (
                "        return view.untyped_storage() if view.numel() else _NOBODYS",
                "        return _NOBODYS",
            ),
            "a saved gradient is freed too early": ("self._device.keep([saved])", "pass"),
        },
    ),
    *wrong_in(
        SYNCHRONISER,
        STREAM_ORDER,
        {
            "flags of use are always read": (
                "if not self._unused_as_none or self._all_used:",
                "if not self._unused_as_none:",
            ),
            "gradients on a GPU are counted one by one": (
                "in_order = not (self.profiling or traced)",
                "in_order = not (self.profiling or traced or device.streams)",
            ),
        },
    ),
    Mutant(
        "copies are made on the packing stream",
        DEVICE,
        "        with torch.cuda.stream(self._outer):\n            yield\n        self._side",
        "        yield\n        self._side",
        "comm/test_device.py",
    ),
    Mutant(
        "cuts of units are not aligned",
        "autotune/knobs.py",
        "step = -(-max(1, self.unit_bytes // layout.itemsize_bytes) // piece) * piece",
        "step = max(1, self.unit_bytes // layout.itemsize_bytes)",
        STREAM_ORDER,
    ),
    Mutant(
        "shares between nodes are not aligned",
        NCCL,
        "piece = self._local_size * max(1, SHARE_ALIGNMENT_BYTES // unit.element_size())",
        "piece = self._local_size",
        ON_GPUS,
    ),
    Mutant(
        "the thread of eager operations uses GPU 0",
        "comm/collectives/engine.py",
        "                    gpu.enter_thread()\n",
        "",
        ON_GPUS,
    ),
)
