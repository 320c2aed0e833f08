"""What is installed by which extra, and what laconic says where it is missing."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import laconic
from laconic import extras

ROOT = Path(__file__).parents[1]
METADATA = importlib.metadata.metadata("laconic")
EXTRA = re.compile(r"extra == ['\"](\w+)['\"]")


def requirements(extra: str | None) -> set[str]:
    """Returns the names of the packages that an extra adds; None: those that are always installed."""
    found = set()
    for line in METADATA.get_all("Requires-Dist") or []:
        given = EXTRA.search(line)
        if (given[1] if given else None) == extra:
            found.add(re.split(r"[^\w.\-\[\],]", line)[0])
    return found


def test_the_library_needs_only_torch_numpy_and_two_small_packages():
    assert requirements(None) == {"torch", "numpy", "cloudpickle", "typing-extensions"}
    assert requirements("fast") == {"numba"}
    assert requirements("cli") == {"rich"}
    assert requirements("emulate") == {"pyroute2"}
    assert requirements("tasks") == {"scikit-learn", "sacrebleu", "pillow"}
    parts = [requirements(extra) for extra in ("fast", "cli", "emulate", "simulate", "tasks")]
    assert requirements("bench") == set().union(*parts)


def test_the_version_has_one_source():
    assert METADATA["Version"] == laconic.__version__
    assert METADATA["Requires-Python"] == ">=3.10"


@pytest.mark.skipif(not (ROOT / "constraints.txt").exists(), reason="needs the repository")
def test_everything_that_is_required_is_pinned():
    pins = {
        name: set(re.findall(r"^([\w.\-]+)==", (ROOT / name).read_text().lower().replace("_", "-"), re.MULTILINE))
        for name in ("constraints.txt", "constraints-lowest.txt")
    }
    needed = set().union(*(requirements(extra) for extra in (None, "fast", "cli", "emulate", "tasks")))
    assert needed <= pins["constraints.txt"]
    assert needed <= pins["constraints-lowest.txt"]
    assert requirements("dev") | requirements("docs") <= pins["constraints.txt"]


def run_without(packages: str, statement: str) -> subprocess.CompletedProcess[str]:
    """Runs a statement in a process in which some packages cannot be imported."""
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages.split()!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
{statement}
"""
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("missing", ["rich"])
def test_the_command_names_the_extra_that_it_needs(missing):
    done = run_without(missing, "from laconic.__main__ import main; main()")
    assert done.returncode == 1
    assert done.stderr.startswith(f"laconic: {missing} is not installed: pip install 'laconic[cli]'")


def test_tasks_name_the_extra_that_they_need(monkeypatch):
    from laconic.tasks import Translate
    from laconic.tasks.data.archive import decode_png

    for module in ("PIL", "PIL.Image", "sacrebleu"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(extras.MissingExtra, match=re.escape("PIL is not installed: pip install 'laconic[tasks]'")):
        decode_png(b"")
    with pytest.raises(
        extras.MissingExtra, match=re.escape("sacrebleu is not installed: pip install 'laconic[tasks]'")
    ):
        Translate().load(0, 1, 0)


def test_digits_name_the_extra_that_they_need(monkeypatch):
    from laconic.tasks import digits

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(extras.MissingExtra, match=re.escape("scikit-learn: pip install 'laconic[tasks]'")):
        digits._digits.__wrapped__(None)  # without its cache


def test_an_error_inside_a_package_is_not_taken_for_a_missing_extra(tmp_path, monkeypatch):
    (tmp_path / "broken_inside.py").write_text("import no_such_thing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_thing") as caught:
        extras.need("broken_inside", "tasks")
    assert not isinstance(caught.value, extras.MissingExtra)


TYPED = """
from dataclasses import dataclass
import laconic

@dataclass
class Counting(laconic.Method):
    every: int = 10
    steps: int = laconic.state(0, merge="same")

laconic.LocalSGD(4, "averaged")
Counting(5)
Counting(5, 6)
"""


def test_type_checkers_know_that_state_is_no_argument(tmp_path):
    """In a folder of the user's: there, mypy takes laconic for an installed package."""
    api = pytest.importorskip("mypy.api")
    (tmp_path / "mine.py").write_text(TYPED)
    arguments = ["--follow-imports=silent", f"--cache-dir={tmp_path}", f"--python-executable={sys.executable}"]
    printed, _, _ = api.run([*arguments, str(tmp_path / "mine.py")])
    assert [line.split(": ", 1)[1] for line in printed.splitlines() if ": error: " in line] == [
        'error: Too many arguments for "Counting"  [call-arg]'
    ]
