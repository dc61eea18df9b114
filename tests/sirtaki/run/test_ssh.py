"""What ssh says about a login that fails becomes what to do about it."""

from pathlib import Path

import pytest

from sirtaki.errors import ConfigError
from sirtaki.run.hosts import remedy, ssh_arguments, why_not


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ssh: connect to host b port 22: Connection refused", "--ssh-port"),
        ("ssh: connect to host b port 22: Connection timed out", "switched on"),
        ("ssh: connect to host b port 22: No route to host", "switched on"),
        ("root@b: Permission denied (publickey,password).", "`ssh-copy-id b`"),
        ("Host key verification failed.", "`ssh b`"),
        ("ssh: Could not resolve hostname b: Name or service not known", "is the name right?"),
        ("sh: 1: exec: /opt/python: not found", "with /opt/python"),
        ("env: '/opt/python': No such file or directory", "with /opt/python"),
        ("/opt/python: No module named sirtaki", "install Sirtaki there for /opt/python"),
        ("(ModuleNotFoundError: No module named 'sirtaki.run')", "the same version"),
    ],
)
def test_each_failure_has_its_remedy(line: str, says: str) -> None:
    assert says in remedy(line, host="b", python="/opt/python")


def test_what_a_login_script_misses_is_no_reason() -> None:
    assert remedy("bash: module: command not found", host="b", python="/opt/python") == ""


def test_the_last_line_that_says_something_is_the_reason() -> None:
    text = "Warning: a banner\nConnection refused\nHost key verification failed.\nlost\n"
    found = why_not(text, host="b", python="python")
    assert found.startswith("Host key verification failed: log in once by hand")
    assert why_not("Welcome\n", host="b", python="python") == ""


def test_port_and_key_are_arguments_and_a_key_must_be_there(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    assert ssh_arguments(2222, str(key)) == ("-p", "2222", "-i", str(key))
    assert ssh_arguments(None, None) == ()
    with pytest.raises(ConfigError, match="no such file"):
        ssh_arguments(None, str(tmp_path / "other"))
