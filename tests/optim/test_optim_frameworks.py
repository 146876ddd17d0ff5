"""Libraries that train with an optimizer they are given: each is run for real, beside torch.optim's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optim_oracle import assert_as_accurate
from optimizers import MATRIX_NAMES, OWN_NAMES, WITH_STATE
from small_models import gpt2, loss_of, model
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import subtensors as st

# Notes of the libraries on their own use of torch, and on a training without a logger.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

CLASSES = ["AdamW", "SGD", "RMSprop", "ASGD", "NAdam"]


def trained(
    package: Any, name: str, steps: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = model().to(dtype)
    optimizer = getattr(package, name)(net.parameters(), lr=0.01, **WITH_STATE[name])
    go_on(net, optimizer, range(steps))
    return net, optimizer


def go_on(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        loss_of(net, number).backward()
        optimizer.step()


# Muon takes matrices alone.
@pytest.mark.parametrize("name", [*CLASSES, *OWN_NAMES, *[name for name in MATRIX_NAMES if name != "Muon"]])
def test_a_distributed_checkpoint_is_saved_and_loaded_in_place(name: str, tmp_path: Path) -> None:
    net, optimizer = trained(st.optim, name, 3)
    saved, saved_state = get_state_dict(net, optimizer)
    dcp.save({"model": saved, "optimizer": saved_state}, checkpoint_id=tmp_path, no_dist=True)
    go_on(net, optimizer, range(3, 6))

    again, other = trained(st.optim, name, 0)
    weights, state = get_state_dict(again, other)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state)
    go_on(again, other, range(3, 6))
    torch.testing.assert_close(again.state_dict(), net.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours to torch", "torch to ours"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_distributed_checkpoint_of_one_package_goes_on_with_the_other(
    name: str, ours_first: bool, tmp_path: Path
) -> None:
    first, second = (st.optim, torch.optim) if ours_first else (torch.optim, st.optim)
    net, optimizer = trained(first, name, 3)
    saved, saved_state = get_state_dict(net, optimizer)
    dcp.save({"model": saved, "optimizer": saved_state}, checkpoint_id=tmp_path, no_dist=True)
    again, other = trained(second, name, 0)
    weights, state = get_state_dict(again, other)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state)
    go_on(again, other, range(3, 6))
    theirs, _ = trained(torch.optim, name, 6)
    truth, _ = trained(torch.optim, name, 6, torch.float64)
    assert_as_accurate(again.parameters(), theirs.parameters(), truth.parameters(), torch.float32)


def test_a_trainer_of_hugging_face_trains_with_the_class_it_is_handed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = (torch.arange(12) * (index + 1)) % 17
            return {"input_ids": row, "labels": row}

    def train(package: Any, resume: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
        transformers.set_seed(0)
        net = gpt2(vocab_size=17, n_positions=12).to(dtype)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / package.__name__),
            max_steps=8,
            save_steps=4,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            lr_scheduler_type="cosine",
            max_grad_norm=0.5,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        given = (package.AdamW, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.01})
        trainer = transformers.Trainer(model=net, args=arguments, train_dataset=Rows(), optimizer_cls_and_kwargs=given)
        trainer.train(resume_from_checkpoint=str(tmp_path / package.__name__ / "checkpoint-4") if resume else None)
        return trainer, {name: t.detach().clone() for name, t in net.state_dict().items()}

    trainer, ours = train(st.optim)
    _, theirs = train(torch.optim)
    _, truth = train(torch.optim, dtype=torch.float64)
    optimizer = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    assert isinstance(optimizer, st.optim.AdamW)
    assert {int(s["step"]) for s in optimizer.state.values()} == {8}
    assert_as_accurate(ours.values(), theirs.values(), truth.values(), torch.float32)
    _, resumed = train(st.optim, resume=True)
    torch.testing.assert_close(resumed, ours, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_trains_with_what_configure_optimizers_returns(precision: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")

    clip = 0.5 if precision == "32-true" else None

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, package: Any) -> None:
            super().__init__()
            self.net, self.package = model(), package

        def training_step(self, batch: list[Tensor]) -> Tensor:
            (x,) = batch
            return (self.net(x) - x.sum(1, keepdim=True)).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = self.package.AdamW(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=12)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train(package: Any, precision: Any = precision, dtype: torch.dtype = torch.float32) -> Any:
        module = Module(package)
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            precision=precision,
            gradient_clip_val=clip,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8))
        return module, trainer

    (ours, trainer), (theirs, _) = train(st.optim), train(torch.optim)
    assert isinstance(trainer.optimizers[0], st.optim.AdamW)
    assert {int(s["step"]) for s in trainer.optimizers[0].state.values()} == {12}
    truth, _ = train(torch.optim, "64-true", torch.float64)
    assert_as_accurate(ours.parameters(), theirs.parameters(), truth.parameters(), torch.float32)
