"""What is built is what is in the repository, and importing it costs nothing and disturbs nobody."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "fp8attn": "fp8attn",
    "kernels": "fp8attn/kernels",
    "transforms": "fp8attn/transforms",
    "analysis": "fp8attn/analysis",
}


def source_files() -> list[str]:
    """The repository's files: from git, new ones included, or else from the list that an sdist carries."""
    if (ROOT / ".git").exists():
        # An owner other than oneself, as in a container, would make git refuse.
        command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    else:
        lists = list(ROOT.glob("*.egg-info/SOURCES.txt"))
        assert lists, f"{ROOT} is neither a git checkout nor an unpacked sdist: no telling which files belong to it"
        names = [name for name in lists[0].read_text().splitlines() if not name.split("/")[0].endswith(".egg-info")]
    return sorted(name for name in names if name and (ROOT / name).is_file())


def build(source: Path, *kinds: str) -> list[Path]:
    out = source / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *kinds, str(source)]
    done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return sorted(out.iterdir())


def contents(wheel: Path) -> dict[str, str]:
    """Name and SHA-256 of each member, but RECORD, which is made of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if not name.endswith(("/", "RECORD"))
        }


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(wheel, sdist) built from a copy of the repository's files, where no older build can lend a file."""
    copy = tmp_path_factory.mktemp("source")
    for name in source_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    sdist, wheel = sorted(build(copy, "--sdist", "--wheel"), key=lambda path: path.suffix == ".whl")
    return wheel, sdist


def test_wheel_holds_exactly_the_tracked_files(built):
    expected = {}
    for name in source_files():
        folder, _, rest = name.partition("/")
        if rest and folder in FOLDERS:
            expected[f"{FOLDERS[folder]}/{rest}"] = hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
    got = {name: digest for name, digest in contents(built[0]).items() if ".dist-info/" not in name}
    assert "fp8attn/kernels/__init__.py" in expected and "fp8attn/analysis/data/sample.safetensors" in expected
    assert sorted(got) == sorted(expected), (
        "a subpackage or data file that pyproject.toml does not list, or one too many"
    )
    assert got == expected


def test_wheel_carries_licence_commands_and_plugin(built):
    with zipfile.ZipFile(built[0]) as archive:
        info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert archive.read(f"{info}/top_level.txt").decode().split() == ["fp8attn"]
    assert "fp8attn = fp8attn.cli:app" in entry_points and "[hypothesis]" in entry_points


def test_sdist_rebuilds_to_the_same_wheel(built, tmp_path):
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    missing = [n for n in source_files() if n.split("/")[0] in (*FOLDERS, "tests") and not (unpacked / n).is_file()]
    assert not missing, "in the repository and not in the sdist"
    (again,) = build(unpacked, "--wheel")
    assert contents(again) == contents(wheel)


@pytest.fixture(scope="module")
def site(built, tmp_path_factory) -> Path:
    """A folder with the wheel unpacked, as pip would."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(folder)
    return folder


def python(code: str, cwd: Path, path: Path | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import fp8attn
imported = time.perf_counter() - start
for name in fp8attn.__all__:
    if name != "testing":  # it is made of Hypothesis, which is a test's to import
        getattr(fp8attn, name)
seconds = time.perf_counter() - start
optional = ["hypothesis", "matplotlib", "pandas", "transformers", "triton"]
brought = [name for name in optional if name in set(sys.modules) - before]
fp8attn.testing
brought += [name for name in ("triton", "matplotlib") if name in set(sys.modules) - before]
print(json.dumps({"file": fp8attn.__file__, "imported": imported, "seconds": seconds, "brought": brought}))
"""


def test_import_is_light(site, tmp_path):
    runs = [json.loads(python(IMPORT, tmp_path, site)) for _ in range(3)]
    assert Path(runs[0]["file"]).parent.parent == site
    assert runs[0]["brought"] == []
    assert (
        min(run["seconds"] for run in runs) < 0.2
    )  # the limit that is promised, for every name and not the import alone


def test_sample_loads_from_the_wheel(site, tmp_path):
    code = "import fp8attn.analysis.inputs as i; s = i.load_sample(); print(s.path, len(s.layers))"
    path, count = python(code, tmp_path, site).split()
    assert site in Path(path).parents and count == "3"


TRANSFORMERS = """
import importlib.util, os
spec = importlib.util.find_spec("kernels")
assert spec is not None and os.path.dirname(os.path.dirname(os.path.realpath(spec.origin))) == ROOT, spec
from transformers import LlamaConfig, LlamaForCausalLM
print(LlamaForCausalLM.__name__)
"""


@pytest.mark.parametrize("how", ["working directory", "PYTHONPATH"])
def test_transformers_imports_where_our_kernels_folder_is_in_the_way(how, tmp_path):
    """It looks for a package named ``kernels``, which it installs with it of late, and imports what it finds."""
    pytest.importorskip("transformers")
    code = TRANSFORMERS.replace("ROOT", repr(str(ROOT)))
    output = python(code, ROOT) if how == "working directory" else python(code, tmp_path, ROOT)
    assert output.strip() == "LlamaForCausalLM"


def test_our_kernels_folder_is_too_old_for_transformers_where_no_package_of_that_name_is():
    code = "import sys; assert 'site' not in sys.modules; import kernels; print(kernels.__version__, kernels.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.0.0", str(ROOT / "kernels/__init__.py")]


@pytest.mark.parametrize("folder", ["kernels", "transforms", "analysis"])
def test_folders_are_no_top_level_packages_inside_pytest(folder):
    if Path(sys.argv[0]).name == "__main__.py":
        pytest.skip("python -m pytest puts the working directory on sys.path; the command pytest does not")
    spec = importlib.util.find_spec(folder)
    assert spec is None or Path(spec.origin or "").parent != ROOT / folder
