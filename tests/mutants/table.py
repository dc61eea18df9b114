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
OVERLAP, CHECKPOINTS = "torch/overlap.py", "torch/elastic/checkpoints.py"
MESH, RENDEZVOUS = "comm/control/mesh.py", "comm/control/mesh_rendezvous.py"

OF_BUFFERS, OF_SCHEDULE = "comm/gradients/test_buffers.py", "comm/gradients/test_schedule.py"
OF_SYNCHRONISER, OF_ITERATION = "comm/gradients/test_synchroniser.py", "comm/gradients/test_iteration.py"
OF_OVERLAP, PUT_OFF = "sirtaki/torch/test_overlap.py", "sirtaki/torch/test_put_off_updates.py"
OF_MESH, MEETING = "comm/control/test_mesh.py", "comm/control/test_meeting.py"
OF_CHECKPOINTS, EDITS = "sirtaki/torch/elastic/test_checkpoints.py", "sirtaki/torch/test_gradient_edits.py"
TRAINING = "sirtaki/torch/test_optimizer.py"

MUTANTS = (
    # ── the way of a gradient ────────────────────────────────────────────────────────────────────────────────────
    Mutant(
        "a missing wait",
        SYNCHRONISER,
        "if not self._wait_for(now.works, now.units, interrupted):",
        "if interrupted and interrupted():",
        OF_SYNCHRONISER,
    ),
    Mutant("a wrong divisor", SYNCHRONISER, "scale=reduction.postscale,", "scale=1.0,", OF_SYNCHRONISER),
    Mutant(
        "a factor that is left out",
        SYNCHRONISER,
        "if reduction.prescale != 1.0:",
        "if reduction.prescale > 1.0:",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "a lost unit",
        SYNCHRONISER,
        "for number in range(len(self._schedule.units)) if number not in left]",
        "for number in range(1, len(self._schedule.units)) if number not in left]",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "a unit that leaves without its gradients",
        SYNCHRONISER,
        "            self._copy_in(since)\n            self._now.left += numbers",
        "            self._now.left += numbers",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "a gradient that did not come is not put in",
        SYNCHRONISER,
        "                if position not in came:\n",
        "                if position not in came and position:\n",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "a course that is gone too far",
        SYNCHRONISER,
        "course[now.step][0] <= came:",
        "course[now.step][0] <= came + 1:",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "counting that forgets what came in order",
        SYNCHRONISER,
        "self._schedule.missing([self._buffers.order[place] for place in arrived.positions])",
        "self._schedule.missing()",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "missing gradients that count as reduced",
        SYNCHRONISER,
        "if self.complete or len(self._arrivals.positions) < self.n_params:",
        "if self.complete:",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "a gradient that is handed out before its unit is reduced",
        SYNCHRONISER,
        "for number in self._schedule.units_of[index]]\n",
        "for number in self._schedule.units_of[index][:0]]\n",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "units that do not wait for the one before",
        SCHEDULE,
        "                self._awaited[number] += 1\n            last",
        "            last",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "a unit that waits for a gradient too few",
        SCHEDULE,
        "missing[number] -= 1\n            while",
        "missing[number] -= 2\n            while",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "units in the wrong order",
        SCHEDULE,
        "units.sort(key=lambda unit: unit.due)",
        "units.sort(key=lambda unit: unit.due[::-1])",
        OF_SCHEDULE,
    ),
    Mutant(
        "a rank without gradients that has a say in the order",
        SCHEDULE,
        "    if counts:\n",
        "    if counts or len(arrived):\n",
        OF_SCHEDULE,
    ),
    Mutant(
        "a gradient that is ready on one rank only is agreed",
        ITERATION,
        "comm.all_reduce(packed, Op.AND)",
        "comm.all_reduce(packed, Op.MAXIMUM)",
        OF_ITERATION,
    ),
    Mutant(
        "a stale view",
        BUFFERS,
        "        if not self.is_intact(position):\n            self.views",
        "        if self.is_intact(position) is None:\n            self.views",
        OF_BUFFERS,
    ),
    Mutant(
        "a gradient out of order taken for the next one",
        BUFFERS,
        " or not all(map(is_, params, buffers.params[expected])):",
        ":",
        OF_BUFFERS,
    ),
    Mutant(
        "a write that nobody sees",
        BUFFERS,
        "                if current._version != version:\n",
        "                if current._version < version:\n",
        OF_BUFFERS,
    ),
    Mutant(
        "zeros that are not zeros",
        BUFFERS,
        "        self._device.launch(self.places[position].zero_)\n",
        "",
        OF_SYNCHRONISER,
    ),
    Mutant(
        "kept gradients that are written over",
        BUFFERS,
        "if max(map(sys.getrefcount, views)) > REFERENCES or buffers.has_users(part):",
        "if buffers.outdated:",
        f"{EDITS} are_kept",
    ),
    Mutant(
        "kept memory that is not put back",
        BUFFERS,
        "        if buffers.lent:\n            buffers.put_back",
        "        if buffers.outdated:\n            buffers.put_back",
        f"{EDITS} are_kept",
    ),
    Mutant("strides that are not looked at", BUFFERS, "gradient.stride() == wanted for", "wanted for", OF_BUFFERS),
    Mutant(
        "a gradient that is handed out twice",
        BUFFERS,
        "wanted = set(positions) - self._handed_out\n",
        "wanted = set(positions)\n",
        OF_BUFFERS,
    ),
    Mutant(
        "passes that are not counted",
        REDUCER,
        "                        self._passes_left_of_all -= 1\n",
        "                        self._passes_left_of_all = 1\n",
        f"{TRAINING} asked_for_through",
    ),
    Mutant(
        "an iteration that does not begin anew",
        REDUCER,
        "                    self._begin_iteration()\n            self.n_reduced",
        "                    pass\n            self.n_reduced",
        f"{TRAINING} never_zeroed",
    ),
    Mutant(
        "a group that leaves before all of it are there",
        REDUCER,
        "len(waiting) == self._group_sizes[place]:",
        "len(waiting) <= self._group_sizes[place]:",
        f"{TRAINING} a_group_leaves",
    ),
    Mutant(
        "models that differ are not refused",
        CHECKS,
        "    if first is None and fewest == most:\n",
        "    if first is None or fewest == most:\n",
        "sirtaki/engine/test_same_model.py first_parameter",
    ),
    # ── updates that are put off ─────────────────────────────────────────────────────────────────────────────────
    Mutant(
        "a parameter that is read before its update",
        OVERLAP,
        "        for tensor in found:\n            wait_for(tensor)\n",
        "        for tensor in found[1:]:\n            wait_for(tensor)\n",
        OF_OVERLAP,
    ),
    Mutant(
        "modules that give what nobody has waited for to an extension",
        OVERLAP,
        "        for param in _own(module):\n            wait_for(param)",
        "        for param in _own(module)[1:]:\n            wait_for(param)",
        OF_OVERLAP,
    ),
    Mutant(
        "groups that stay parts where a step raises",
        OVERLAP,
        "        finally:\n            optimizer.param_groups = whole\n            self.running = False",
        "            optimizer.param_groups = whole\n        finally:\n            self.running = False",
        OF_OVERLAP,
    ),
    Mutant(
        "options that change under an update that was put off",
        OVERLAP,
        "return value.clone() if isinstance(value, torch.Tensor) else value",
        "return value",
        OF_OVERLAP,
    ),
    Mutant(
        "an optimizer that clips is taken for one that does not",
        OVERLAP,
        "SCALES = (1.0, 1e4, 1e-4)",
        "SCALES = (1.0,)",
        OF_OVERLAP,
    ),
    Mutant(
        "what is read past Python is not updated by step",
        OVERLAP,
        "if id(param) in self.uncovered or _has_alias(param):",
        "if _has_alias(param):",
        PUT_OFF,
    ),
    Mutant(
        "a tensor that shares a parameter's memory is read before the update",
        OVERLAP,
        "return _n_references(param) > _ALONE",
        "return _n_references(param) > _ALONE + 1",
        PUT_OFF,
    ),
    Mutant(
        "a graph through values from before the step",
        OVERLAP,
        "                    torch.autograd.graph.increment_version(param)\n",
        "",
        PUT_OFF,
    ),
    Mutant(
        "zeroing that is forgotten",
        OVERLAP,
        "zeroing = self._zeroing.pop(number, None)",
        "zeroing = None",
        PUT_OFF,
    ),
    Mutant(
        "a gradient of another pass takes the place of the reduced one",
        OVERLAP,
        "param.grad = gradient if param.grad is None else param.grad + gradient",
        "param.grad = gradient",
        PUT_OFF,
    ),
    Mutant(
        "parameters wait for ranks that are gone",
        OVERLAP,
        "            self._let_go_all()\n            self._gradient_of.clear()",
        "            self._gradient_of.clear()",
        PUT_OFF,
    ),
    Mutant(
        "an iteration that was put off and never ends",
        OVERLAP,
        "            self._gradients.finish()\n",
        "",
        PUT_OFF,
    ),
    # ── the mesh ─────────────────────────────────────────────────────────────────────────────────────────────────
    Mutant(
        "a message of another operation is taken for this one's",
        MESH,
        "    if found != expected:\n",
        "    if found < expected:\n",
        OF_MESH,
    ),
    Mutant(
        "bytes that are lost where a frame wraps",
        MESH,
        "            self._inbound[:left] = self._inbound[self._begin : self._end]\n",
        "",
        OF_MESH,
    ),
    Mutant(
        "memory that is said to be free and is sent later",
        MESH,
        '                    rest = [memoryview(b"".join(rest))]\n',
        "",
        OF_MESH,
    ),
    Mutant(
        "a part of a sum in the wrong place",
        MESH,
        "    begin = sum(counts[: exchange.rank])\n    array",
        "    begin = low * exchange.rank\n    array",
        OF_MESH,
    ),
    Mutant(
        "what comes for a communicator that was freed is kept",
        MESH,
        "        self._freed.add(context)\n",
        "",
        OF_MESH,
    ),
    Mutant(
        "a leave that is taken for a loss",
        MESH,
        "self._connections[source].said_bye = True",
        "self._connections[source].said_bye = False",
        OF_MESH,
    ),
    Mutant(
        "a short silence that is never forgiven",
        MESH,
        "            self._silent_beats = 0\n            return",
        "            return",
        OF_MESH,
    ),
    Mutant(
        "a rank that ends without a word",
        MESH,
        "        self._tell(self.rank, reason, FAULT if fault else 0)\n",
        "",
        OF_MESH,
    ),
    Mutant(
        "a rank that gives up and wakes nobody",
        MESH,
        "connection.stop_sending()  # which wakes",
        "pass  # which wakes",
        OF_MESH,
    ),
    Mutant(
        "a fault that is told as a leave",
        MESH,
        "kind = PeerFaultError if header.tag == FAULT else PeerLostError",
        "kind = PeerLostError",
        OF_MESH,
    ),
    Mutant(
        "a proof that holds for every connection",
        RENDEZVOUS,
        "hmac.digest(key, side + hello + challenge,",
        "hmac.digest(key, side + hello,",
        f"{MEETING} a_replay",
    ),
    Mutant(
        "a rank of another generation that is let in",
        RENDEZVOUS,
        'f"sirtaki mesh {job}".encode()',
        'b"sirtaki mesh"',
        f"{MEETING} another_generation",
    ),
    Mutant(
        "who does not prove itself in time holds its place",
        RENDEZVOUS,
        "            self.door.drop_late()\n",
        "",
        f"{MEETING} the_slow_and_the_many",
    ),
    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────
    Mutant(
        "a skipped fsync of what was written",
        CHECKPOINTS,
        "        os.fsync(descriptor)\n",
        "        pass\n",
        f"{OF_CHECKPOINTS} on_disk",
    ),
    Mutant(
        "a skipped fsync of the manifest",
        CHECKPOINTS,
        "for place in (state, unfinished / MANIFEST, unfinished):",
        "for place in (state, unfinished):",
        f"{OF_CHECKPOINTS} on_disk",
    ),
    Mutant(
        "a skipped fsync of the folder in which it appears",
        CHECKPOINTS,
        "            _sync(self.path)\n",
        "",
        f"{OF_CHECKPOINTS} on_disk",
    ),
    Mutant(
        "what was written is not read back",
        CHECKPOINTS,
        "if problem := _problem(unfinished, pace):",
        "if (problem := _problem(unfinished, pace)) is None:",
        f"{OF_CHECKPOINTS} read_back",
    ),
    Mutant(
        "a changed byte that is not noticed",
        CHECKPOINTS,
        "if _digest(path / STATE, pace or Pace()) != digest:",
        "if len(_digest(path / STATE, pace or Pace())) != len(digest):",
        f"{OF_CHECKPOINTS} damaged",
    ),
    Mutant(
        "a commit that cannot be written over",
        CHECKPOINTS,
        "            shutil.rmtree(final, ignore_errors=True)  # of a job",
        "            # of a job",
        f"{OF_CHECKPOINTS} written_again",
    ),
    Mutant(
        "newer ones of another line that are found instead",
        CHECKPOINTS,
        "there[there.index(final) + 1 :]",
        "there[len(there) :]",
        f"{OF_CHECKPOINTS} another_line",
    ),
    Mutant(
        "one is due as soon as the one before is written",
        CHECKPOINTS,
        "        self._last_s, self._pace = self._clock(), Pace(",
        "        self._pace = Pace(",
        f"{OF_CHECKPOINTS} is_due",
    ),
    Mutant(
        "random numbers that do not go on",
        CHECKPOINTS,
        "        torch.set_rng_state(self.host)\n",
        "",
        f"{OF_CHECKPOINTS} is_plain",
    ),
)
