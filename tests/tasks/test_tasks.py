"""Properties that every task must have, and tests of individual tasks."""

import inspect
from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.tasks import TASKS, Cifar10, Digits, Fashion, Quadratic, Shakespeare, Task, Translate, find_task
from laconic.tasks.transformer import Translator

pytestmark = pytest.mark.usefixtures("synthetic_data")

ALL = [
    Digits(model="cnn"),
    Digits(model="mlp"),
    Digits(model="wide"),
    Quadratic(),
    Fashion(model="mlp"),
    Fashion(model="cnn"),
    Cifar10(model="resnet8"),
    Cifar10(model="resnet20", subset=True),
    Shakespeare(),
    Translate(),
]


def identifier(task):
    return f"{task.name}-{getattr(task, 'model', '')}".strip("-")


every_task = pytest.mark.parametrize("task", [replace(task, batch_size=6) for task in ALL], ids=identifier)


def test_every_task_in_the_table_is_tested():
    assert {type(task) for task in ALL} == set(TASKS.values())


@every_task
def test_batches_are_a_pure_function_of_seed_rank_and_step(task):
    before_torch, before_numpy = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].copy()
    first = task.load(1, 2, seed=3)
    forward = [first.batch(step) for step in range(5)]
    second = task.load(1, 2, seed=3)
    for step in (4, 0, 2):
        for a, b in zip(forward[step], second.batch(step), strict=True):
            assert torch.equal(a, b)
    other_seed, other_rank = task.load(1, 2, seed=4).batch(0), task.load(0, 2, seed=3).batch(0)
    for other in (forward[1], other_seed, other_rank):
        assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(forward[0], other, strict=True))
    assert torch.equal(before_torch, torch.get_rng_state())
    assert np.array_equal(before_numpy, np.random.get_state(legacy=False)["state"]["key"])


@every_task
def test_the_model_depends_on_torchs_seed_alone(task):
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(torch.cat([p.detach().flatten() for p in task.build_model().parameters()]))
    assert torch.equal(states[0], states[1])
    if not isinstance(task, Quadratic):  # its weights always start at zero
        assert not torch.equal(states[0], states[2])


@every_task
def test_the_loss_is_a_scalar_that_reaches_every_parameter(task):
    model = task.build_model()
    loss = task.loss(model, task.load(0, 1, seed=0).batch(0))
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@every_task
def test_evaluate_changes_nothing(task):
    torch.manual_seed(0)
    model = task.build_model().train()
    frozen = next(model.children(), model).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    result = task.evaluate(model)
    assert {"loss", task.metric} <= set(result)
    assert all(np.isfinite(value) for value in result.values())
    assert task.evaluate(model) == result
    assert torch.equal(rng, torch.get_rng_state())
    assert not frozen.training
    assert model is frozen or model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()
    task.loss(model, task.load(0, 1, seed=0).batch(0)).backward()


@every_task
def test_evaluate_restores_the_mode_when_the_model_fails(task):
    class Broken(nn.Linear):
        def forward(self, *_):
            raise RuntimeError("broken")

    model = Broken(2, 2)
    with pytest.raises((RuntimeError, AssertionError)):
        task.evaluate(model)
    assert model.training


def test_shards_together_contain_all_data():
    task = Digits(batch_size=1437)
    everything = task.load(0, 1, seed=0).batch(0)[0].sum((1, 2, 3))
    shares = [replace(task, batch_size=size).load(rank, 4, seed=0) for rank, size in enumerate((360, 359, 359, 359))]
    together = torch.cat([shard.batch(0)[0].sum((1, 2, 3)) for shard in shares])
    assert torch.equal(together.sort().values, everything.sort().values)


@every_task
def test_optimizer_and_schedule(task):
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    assert type(optimizer).__name__.lower() == task.optimizer
    schedule = task.build_schedule(optimizer, 200)
    rates = []
    for _ in range(200):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert max(rates) == pytest.approx(task.lr)
    assert rates[0] < rates[5] < rates[10]
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] < 0.06 * task.lr
    assert replace(task, schedule="constant").build_schedule(optimizer, 200) is None


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_learning_rate_of_very_short_runs_is_never_zero(steps):
    task = Quadratic()
    optimizer = task.build_optimizer(task.build_model())
    schedule = task.build_schedule(optimizer, steps)
    assert schedule is not None
    for _ in range(steps):
        assert schedule.get_last_lr()[0] > 0
        optimizer.step()
        schedule.step()


