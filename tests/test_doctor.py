# pyright: reportArgumentType=false
import json
import os
from importlib.metadata import version

import pytest
import torch

from lightning_memkit.attention import packed_attention
from lightning_memkit.cli import main
from lightning_memkit.memory.measure import Capacity
from lightning_memkit.plugins.cli import doctor


def choice(diagnosis, purpose):
    return next(found.choice for found in diagnosis.choices if found.purpose == purpose)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def ampere(monkeypatch):
    """A machine with two GPUs of capability 8.0; nothing is allocated there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")
    monkeypatch.setattr(doctor, "capacity", lambda device: Capacity(total_bytes=80 * 2**30, free_bytes=2**30))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, dtype: empty(*size, device="meta", dtype=dtype))
    monkeypatch.setattr(doctor, "choose", lambda query: "varlen")


linux = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="reads Linux's scheduler")


@linux
def test_the_host_is_read_from_the_machine(no_gpu):
    host = doctor.diagnose().host
    assert host.cores == os.cpu_count()
    assert host.usable_cores == len(os.sched_getaffinity(0))
    assert (
        0 < host.free_bytes <= host.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )


@linux
def test_fewer_cores_are_usable_where_affinity_says_so(no_gpu, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert doctor.diagnose().host.usable_cores == 1


@pytest.mark.parametrize(("found", "shown"), [([4.0, 1.5], "quota 1.5"), ([], "no quota")])
def test_the_narrowest_quota_of_the_control_groups_is_shown(no_gpu, found, shown, monkeypatch):
    monkeypatch.setattr(doctor, "quotas", lambda: iter(found))
    diagnosis = doctor.diagnose()
    assert diagnosis.host.quota_cores == min(found, default=None)
    assert shown in str(doctor.summary(diagnosis))


def test_without_a_gpu_every_choice_is_the_cpus(no_gpu):
    diagnosis = doctor.diagnose()
    assert [device.device for device in diagnosis.devices] == ["cpu"]
    assert choice(diagnosis, "training device") == "cpu"
    assert choice(diagnosis, "packed_attention in bfloat16") == "loop"
    assert choice(diagnosis, "memory meter of MemoryBudget") == "operator by operator"
    assert choice(diagnosis, "pinned batches of PackedDataModule and LoaderTuner") == "no"
    assert not diagnosis.kernels["flash-attn"]
    assert not diagnosis.kernels["Triton"]


def test_the_attention_named_is_the_one_that_runs(no_gpu):
    query = torch.randn(1, 2, 8, 4, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    named = choice(doctor.diagnose(), "packed_attention in bfloat16")
    chosen = packed_attention(query, query, query, bounds, backend=named)
    assert torch.equal(chosen, packed_attention(query, query, query, bounds))


def test_gpus_are_listed_and_chosen(ampere):
    diagnosis = doctor.diagnose()
    assert [(device.device, device.capability) for device in diagnosis.devices] == [
        ("cuda:0", "8.0"),
        ("cuda:1", "8.0"),
    ]
    assert diagnosis.devices[0].bfloat16 == "in hardware"
    assert choice(diagnosis, "training device") == "cuda:0"
    assert choice(diagnosis, "packed_attention in bfloat16") == "varlen"
    assert choice(diagnosis, "pinned batches of PackedDataModule and LoaderTuner") == "yes"
    assert choice(diagnosis, "memory meter of MemoryBudget") == "the CUDA allocator"
    assert diagnosis.kernels["SDPA memory-efficient"]


def test_an_older_gpu_has_no_packed_kernels(ampere, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (7, 5))
    diagnosis = doctor.diagnose()
    assert diagnosis.devices[0].bfloat16 == "emulated"
    assert not diagnosis.kernels["varlen attention"]
    assert not diagnosis.kernels["SDPA flash"]


def test_a_missing_compiler_is_a_missing_kernel(no_gpu, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert not doctor.diagnose().kernels["C++ compiler for torch.compile"]
    monkeypatch.setenv("CXX", "my-compiler")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if name == "my-compiler" else None)
    assert doctor.diagnose().kernels["C++ compiler for torch.compile"]


def test_packages_have_their_versions_or_the_way_to_get_them(no_gpu, monkeypatch):
    real = doctor.version

    def absent(package):
        if package == "flash-attn":
            raise doctor.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(doctor, "version", absent)
    diagnosis = doctor.diagnose()
    assert diagnosis.packages["torch"] == version("torch")
    assert diagnosis.packages["flash-attn"] is None
    assert ("flash-attn", "not installed: pip install flash-attn") in doctor.summary(diagnosis)["Packages"]


def test_the_command_prints_a_table_and_json(no_gpu, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for title in ("This machine", "Devices", "Kernels", "Packages", "memkit will use"):
        assert title in printed
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(
        json.dumps(doctor.diagnose().as_dict() | {"host": found["host"], "devices": found["devices"]})
    )
    assert found["host"]["cores"] == os.cpu_count()


def test_nothing_of_lightning_is_loaded():
    import subprocess
    import sys

    code = (
        "import sys; from lightning_memkit.plugins.cli.doctor import diagnose; diagnose(); "
        "print('lightning' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "False", out.stderr
