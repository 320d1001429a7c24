import json
from pathlib import Path

import torch
from torch import nn

from lightning_memkit.memory.anatomy import AnatomyMeter


def test_categories_of_a_hand_counted_step_add_up_to_the_peak(tmp_path: Path) -> None:
    model = nn.Linear(100, 50, bias=False)  # 20,000 B
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(30, 100)  # 12,000 B
    meter = AnatomyMeter()
    meter.track(model.parameters(), "weights")
    meter.track([inputs], "inputs")
    with meter:
        meter.phase = "forward"
        out = model(inputs)
        loss = out.exp().sum()  # saves exp: 6,000 B; out is kept by its name
        meter.end_forward()
        loss.backward()
        del out, loss
        meter.phase = "optimizer"
        optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    states = [t for state in optimizer.state.values() for t in state.values()]
    anatomy = meter.dissect(gradients=gradients, optimizer_states=states)
    assert anatomy.largest["weights"] == 20_000
    assert anatomy.largest["inputs"] == 12_000
    assert anatomy.largest["gradients"] == 20_000
    assert anatomy.largest["optimizer_states"] == 20_000
    assert anatomy.largest["saved_activations"] == 6_000 + 6_000 + 4
    assert sum(anatomy.at_peak.values()) == anatomy.peak_bytes
    assert anatomy.peak_phase == "optimizer"
    path = tmp_path / "report.json"
    anatomy.to_json(path)
    assert json.loads(path.read_text())["peak_bytes"] == anatomy.peak_bytes
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