def train(task, steps):
    torch.manual_seed(0)
    model = task.build_model()
    optimizer, shard = task.build_optimizer(model), task.load(0, 1, seed=0)
    schedule = task.build_schedule(optimizer, steps)
    for step in range(steps):
        task.loss(model, shard.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return task.evaluate(model)


@pytest.mark.parametrize("model", ["cnn", "mlp", "wide"])
def test_digits_learns(model):
    assert train(Digits(model=model, batch_size=64), 60)["accuracy"] > 0.85


def test_quadratic_converges_to_its_optimum():
    result = train(Quadratic(), 200)
    assert result["distance"] < 0.1  # it starts at 1
    assert result["excess_loss"] < 0.002
    assert result["loss"] == pytest.approx(result["excess_loss"] + 0.005)


def test_quadratic_evaluates_exactly():
    task = Quadratic(dimension=8, noise=0.5)
    model = task.build_model()
    at_origin = task.evaluate(model)
    assert at_origin["distance"] == pytest.approx(1.0, rel=1e-6)
    shard = replace(task, batch_size=400_000).load(0, 1, 0)
    assert task.loss(model, shard.batch(0)).item() == pytest.approx(at_origin["loss"], rel=0.02)


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        (Digits(model="wide"), 1_126_410),
        (Fashion(), 1_863_690),
        (Cifar10(), 272_474),
        (Shakespeare(), 809_984),
        (Translate(), 1_450_496),
    ],
    ids=lambda value: value.name if isinstance(value, Task) else str(value),
)
def test_model_sizes(task, parameters):
    assert sum(p.numel() for p in task.build_model().parameters()) == parameters


def test_images_are_normalised():
    x, y = Digits(batch_size=1437).load(0, 1, 0).batch(0)
    assert (x.dtype, x.shape[1:], y.dtype) == (torch.float32, (1, 8, 8), torch.int64)
    assert x.mean().item() == pytest.approx(0, abs=0.01)
    assert x.std().item() == pytest.approx(1, abs=0.01)
    x, _ = Cifar10(batch_size=4, augment=False).load(0, 1, 0).batch(0)
    assert x.shape == (4, 3, 32, 32)


def test_a_non_iid_partition_reaches_the_shard():
    task = Digits(partition="classes:1", batch_size=200)
    labels = task.load(0, 10, seed=0).batch(0)[1]
    assert len(labels.unique()) <= 2
    assert len(replace(task, partition="iid").load(0, 10, seed=0).batch(0)[1].unique()) == 10


