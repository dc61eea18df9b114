import pytest

from sirtaki.run.output import NoticeFilter

RULE = "-" * 74
KILLED = "prterun noticed that process rank 1 with PID 16144 on node n0 exited on\nsignal 9 (Killed)."
EXITED = """\
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-7947@1,2]
   Exit code:    7"""
ABORTED = """\
MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD
  Proc: [[52025,1],3]
  Errorcode: 5

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes."""
UNREACHED = """\
A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the

  Local host:    vm
  Remote host:   far
  Daemon exit status: 255"""
AFTER = 'prterun has exited due to process rank 0 with PID 0 on node vm calling\n"abort".'
IMPROPER = "prterun has exited due to process rank 1 with PID 13536 on node vm exiting\nimproperly."
HYDRA = "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 12 RUNNING AT vm\n=   EXIT CODE: 9"
OTHER = "There are not enough slots available in the system to satisfy the 4\nslots that were requested."


def taken(text):
    endings, unreached = [], []
    notices = NoticeFilter(endings.append, unreached.append)
    shown = b"".join(notices.take(f"{line}\n".encode()) for line in text.splitlines())
    shown += notices.rest()
    return shown.decode(), [(end.rank, end.exit_code, end.reason) for end in endings], unreached


@pytest.mark.parametrize(
    ("box", "endings"),
    [
        (KILLED, [(1, 137, "killed by SIGKILL, as the system does where memory runs out")]),
        (KILLED.replace("9 (Killed)", "11 (Segmentation fault)"), [(1, 139, "killed by SIGSEGV")]),
        (EXITED, [(2, 7, "exit code 7")]),
        (EXITED.replace("prterun-vm-7947@1,2", "[26313,1],2"), [(2, 7, "exit code 7")]),
        (ABORTED, [(3, 5, "it called MPI_Abort with 5")]),
        (AFTER, [(0, 1, "it called MPI_Abort")]),
        (IMPROPER, [(1, 1, "it ended without MPI_Finalize")]),
        (HYDRA, [(None, 9, "exit code 9")]),
    ],
)
def test_what_mpiexec_says_of_ended_ranks_is_understood_and_not_shown(box, endings):
    assert taken(f"before\n{RULE}\n{box}\n{RULE}\nafter") == ("before\nafter\n", endings, [])


def test_a_host_that_has_fallen_silent_is_the_end_of_its_ranks():
    box = """PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-n0-987@0,0] on node n0
  Remote daemon: [prterun-n0-987@0,2] on node n2

This is usually due to either a failure of the TCP network"""
    assert taken(f"{RULE}\n{box}\n{RULE}") == ("", [(None, 1, "its host cannot be reached any more")], [])


def test_a_host_that_mpiexec_did_not_reach_is_named():
    assert taken(f"{'-' * 60}\n{UNREACHED}\n{'-' * 60}") == ("", [], ["far"])


def test_other_boxes_are_shown_whole_also_where_they_are_cut_off_or_no_box():
    for text in (f"{RULE}\n{OTHER}\n{RULE}\n", f"{RULE}\n{OTHER}\n", f"{RULE}\n" + "line\n" * 200):
        assert taken(text) == (text, [], [])
