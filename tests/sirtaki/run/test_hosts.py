import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.errors import ConfigError
from sirtaki.run.hosts import Host, parse_hosts, read_hostfile, slurm_hosts

names = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
hosts = st.lists(
    st.builds(Host, name=names, slots=st.integers(1, 64)), min_size=1, max_size=5, unique_by=lambda h: h.name
)


@given(hosts)
def test_hosts_written_in_any_of_the_three_forms_are_read_alike(tmp_path_factory, expected):
    file = tmp_path_factory.mktemp("hosts") / "hostfile"
    file.write_text("# a comment\n\n" + "".join(f"{host.name} slots={host.slots}  # here\n" for host in expected))
    assert parse_hosts(",".join(f"{host.name}:{host.slots}" for host in expected)) == tuple(expected)
    assert read_hostfile(file) == tuple(expected)
    file.write_text("".join(f"{host.name}:{host.slots}\n" for host in expected))
    assert read_hostfile(file) == tuple(expected)


def test_a_host_without_a_number_has_one_slot_and_naming_it_again_adds():
    assert parse_hosts("a,b:2,a") == (Host(name="a", slots=2), Host(name="b", slots=2))


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:x", "a:-1", ":2", "a b:2", "a,,b", "[::1]:2"])
def test_what_is_not_a_host_is_refused_with_the_form_to_write(text):
    with pytest.raises(ConfigError, match="slots"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a slots=2\nb slots=many\n", "line 2: 'many'"),
        ("a slots=2\n\nb max_slots=3 slots=2\n", "line 3"),
        ("# nothing\n", "names no host"),
        ("", "names no host"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_its_line(tmp_path, content, message):
    file = tmp_path / "hostfile"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(file)


def test_a_hostfile_that_is_missing_a_folder_or_binary_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "binary"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_hostfile(path)


def test_a_slurm_allocation_gives_hosts_and_slots():
    environ = {"SLURM_JOB_NODELIST": "gpu[01-03,7],login", "SLURM_TASKS_PER_NODE": "2(x3),1,4"}
    assert [(host.name, host.slots) for host in slurm_hosts(environ)] == [
        ("gpu01", 2), ("gpu02", 2), ("gpu03", 2), ("gpu7", 1), ("login", 4),
    ]  # fmt: skip


def test_outside_of_slurm_there_are_no_hosts():
    assert slurm_hosts({}) == ()


@pytest.mark.parametrize("tasks", ["2(x3)", "x", "2(3)"])
def test_slurm_variables_that_contradict_each_other_are_refused(tasks):
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE"):
        slurm_hosts({"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": tasks})


def test_a_sirtakirun_that_srun_has_started_says_how_it_is_meant():
    job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1"}
    with pytest.raises(
        ConfigError, match="2 nodes, but SLURM_TASKS_PER_NODE='1' is for 1; start sirtakirun without srun"
    ):
        slurm_hosts(job)
    several = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "a,b"}
    with pytest.raises(ConfigError, match="srun has started sirtakirun 2 times; start it once, without srun"):
        slurm_hosts(job | several)
