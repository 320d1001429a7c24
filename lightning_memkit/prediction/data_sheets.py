"""The known devices, as their makers' data sheets and white papers describe them."""

from typing import Any

from lightning_memkit.memory.cublas import WORKSPACE_BYTES_HOPPER, WORKSPACE_BYTES_MI300
from lightning_memkit.prediction.device import Device

_MIB, _GIGA, _TERA = 1 << 20, 10**9, "e12"

# Memory: as nvidia-smi (rocm-smi) reports it. Workspaces of the matrix library: torch's default (`memory/cublas.py`).
# Links: NVLink, else PCIe. Networks: 400 Gbit/s for each device of a cluster, else 100 Gbit/s.
# Rates in 16 bits are dense and accumulate in float32: half of what data sheets print with sparsity, and on GeForce a
# quarter, since its tensor cores accumulate in float32 at half their rate. Rates that a sheet lacks are its cores
# times its boost clock times 2 (float32), times 2 again on GeForce since Ampere, times 4 elsewhere (16 bits).
_CLUSTER: dict[str, Any] = {"network_bytes_per_second": 50e9}
_PCIE_3: dict[str, Any] = {
    "host_bytes_per_second": 12e9,
    "link_bytes_per_second": 12e9,
}  # or 8 lanes of PCIe 4
_PCIE_5: dict[str, Any] = {"host_bytes_per_second": 50e9}  # GeForce copies to other cards by way of the host
_HOPPER_CARD: dict[str, Any] = {
    "context_bytes": 620 * _MIB,  # an H200 with torch 2.11 and CUDA 13 took 619
    "library_bytes": WORKSPACE_BYTES_HOPPER,
    "prefers_cudnn": True,
    "host_bytes_per_second": 50e9,  # an H200 copied 53e9 each way
    "link_bytes_per_second": 50e9,
    **_CLUSTER,
}
_HOPPER = {**_HOPPER_CARD, "link_bytes_per_second": 450e9}
_H800 = {**_HOPPER_CARD, "link_bytes_per_second": 200e9}
_GRACE: dict[str, Any] = {"host_bytes_per_second": 300e9}  # NVLink-C2C: 450e9 at most
_BLACKWELL = {**_CLUSTER, **_PCIE_5, "link_bytes_per_second": 900e9, "prefers_cudnn": True}
_AMPERE = {**_CLUSTER, "link_bytes_per_second": 300e9}
_A800 = {**_CLUSTER, "link_bytes_per_second": 200e9}
_OLD: dict[str, Any] = {**_PCIE_3, "has_bfloat16": False}
_VOLTA = {**_OLD, "link_bytes_per_second": 150e9}
_P100 = {**_OLD, "link_bytes_per_second": 80e9}
_CDNA_2: dict[str, Any] = {"library_bytes": WORKSPACE_BYTES_HOPPER}  # ROCm's default, too
_CDNA_3 = {
    **_CLUSTER,
    **_PCIE_5,
    "library_bytes": WORKSPACE_BYTES_MI300,
    "link_bytes_per_second": 448e9,
}

