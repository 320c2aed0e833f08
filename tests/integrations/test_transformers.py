"""LaconicTrainer over two emulated hosts, against the Trainer with DistributedDataParallel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from tests.integrations.helpers import STEPS, flat, require_close, sent_nbytes, two_hosts

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'laconic[transformers]'")


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 31, (count,), generator=generator)
    rows = [(start + torch.arange(12) * (1 + i % 3)) % 31 for i, start in enumerate(starts)]
    return [{"input_ids": row, "labels": row} for row in rows]


def build(method: laconic.Method | None, directory: Path, width: int = 16, **settings: Any) -> Any:
    """Returns a Trainer, laconic's if there is a method, with a small GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from laconic.integrations.transformers import LaconicTrainer

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=width, vocab_size=31, n_positions=12, eos_token_id=0)
    settings = {"max_grad_norm": 0.0, "save_strategy": "no", "logging_steps": 2} | settings
    arguments = TrainingArguments(
        output_dir=str(directory),
        use_cpu=True,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    data: dict[str, Any] = {"train_dataset": sentences(64, 1), "eval_dataset": sentences(16, 2)}
    if method is None:
        return Trainer(GPT2LMHeadModel(config), arguments, **data)
    return LaconicTrainer(GPT2LMHeadModel(config), arguments, method=method, **data)


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def compare_with_ddp(directory: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "max_steps": 8,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
    }
    outcome = {}
    for name, method in {"ddp": None, "all_reduce": laconic.AllReduce()}.items():
        trainer = build(method, directory / name, **settings)
        trainer.train()
        outcome[name] = {key: logged(trainer, key) for key in ("loss", "eval_loss")} | {"x": flat(trainer.model)}
    return outcome


def save_and_resume(directory: Path) -> dict[str, Any]:
    """Trains with everything that a Trainer can do, once in one go and once from the checkpoint in the middle."""
    from transformers import GPT2LMHeadModel

    settings: dict[str, Any] = {
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "bf16": True,
        "lr_scheduler_type": "cosine",
        # Takes the model with the highest loss for the best one, so that it is not the last.
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    method = laconic.Divisible(period=2)
    whole = build(method, directory, **settings)
    whole.train()
    best = directory / "checkpoint-4"
    resumed = build(method, directory, **settings)
    resumed.train(resume_from_checkpoint=str(best))
    saved = build(method, directory, **settings)
    saved.model.load_state_dict(GPT2LMHeadModel.from_pretrained(best).state_dict())
    own = torch.load(best / "laconic" / "000001-step4" / f"rank-{int(os.environ['RANK']):05d}.pt")
    return {
        "distance": whole.worker.consensus_distance,
        "losses": [logged(whole, "loss")[2:], logged(resumed, "loss")[2:]],
        "eval_losses": [logged(whole, "eval_loss"), logged(resumed, "eval_loss")],
        "rates": logged(whole, "learning_rate"),
        "logged": [key for key in whole.state.log_history[0] if key.startswith("laconic_")],
        "x": [flat(whole.model), flat(resumed.model)],
        "saved": flat(saved.model),
        "saved eval_loss": saved.evaluate()["eval_loss"],
        "own": own["worker"]["x"],
    }


def count_traffic(directory: Path) -> list[int]:
    counts = []
    for method in (None, laconic.Divisible()):
        before = sent_nbytes()
        build(method, directory, width=96, max_steps=STEPS).train()
        counts.append(sent_nbytes() - before)
    return counts


def fail(directory: Path) -> str:
    """Raises in a callback of rank 1, and returns what each rank raised."""
    from transformers import TrainerCallback

    class Failing(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if os.environ["RANK"] == "1":
                raise ArithmeticError("on purpose")

    trainer = build(laconic.AllReduce(), directory, max_steps=4, average_tokens_across_devices=False)
    trainer.add_callback(Failing())
    try:
        trainer.train()
    except Exception as error:  # noqa: BLE001  of either rank
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run(directory: Path) -> dict[str, Any]:
    return {
        "comparison": compare_with_ddp(directory),
        "resumed": save_and_resume(directory / "resumed"),
        "traffic": count_traffic(directory / "traffic"),
        "failure": fail(directory / "failure"),
    }


def test_trainer(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        outcomes = laconic.spawn(run, 2, tmp_path, hosts=hosts)
    ddp, all_reduce = (outcomes[0]["comparison"][name] for name in ("ddp", "all_reduce"))
    require_close(ddp["loss"], all_reduce["loss"])
    require_close(ddp["eval_loss"], all_reduce["eval_loss"])
    torch.testing.assert_close(ddp["x"], all_reduce["x"], rtol=1e-3, atol=1e-5)

    first, second = (outcome["resumed"] for outcome in outcomes)
    assert first["distance"] > 0, "the gradients of all ranks were the same, so something averages them"
    assert first["losses"][0] == first["losses"][1]
    assert first["eval_losses"][0] == first["eval_losses"][1]
    assert first["eval_losses"][0][0] == pytest.approx(first["saved eval_loss"], rel=1e-6)
    assert not torch.equal(first["own"], second["own"])
    assert {"laconic_bytes_background", "laconic_waited_seconds", "laconic_period"} <= set(first["logged"])
    assert first["rates"] == sorted(first["rates"], reverse=True)
    assert first["rates"][-1] < 1e-3
    for x in (*first["x"], *second["x"], second["saved"]):
        assert torch.equal(x, first["saved"]), "this is not the best model, which was saved first"

    for ddp_nbytes, divisible_nbytes in (outcome["traffic"] for outcome in outcomes):
        assert divisible_nbytes < ddp_nbytes / 2

    assert outcomes[1]["failure"] == "ArithmeticError: on purpose"
    assert "PeerError" in outcomes[0]["failure"]
    assert "on purpose" in outcomes[0]["failure"]


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method must be a method of laconic"):
        build("divisible", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be used with auto_find_batch_size"):
        build(laconic.AllReduce(), tmp_path, auto_find_batch_size=True)


def test_another_trainer_class_in_one_process(tmp_path: Path) -> None:
    """Derives from both classes, and resumes from a checkpoint that the plain Trainer has saved."""
    from transformers import Seq2SeqTrainer

    from laconic.integrations.transformers import LaconicTrainer

    class Both(LaconicTrainer, Seq2SeqTrainer):  # type: ignore[misc]
        pass

    assert Both.__mro__.index(LaconicTrainer) < Both.__mro__.index(Seq2SeqTrainer)
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    build(None, tmp_path, max_steps=2, **settings).train()
    trainer = build(laconic.LocalSGD(), tmp_path, max_steps=4, **settings)
    with pytest.warns(UserWarning, match="there is no state of a worker"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.worker.step == 2
    assert (tmp_path / "checkpoint-4" / "laconic").is_dir()
