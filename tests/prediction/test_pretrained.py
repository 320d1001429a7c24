"""A prediction takes a model of `from_pretrained` for that of its config, at the dtype that it would be trained at."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_memkit import PureBF16Precision, predict_memory
from lightning_memkit.prediction.pretrained import without_reading_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


class Model(LightningModule):
    def __init__(self, folder: Path, loads: bool) -> None:
        super().__init__()
        if loads:
            self.model: Any = AutoModelForCausalLM.from_pretrained(folder).train()
        else:
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes: Any = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=128, tie_word_embeddings=True, **sizes)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.long
def test_a_saved_model_is_predicted_as_its_config_is(folder: Path) -> None:
    ids = torch.randint(0, 128, (4, 32))

    def peak(loads: bool) -> int:
        trainer = {"plugins": [PureBF16Precision()]}
        batch = {"input_ids": ids, "labels": ids}
        return predict_memory(
            lambda: Model(folder, loads), batch, device="rtx4090", trainer=trainer
        ).peak_bytes

    assert peak(loads=True) == peak(loads=False)


def test_loading_is_put_back_and_keeps_its_options(folder: Path) -> None:
    plain = PreTrainedModel.__dict__["from_pretrained"]
    with without_reading_weights():
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, num_hidden_layers=1)
        (folder / "model.safetensors").unlink()
        AutoModelForCausalLM.from_pretrained(folder)
    assert PreTrainedModel.__dict__["from_pretrained"] is plain
    assert len(model.model.layers) == 1
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert not model.training
    with pytest.raises(OSError, match="model.safetensors"):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.long
def test_transformers_is_imported_by_a_model_alone_and_then_met(folder: Path) -> None:
    asked = f"""
import sys
from lightning_memkit.prediction.pretrained import without_reading_weights

with without_reading_weights():
    assert "transformers.modeling_utils" not in sys.modules
    from transformers import LlamaForCausalLM, PreTrainedModel

    loaded = PreTrainedModel.__dict__["from_pretrained"]
    assert loaded.__func__.__module__ == "lightning_memkit.prediction.pretrained"
    LlamaForCausalLM.from_pretrained({str(folder)!r})
assert PreTrainedModel.__dict__["from_pretrained"] is not loaded
assert not [finder for finder in sys.meta_path if type(finder).__module__ == loaded.__func__.__module__]
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