# Source; what its devices share; name, MiB, teraFLOPs in 16 bits and in float32, GB/s of memory.
SHEETS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("NVIDIA H200 data sheet (SXM)", _HOPPER, "h200 143771 989 67 4800"),
    ("NVIDIA HGX B200 data sheet", _BLACKWELL, "b200 183359 2250 75 7700"),
    ("AMD Instinct MI300X data sheet", _CDNA_3, "mi300x 196592 1307 163.4 5300"),
    ("NVIDIA H100 data sheet (SXM)", _HOPPER, "h100-80gb 81559 989 67 3350"),
    (
        "NVIDIA A100 data sheet",
        _AMPERE,
        """
        a100-80gb 81920 312 19.5 2039
        a100-40gb 40960 312 19.5 1555
        """,
    ),
    ("NVIDIA L40S data sheet", {}, "l40s 46068 362 91.6 864"),
    ("NVIDIA RTX A6000 data sheet", {}, "a6000 49140 154.8 38.7 768"),
    ("NVIDIA RTX Blackwell GPU architecture white paper", _PCIE_5, "rtx5090 32607 209.5 104.8 1792"),
    ("NVIDIA Ada GPU architecture white paper", {}, "rtx4090 24564 165.2 82.6 1008"),
    ("NVIDIA Ampere GA102 GPU architecture white paper", {}, "rtx3090 24576 71 35.6 936"),
    ("NVIDIA L4 data sheet", {}, "l4 23034 121 30.3 300"),
    ("NVIDIA A10 data sheet", {}, "a10 23028 125 31.2 600"),
    (
        "NVIDIA V100 data sheet (SXM2)",
        _VOLTA,
        """
        v100-32gb 32510 125 15.7 900
        v100-16gb 16160 125 15.7 900
        """,
    ),
    ("NVIDIA T4 data sheet", _OLD, "t4 15360 65 8.1 320"),
    # Data centers, the newest first.
    ("NVIDIA HGX B300 data sheet", _BLACKWELL, "b300 275040 2250 75 8000"),
    ("NVIDIA GB200 NVL72 data sheet, of each GPU", _BLACKWELL | _GRACE, "gb200 189471 2500 80 8000"),
    ("NVIDIA GH200 data sheet (HBM3)", _HOPPER | _GRACE, "gh200 97871 989 67 4000"),
    ("NVIDIA H200 data sheet (NVL)", _HOPPER_CARD, "h200nvl 143771 835 60 4800"),
    ("NVIDIA H100 data sheet (NVL)", _HOPPER_CARD, "h100nvl 95830 835 60 3900"),
    ("NVIDIA H100 PCIe product brief", _HOPPER_CARD, "h100pcie 81559 756 51 2039"),
    ("NVIDIA H800 data sheet (SXM)", _H800, "h800 81559 989 67 3350"),
    ("NVIDIA H20 data sheet", _HOPPER, "h20 97871 148 44 4000"),
    (
        "NVIDIA A800 data sheet",
        _A800,
        """
        a800-80gb 81920 312 19.5 2039
        a800-40gb 40960 312 19.5 1555
        """,
    ),
    ("NVIDIA L40 data sheet", {}, "l40 46068 181 90.5 864"),
    ("NVIDIA A40 data sheet", {}, "a40 46068 149.7 37.4 696"),
    ("NVIDIA A30 data sheet", {}, "a30 24576 165 10.3 933"),
    ("NVIDIA A10G data sheet (Amazon)", {}, "a10g 23028 70 35 600"),
    ("NVIDIA A16 data sheet, of each of its four GPUs", {}, "a16 15356 17.9 4.5 200"),
    ("NVIDIA A2 data sheet", _PCIE_3, "a2 15356 18 4.5 200"),
    (
        "NVIDIA V100 data sheet (PCIe)",
        _OLD,
        """
        v100pcie-32gb 32510 112 14 900
        v100pcie-16gb 16160 112 14 900
        """,
    ),
    # Pascal has no tensor cores: with float32 accumulation it is as fast as in float32.
    ("NVIDIA P100 data sheet (SXM2)", _P100, "p100 16280 10.6 10.6 732"),
    ("NVIDIA P100 data sheet (PCIe, 16 GB)", _OLD, "p100pcie 16280 9.3 9.3 732"),
    # Workstations.
    ("NVIDIA RTX PRO 6000 Blackwell data sheet (workstation)", _PCIE_5, "rtxpro6000 97887 500 125 1792"),
    (
        "NVIDIA RTX 6000, 5000 and 4500 Ada Generation data sheets",
        {},
        """
        rtx6000ada 49140 364.2 91.1 960
        rtx5000ada 32760 261.1 65.3 576
        rtx4500ada 24570 158.5 39.6 432
        """,
    ),
    (
        "NVIDIA RTX A5500, A5000, A4500 and A4000 data sheets",
        {},
        """
        a5500 24564 136.4 34.1 768
        a5000 24564 111.1 27.8 768
        a4500 20470 94.6 23.7 640
        a4000 16376 76.7 19.2 448
        """,
    ),
    ("NVIDIA Quadro RTX 8000 data sheet", _OLD, "rtx8000 48601 130.5 16.3 672"),
    ("NVIDIA TITAN RTX, specifications", _OLD, "titanrtx 24190 130.5 16.3 672"),
    ("NVIDIA TITAN V, specifications", _OLD, "titanv 12066 110 14.9 652.8"),
    # GeForce.
    (
        "NVIDIA RTX Blackwell GPU architecture white paper",
        _PCIE_5,
        """
        rtx5080 16303 112.6 56.3 960
        rtx5070ti 16303 87.9 43.9 896
        rtx5070 12227 61.7 30.9 672
        """,
    ),
    (
        "GeForce RTX 5060 family, specifications (8 lanes of PCIe 5)",
        {},
        """
        rtx5060ti-16gb 16311 47.4 23.7 448
        rtx5060ti-8gb 8151 47.4 23.7 448
        rtx5060 8151 38.4 19.2 448
        """,
    ),
    (
        "NVIDIA Ada GPU architecture white paper; GeForce RTX 40 SUPER, specifications",
        {},
        """
        rtx4090d 24564 147 73.5 1008
        rtx4080super 16376 104.4 52.2 736
        rtx4080 16376 97.5 48.7 716.8
        rtx4070tisuper 16376 88.2 44.1 672
        rtx4070ti 12282 80.2 40.1 504.2
        rtx4070super 12282 71 35.5 504.2
        rtx4070 12282 58.3 29.1 504.2
        """,
    ),
    (
        "GeForce RTX 4060 family, specifications (8 lanes of PCIe 4)",
        _PCIE_3,
        """
        rtx4060ti-16gb 16380 44.1 22.1 288
        rtx4060ti-8gb 8188 44.1 22.1 288
        rtx4060 8188 30.2 15.1 272
        """,
    ),
    ("NVIDIA Ada GPU architecture white paper", {}, "rtx3090ti 24564 80 40 1008"),
    (
        "NVIDIA Ampere GA102 GPU architecture white paper; GeForce RTX 30, specifications",
        {},
        """
        rtx3080ti 12288 68.2 34.1 912
        rtx3080-12gb 12288 61.3 30.6 912
        rtx3080-10gb 10240 59.5 29.8 760
        rtx3070ti 8192 43.5 21.7 608
        rtx3070 8192 40.6 20.3 448
        rtx3060ti 8192 32.4 16.2 448
        rtx3060 12288 25.5 12.7 360
        """,
    ),
    (
        "NVIDIA Turing GPU architecture white paper",
        _OLD,
        """
        rtx2080ti 11264 53.8 13.4 616
        rtx2080 8192 40.3 10.1 448
        rtx2070 8192 29.9 7.5 448
        """,
    ),
    ("GeForce GTX 1080 Ti, specifications", _OLD, "gtx1080ti 11178 11.3 11.3 484"),
    # AMD; of the MI250 family each of a card's two dies, which torch sees as devices.
    ("AMD Instinct MI355X data sheet", _CDNA_3, "mi355x 294896 2516.6 157.3 8000"),
    ("AMD Instinct MI325X data sheet", _CDNA_3, "mi325x 262128 1307.4 163.4 6000"),
    (
        "AMD Instinct MI200 series data sheets",
        _CDNA_2,
        """
        mi250x 65520 191.5 47.9 1638.4
        mi250 65520 181 45.3 1638.4
        mi210 65520 181 45.3 1638.4
        """,
    ),
)


def _of_rows(shared: dict[str, Any], rows: str) -> list[Device]:
    return [
        Device(
            name=name,
            memory_bytes=int(mib) * _MIB,
            flops_16=float(half + _TERA),
            flops_32=float(single + _TERA),
            bytes_per_second=float(memory) * _GIGA,
            **shared,
        )
        for name, mib, half, single, memory in map(str.split, rows.strip().splitlines())
    ]


DEVICES = {device.name: device for _, shared, rows in SHEETS for device in _of_rows(shared, rows)}
