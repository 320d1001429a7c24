"""What a terminal under `memkit` leaves out, and that everything else is said as before."""

import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lightning_memkit.plugins.cli.quiet import only_what_matters

NEEDLESS = [
    ("torchao", "Failed to load /x/_C_mxfp8.so: Could not load this library"),
    ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community"),
]


@pytest.mark.parametrize(("name", "line"), NEEDLESS)
def test_extensions_that_optional_packages_miss_are_left_out(name, line, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as where nobody has set logging up
    log = logging.getLogger(name)
    with only_what_matters():
        log.warning(line)
        log.warning("Something else")
        log.error(line)
    log.warning(line)
    said = capsys.readouterr().err.splitlines()
    assert said == ["Something else", line, line]  # the error, and the line after the context


def test_deprecations_of_libraries_are_left_out_and_a_projects_own_are_not():
    with only_what_matters():
        found = [
            (category, module) for action, _, category, module, _ in warnings.filters if action == "ignore"
        ]
    for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
        patterns = [re.compile(module) for one, module in found if one is category and module is not None]
        assert any(pattern.match("torch.utils._pytree") for pattern in patterns)
        assert any(pattern.match("lightning.pytorch.trainer") for pattern in patterns)
        assert not any(
            pattern.match(own) for pattern in patterns for own in ("my.model", "torchmodel", "__main__")
        )


def test_a_users_own_filters_come_first():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with only_what_matters(), pytest.raises(UserWarning, match="No seed found"):
            warnings.warn("No seed found, seed set to 0", stacklevel=1)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.long
def test_a_run_prints_no_needless_line(tmp_path: Path, debug: bool):
    config = tmp_path / "job.yaml"
    config.write_text(
        "seed_everything: 1\n"
        "model: {class_path: tests.cli_models.Early}\n"
        "trainer: {max_steps: 1, accelerator: cpu, enable_progress_bar: false, "
        f"callbacks: [lightning_memkit.MemoryBudget], default_root_dir: {tmp_path}}}\n"
        "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01}}\n"
    )
    words = [sys.executable, "-m", "lightning_memkit.cli", "fit", "--config", str(config)]
    done = subprocess.run([*words, *["--debug"] * debug], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for beginning in ("Seed set to", "💡 Tip", "TPU available", "GPU available", "Starting from v1.9.0"):
        assert (beginning in done.stdout + done.stderr) == debug, beginning
    assert "stopped: `max_steps=1` reached" in done.stderr
