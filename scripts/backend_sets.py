"""Write kvctl/data/backends: what each backend's environment is made of, pinned and hashed.

    python scripts/backend_sets.py --uv PATH

uv resolves each set for every Python and platform in its table and knows the files' hashes and sizes; here they are
thinned to the files that can be taken there. What only torch's CUDA build needs stands apart at the end of each set.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "kvctl" / "data" / "backends"
WANTED = {
    "autoawq": ("autoawq==0.2.9", "transformers==4.51.3", "torch==2.13.0", "numpy<2.3"),
    "gptqmodel": ("gptqmodel==7.6.0", "transformers==5.24.0", "torch==2.13.0"),
    "llm-compressor": ("llmcompressor==0.14.0.1", "transformers==5.17.0", "torch==2.13.0"),
}
BUILD = ("setuptools==82.0.1", "wheel==0.48.0", "cmake<5", "ninja==1.13.2")
"""What packages that come as source are built with; they are built without network access of their own."""
PYTHON = ">=3.11,<3.15"
ENVIRONMENTS = (
    "sys_platform == 'linux' and platform_machine == 'x86_64'",
    "sys_platform == 'linux' and platform_machine == 'aarch64'",
    "sys_platform == 'darwin' and platform_machine == 'arm64'",
)
CUDA = re.compile(r"nvidia-(?!ml-py)[\w-]+|cuda-[\w-]+|triton")
MARK = "# -- of torch's CUDA build alone --"
# PyTorch's own index of CPU builds, as several public lock files record it; that of cp311 x86_64 was also computed here.
TORCH_CPU = ("2.13.0+cpu", {
    "cp311 x86_64": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    "cp311 aarch64": "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
    "cp312 x86_64": "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
    "cp312 aarch64": "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
    "cp313 x86_64": "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    "cp313 aarch64": "0b8f7d0423027ae8b90c7977c627f3379f325363a08224dffad9b4b2d684a83d",
    "cp314 x86_64": "d20fa53ee744502fa4c69818a720b05ca0d37abd055d4f6e66cae155114bc691",
    "cp314 aarch64": "ca021f9eb2f8345c83fa03e3a04587308afb8df71bd472670b3ece00df58621c",
})  # fmt: skip


def locked(
    uv: str, wanted: tuple[str, ...], places: tuple[str, ...] = ENVIRONMENTS
) -> tuple[str, dict[str, tuple[str, int]]]:
    """uv's requirements with markers and hashes, and of every hash the file's name and size."""
    with tempfile.TemporaryDirectory() as folder:
        project = {"name": "set", "version": "0", "requires-python": PYTHON, "dependencies": list(wanted)}
        lines = ["[project]", *(f"{key} = {json.dumps(value)}" for key, value in project.items())]
        lines += ["[tool.uv]", f"environments = {json.dumps(list(places))}", ""]
        Path(folder, "pyproject.toml").write_text("\n".join(lines))
        subprocess.run([uv, "lock", "-q"], cwd=folder, check=True)
        command = [uv, "export", "-q", "--frozen", "--no-emit-project", "--no-annotate", "--no-header"]
        text = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
        lock = tomllib.loads(Path(folder, "uv.lock").read_text())
    markers = [line.split(" ; ")[1].split(" \\")[0] for line in text.splitlines() if " ; " in line]
    text = text.replace(f" ; {max(set(markers), key=markers.count)}", "")  # all of the platforms
    files = {}
    for package in lock["package"]:
        for file in [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]:
            files[file["hash"].removeprefix("sha256:")] = (file["url"].rsplit("/", 1)[1], file["size"])
    return text, files


def usable(name: str) -> bool:
    """Whether a wheel is for one of the Pythons and platforms."""
    *_, python, abi, platform = name.removesuffix(".whl").split("-")
    if not re.search(r"(^|\.)any$|manylinux\w*_(x86_64|aarch64)|macosx_\w+_(arm64|universal2)", platform):
        return False
    old = re.fullmatch(r"cp3(\d+)", python)
    return abi == "abi3" or python.startswith("py") or (old is not None and 11 <= int(old[1]) <= 14 and abi == python)


def entries(text: str, files: dict[str, tuple[str, int]]) -> list[tuple[str, list[str]]]:
    """Requirements and the hashes that they may have: of wheels, or of the source where there is none."""
    found: list[tuple[str, list[str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        head, *hashes = line.split("--hash=sha256:")
        hashes = [digest.strip() for digest in hashes]
        wheels = [digest for digest in hashes if files[digest][0].endswith(".whl") and usable(files[digest][0])]
        found.append((head.strip(), sorted(wheels or [d for d in hashes if not files[d][0].endswith(".whl")])))
    return found


def written(found: list[tuple[str, list[str]]]) -> str:
    return "".join(
        " \\\n    ".join([head, *(f"--hash=sha256:{digest}" for digest in hashes)]) + "\n" for head, hashes in found
    )


def download(found: list[tuple[str, list[str]]], files: dict[str, tuple[str, int]]) -> int:
    """Bytes that pip fetches on Linux x86_64 with Python 3.11."""
    total = 0
    for head, hashes in found:
        newer = re.search(r"python_full_version >= '3\.1[2-9]'", head)
        if newer or "sys_platform == 'win32'" in head:
            continue
        fits = [
            files[digest] for digest in hashes if re.search(r"any\.whl|x86_64\.whl|\.tar\.gz|\.zip", files[digest][0])
        ]
        own = [one for one in fits if "-cp311-" in one[0]] or [
            one for one in fits if not re.search(r"-cp31[2-9]-", one[0])
        ]
        total += own[0][1]
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uv", default="uv")
    uv = parser.parse_args().uv
    text, files = locked(uv, BUILD)
    build = entries(text, files)
    OUT.mkdir(exist_ok=True)
    (OUT / "build.txt").write_text(written(build))
    tools = download(build, files)
    for name, wanted in WANTED.items():
        text, files = locked(uv, (*wanted, *BUILD[:2]), ENVIRONMENTS[:2] if name == "autoawq" else ENVIRONMENTS)
        found = entries(text, files)
        own = [one for one in found if not CUDA.fullmatch(one[0].split("==")[0])]
        cuda = [one for one in found if CUDA.fullmatch(one[0].split("==")[0])]
        if name == "autoawq":  # asks for triton itself
            own += [one for one in cuda if one[0].startswith("triton=")]
            cuda = [one for one in cuda if not one[0].startswith("triton=")]
        (OUT / f"{name}.txt").write_text(written(own) + MARK + "\n" + written(cuda))
        torch = download([one for one in own if one[0].startswith("torch=")], files)
        plain = tools + download(own, files) - torch
        print(f"{name}: {plain} and torch's CPU build; {plain + torch + download(cuda, files)} with its CUDA build")
    version, hashes = TORCH_CPU
    (OUT / "torch-cpu.txt").write_text(written([(f"torch=={version}", sorted(hashes.values()))]))


if __name__ == "__main__":
    main()
