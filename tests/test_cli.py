"""The command line, called in this process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from laconic import cli
from laconic.bench.record import RunsFile


def call(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr("sys.argv", ["laconic", *line.split()])
    with pytest.raises(SystemExit) as info:
        cli.main()
    code = info.value.code
    return code if isinstance(code, int) else 2


def test_methods(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "methods") == 0
    text = capsys.readouterr().out
    for word in ("allreduce", "local_sgd", "period=8", "powersgd", "arXiv", "2501.18512", "1905.13727", "2411.19870"):
        assert word in text


def test_train_save_and_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    base = "train local_sgd --period 2 --workers 2 --batch-size 8"
    assert call(monkeypatch, f"{base} --steps 6 --out {out} --save-every 4") == 0
    assert call(monkeypatch, f"{base} --steps 10 --resume {out}") == 0
    text = capsys.readouterr().out
    assert "step 10/10" in text
    first, second = RunsFile(out).read()
    assert first.points[-1].step == 6
    assert [point.step for point in second.points] == [7, 8, 9, 10]
    assert second.task_settings["batch_size"] == 8
    assert json.loads(next(out.glob("checkpoint/*/manifest.json")).read_text())["step"] == 10
    assert call(monkeypatch, f"{base} --steps 20 --seed 1 --resume {out}") == 1
    assert "the checkpoint is of Digits" in capsys.readouterr().err
    assert call(monkeypatch, f"{base} --steps 10 --resume {out}") == 1
    assert "is at step 10 already" in capsys.readouterr().err


def test_compare_writes_runs_and_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "cmp"
    line = f"compare --methods ddp,none,local_sgd+period=2 --workers 2 --steps 4 --model mlp --out {out}"
    assert call(monkeypatch, line + " --target accuracy=90") == 0
    records = RunsFile(out).read()
    assert [record.name for record in records] == ["none", "ddp", "local_sgd+period=2"]
    assert records[1].step_time is not None
    assert records[1].step_time.compute is not None, "the compute time of DDP follows from the run of `none`"
    assert "<html" in (out / "index.html").read_text()
    text = capsys.readouterr().out
    assert "not reached" in text
    assert call(monkeypatch, line) == 2
    assert "give --overwrite" in capsys.readouterr().err
    for wrong in ("--link fast", "--task digit", "--lr fast", "--rho -1", "--colour red"):
        assert call(monkeypatch, f"compare --workers 2 --out {out} --overwrite {wrong}") == 2
        assert len(RunsFile(out).read()) == 3, "wrong arguments must not delete earlier results"


def test_rho_sets_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.bench.compare import rate_for
    from laconic.bench.run import Plan
    from laconic.tasks import Digits

    rate = rate_for(2.0, Plan(Digits(model="mlp"), workers=2, steps=100))
    assert rate.endswith("mbit")
    assert float(rate[:-4]) > 0
    with pytest.raises(ValueError, match="rho must be a finite number above 0, not -1"):
        rate_for(-1, Plan(Digits(), workers=2, steps=100))


def test_a_missing_dataset_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("LACONIC_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert call(monkeypatch, f"compare --task fashion --out {tmp_path / 'out'}") == 2
    error = capsys.readouterr().err
    assert "run `laconic data fashion`" in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train local_sdg", "no method or baseline is called 'local_sdg'; did you mean local_sgd"),
        ("train local_sgd --task digit", "digits"),
        ("train local_sgd --period often", "local_sgd.period must be a whole number, not 'often'"),
        ("train local_sgd --worker 4", "laconic: train local_sgd has no option --worker; did you mean --workers"),
        ("train local_sgd --workers 0", "workers must be from 1 to 64 (up to 4096 with compare --simulate), not 0"),
        (
            "train local_sgd --workers 1000",
            "workers must be from 1 to 64 (up to 4096 with compare --simulate), not 1000",
        ),
        ("train local_sgd --steps 0", "steps must be a whole number, at least 1, not 0"),
        ("train local_sgd --link fast", "fast"),
        ("train local_sgd --link 1gbit --rho 2", "give either --link or --rho, not both"),
        ("train local_sgd --resume nowhere", "nowhere has no checkpoint to resume from"),
        ("train ddp --resume nowhere", "ddp has no checkpoints"),
        ("train local_sgd --partition pies", "pies"),
        ("train local_sgd --save-every -1", "save_every must be a whole number, at least 1, not -1"),
        ("train local_sgd --rho inf", "rho must be a finite number above 0, not inf"),
        ("train local_sgd --seed -1", "seed must be a whole number from 0 to 18446744073709551615, not -1"),
        (f"train local_sgd --period {10**20}", f"period must be a whole number from 1 to 2147483647, not {10**20}"),
        ("compare --target accuracy=nan", "--target must be a finite number, not nan"),
        ("compare --target acuracy=85", "the metric of this task is accuracy; did you mean accuracy?"),
        ("compare --target accuracy=850", "must be above 0 and at most 100 %"),
        ("compare --target high", "--target must be METRIC=NUMBER, such as accuracy=0.9, not 'high'"),
        ("compare --task quadratic --target excess_loss=1%", "excess_loss is not measured in per cent"),
        ("compare --methods ddp,pdd", "no method or baseline is called 'pdd'"),
        ("compare --seeds 0", "seeds must be a whole number, at least 1, not 0"),
        ("data mnist", "mnist"),
        ("methods --loud yes", "laconic: methods has no option --loud"),
        ("comapre", "no command is called 'comapre'; did you mean compare?"),
        ("train local_sgd --perod 4", "laconic: train local_sgd has no option --perod; did you mean --period"),
        ("train local_sgd --perid 4", "has no option --perid; did you mean --period? `laconic train local_sgd --help`"),
        ("train local_sgd --compressor Uniform(4", "'Uniform(4': the bracket is not closed; write it as in Uniform(4)"),
        ("train local_sgd --batch 4", "has no option --batch; did you mean --batch-size"),
        (
            "train local_sgd --moments averagd",
            "local_sgd.moments must be local or averaged, not 'averagd'; did you mean averaged?",
        ),
        ("train local_sgd --compressor Unifrm(4)", "no compressor is called 'unifrm'; did you mean uniform"),
        ("train local_sgd --period", "--period: expected one argument; see `laconic train local_sgd --help`"),
        ("train --period 4 local_sgd", "'4' is no method: it comes first, as in laconic train local_sgd --period 4"),
        ("train allreduce --period 4", "laconic: train allreduce has no option --period"),
        ("train local_sgd 4", "laconic: train local_sgd does not expect '4': options are written --name value"),
        ("compare --task nowhere:Mine", "the module nowhere cannot be imported"),
        ("compare --task laconic.tasks:Digit", "no task in laconic.tasks is called 'Digit'; did you mean Digits"),
        ("compare --task laconic.tasks:DatasetError", "DatasetError is not a subclass of laconic.tasks.Task"),
        ("compare --methods ddp,ddp", "--methods has ddp twice"),
        ("compare --resume --overwrite", "give either --resume or --overwrite, not both"),
        ("data", "the following arguments are required: NAME; see `laconic data --help`"),
        ("store --port 65536", "--port must be from 0 (any free port) to 65535, not 65536"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, line) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("laconic: ")
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_store_is_held_until_interrupted() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "laconic", "store", "--port", "0", "--address", "127.0.0.1"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().partition("127.0.0.1:")[2].partition(",")[0])
        assert process.stdout.readline() == (
            f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} TORCHELASTIC_USE_AGENT_STORE=True\n"
        )
        one, other = (TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60)) for _ in range(2))
        one.set("key", "value")
        assert other.get("key") == b"value"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_own_task_by_module_and_class(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent / "examples")
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    base = f"compare --task own_task:Sine --methods none,local_sgd+compressor=Uniform(4) --workers 2 --out {tmp_path}"
    assert call(monkeypatch, f"{base} --width 8 --lr 1e-2 --steps 20 --target loss=0.9") == 0
    none, local_sgd = RunsFile(tmp_path).read()
    assert (none.task, none.metric, none.target, none.parameters) == ("sine", "loss", 0.9, 25)
    assert local_sgd.settings["compressor"] == "Uniform(bits=4, stochastic=False, block=2048, seed=0)"
    assert "loss" in capsys.readouterr().out
    assert call(monkeypatch, f"{base} --widht 8 --overwrite") == 2
    assert "laconic: compare has no option --widht; did you mean --width" in capsys.readouterr().err
    assert call(monkeypatch, "compare --task own_task:Sinus") == 2
    assert "no task in own_task is called 'Sinus'; did you mean Sine? there are: Sine" in capsys.readouterr().err


def test_simulated_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """80 workers, more than can be emulated; times follow from the link and do not depend on this machine."""
    pytest.importorskip("greenlet")
    base = f"compare --simulate --workers 80 --out {tmp_path} --steps 4 --evaluations 1"
    words = "--link 1gbit+10ms --compute 0.5 --methods allreduce,local_sgd+period=2 --batch-size 4"
    assert call(monkeypatch, f"{base} {words}") == 0
    allreduce, local_sgd = RunsFile(tmp_path).read()
    assert allreduce.link == "simulated 1gbit+10ms"
    assert 4 * 0.5 + 4 * 316 * 0.01 < allreduce.seconds < 15.0, "316 rounds of a ring in each step"
    assert 2.0 < local_sgd.seconds < allreduce.seconds
    assert "(simulated)" in capsys.readouterr().out
    assert "Simulated in one process, not measured" in (tmp_path / "index.html").read_text()
    for bad, message in [
        ("--link 1gbit --methods ddp", "ddp must be a method of laconic to be simulated"),
        ("--methods allreduce", "a simulation needs a link"),
        ("--link 1gbit+oops --methods allreduce", "RATE[+DELAY]"),
        ("--rho 3 --methods allreduce", "--rho measures real processes"),
    ]:
        assert call(monkeypatch, f"{base} --overwrite {bad}") == 2
        assert message in capsys.readouterr().err
    assert call(monkeypatch, "compare --workers 80") == 2
    assert "from 1 to 64 (up to 4096 with compare --simulate)" in capsys.readouterr().err
    assert call(monkeypatch, "compare --compute 1") == 2
    assert "add --simulate" in capsys.readouterr().err


def test_after_ctrl_c_train_names_the_command_that_resumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("laconic.bench.run.run", interrupted)
    line = f"train local_sgd --workers 2 --out {out} --overwrite"
    assert call(monkeypatch, line) == 130
    assert f"{out} has no checkpoint yet: --save-every STEPS saves them" in capsys.readouterr().err
    (out / "checkpoint" / "step-4").mkdir(parents=True)
    (out / "checkpoint" / "step-4" / "manifest.json").touch()
    (out / "runs.jsonl").touch()
    monkeypatch.setattr("laconic.bench.compare.prepare_folder", lambda *_: None)
    assert call(monkeypatch, line) == 130
    error = capsys.readouterr().err
    assert error == f"laconic: interrupted; resume with: laconic train local_sgd --workers 2 --resume {out}\n"
    assert call(monkeypatch, "train local_sgd --workers 2") == 130
    assert "nothing was saved: --out FOLDER --save-every STEPS saves checkpoints" in capsys.readouterr().err


def test_downloads_show_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fetch(name: str, progress: Callable[[str, int, int | None], None]) -> list[Path]:
        progress("https://example.org/a.gz", 1_000_000, 4_000_000)
        progress("https://example.org/a.gz", 2_000_000, 4_000_000)
        progress("https://example.org/a.gz", 4_000_000, 4_000_000)
        return [tmp_path / "a"]

    monkeypatch.setattr("laconic.tasks.fetch", fetch)
    assert call(monkeypatch, "data fashion") == 0
    assert capsys.readouterr().out.splitlines() == [
        "https://example.org/a.gz: 1 MB of 4 MB",
        "https://example.org/a.gz: 4 MB of 4 MB",
        str(tmp_path / "a"),
    ]
