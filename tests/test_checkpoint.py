"""A checkpoint is complete or does not exist, and is never loaded into a run that it does not fit."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import laconic
from laconic.checkpoint import files
from tests.helpers import build_model, rank, train_step


def make(model: nn.Module | None = None, method: laconic.Method | None = None) -> laconic.Worker:
    model = model or build_model()
    return laconic.Worker(model, torch.optim.Adam(model.parameters(), lr=0.01), method or laconic.LocalSGD(4))


def trained(steps: int) -> laconic.Worker:
    worker = make()
    for step in range(steps):
        train_step(worker.model, worker.optimizer, worker.rank, step)
    return worker


def folders(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_one_folder_with_a_file_a_rank_and_a_manifest(tmp_path: Path) -> None:
    def run() -> None:
        worker = trained(3)
        worker.save(tmp_path, keep=1)
        worker.save(tmp_path, keep=1)

    laconic.spawn(run, 3)
    assert folders(tmp_path) == ["000002-step3"]
    assert folders(tmp_path / "000002-step3") == ["manifest.json", *(f"rank-0000{i}.pt" for i in range(3))]
    manifest = json.loads((tmp_path / "000002-step3" / "manifest.json").read_text())
    assert manifest["workers"] == 3
    assert manifest["step"] == 3


def test_extra_comes_back(tmp_path: Path) -> None:
    extra = {"epoch": 3, "history": [1.5, 2.5], "mask": torch.ones(2)}
    trained(1).save(tmp_path, extra)
    loaded = make().load(tmp_path)
    assert loaded["epoch"] == 3
    assert loaded["history"] == [1.5, 2.5]
    assert torch.equal(loaded["mask"], extra["mask"])  # type: ignore[arg-type]


def test_extra_that_could_not_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="extra must be tensors and plain data"):
        trained(1).save(tmp_path, {"model": build_model()})
    assert folders(tmp_path) == []


@pytest.mark.parametrize("crash", ["open", "fsync", "replace", "rmtree"])
def test_a_crash_at_any_moment_leaves_a_readable_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    """Crash in the second save: before its file, while writing, before the manifest, before removing the old one."""
    worker = trained(2)
    worker.save(tmp_path)
    first = worker.x.clone()
    train_step(worker.model, worker.optimizer, 0, 7)

    class Crash(BaseException):
        pass

    def die(*arguments: object, **settings: object) -> None:
        raise Crash

    target = {"open": "torch.save", "fsync": "os.fsync", "replace": "os.replace", "rmtree": "shutil.rmtree"}[crash]
    with monkeypatch.context() as patch:
        patch.setattr(target, die)
        with pytest.raises(Crash):
            worker.save(tmp_path, keep=1)
    again = make()
    again.load(tmp_path)
    assert again.step == (3 if crash == "rmtree" else 2)
    assert torch.equal(again.x, worker.x if crash == "rmtree" else first)
    again.save(tmp_path, keep=1)  # and the next save cleans up
    assert len(folders(tmp_path)) == 1


@pytest.mark.parametrize("where", ["claim", "write_rank", "write_manifest"])
def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_nothing(tmp_path: Path, where: str) -> None:
    """Before the files, while they are written, and between the files and the manifest. The next save works."""

    def run() -> tuple[str, list[str], int]:
        worker = trained(2)
        worker.save(tmp_path)
        write = getattr(files, where)

        def full(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        if worker.rank == 1:
            setattr(files, where, full)
        try:
            worker.save(tmp_path)
        except OSError as error:
            text = str(error)
        else:
            return "", [], 0
        worker.comm.meet("looking")
        left = folders(tmp_path)
        worker.comm.meet("looked")
        setattr(files, where, write)
        train_step(worker.model, worker.optimizer, worker.rank, 5)
        worker.save(tmp_path)
        worker.load(tmp_path)
        return text, left, worker.step

    for text, left, step in laconic.spawn(run, 2):
        assert text.endswith("rank 1: OSError: [Errno 28] No space left on device")
        assert left == ["000001-step2"]
        assert step == 3
    assert folders(tmp_path) == ["000001-step2", "000002-step3"]


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """/dev/full takes no bytes: torch and the file system report it in their own ways."""
    worker = trained(2)
    worker.save(tmp_path)
    write = files.write_rank

    def to_full_disk(path: Path, content: dict[str, Any]) -> dict[str, Any]:
        path.symlink_to("/dev/full")
        return write(path, content)

    files.write_rank = to_full_disk
    try:
        with pytest.raises(OSError, match=r"cannot save to .* rank 0: "):
            worker.save(tmp_path)
    finally:
        files.write_rank = write
    assert folders(tmp_path) == ["000001-step2"]
    worker.save(tmp_path)


def test_parameters_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    def run() -> str:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with laconic.Worker(model, optimizer, laconic.LocalSGD(10)) as worker:
                train_step(model, optimizer, worker.rank, 0)
                worker.save(tmp_path)
                for p in model.parameters():
                    p.grad = torch.full_like(p, float("nan") if worker.rank == 1 else 0.0)
                optimizer.step()
                worker.save(tmp_path)
        except FloatingPointError as error:
            return str(error)
        return "no error"

    for text in laconic.spawn(run, 3):
        assert text.startswith("save() at step 2: NaN or infinity in the parameters of rank 1; nothing was saved")
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step1"]


def test_keep_is_how_many_are_kept(tmp_path: Path) -> None:
    worker = trained(1)
    for _ in range(4):
        worker.save(tmp_path, keep=3)
    assert folders(tmp_path) == [f"00000{i}-step1" for i in (2, 3, 4)]
    worker.save(tmp_path)
    assert folders(tmp_path) == [f"00000{i}-step1" for i in (4, 5)]
    with pytest.raises(ValueError, match="keep must be a whole number, at least 1, not 0"):
        worker.save(tmp_path, keep=0)


def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_a_warning(tmp_path: Path) -> None:
    worker = trained(2)
    worker.save(tmp_path)
    first = worker.x.clone()
    train_step(worker.model, worker.optimizer, 0, 7)
    worker.save(tmp_path)
    cut_file(tmp_path / "000002-step3")
    again = make()
    with pytest.warns(UserWarning, match=r"continuing from 000001-step2, since rank 0: .*rank-00000.pt is damaged"):
        again.load(tmp_path)
    assert torch.equal(again.x, first)
    again.save(tmp_path)  # the damaged one has been seen, and is no other job's
    assert folders(tmp_path) == ["000002-step3", "000003-step2"]


def test_another_job_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    one, other = trained(2), trained(2)
    one.save(tmp_path)
    with pytest.raises(ValueError, match="has checkpoint number 1 of another job, that this one has not loaded"):
        other.save(tmp_path)
    other.load(tmp_path)  # a successor
    other.save(tmp_path)
    with pytest.raises(ValueError, match="has checkpoint number 2 of another job, since this one loaded or saved numb"):
        one.save(tmp_path)
    assert folders(tmp_path) == ["000001-step2", "000002-step2"]
    other.save(tmp_path)


def test_two_jobs_that_save_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes to a folder that the first has claimed: it is refused, and the first is whole."""
    one, other = trained(2), trained(2)
    require = files.require_unclaimed

    def and_the_other(folder: Path, token: str) -> None:
        require(folder, token)
        monkeypatch.setattr(files, "require_unclaimed", require)
        with pytest.raises(ValueError, match=r"another job saves to .*000001-step2 at this moment"):
            other.save(tmp_path)

    number_of = files.number_of
    monkeypatch.setattr(files, "require_unclaimed", and_the_other)
    monkeypatch.setattr(files, "number_of", lambda path: 0)  # as if the folder were not there yet when it looked
    one.save(tmp_path)
    monkeypatch.setattr(files, "number_of", number_of)
    assert folders(tmp_path / "000001-step2") == ["manifest.json", "rank-00000.pt"]
    make().load(tmp_path)


