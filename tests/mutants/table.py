"""Deliberate errors in lines of Sirtaki, and the tests that must detect them."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One deliberate error: a text that occurs once, its replacement, and the tests that must fail.

    Attributes:
        file: path below `sirtaki/`.
        tests: path below `tests/`, optionally followed by a part of test names, as for `pytest -k`.
    """

    what: str
    file: str
    right: str
    wrong: str
    tests: str


BUFFERS, SCHEDULE = "comm/gradients/buffers.py", "comm/gradients/schedule.py"
LAUNCHED = "comm/gradients/launched.py"
PIPELINE, NEGOTIATION = "comm/gradients/pipeline.py", "comm/gradients/negotiation.py"
READY, TRACE = "comm/gradients/ready.py", "comm/gradients/trace.py"
HOOKS, CHECKS = "engine/reducing/gradient_hooks.py", "engine/reducing/checks.py"
OVERLAP, CHECKPOINTS, STATE = "torch/overlap.py", "torch/elastic/checkpoints.py", "torch/elastic/state.py"
MESH, HANDSHAKE = "comm/control/mesh.py", "comm/control/handshake.py"

OF_BUFFERS, OF_SCHEDULE = "comm/gradients/test_buffers.py", "comm/gradients/test_schedule.py"
OF_PIPELINE, OF_NEGOTIATION = "comm/gradients/test_pipeline.py", "comm/gradients/test_negotiation_and_trace.py"
OF_OVERLAP, PUT_OFF = "sirtaki/torch/test_overlap.py", "sirtaki/torch/test_put_off_updates.py"
OF_MESH, MEETING = "comm/control/test_mesh.py", "comm/control/test_meeting.py"
OF_CHECKPOINTS, EDITS = "sirtaki/torch/elastic/test_checkpoints.py", "sirtaki/torch/test_gradient_edits.py"
TRAINING = "sirtaki/torch/test_optimizer.py"


