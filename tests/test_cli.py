# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
import os
import subprocess
import sys

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.accelerators import CUDAAccelerator

from lightning_memkit import PureBF16Precision
from lightning_memkit.cli import COMMANDS, main
from lightning_memkit.plugins.callbacks.random_state import KEY
from lightning_memkit.plugins.cli._build_target import target_device, target_dtype
from tests import cli_models
from tests.plugins.noise import NOISE

pytestmark = [
    *NOISE,
    pytest.mark.filterwarnings("ignore:.*jsonargparse"),
    pytest.mark.filterwarnings("ignore:.*configure_optimizers. is not overridden"),
]
ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}
SHORT = {
    "max_steps": 3,
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture
def memkit(tmp_path, monkeypatch):
    """Runs a command in a folder of its own; returns the exit code and the model that it built."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMKIT_DEBUG", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(command, *options, model="tests.cli_models.Early", **config):
        trainer = {**SHORT, "default_root_dir": str(tmp_path), **config.pop("trainer", {})}
        path = tmp_path / "given.yaml"
        model = {"class_path": model} if isinstance(model, str) else model
        path.write_text(yaml.safe_dump({"seed_everything": 1, "model": model, "trainer": trainer, **config}))
        cli_models.BUILT.clear()
        code = main([command, "--config", str(path), *options])
        return code, cli_models.BUILT[-1] if cli_models.BUILT else None

    return run


BF16_PLUGIN = {"plugins": [{"class_path": "lightning_memkit.PureBF16Precision"}]}


@pytest.mark.parametrize(
    "trainer",
    [BF16_PLUGIN, {"precision": "bf16-true"}, {"precision": "bf16", "strategy": "memkit"}],
    ids=["plugin", "bf16-true", "strategy"],
)
def test_a_model_of_a_config_is_built_in_bfloat16_with_one_float32_tensor_at_a_time(memkit, trainer):
    if trainer.get("precision") == "bf16":
        trainer = {"strategy": "memkit", **BF16_PLUGIN}
    code, model = memkit("fit", trainer=trainer, optimizer=ADAMW)
    assert code == 0
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.counter.peak == 4 * 64 * 64  # the largest parameter
    assert model.counter.live == 0
    assert model.change() > 0


def test_the_stock_path_builds_everything_in_float32(tmp_path, monkeypatch):
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stock"])
    LightningCLI(
        cli_models.Early,
        run=False,
        args=["--seed_everything=0", "--trainer.precision=bf16-true", "--trainer.logger=false"],
    )
    model = cli_models.BUILT[-1]
    assert model.counter.peak == 4 * sum(p.numel() for p in model.parameters())


def test_a_float32_run_is_stock(memkit):
    code, model = memkit("fit", optimizer=ADAMW)
    assert code == 0
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_modules_that_are_arguments_of_the_model_are_built_likewise(memkit):
    network = {"class_path": "tests.cli_models.Network", "init_args": {"width": 16}}
    model = {"class_path": "tests.cli_models.Early", "init_args": {"network": network}}
    code, built = memkit("fit", model=model, trainer=BF16_PLUGIN, optimizer=ADAMW)
    assert code == 0
    assert {p.dtype for p in built.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("trainer", [{}, BF16_PLUGIN, {"strategy": "memkit"}], ids=["fp32", "bf16", "memkit"])
def test_an_optimizer_of_the_config_trains_a_model_built_late(memkit, trainer):
    schedule = {"class_path": "torch.optim.lr_scheduler.ConstantLR", "init_args": {"total_iters": 2}}
    trainer = {"max_steps": 6, **trainer}
    code, model = memkit(
        "fit", model="tests.cli_models.Late", trainer=trainer, optimizer=ADAMW, lr_scheduler=schedule
    )
    assert code == 0
    assert model.change() > 1e-3
    assert model.trainer.lr_scheduler_configs[0].scheduler.last_epoch > 0


def test_the_configs_optimizer_replaces_the_models_own_with_a_warning(memkit):
    with pytest.warns(UserWarning, match=r"WithOptimizer\.configure_optimizers is not used"):
        code, model = memkit("fit", model="tests.cli_models.WithOptimizer", optimizer=ADAMW)
    assert code == 0
    assert isinstance(model.trainer.optimizers[0], torch.optim.AdamW)


def test_without_an_optimizer_in_the_config_the_models_own_is_used(memkit):
    code, model = memkit("fit", model="tests.cli_models.WithOptimizer")
    assert code == 0
    assert isinstance(model.trainer.optimizers[0], torch.optim.SGD)


def test_seeded_runs_repeat_and_resume_bitwise(memkit, tmp_path):
    def weights(steps, *options):
        keep = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(tmp_path), "save_last": True}}
        trainer = {"max_steps": steps, "callbacks": [keep], "enable_checkpointing": True, **BF16_PLUGIN}
        code, model = memkit("fit", *options, trainer=trainer, optimizer=ADAMW)
        assert code == 0
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    whole = weights(8)
    assert torch.equal(weights(8), whole)
    weights(4)
    last = tmp_path / "last.ckpt"
    assert KEY in torch.load(last, weights_only=True)
    assert torch.equal(weights(8, "--ckpt_path", str(last)), whole)


def test_plugins_have_short_names(memkit):
    trainer = {"plugins": [{"class_path": "PureBF16Precision"}], "callbacks": [{"class_path": "RandomState"}]}
    code, model = memkit("fit", trainer=trainer, optimizer=ADAMW)
    assert code == 0
    assert isinstance(model.trainer.precision_plugin, PureBF16Precision)


def test_predict_runs(memkit):
    code, model = memkit("predict", trainer=BF16_PLUGIN)
    assert code == 0
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_two_precisions_are_refused_before_anything_is_built(memkit, capsys):
    code, model = memkit("fit", trainer={**BF16_PLUGIN, "precision": "32-true"}, optimizer=ADAMW)
    assert code == 1
    assert model is None
    assert "stands beside the precision plugin PureBF16Precision" in capsys.readouterr().err


def test_an_unknown_key_is_refused_by_name(memkit, capsys):
    code, model = memkit("fit", trainer={"max_stepz": 3})
    assert code == 2
    assert model is None
    assert capsys.readouterr().err == (
        "memkit: error: the config has no option 'trainer.max_stepz' (did you mean 'trainer.max_steps'?)\n"
    )


BUDGET = "trainer.callbacks: lightning_memkit.MemoryBudget"
DATA = "data: lightning_memkit.PackedDataModule"


@pytest.mark.parametrize(
    ("key", "options", "printed"),
    [
        ("callbacks", {"budget": "-1GiB"}, f"{BUDGET}: budget='-1GiB' is no positive size"),
        (
            "callbacks",
            {"budget": ["1GiB"]},
            f"{BUDGET}: budget: ['1GiB'] is none of: str, int, float; write a size such as 22GiB, a fraction ",
        ),
        (
            "callbacks",
            {"budget": float("nan")},
            f"{BUDGET}: budget=nan is not a budget: a budget is a size such as",
        ),
        (
            "callbacks",
            {"budget": float("inf")},
            f"{BUDGET}: budget=inf is not a budget: a budget is a size such as",
        ),
        (
            "callbacks",
            {"micro_batch_size": [1]},
            f"{BUDGET}: micro_batch_size: [1] is none of: int, Literal['auto']; write one value, without the brackets",
        ),
        (
            "callbacks",
            {"bugdet": 1},
            f"{BUDGET} has no option 'bugdet'; it accepts budget, micro_batch_size, ",
        ),
        ("data", {"context": -5}, f"{DATA}: context=-5 is below 1"),
        ("data", {"contxt": 5}, f"{DATA} has no option 'contxt'; it accepts source, tokenizer, context, "),
        (
            "data",
            {"batches": {"workers": 1}},
            "data: batches of lightning_memkit.PackedDataModule has no option",
        ),
        ("data", {"documents": {"validation": 3}}, f"{DATA}: documents: validation=3.0 is outside [0, 1)"),
        (
            "data",
            {"documents": "my.jsonl"},
            f"{DATA}: documents='my.jsonl' is no mapping of options (text_field, ",
        ),
        (
            "data",
            {"documents": ["my.jsonl"]},
            f"{DATA}: documents=['my.jsonl'] is no mapping of options (text_f",
        ),
        ("data", {"documents": None}, f"{DATA}: documents=None is no mapping of options (text_field, "),
        ("data", {"batches": 4}, f"{DATA}: batches=4 is no mapping of options (num_workers, "),
        ("data", {"tokenizer": None}, f"{DATA}: tokenizer=None is no name of a tokenizer; "),
        ("data", {"source": None}, f"{DATA}: source=None is no source; "),
    ],
)
def test_an_error_inside_a_class_is_one_line_with_its_place(memkit, capsys, key, options, printed):
    name = "MemoryBudget" if key == "callbacks" else "PackedDataModule"
    item = {"class_path": f"lightning_memkit.{name}", "init_args": options}
    config = (
        {"trainer": {"callbacks": [{"class_path": "MemoryReport"}, item]}}
        if key == "callbacks"
        else {key: item}
    )
    code, _ = memkit("fit", **config)
    lines = [line for line in capsys.readouterr().err.splitlines() if "eed set to" not in line]
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"memkit: error: {printed}")


def entry(name: str, **options: object) -> dict[str, object]:
    return {"class_path": f"lightning_memkit.{name}", "init_args": options}


@pytest.mark.parametrize(
    ("trainer", "printed"),
    [
        (
            {"callbacks": [entry("PureBF16Precision")]},
            "trainer.callbacks: lightning_memkit.PureBF16Precision is a plugin and belongs under trainer.plugins",
        ),
        (
            {"callbacks": ["PureBF16Precision"]},
            "trainer.callbacks: lightning_memkit.PureBF16Precision is a plugin and belongs under trainer.plugins",
        ),
        (
            {"plugins": [entry("MemoryBudget")]},
            "trainer.plugins: lightning_memkit.MemoryBudget is a callback and belongs under trainer.callbacks",
        ),
        (
            {"plugins": [entry("ZeRO1Strategy")]},
            "trainer.plugins: lightning_memkit.ZeRO1Strategy is a strategy and belongs under trainer.strategy",
        ),
        (
            {"callbacks": [entry("MemoryBuget")]},
            "trainer.callbacks: lightning_memkit.MemoryBuget: lightning_memkit has no MemoryBuget (did you mean "
            "lightning_memkit.MemoryBudget?)",
        ),
        (
            {"callbacks": ["MemoryBuget"]},
            "trainer.callbacks: 'MemoryBuget' is no entry; write - class_path: lightning_memkit.MemoryBudget",
        ),
        (
            {"callbacks": [entry("MemoryBudget", budget="1GiB"), entry("MemoryBudget", budget="2GiB")]},
            "trainer.callbacks has 2 of lightning_memkit.MemoryBudget, and a run has one budget: remove all but one.",
        ),
        (
            {"strategy": "memkit_fsdp"},
            "trainer.strategy='memkit_fsdp' is no strategy (did you mean 'memkit_fsdp2'?); there are ",
        ),
        ({"precision": "budget"}, "trainer.precision: budget is none of: "),
        ({"strategy": "dpp"}, "trainer.strategy='dpp' is no strategy (did you mean 'ddp'?); there are "),
    ],
)
def test_what_stands_where_it_can_not_is_told_with_its_place(memkit, capsys, trainer, printed):
    code, model = memkit("fit", trainer=trainer)
    lines = [line for line in capsys.readouterr().err.splitlines() if "eed set to" not in line]
    assert (code, model, len(lines)) == (2, None, 1)
    assert lines[0].startswith(f"memkit: error: {printed}")


def test_a_single_callback_needs_no_list(memkit):
    code, model = memkit("fit", trainer={"callbacks": entry("MemoryBudget", budget="1GiB")}, optimizer=ADAMW)
    assert code == 0
    assert model is not None


def test_an_empty_config_is_told_what_it_needs(tmp_path, capsys):
    (tmp_path / "empty.yaml").write_text("")
    assert main(["fit", "--config", str(tmp_path / "empty.yaml")]) == 2
    assert "memkit: error: the config is empty: it names a model, data" in capsys.readouterr().err


@pytest.mark.parametrize(("budget", "key"), [("-1GiB", "budget"), ("1GiB", "bugdet")], ids=["value", "key"])
def test_debugging_shows_all_of_an_error_inside_a_class(memkit, capsys, budget, key):
    item = {"class_path": "lightning_memkit.MemoryBudget", "init_args": {key: budget}}
    code, _ = memkit("fit", "--debug", trainer={"callbacks": [item]})
    printed = capsys.readouterr().err
    assert code == 2
    assert "Traceback" in printed
    assert "Given value" in printed
    assert printed.splitlines()[-1].startswith(f"memkit: error: {BUDGET}")


def test_a_checkpoint_that_is_not_there_or_cut_off_is_refused_before_anything_is_built(
    memkit, capsys, tmp_path
):
    whole, cut_off = tmp_path / "whole.ckpt", tmp_path / "cut_off.ckpt"
    for path in (whole, cut_off):
        torch.save({"state_dict": {}, "filler": torch.zeros(1000)}, path)
    cut_off.write_bytes(cut_off.read_bytes()[:900])
    for name, printed in (
        (
            "lost.ckpt",
            "is not there: give the path of a checkpoint; the newest other one beside it is whole.ckpt.",
        ),
        ("cut_off.ckpt", "was cut off after 900 bytes; the newest other one beside it is whole.ckpt."),
    ):
        code, built = memkit("fit", "--ckpt_path", name)
        assert (code, built) == (1, None)
        assert printed in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("weights.pt", "it has no 'pytorch-lightning_version'; weights alone are loaded by the callback Initial"),
        ("old.pt", "it has no 'pytorch-lightning_version'; weights alone are loaded by the callback Initial"),
        ("my.jsonl", "neither torch.save nor memkit wrote it; the newest other one beside it is whole.ckpt."),
        ("runs", "it is a folder without '.metadata'; it holds runs/newer.ckpt."),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_refused_before_anything_is_built(
    memkit, capsys, tmp_path, name: str, printed: str
) -> None:
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "weights.pt")
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, tmp_path / "whole.ckpt")
    (tmp_path / "my.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "runs").mkdir()
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, tmp_path / "runs" / "newer.ckpt")
    assert memkit("fit", "--ckpt_path", name) == (1, None)
    said = capsys.readouterr().err
    assert f"ckpt_path='{name}' is no checkpoint of a Trainer: {printed}" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "config.yaml").exists()


def test_a_config_that_is_no_yaml_is_named(memkit, capsys, tmp_path):
    (tmp_path / "broken.yaml").write_text("trainer:\n\tmax_steps: 1\n")
    assert memkit("fit", "--config", "broken.yaml")[0] == 2
    assert "memkit: error: broken.yaml: Problems parsing config: " in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
def test_an_error_of_ours_has_no_place(memkit, capsys, tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    data = {"class_path": "lightning_memkit.PackedDataModule", "init_args": {"source": "none.jsonl"}}
    assert memkit("fit", data=data, optimizer=ADAMW)[0] == 1
    assert (
        capsys.readouterr()
        .err.rstrip()
        .endswith("memkit: error: The source 'none.jsonl' holds 0 documents and no token; give at least one.")
    )


def test_an_error_is_one_line_and_a_place_unless_debugging(memkit, capsys):
    code, _ = memkit("fit", model="tests.cli_models.Failing", optimizer=ADAMW)
    printed = capsys.readouterr().err
    assert code == 1
    assert "memkit: error: ValueError: the third document is empty" in printed
    assert "in training_step" in printed
    assert "Traceback" not in printed
    code, _ = memkit("fit", "--debug", model="tests.cli_models.Failing", optimizer=ADAMW)
    assert code == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_command_line_changes_the_last_callback_and_appends_another(memkit, capsys):
    budget = {"class_path": "lightning_memkit.MemoryBudget", "init_args": {"budget": "1GiB"}}
    trainer = {"callbacks": [{"class_path": "lightning_memkit.MemoryReport"}, budget]}
    appended = ("--trainer.callbacks+=RandomState", "--print_config")
    code, _ = memkit("fit", "--trainer.callbacks.budget=4GiB", *appended, trainer=trainer)
    assert code == 0
    callbacks = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert [item["class_path"].rpartition(".")[2] for item in callbacks] == [
        "MemoryReport",
        "MemoryBudget",
        "RandomState",
    ]
    assert callbacks[1]["init_args"]["budget"] == "4GiB"


def test_an_interrupt_is_130(memkit):
    import signal

    handler = signal.getsignal(signal.SIGINT)
    try:
        assert memkit("fit", model="tests.cli_models.Interrupted", optimizer=ADAMW)[0] == 130
    finally:
        signal.signal(signal.SIGINT, handler)


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"MemoryBudget": {"budget": "1GiB"}}, "MemoryBudget.budget"),
        ([{"class_path": "lightning_memkit.MemoryReport", "live": False}], "class_path"),
        ([{"MemoryBudget": None}], "MemoryBudget"),
    ],
)
def test_an_entry_that_is_not_formed_as_one_says_its_form(memkit, capsys, entry, named: str) -> None:
    assert memkit("fit", trainer={"callbacks": entry})[0] == 2
    said = capsys.readouterr().err
    assert (
        f"trainer.callbacks: an entry with {named!r} is not formed as one: write class_path: NAME and, "
        in said
    )


def test_what_is_like_no_key_of_its_group_is_not_asked_about(memkit, capsys) -> None:
    assert memkit("fit", trainer={"budget": "1GiB"})[0] == 2
    said = capsys.readouterr().err
    assert said.endswith(
        "the config has no option 'trainer.budget'; MemoryBudget has it, under trainer.callbacks\n"
    )
    assert memkit("fit", trainer={"batch": 4})[0] == 2
    said = capsys.readouterr().err
    assert said.endswith("the config has no option 'trainer.batch'; --help lists what there is\n")


def test_the_help_of_fit_names_the_options_of_a_budget(capsys):
    assert main(["fit", "--help"]) == 0
    said = capsys.readouterr().out.split()
    assert {"--budget", "--goal", "--headroom"} <= set(said)


def test_a_class_that_says_very_much_is_cut_and_says_so(memkit, capsys):
    assert memkit("fit", model="tests.cli_models.Talkative")[0] == 2
    printed = capsys.readouterr().err
    assert "Talkative: " in printed
    assert printed.endswith("more characters: --debug prints them)\n")
    assert len(printed) < 1_200


def test_a_module_that_is_not_found_says_where_it_was_looked_for(memkit, capsys):
    assert memkit("fit", model="nowhere.Model") == (2, None)
    printed = capsys.readouterr().err
    assert printed.startswith(
        "memkit: error: model: nowhere.Model: No module named 'nowhere'; your own classes"
    )


def test_an_unknown_command_is_refused_with_the_list(capsys):
    assert main(["train"]) == 2
    assert "'train' is no command; the commands are fit, validate" in capsys.readouterr().err


def test_classes_of_the_working_folder_are_found(tmp_path):
    (tmp_path / "mine.py").write_text("from tests.cli_models import WithOptimizer as Model\n")
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"model": {"class_path": "mine.Model"}, "trainer": {**SHORT, "max_steps": 1}})
    )
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-P", "-m", "lightning_memkit.cli", "fit", "--config", "mine.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize(
    ("trainer", "dtype"),
    [
        ({}, torch.float32),
        ({"precision": 16}, torch.float32),
        ({"precision": "bf16"}, torch.float32),  # Lightning's short name of mixed precision
        ({"precision": "bf16-true"}, torch.bfloat16),
        ({"precision": "64"}, torch.float64),
        ({"precision": "transformer-engine"}, None),
        ({"plugins": PureBF16Precision()}, torch.bfloat16),
        ({"plugins": [Namespace(class_path="lightning_memkit.PureBF16Precision")]}, torch.bfloat16),
        (
            {
                "strategy": Namespace(
                    class_path="lightning.pytorch.strategies.DDPStrategy",
                    init_args=Namespace(
                        precision_plugin=Namespace(
                            class_path="lightning.pytorch.plugins.precision.HalfPrecision",
                            init_args=Namespace(precision="bf16-true"),
                        )
                    ),
                )
            },
            torch.bfloat16,
        ),
    ],
)
def test_the_target_dtype_is_read_from_the_config(trainer, dtype):
    assert target_dtype(Namespace(**trainer)) == dtype


@pytest.mark.parametrize(
    ("trainer", "environ", "device"),
    [
        ({}, {}, "cuda:0"),
        ({"devices": [2, 3]}, {}, "cuda:2"),
        ({"devices": [2, 3], "strategy": "ddp"}, {"LOCAL_RANK": "1"}, "cuda:3"),
        ({"devices": 4, "strategy": "ddp"}, {"SLURM_LOCALID": "2"}, "cuda:2"),
        ({"devices": "auto", "accelerator": "gpu", "strategy": "ddp"}, {"LOCAL_RANK": "3"}, "cuda:3"),
        ({"strategy": "ddp_spawn"}, {}, "cpu"),
        ({"strategy": "ddp_notebook"}, {}, "cpu"),
        ({"accelerator": "cpu"}, {}, "cpu"),
        (
            {"strategy": Namespace(class_path="OnDeviceStrategy", init_args=Namespace(device="cuda:1"))},
            {},
            "cuda:1",
        ),
    ],
)
def test_the_target_device_is_that_of_the_local_rank(trainer, environ, device, monkeypatch):
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 4))
    monkeypatch.setattr(
        CUDAAccelerator,
        "parse_devices",
        staticmethod(lambda n: n if isinstance(n, list) else list(range(int(n)))),
    )
    assert target_device(Namespace(**trainer), environ) == torch.device(device)


def saved_by(memkit, tmp_path) -> list[torch.Tensor]:
    """Trains with the bfloat16 plugin and saves `bf16.ckpt`; the float32 weights by the plugin's own account."""
    epoch = {**SPLIT_PLUGIN, "max_steps": 4}
    code, model = memkit("fit", model="tests.cli_models.WithOptimizer", trainer=epoch)
    assert code == 0
    model.trainer.save_checkpoint("bf16.ckpt")
    handle = model.trainer.precision_plugin.compensations[0]
    return [weight for _, weight in handle.float32_weights()]


SPLIT_PLUGIN = {
    "plugins": [{"class_path": "lightning_memkit.PureBF16Precision", "init_args": {"compensation": "split"}}]
}


def test_consolidate_writes_what_plain_float32_training_loads(memkit, tmp_path, capsys):
    weights = saved_by(memkit, tmp_path)
    assert main(["consolidate", "bf16.ckpt", "fp32.ckpt"]) == 0
    assert "fp32.ckpt: " in capsys.readouterr().out
    saved = torch.load("fp32.ckpt", weights_only=True)
    for left, right in zip(saved["state_dict"].values(), weights, strict=True):
        assert torch.equal(left, right)
    code, model = memkit(
        "fit", "--ckpt_path=fp32.ckpt", model="tests.cli_models.WithOptimizer", trainer={"max_steps": 6}
    )
    assert code == 0
    assert model.trainer.global_step == 6
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_that_do_not_fit_are_one_error(memkit, tmp_path, capsys):
    torch.save({"odd": torch.ones(2)}, tmp_path / "w.pt")
    callback = {"class_path": "InitialWeights", "init_args": {"source": str(tmp_path / "w.pt")}}
    code, _ = memkit("fit", trainer={"callbacks": [callback]}, optimizer=ADAMW)
    assert code == 1
    assert "Unexpected, not in the module (1): odd" in capsys.readouterr().err


def test_a_model_built_in_bfloat16_resumes_from_float32_weights_with_their_low_halves(memkit, tmp_path):
    weights = saved_by(memkit, tmp_path)
    main(["consolidate", "bf16.ckpt", "fp32.ckpt"])
    code, model = memkit(
        "fit",
        "--ckpt_path=fp32.ckpt",
        model="tests.cli_models.WithOptimizer",
        trainer={**SPLIT_PLUGIN, "max_steps": 4},  # as many as were made: it loads, and steps no further
    )
    assert code == 0
    handle = model.trainer.precision_plugin.compensations[0]
    for (parameter, weight), saved in zip(handle.float32_weights(), weights, strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(weight, saved)


def test_consolidate_refuses_and_says_what_to_do(memkit, tmp_path, capsys):
    saved_by(memkit, tmp_path)
    (tmp_path / "fp32.ckpt").write_text("kept")
    capsys.readouterr()
    for words, message in (
        (
            ["bf16.ckpt", "fp32.ckpt"],
            "fp32.ckpt exists and would be replaced; choose another name, or write --overwrite.",
        ),
        (["absent.ckpt", "new.ckpt"], "absent.ckpt does not exist"),
        (["fp32.ckpt", "new.ckpt"], "no checkpoint that torch can read"),
    ):
        assert main(["consolidate", *words]) == 1
        printed = capsys.readouterr()
        assert message in printed.err
        assert not printed.out
    assert (tmp_path / "fp32.ckpt").read_text() == "kept"
    assert main(["consolidate", "bf16.ckpt", "fp32.ckpt", "--overwrite"]) == 0
    assert not list(tmp_path.glob(".*partial"))


def test_consolidate_explains_itself(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["consolidate", "--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("IN.ckpt", "OUT.ckpt", "--overwrite", "weights_only=True"))
    with pytest.raises(SystemExit) as exit_:
        main(["consolidate", "one.ckpt"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith(
        "memkit: error: memkit consolidate: name the file to write, once"
    )
    for words, said in (
        ([], "needs IN.ckpt: write `memkit consolidate IN.ckpt OUT.ckpt`; `memkit consolidate --help`"),
        (["a", "b", "--kept"], "has no argument '--kept'; `memkit consolidate --help`"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["consolidate", *words])
        printed = capsys.readouterr().err
        assert said in printed
        assert printed.count("\n") == 1
