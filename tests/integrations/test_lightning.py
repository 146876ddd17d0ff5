"""A LightningModule with a causal language model trains, evaluates and resumes as it did, with the callback."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from chunked_programs import allocations
from optim_oracle import flat
from tiny_causal_lms import VOCABULARY, causal_lm
from torch import Tensor

import subtensors as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch", reason="needs the package lightning")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]
callback = st.integrations.lightning.callback

ROWS = [(torch.arange(11) * (n + 1)) % (VOCABULARY - 3) + 3 for n in range(24)]
CLIP = 0.05


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A model that is trained by an optimizer of a package."""

    def __init__(self, package: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.net, self.package = causal_lm(dtype=dtype), package
        self.losses: list[float] = []
        self.largest = 0

    def training_step(self, batch: Tensor) -> Tensor:
        with allocations() as seen:
            loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        self.largest = max(self.largest, seen.largest)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("eval", self.net(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> Any:
        return self.package.AdamW(self.parameters(), lr=1e-2)


def fitted(
    folder: Path,
    package: Any,
    callbacks: list[Any],
    dtype: Any = torch.float32,
    kind: type[Module] = Module,
    **options: Any,
) -> Any:
    module = kind(package, dtype)
    trainer = lightning.Trainer(
        **{"max_epochs": 2, "gradient_clip_val": CLIP, **options.pop("trainer", {})},
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(torch.stack(ROWS), batch_size=8)
    trainer.fit(module, loader, loader, **options)
    return module, trainer


def test_training_and_evaluation_are_those_of_lightning_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, their_trainer = fitted(tmp_path, torch.optim, [])
    clipped: list[object] = []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *args, **kw: (clipped.append(args), clip(*args, **kw))
    )
    ours, trainer = fitted(tmp_path, st.optim, [callback(loss={"rows": 4}, buckets=st.Dim("seq", max=64, buckets=16))])
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    for name, value in their_trainer.callback_metrics.items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(value), rel=1e-4)
    start = flat(causal_lm().parameters())
    learned = flat(theirs.parameters()) - start
    assert float((flat(ours.parameters()) - start - learned).norm()) < 1e-3 * float(learned.norm())
    assert clipped == []
    (optimizer,) = trainer.optimizers
    assert [group["max_norm"] for group in optimizer.param_groups] == [CLIP]
    assert ours.largest < 8 * 10 * VOCABULARY / 2 < theirs.largest


def test_all_is_taken_back_when_the_trainer_is_done_or_fails(tmp_path: Path) -> None:
    made = callback()
    module, trainer = fitted(tmp_path, st.optim, [made])
    assert not module.net.lm_head._forward_pre_hooks
    assert trainer.gradient_clip_val == CLIP

    class Fails(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            modules.append(module)
            assert module.net.lm_head._forward_pre_hooks
            raise KeyError("stop")

    modules: list[Any] = []
    with pytest.raises(KeyError):
        fitted(tmp_path, st.optim, [made, Fails()])
    assert not modules[0].net.lm_head._forward_pre_hooks


def test_a_run_that_resumes_ends_bit_by_bit_where_it_would_have(tmp_path: Path) -> None:
    whole, _ = fitted(tmp_path, st.optim, [callback()])
    _, half = fitted(tmp_path, st.optim, [callback()], trainer={"max_epochs": 1})
    path = tmp_path / "half.ckpt"
    half.save_checkpoint(path)
    resumed, _ = fitted(tmp_path, st.optim, [callback()], ckpt_path=path)
    assert len(resumed.losses) == len(whole.losses) / 2
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_clipping_by_value_and_optimizers_of_torch_are_left_to_lightning(tmp_path: Path) -> None:
    clipped, trainer = fitted(tmp_path, st.optim, [callback()], trainer={"gradient_clip_algorithm": "value"})
    assert (
        "max_norm" not in trainer.optimizers[0].param_groups[0] or not trainer.optimizers[0].param_groups[0]["max_norm"]
    )
    theirs, _ = fitted(tmp_path, torch.optim, [], trainer={"gradient_clip_algorithm": "value"})
    assert clipped.losses == pytest.approx(theirs.losses, rel=1e-3)
    ours, trainer = fitted(tmp_path, torch.optim, [callback()])
    assert "max_norm" not in trainer.optimizers[0].param_groups[0]
    assert trainer.gradient_clip_val == CLIP
    alone, _ = fitted(tmp_path, torch.optim, [])
    assert ours.losses == pytest.approx(alone.losses, rel=1e-4)


def test_gradients_are_clipped_in_mixed_precision_which_lightning_alone_refuses(tmp_path: Path) -> None:
    mixed = {"precision": "bf16-mixed"}
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fitted(tmp_path, st.optim, [], trainer=mixed)
    ours, trainer = fitted(tmp_path, st.optim, [callback()], trainer=mixed)
    theirs, _ = fitted(tmp_path, torch.optim, [], trainer=mixed)
    assert trainer.optimizers[0].param_groups[0]["max_norm"] == CLIP
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-2)


def test_a_module_without_a_causal_language_model_is_refused(tmp_path: Path) -> None:
    module = lightning.LightningModule()
    callback().setup(None, module, "fit")
    with pytest.raises(TypeError, match="LightningModule holds no causal language model of transformers"):
        module.configure_model()
    assert "configure_model" not in vars(module)


class Late(Module):
    """A module that makes its model in a hook, beside an encoder that comes first."""

    def __init__(self, package: Any, dtype: torch.dtype) -> None:
        super().__init__(package, dtype)
        made, self.encoder = self.net, causal_lm().model
        del self.net
        self.make = lambda: setattr(self, "net", made)

    def configure_model(self) -> None:
        self.make()


class LateInSetup(Late):
    """The same in the other hook."""

    def setup(self, stage: str) -> None:
        self.make()

    configure_model = Module.configure_model


class ClipsLater(Module):
    """A module that clips gradients from the second epoch on."""

    def configure_gradient_clipping(self, optimizer: Any, *given: Any, **options: Any) -> None:
        if self.current_epoch:
            super().configure_gradient_clipping(optimizer, *given, **options)


@pytest.mark.parametrize("kind", [Late, LateInSetup, ClipsLater])
def test_modules_that_make_their_model_or_clip_in_hooks_of_their_own_train_as_they_did(
    kind: type[Module], tmp_path: Path
) -> None:
    ours, trainer = fitted(tmp_path, st.optim, [callback(loss={"rows": 4})], kind=kind)
    theirs, _ = fitted(tmp_path, torch.optim, [], kind=kind)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.largest < 8 * 10 * VOCABULARY / 2 < theirs.largest
    assert ("max_norm" in trainer.optimizers[0].param_groups[0]) == (kind is not ClipsLater)