def check_refused(directory: Path, match: str, worker: laconic.Worker | None = None) -> None:
    worker = worker or trained(1)
    x, state = worker.x.clone(), worker.optimizer.state_dict()
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        worker.load(directory)
    assert torch.equal(worker.x, x)
    assert worker.step == 1
    for entry, before in zip(worker.optimizer.state_dict()["state"].values(), state["state"].values(), strict=True):
        assert torch.equal(entry["exp_avg"], before["exp_avg"])


def damage_file(folder: Path) -> None:
    data = bytearray((folder / "rank-00000.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "rank-00000.pt").write_bytes(data)


def cut_file(folder: Path) -> None:
    data = (folder / "rank-00000.pt").read_bytes()
    (folder / "rank-00000.pt").write_bytes(data[:-100])


def foreign_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"weight_map": {}}')


def later_format(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))


def earlier_format(folder: Path) -> None:
    """Up to format 4 the version was in the fingerprint."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["laconic"]
    manifest["fingerprint"]["laconic"] = "0.0.9"
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 4}))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (damage_file, "is damaged"),
        (cut_file, "is damaged"),
        (foreign_manifest, "is not a manifest of laconic"),
        (earlier_format, "has checkpoint format 4, .* the version that wrote it, laconic 0.0.9"),
        (
            later_format,
            "has checkpoint format 99, and laconic .* reads format 5: go on with the version that",
        ),
        (lambda folder: (folder / "rank-00000.pt").unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").unlink(), "no complete checkpoint of all 1 ranks"),
        (shutil.rmtree, "no complete checkpoint of all 1 ranks"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: Callable[[Path], None], match: str) -> None:
    trained(5).save(tmp_path)
    damage(tmp_path / "000001-step5")
    check_refused(tmp_path, match)


def test_another_version_with_the_same_format_is_read(tmp_path: Path) -> None:
    """Also one that did not have one of today's settings yet."""
    worker = trained(3)
    worker.save(tmp_path)
    path = tmp_path / "000001-step3" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["fingerprint"]["LocalSGD.compressor"]
    path.write_text(json.dumps(manifest | {"laconic": "9.9.9"}))
    again = make()
    again.load(tmp_path)
    assert torch.equal(again.x, worker.x)


