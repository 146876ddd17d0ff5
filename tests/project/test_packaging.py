"""What a user installs: a wheel of real files that imports from anywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import subtensors as st

ROOT = Path(__file__).parents[2]
SOURCES = ["pyproject.toml", "setup.py", "README.md", "LICENSE", ".ci", "subtensors", "dispatch", "kernels"]


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints; a failure shows what it wrote to stderr."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which the links are still links."""
    tree = tmp_path_factory.mktemp("packaging") / "tree"
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, tree / name)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """A wheel of the copy."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tree.parent
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "--wheel-dir", folder, tree, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def new_environment(folder: Path) -> tuple[Path, Path]:
    """The Python and the site-packages of an environment that borrows this one's packages but not its links to us."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # .pth files in a borrowed folder are not read, so the editable install stays out.
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    return folder / "bin" / "python", site


def install(python: Path, *what: str | Path, cwd: Path) -> None:
    """Install into an environment, without the network."""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--ignore-installed", "--no-build-isolation", *what, cwd=cwd)


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
    python, site = new_environment(tmp_path / "environment")
    install(python, wheel, cwd=tmp_path)

    program = "import subtensors as st, subtensors.kernels; print(st.__file__); print(st.RuleError.__module__)"
    where, module = run(python, "-I", "-c", program, cwd=tmp_path).split()
    assert Path(where) == site / "subtensors" / "__init__.py"
    assert module == "subtensors"
    assert (site / "subtensors" / "dispatch").is_dir()
    assert not (site / "subtensors" / "dispatch").is_symlink()


def test_a_type_checker_sees_an_editable_install_from_another_folder_and_nothing_beside_it(
    tree: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mypy")
    python, _ = new_environment(tmp_path / "environment")
    install(python, "--editable", tree, cwd=tmp_path)
    found = run(python, "-I", "-c", "import sys; print(*[p for p in sys.path if 'tree' in p])", cwd=tmp_path).split()
    assert found == [str(tree / ".ci" / "editable")]
    assert [path.name for path in (tree / ".ci" / "editable").iterdir() if path.suffix != ".egg-info"] == ["subtensors"]
    (tmp_path / "program.py").write_text("import subtensors as st\nfrom subtensors.kernels.fused import launch\n")
    # Imports that are found are not read, which takes long.
    checker = [sys.executable, "-m", "mypy", "--follow-imports=skip", "--python-executable", python]
    assert "no issues" in run(*checker, "program.py", cwd=tmp_path)


def test_the_version_is_the_same_everywhere(metadata: Message) -> None:
    assert metadata["Version"] == st.__version__
    assert f"\nversion: {st.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_an_index_is_told_what_the_package_is_and_needs(metadata: Message) -> None:
    needs = {re.split(r"[<>=;\s]", x)[0] for x in metadata.get_all("Requires-Dist", []) if "extra ==" not in x}
    assert needs == {"torch", "triton", "numpy", "sympy", "optree"}
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert "pytorch" in metadata["Keywords"]


def test_the_readme_of_the_wheel_is_markdown_without_links_into_the_repository(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert "# subtensors" in text
    assert ">>> import torch, subtensors as st" in text
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", text) == []
    assert "](docs/" in (ROOT / "README.md").read_text()


def test_make_demo_installs_what_the_demo_needs_and_make_test_adds_the_rest(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)

    def installs(target: str) -> list[str]:
        lines = run("make", "--dry-run", target, "TORCH=", cwd=tmp_path).splitlines()
        assert all("--quiet" not in line for line in lines)
        return [line.split()[-1] for line in lines if "--editable" in line]

    assert installs("demo") == ["'.[plot]'"]
    assert installs("test") == ["'.[plot]'", "'.[test,docs,serve]'"]
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".demo").touch()
    assert installs("demo") == []
    assert installs("test") == ["'.[test,docs,serve]'"]
    assert "minutes" in run("make", "--dry-run", "demo", "--always-make", "TORCH=", cwd=tmp_path)


def test_the_repository_has_the_files_that_hosts_look_for() -> None:
    names = (
        "LICENSE CITATION.cff SECURITY.md CODE_OF_CONDUCT.md .pre-commit-config.yaml .github/Dockerfile .dockerignore"
    )
    for name in [*names.split(), ".github/ISSUE_TEMPLATE/bug.yml"]:
        assert (ROOT / name).is_file(), name