def test_augmentation_only_shifts_and_mirrors():
    task = Cifar10()
    pixels = np.random.default_rng(0).integers(1, 255, (50, 32, 32, 3)).astype(np.uint8)
    changed = task.augmented(pixels, np.random.default_rng(1))
    assert changed.shape == pixels.shape
    assert changed.dtype == np.uint8
    for before, after in zip(pixels, changed, strict=True):
        rows, columns = np.flatnonzero(after.any((1, 2))), np.flatnonzero(after.any((0, 2)))
        inside = after[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        height, width = inside.shape[:2]
        assert min(height, width) >= 28
        crops = [
            source[top : top + height, left : left + width]
            for source in (before, before[:, ::-1])
            for top in (0, 32 - height)
            for left in (0, 32 - width)
        ]
        assert any(np.array_equal(inside, crop) for crop in crops)
    unchanged = Cifar10(augment=False).augmented(pixels, np.random.default_rng(1))
    assert np.array_equal(unchanged, pixels)


def test_shakespeare_predicts_the_next_character():
    x, y = Shakespeare(batch_size=5).load(0, 1, 0).batch(0)
    assert x.shape == y.shape == (5, 64)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_the_character_model_is_causal():
    model = Shakespeare().build_model().eval()
    x = torch.randint(0, 65, (1, 20))
    changed = x.clone()
    changed[0, 12] = (x[0, 12] + 1) % 65
    with torch.no_grad():
        assert torch.allclose(model(x)[:, :12], model(changed)[:, :12], atol=1e-5)
        assert not torch.allclose(model(x)[:, 12:], model(changed)[:, 12:], atol=1e-3)


def gradients(model: nn.Module) -> list[Tensor]:
    """Returns the gradient of every parameter; each must have one."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(list(model.parameters()))
    return found


def test_accumulated_gradients_are_the_mean_over_micro_batches():
    recipe = Shakespeare(batch_size=2, accumulate=3)
    torch.manual_seed(0)
    model = recipe.build_model()
    shard = recipe.load(0, 1, seed=0)
    loss = recipe.backward(model, shard, step=2)
    accumulated = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    batches = [shard.batch(step) for step in (6, 7, 8)]
    joined = recipe.loss(model, tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True)))
    joined.backward()
    assert loss.item() == pytest.approx(joined.item(), rel=1e-5)
    for gradient, expected in zip(accumulated, gradients(model), strict=True):
        assert torch.allclose(gradient, expected, atol=1e-6)


class RandomWindows:
    """Random characters that depend on rank and step."""

    def __init__(self, rank):
        self.rank = rank

    def batch(self, step):
        generator = torch.Generator().manual_seed(100 * self.rank + step)
        return tuple(torch.randint(0, 65, (2, 2, 8), generator=generator).unbind())


def gradients_under_ddp():
    """Returns the accumulated gradient of DDP, and the mean gradient of all micro-batches of both workers."""
    dist.init_process_group("gloo")
    recipe = Shakespeare(accumulate=3)
    torch.manual_seed(0)
    model = recipe.build_model()
    recipe.backward(DistributedDataParallel(model), RandomWindows(dist.get_rank()), step=1)
    averaged = torch.cat([gradient.flatten() for gradient in gradients(model)])
    model.zero_grad()
    for rank in range(2):
        for step in (3, 4, 5):
            (recipe.loss(model, RandomWindows(rank).batch(step)) / 6).backward()
    expected = torch.cat([gradient.flatten() for gradient in gradients(model)])
    dist.destroy_process_group()
    return averaged, expected


def test_accumulation_under_ddp_averages_the_micro_batches_of_all_workers():
    for averaged, expected in laconic.spawn(gradients_under_ddp, 2):
        assert torch.allclose(averaged, expected, atol=1e-6)


def test_clipping_bounds_the_gradient_norm():
    for clip, bound in ((None, float("inf")), (0.25, 0.25)):
        recipe = Shakespeare(batch_size=2, clip=clip)
        torch.manual_seed(0)
        model = recipe.build_model()
        recipe.backward(model, recipe.load(0, 1, seed=0), step=0)
        norm = torch.cat([gradient.flatten() for gradient in gradients(model)]).norm().item()
        assert norm == pytest.approx(bound, rel=1e-3) if clip else norm > 0.25


def test_weight_decay_of_matrices_only_and_betas():
    model = Shakespeare().build_model()
    optimizer = Shakespeare(decay_matrices_only=True, betas=(0.9, 0.95)).build_optimizer(model)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.95)] * 2
    assert all(p.dim() == 2 for p in optimizer.param_groups[0]["params"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    (group,) = Shakespeare().build_optimizer(model).param_groups
    assert (group["weight_decay"], group["betas"]) == (0.1, (0.9, 0.999))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": (0.9, 0.95), "optimizer": "sgd"}, "betas are for adam and adamw"),
        ({"clip": 0.0}, "clip must be a finite number above 0, not 0.0"),
        ({"accumulate": 0}, "accumulate must be a whole number, at least 1, not 0"),
    ],
)
def test_bad_settings_of_the_gpt_recipe(settings, message):
    with pytest.raises(ValueError, match=message):
        Shakespeare(**settings)


def test_greedy_decoding_equals_step_by_step_argmax_of_the_whole_model():
    torch.manual_seed(0)
    task = Translate()
    model = task.build_model().eval()
    assert isinstance(model, Translator)
    source, _ = task.load(0, 1, 0).batch(0)
    with torch.no_grad():
        fast = model.greedy(source, begin=1, end=2, limit=7)
        target = torch.ones(len(source), 1, dtype=torch.int64)
        for _ in range(fast.shape[1]):
            target = torch.cat([target, model(source, target)[:, -1:].argmax(-1)], dim=1)
    for row, expected in zip(fast.tolist(), target[:, 1:].tolist(), strict=True):
        ended = expected.index(2) + 1 if 2 in expected else len(expected)
        assert row[:ended] == expected[:ended]
        assert set(row[ended:]) <= {0}


def test_padding_changes_no_translation():
    model = Translate().build_model().eval()
    source, target = torch.randint(4, 4096, (2, 9)), torch.randint(4, 4096, (2, 5))
    padded = torch.cat([source, torch.zeros(2, 4, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        assert torch.allclose(model(source, target), model(padded, target), atol=1e-4)


def test_translate_learns_synthetic_sentences():
    result = train(Translate(batch_size=16), 40)
    assert result["bleu"] > 50
    assert result["loss"] < 1.5


def test_pairs_of_a_pool_are_the_pairs_of_the_order():
    """Sorting by length within a pool neither loses nor repeats a sentence."""
    shard = Translate(batch_size=2).load(0, 1, seed=0)  # 32 pairs: one epoch is one pool of 16 batches
    seen = sorted(tuple(row[row != 0].tolist()) for step in range(16) for row in shard.batch(step)[0])
    arrays_rows = sorted(tuple(row[row != 0].tolist()) for row in Translate(batch_size=32).load(0, 1, 0).batch(0)[0])
    assert len(seen) == 32
    assert set(seen) == set(arrays_rows)
    assert all(seen.count(row) == 8 for row in set(seen))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number, at least 1, not 0"),
        ({"batch_size": 1.5}, "not 1.5"),
        ({"batch_size": "8"}, "not '8'"),
        ({"steps": True}, "steps must be a whole number, at least 1, not True"),
        ({"lr": 0.0}, "lr must be a finite number above 0 .*, not 0.0"),
        ({"lr": float("nan")}, "not nan"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number at least 0 .*, not -1.0"),
        ({"optimizer": "lion"}, "optimizer must be one of adam, adamw, sgd, not 'lion'"),
        ({"schedule": "linear"}, "schedule must be one of cosine, constant, not 'linear'"),
        ({"model": "gpt"}, "model must be one of cnn, mlp, middle, wide, not 'gpt'"),
        ({"partition": "dirichlet:-1"}, "above 0, not 'dirichlet:-1'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Digits(**settings)


@pytest.mark.parametrize("task", [Shakespeare, Translate])
def test_text_has_no_classes_to_partition_by(task):
    with pytest.raises(ValueError, match=f"{task.name}: partition must be iid or contiguous, not 'dirichlet:0.3'"):
        task(partition="dirichlet:0.3")
    task(partition="contiguous").load(0, 2, 0)


def test_quadratic_settings():
    with pytest.raises(ValueError, match="quadratic: partition must be iid, not 'classes:2'"):
        Quadratic(partition="classes:2")
    with pytest.raises(ValueError, match="condition must be a finite number at least 1, not 0\\.5"):
        Quadratic(condition=0.5)
    with pytest.raises(ValueError, match="rank must be"):
        Quadratic().load(2, 2, 0)


def test_find_task():
    assert find_task("digits") is Digits
    with pytest.raises(ValueError, match="no task is called 'digit'; did you mean digits\\? there are: digits, q"):
        find_task("digit")
    with pytest.raises(ValueError, match="no task is called 'zzz'; there are: digits"):
        find_task("zzz")


def test_tasks_are_frozen_and_their_settings_are_fields():
    with pytest.raises(FrozenInstanceError):
        Digits().lr = 1.0  # type: ignore[misc]
    for task in TASKS.values():
        assert issubclass(task, Task)
        assert [f.name for f in fields(task)] == list(inspect.signature(task).parameters)