def test_a_setting_that_is_gone_is_refused(tmp_path: Path) -> None:
    trained(3).save(tmp_path)
    path = tmp_path / "000001-step3" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["fingerprint"]["LocalSGD.gone"] = "3"
    path.write_text(json.dumps(manifest))
    check_refused(tmp_path, "differ in LocalSGD.gone: 3 in the checkpoint; None in this run")


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    make(other).save(tmp_path)
    check_refused(tmp_path, r"differ in parameters\[2\]: 2.weight \(3, 9\) torch.float32 in the checkpoint; 2.w")


def test_another_methods_checkpoint_is_refused(tmp_path: Path) -> None:
    make(method=laconic.LocalSGD(5)).save(tmp_path)
    check_refused(tmp_path, "differ in LocalSGD.period: 5 in the checkpoint; 4 in this run")


def test_another_optimizers_checkpoint_is_refused(tmp_path: Path) -> None:
    model = build_model()
    laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.LocalSGD(4)).save(tmp_path)
    check_refused(tmp_path, "differ in optimizer: SGD in the checkpoint; Adam in this run")


def test_another_number_of_workers_needs_the_files_of_all(tmp_path: Path) -> None:
    laconic.spawn(lambda: trained(1).save(tmp_path), 2)
    (tmp_path / "000001-step1" / "rank-00001.pt").unlink()
    check_refused(
        tmp_path,
        "was saved by 2 workers, and this run has 1. Then every rank needs the files of all, and rank-00001.pt is not "
        "here: use a directory that all machines share",
    )


def test_no_checkpoint_there(tmp_path: Path) -> None:
    check_refused(tmp_path / "nowhere", "no complete checkpoint of all 1 ranks is in")


def test_a_file_damaged_on_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    def run() -> tuple[str, bool]:
        worker = trained(1)
        worker.save(tmp_path)
        if worker.rank == 1:
            path = tmp_path / "000001-step1" / "rank-00001.pt"
            path.write_bytes(path.read_bytes()[:-1])
        train_step(worker.model, worker.optimizer, worker.rank, 5)
        x = worker.x.clone()
        try:
            worker.load(tmp_path)
        except ValueError as error:
            return str(error), torch.equal(worker.x, x)
        return "", False

    for text, unchanged in laconic.spawn(run, 2):
        assert text.startswith("rank 1: ")
        assert "is damaged" in text
        assert unchanged


