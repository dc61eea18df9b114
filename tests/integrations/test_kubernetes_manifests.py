"""The manifests in deploy/kubernetes are valid, and the values of the user's file reach all places."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from integrations.manifests import KUBERNETES, OVERLAYS, pod_templates, rendered, training

pytestmark = pytest.mark.integration

SCHEMAS = Path(__file__).parent / "kubernetes"
RELEASES = ("1.29", "1.33", "1.37")  # the first one with backoffLimitPerIndex by default, the first where it is stable

FILLED: dict[str, Any] = {
    "image": "example.org/mine:7",
    "script": ["train.py", "--lr", "0.1"],
    "pods": 5,
    "podsButFirst": 4,
    "ranksPerPod": 8,
    "resources": {"requests": {"cpu": "16"}, "limits": {"nvidia.com/gpu": 8}},
    "claim": "results",
}


def filled() -> dict[str, Any]:
    values = training()
    assert set(values["spec"]) == set(FILLED)
    return {**values, "metadata": {**values["metadata"], "name": "resnet"}, "spec": FILLED}


def strings(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for child in node.values():
            yield from strings(child)
    elif isinstance(node, list):
        for child in node:
            yield from strings(child)
    elif isinstance(node, str):
        yield node


def render_by_program(folder: Path) -> list[dict[str, Any]]:
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, done.stderr
            return list(yaml.safe_load_all(done.stdout))
    pytest.skip("neither kustomize nor kubectl is on PATH")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_renders_the_same(tmp_path: Path, overlay: str) -> None:
    folder = shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    (folder / "base" / "training.yaml").write_text(yaml.safe_dump(filled()))
    by_kind = {found["kind"]: found for found in rendered(overlay, filled())}
    assert {found["kind"]: found for found in render_by_program(folder / overlay)} == by_kind


def validate(found: dict[str, Any]) -> None:
    """Against Kubernetes' schemas and the operators'; a TrainJob has patches of pods, which its own schema knows."""
    import jsonschema
    import kubernetes_validate

    core = [found]
    if (schema := SCHEMAS / f"{found['kind'].lower()}.yaml").exists():
        jsonschema.validate(found, yaml.safe_load(schema.read_text()))
        core = []
    if found["kind"] != "TrainJob":
        core += [
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
            for template in pod_templates(found)
        ]
    for release in RELEASES:
        for each in core:
            kubernetes_validate.validate(each, release, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_are_valid(overlay: str) -> None:
    for found in rendered(overlay, filled()):
        validate(found)


def test_the_volume_is_valid_and_is_the_one_that_the_file_names() -> None:
    volume = yaml.safe_load((KUBERNETES / "volume.yaml").read_text())
    validate(volume)
    assert volume["metadata"]["name"] == training()["spec"]["claim"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_misspelt_field_is_found(overlay: str) -> None:
    job = rendered(overlay, filled())[-1]
    job["spec"]["paralelism"] = 2
    with pytest.raises(Exception, match="'paralelism' was unexpected"):
        validate(job)


def test_a_misspelt_field_of_a_pod_is_found() -> None:
    (job,) = rendered("mpijob", filled())
    job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["volume"] = []
    with pytest.raises(Exception, match="'volume' was unexpected"):
        validate(job)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_left_to_fill_in(overlay: str) -> None:
    found = list(strings(rendered(overlay, filled())))
    assert not [text for text in found if any(word in text for word in ("NAME", "IMAGE", "CLAIM"))]
    assert "/volume/resnet/checkpoints" in found


def container(template: dict[str, Any]) -> dict[str, Any]:
    (only,) = template["spec"]["containers"]
    return only


def test_values_reach_a_job() -> None:
    service, job = rendered("job", filled())
    (template,) = pod_templates(job)
    spec, train = job["spec"], container(template)
    env = {entry["name"]: entry.get("value") for entry in train["env"]}
    assert (spec["completions"], spec["parallelism"], env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == (5, 5, "5", "8")
    assert (train["image"], train["args"], train["resources"]) == tuple(
        FILLED[name] for name in ("image", "script", "resources")
    )
    assert template["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "results"
    # Rank 0's address is a name that the Service gives: it is the pods' subdomain, and selects them.
    assert job["metadata"]["name"] == service["metadata"]["name"] == template["spec"]["subdomain"] == "resnet"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "resnet"}
    assert env["PET_MASTER_ADDR"] == "resnet-0.resnet"
    assert env["PET_MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])


def test_values_reach_a_pytorchjob() -> None:
    (job,) = rendered("pytorchjob", filled())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"], job["spec"]["nprocPerNode"]) == (1, 4, "8")
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    train = container(replicas["Worker"]["template"])
    assert (train["image"], train["args"], train["resources"]) == tuple(
        FILLED[name] for name in ("image", "script", "resources")
    )
    assert "results" in strings(replicas["Master"]["template"]["spec"]["volumes"])
    assert training()["spec"]["podsButFirst"] == training()["spec"]["pods"] - 1


def test_values_reach_a_trainjob() -> None:
    (job,) = rendered("trainjob", filled())
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (5, 8)
    assert (trainer["image"], trainer["args"], trainer["resourcesPerNode"]) == tuple(
        FILLED[name] for name in ("image", "script", "resources")
    )
    assert "results" in strings(job["spec"]["runtimePatches"])


def test_values_reach_an_mpijob() -> None:
    (job,) = rendered("mpijob", filled())
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    assert (launcher["replicas"], worker["replicas"], job["spec"]["slotsPerWorker"]) == (1, 5, 8)
    assert container(launcher["template"])["args"] == FILLED["script"]
    assert container(launcher["template"])["image"] == container(worker["template"])["image"] == FILLED["image"]
    assert container(worker["template"])["resources"] == FILLED["resources"]
    assert "results" in strings(worker["template"]["spec"]["volumes"])


def test_the_image_has_what_the_mpijob_names() -> None:
    (job,) = rendered("mpijob", filled())
    settings = (KUBERNETES / "sshd_config").read_text().splitlines()
    keys = job["spec"]["sshAuthMountPath"]
    assert f"HostKey {keys}/id_rsa" in settings
    assert f"AuthorizedKeysFile {keys}/authorized_keys" in settings
    ssh = [line.strip() for line in (KUBERNETES / "ssh_config").read_text().splitlines()]
    assert f"IdentityFile {keys}/id_rsa" in ssh
    assert next(line for line in settings if line.startswith("Port")) in ssh
    worker = container(job["spec"]["mpiReplicaSpecs"]["Worker"]["template"])
    assert f"COPY deploy/kubernetes/sshd_config {worker['command'][-1]}" in (KUBERNETES / "Dockerfile").read_text()


def test_all_that_the_image_copies_is_there_and_not_ignored() -> None:
    copied = [
        line.split()[1] for line in (KUBERNETES / "Dockerfile").read_text().splitlines() if line.startswith("COPY")
    ]
    kept = [line[1:] for line in (KUBERNETES / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    root = KUBERNETES.parents[1]
    assert copied
    assert set(copied) <= set(kept)
    assert all((root / path).exists() for path in kept)
    links = [path for name in kept for path in (root / name).rglob("*") if path.is_symlink()]
    assert links, "those of sirtaki/ to the folders that are installed below it"
    assert {path.resolve().relative_to(root).parts[0] for path in links} <= set(kept)