def wrong_in(file: str, tests: str, lines: dict[str, tuple[str, str]]) -> list[Mutant]:
    """Return mutants of one file that the same tests detect. `lines`: right text and wrong text by description."""
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
            "the default stream is wrapped as an external one": ("if raw == 0:", "if raw is None:"),
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
            "the way back is not awaited": ("        self._device.order_after(self.copied)\n", ""),
            "a copy out does not wait for packing": (
                "            device.order_after(packed)\n            device.launch(copy_, on_host, on_gpu)",
                "            device.launch(copy_, on_host, on_gpu)",
            ),
        },
    ),
    *wrong_in(
        BUFFERS,
        STREAM_ORDER,
        {
            "gradients are not aligned": ("piece = alignment(device, wire.itemsize)", "piece = 1"),
            "what the user keeps on a GPU is overwritten": (
                "        return view.untyped_storage() if view.numel() else _EMPTY_STORAGE",
                "        return _EMPTY_STORAGE",
            ),
            "a saved gradient is freed too early": ("self._device.keep([saved])", "pass"),
        },
    ),
    *wrong_in(
        PIPELINE,
        STREAM_ORDER,
        {
            "flags of use are always read": (
                "        if self._all_used:\n            return ()\n",
                "",
            ),
            "gradients on a GPU are counted one by one": (
                "elif self._trace is None:",
                "elif self._trace is None and not device.streams:",
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
        "the host waits for the residuals of a GPU",
        "comm/compress.py",
        "if residual.is_cuda or not bool(",
        "if not bool(",
        ON_GPUS,
    ),
    Mutant(
        "the thread of eager operations uses GPU 0",
        "comm/collectives/engine.py",
        "                    gpu.enter_thread()\n",
        "",
        ON_GPUS,
    ),
    Mutant(
        "the watchdog uses GPU 0",
        TRACE,
        "        self.device.enter_thread()\n        return not all(",
        "        return not all(",
        STREAM_ORDER,
    ),
    *wrong_in(
        LAUNCHED,
        OF_PIPELINE,
        {
            "a wrong divisor": ("scale=self.reduction.postscale,", "scale=1.0,"),
            "a factor that is left out": ("self.reduction.prescale) != 1.0:", "self.reduction.prescale) > 1.0:"),
        },
    ),
    # ── the way of a gradient ────────────────────────────────────────────────────────────────────────────────────
    *wrong_in(
        PIPELINE,
        OF_PIPELINE,
        {
            "a missing wait": (
                "if not self._launched.wait(interrupted):",
                "if interrupted and interrupted():",
            ),
            "a lost unit": (
                "for number, unit in enumerate(units) if id(unit) not in launched]",
                "for number, unit in enumerate(units) if number and id(unit) not in launched]",
            ),
            "a unit that leaves without its gradients": (
                "n_copied = self._ready.copy_in(since)",
                "n_copied = 0",
            ),
            "a missing gradient is not filled in": (
                "                if position not in own:\n",
                "                if position not in own and position:\n",
            ),
            "a unit that is launched a gradient too early": (
                "steps[self._step][0] <= n_ready:",
                "steps[self._step][0] <= n_ready + 1:",
            ),
            "counting that forgets what was ready in order": (
                "self._schedule.pending_counts([self._buffers.order[place] for place in ready.positions])",
                "self._schedule.pending_counts()",
            ),
            "missing gradients that count as reduced": (
                "if self.state is IterationState.REDUCED or len(self._ready.positions) < self.n_params:",
                "if self.state is IterationState.REDUCED:",
            ),
            "a gradient that is assigned before its unit is reduced": (
                "for number in self._schedule.units_of[index]]\n",
                "for number in self._schedule.units_of[index][:0]]\n",
            ),
        },
    ),
    *wrong_in(
        SCHEDULE,
        OF_PIPELINE,
        {
            "units that do not wait for the one before": (
                "                self._awaited[number] += 1\n            last",
                "            last",
            ),
            "a unit that waits for a gradient too few": (
                "pending[number] -= 1\n            while",
                "pending[number] -= 2\n            while",
            ),
        },
    ),
    *wrong_in(
        SCHEDULE,
        OF_SCHEDULE,
        {
            "units in the wrong order": (
                "units.sort(key=lambda unit: unit.due)",
                "units.sort(key=lambda unit: unit.due[::-1])",
            ),
            "a rank without gradients that has a say in the order": (
                "    if counts:\n",
                "    if counts or len(arrived):\n",
            ),
        },
    ),
    *wrong_in(
        NEGOTIATION,
        OF_NEGOTIATION,
        {
            "a gradient that is ready on one rank only is agreed": (
                "comm.all_reduce(packed, Op.AND)",
                "comm.all_reduce(packed, Op.MAXIMUM)",
            ),
        },
    ),
    *wrong_in(
        BUFFERS,
        OF_BUFFERS,
        {
            "a stale view": (
                "        if not self.is_intact(position):\n            self.views",
                "        if self.is_intact(position) is None:\n            self.views",
            ),
        },
    ),
    *wrong_in(
        READY,
        OF_BUFFERS,
        {
            "a gradient out of order taken for the next one": (
                " or not all(map(is_, params, buffers.params[expected])):",
                ":",
            ),
            "a write that nobody sees": (
                "                if current._version != version:\n",
                "                if current._version < version:\n",
            ),
        },
    ),
    *wrong_in(
        BUFFERS,
        OF_PIPELINE,
        {
            "zeros that are not zeros": ("        self._device.launch(self.places[position].zero_)\n", ""),
        },
    ),
    *wrong_in(
        READY,
        f"{EDITS} are_kept",
        {
            "kept gradients that are written over": (
                "elif max(map(sys.getrefcount, views)) > REFERENCES or not buffers.accept(part, fresh):",
                "elif buffers.outdated:",
            ),
            "kept memory that is not put back": (
                "        if buffers.lent:\n            buffers.restore",
                "        if buffers.outdated:\n            buffers.restore",
            ),
        },
    ),
    *wrong_in(
        BUFFERS,
        OF_BUFFERS,
        {
            "strides that are not looked at": (
                "return all(map(eq, map(_STRIDE, compress(gradients, strides)), compress(strides, strides)))",
                "return True",
            ),
        },
    ),
    *wrong_in(
        READY,
        OF_BUFFERS,
        {
            "a gradient that is assigned twice": (
                "wanted = set(positions) - self._assigned\n",
                "wanted = set(positions)\n",
            ),
        },
    ),
    *wrong_in(
        HOOKS,
        f"{TRAINING} asked_for_through",
        {
            "passes that are not counted": (
                "                    self._passes_left_of_all -= 1\n",
                "                    self._passes_left_of_all = 1\n",
            ),
        },
    ),
    *wrong_in(
        HOOKS,
        f"{TRAINING} never_zeroed",
        {
            "an iteration that does not begin anew": (
                "            self._begin_iteration()\n        return problem",
                "            pass\n        return problem",
            ),
        },
    ),
    *wrong_in(
        HOOKS,
        f"{TRAINING} a_group_leaves",
        {
            "a group that leaves before all of it are there": (
                "len(waiting) == self._group_sizes[place]:",
                "len(waiting) <= self._group_sizes[place]:",
            ),
        },
    ),
    *wrong_in(
        CHECKS,
        "sirtaki/engine/test_same_model.py first_parameter",
        {
            "models that differ are not refused": (
                "    if first is None and fewest == most:\n",
                "    if first is None or fewest == most:\n",
            ),
        },
    ),
    # ── updates that are put off ─────────────────────────────────────────────────────────────────────────────────
    *wrong_in(
        OVERLAP,
        OF_OVERLAP,
        {
            "a parameter that is read before its update": (
                "        for tensor in found:\n            wait_for(tensor)\n",
                "        for tensor in found[1:]:\n            wait_for(tensor)\n",
            ),
            "modules that give what nobody has waited for to an extension": (
                "        for param in _own(module):\n            wait_for(param)",
                "        for param in _own(module)[1:]:\n            wait_for(param)",
            ),
            "groups that stay parts where a step raises": (
                "        finally:\n            optimizer.param_groups = whole\n            self.running = False",
                "            optimizer.param_groups = whole\n        finally:\n            self.running = False",
            ),
            "options that change under an update that was put off": (
                "return value.clone() if isinstance(value, torch.Tensor) else value",
                "return value",
            ),
            "an optimizer that clips is taken for one that does not": ("SCALES = (1.0, 1e4, 1e-4)", "SCALES = (1.0,)"),
        },
    ),
    *wrong_in(
        OVERLAP,
        PUT_OFF,
        {
            "what is read past Python is not updated by step": (
                "if id(param) in self.uncovered or _has_alias(param):",
                "if _has_alias(param):",
            ),
            "a tensor that shares a parameter's memory is read before the update": (
                "return _n_references(param) > _ALONE",
                "return _n_references(param) > _ALONE + 1",
            ),
            "a graph through values from before the step": (
                "                    torch.autograd.graph.increment_version(param)\n",
                "",
            ),
            "zeroing that is forgotten": ("zeroing = self._zeroing.pop(number, None)", "zeroing = None"),
            "a gradient of another pass takes the place of the reduced one": (
                "param.grad = gradient if param.grad is None else param.grad + gradient",
                "param.grad = gradient",
            ),
            "parameters wait for ranks that are gone": (
                "            self._release_all()\n            self._gradient_of.clear()",
                "            self._gradient_of.clear()",
            ),
            "an iteration that was put off and never ends": ("            self._gradients.finish()\n", ""),
        },
    ),
    # ── the mesh ─────────────────────────────────────────────────────────────────────────────────────────────────
    *wrong_in(
        MESH,
        OF_MESH,
        {
            "a message of another operation is taken for this one's": (
                "    if found != expected:\n",
                "    if found < expected:\n",
            ),
            "bytes that are lost where a header is divided": (
                "                buffer[:kept] = self._rest\n",
                "",
            ),
            "memory that is said to be free and is sent later": (
                '                    rest = [memoryview(b"".join(rest))]\n',
                "",
            ),
            "a part of a sum in the wrong place": (
                "    begin = sum(counts[: exchange.rank])\n    array",
                "    begin = low * exchange.rank\n    array",
            ),
            "what comes for a communicator that was freed is kept": ("        self._freed.add(context)\n", ""),
            "a leave that is taken for a loss": (
                "self._connections[source].received_bye = True",
                "self._connections[source].received_bye = False",
            ),
            "a short silence that is never forgiven": (
                "            self._silent_beats = 0\n            return",
                "            return",
            ),
            "a rank that ends without a word": (
                "        self._send_lost(self.rank, reason, FAULT if fault else 0)\n",
                "",
            ),
            "a rank that gives up and wakes nobody": (
                "                connection.stop_sending()\n\n    def _watch",
                "                pass\n\n    def _watch",
            ),
            "a fault that is told as a leave": (
                "kind = PeerFaultError if header.tag == FAULT else PeerLostError",
                "kind = PeerLostError",
            ),
        },
    ),
    *wrong_in(
        "comm/control/members.py",
        "simulation/test_scale.py share",
        {"ranks that all connect to rank 0 first": ("in reversed(range(rank))", "in range(rank)")},
    ),
    *wrong_in(
        "comm/control/plane.py",
        "simulation/test_scale.py share",
        {"ranks that all measure at once": ("time.sleep(APART_S * self.rank)", "pass")},
    ),
    *wrong_in(
        "comm/control/watchdog.py",
        "simulation/test_scale.py whom",
        {"each rank asks all others": ("if self._is_lowest_waiting(wait):", "if True:")},
    ),
    *wrong_in(
        HANDSHAKE,
        f"{MEETING} a_replay",
        {
            "a proof that holds for every connection": (
                "hmac.digest(key, side + hello + challenge,",
                "hmac.digest(key, side + hello,",
            ),
        },
    ),
    *wrong_in(
        HANDSHAKE,
        f"{MEETING} another_generation",
        {
            "a rank of another generation that is let in": ('f"sirtaki mesh {job}".encode()', 'b"sirtaki mesh"'),
        },
    ),
    *wrong_in(
        HANDSHAKE,
        f"{MEETING} slow_and_numerous",
        {
            "who does not prove itself in time holds its place": ("            self.handshakes.drop_expired()\n", ""),
        },
    ),
    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────
    *wrong_in(
        CHECKPOINTS,
        f"{OF_CHECKPOINTS} on_disk",
        {
            "a skipped fsync of what was written": ("        os.fsync(descriptor)\n", "        pass\n"),
            "a skipped fsync of the manifest": (
                "for place in (state, unfinished / MANIFEST, unfinished):",
                "for place in (state, unfinished):",
            ),
            "a skipped fsync of the folder in which it appears": ("            _sync(self.path)\n", ""),
        },
    ),
    *wrong_in(
        CHECKPOINTS,
        f"{OF_CHECKPOINTS} not_reported_as_written",
        {
            "what was written is not read back": (
                "if problem := _problem(unfinished, throttle):",
                "if (problem := _problem(unfinished, throttle)) is None:",
            ),
        },
    ),
    *wrong_in(
        CHECKPOINTS,
        f"{OF_CHECKPOINTS} damaged",
        {
            "a changed byte that is not noticed": (
                "if _digest(path / STATE, throttle or WriteThrottle()) != digest:",
                "if len(_digest(path / STATE, throttle or WriteThrottle())) != len(digest):",
            ),
        },
    ),
    *wrong_in(
        CHECKPOINTS,
        f"{OF_CHECKPOINTS} written_again",
        {
            "a commit that cannot be written over": (
                "            shutil.rmtree(final, ignore_errors=True)  # exists",
                "            pass",
            ),
        },
    ),
    *wrong_in(
        CHECKPOINTS,
        f"{OF_CHECKPOINTS} another_history",
        {
            "newer ones of another line that are found instead": (
                "there[there.index(final) + 1 :]",
                "there[len(there) :]",
            ),
        },
    ),
    *wrong_in(
        CHECKPOINTS,
        f"{OF_CHECKPOINTS} is_due",
        {
            "one is due as soon as the one before is written": (
                "        self._last_s, self._throttle = self._clock(), WriteThrottle(",
                "        self._throttle = WriteThrottle(",
            ),
        },
    ),
    *wrong_in(
        STATE,
        f"{OF_CHECKPOINTS} plain_values",
        {
            "random numbers that do not go on": ("        torch.set_rng_state(self.host)\n", ""),
        },
    ),
    # ── what is called faster ────────────────────────────────────────────────────────────────────────────────────
    *wrong_in(
        "autotune/paired.py",
        "autotune/test_paired.py not hardly_ever",
        {
            "an interval that is too short by a rank": ("float(walsh[k - 1])", "float(walsh[k])"),
            "a proof after any pair": ("(n in self.looks or n > last) and self.proved", "self.proved"),
            "a first look after five pairs": ("FEWEST_PAIRS = 6\n", "FEWEST_PAIRS = 5\n"),
            "an order that does not alternate": ("candidate_first = not candidate_first", "pass"),
            "a ratio upside down": ("[before - after for", "[after - before for"),
            "giving up what may still gain": ("return Verdict.OPEN\n        return", "pass\n        return"),
        },
    ),
)