def test_machines_with_directories_of_their_own(tmp_path: Path) -> None:
    """One machine does not have the newest checkpoint: all continue from the newest that all have."""

    def run() -> int:
        own = tmp_path / f"machine-{rank()}"
        worker = trained(2)
        worker.save(own)
        train_step(worker.model, worker.optimizer, worker.rank, 5)
        worker.save(own)
        if worker.rank == 0:
            (own / "000002-step3" / "manifest.json").unlink()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            worker.load(own)
        texts = [str(warning.message) for warning in seen]
        assert texts == ["continuing from 000001-step2, since 000002-step3 is not complete on rank 0"] * (rank() == 0)
        return worker.step

    assert laconic.spawn(run, 2) == [2, 2]


def test_loading_unpickles_no_objects(tmp_path: Path) -> None:
    """torch's weights_only refuses a file with an object in it, even if the manifest has the file's checksum."""
    import hashlib
    import pickle

    trained(1).save(tmp_path)
    path = tmp_path / "000001-step1" / "rank-00000.pt"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (Path(tmp_path / "touched"),)  # type: ignore[return-value]

    torch.save({"model": Evil()}, path)
    manifest = json.loads(path.with_name("manifest.json").read_text())
    manifest["files"][0] |= {
        "nbytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    path.with_name("manifest.json").write_text(json.dumps(manifest))
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        make().load(tmp_path)
    assert not (tmp_path / "touched").exists()


def test_state_of_another_form_changes_nothing() -> None:
    worker = trained(2)
    x = worker.x.clone()
    with pytest.raises(ValueError, match=r"worker.x must be \(\(83,\), torch.float32\), and the saved one is \(\(5"):
        worker.load_state_dict(worker.state_dict() | {"x": torch.zeros(5), "step": 9})
    with pytest.raises(ValueError, match="must have the keys"):
        worker.load_state_dict({"x": x})
    assert torch.equal(worker.x, x)
    assert worker.step == 2


def test_state_that_torch_would_not_load_is_not_saved(tmp_path: Path) -> None:
    """A learning rate of numpy's is an object to torch: it is refused, and the previous checkpoint stays."""
    model = build_model()
    worker = laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.LocalSGD(4))
    worker.save(tmp_path)
    worker.optimizer.param_groups[0]["lr"] = np.float64(0.1)
    with pytest.raises(OSError, match=r"cannot save to .* rank 0: UnpicklingError"):
        worker.save(tmp_path)
    assert folders(tmp_path) == ["000001-step0"]


def test_dropout_continues_as_without_the_interruption(tmp_path: Path) -> None:
    torch.manual_seed(5)
    worker = trained(1)
    worker.save(tmp_path)
    expected = nn.functional.dropout(torch.ones(50))
    torch.manual_seed(6)
    make().load(tmp_path)
    assert torch.equal(nn.functional.dropout(torch.ones(50)), expected)


def test_export_is_one_file_of_the_averaged_model(tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.pt"

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        worker = trained(3)  # LocalSGD(4): the ranks' models differ
        own = worker.x.clone()
        worker.export(path)
        assert torch.equal(worker.x, own)
        with worker.consensus():
            return own, worker.x.clone()

    (first, averaged), (second, _) = laconic.spawn(run, 2)
    assert not torch.equal(first, second)
    model = build_model()
    model.load_state_dict(torch.load(path, weights_only=True))
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), averaged)
    assert folders(path.parent) == ["model.pt"]


def test_export_to_a_place_that_cannot_be_written_raises_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def run() -> str:
        try:
            trained(1).export(tmp_path / "file" / "model.pt")
        except OSError as error:
            return str(error)
        return ""

    for text in laconic.spawn(run, 2):
        assert text.startswith("cannot export to ")
        assert "rank 0: " in text
