"""What a user installs: a wheel of real files that imports from anywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "subtensors", "dispatch", "kernels"]


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints; a failure shows what it wrote to stderr."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree in which the links are still links."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("packaging")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "--wheel-dir", folder, tree, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_every_module_as_a_real_file(wheel: Path) -> None:
    expected = {
        f"subtensors/{folder}{path.relative_to(ROOT / source)}"
        for source, folder in [("subtensors", ""), ("dispatch", "dispatch/"), ("kernels", "kernels/")]
        for path in (ROOT / source).rglob("*.py")
    } | {"subtensors/py.typed"}
    with zipfile.ZipFile(wheel) as archive:
        entries = [entry for entry in archive.infolist() if ".dist-info/" not in entry.filename]
        links = [entry.filename for entry in entries if entry.external_attr >> 28 == 0o12]
        texts = {entry.filename: archive.read(entry) for entry in entries}
    assert links == []
    assert set(texts) == expected
    assert texts["subtensors/dispatch/ops/errors.py"] == (ROOT / "dispatch" / "ops" / "errors.py").read_bytes()


def test_the_wheel_carries_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_the_installed_wheel_imports_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    # The dependencies are borrowed: .pth files in a borrowed folder are not read, so the editable install stays out.
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, wheel, cwd=tmp_path)

    program = "import subtensors as st, subtensors.kernels; print(st.__file__); print(st.RuleError.__module__)"
    where, module = run(python, "-I", "-c", program, cwd=tmp_path).split()
    assert Path(where) == site / "subtensors" / "__init__.py"
    assert module == "subtensors"
    assert (site / "subtensors" / "dispatch").is_dir()
    assert not (site / "subtensors" / "dispatch").is_symlink()
