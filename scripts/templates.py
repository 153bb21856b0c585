"""Downloads chat templates that packages ship into .cache/templates, for the tests of rendering.

Usage: scripts/templates.py

Templates are the work of the models' authors under licences of their own: they are read from these packages, and
not kept here. crates/sinew-render/tests/golden/packages.json lists those that are tested.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache/templates"
# Package, version, folder in it, name here. The templates of llama.cpp are in the source distribution only.
WHEEL = ("trl", "1.16.0", "trl/chat_templates/", "trl")
SOURCE = ("llama-cpp-python", "0.3.36", "vendor/llama.cpp/models/templates/", "llama.cpp")


def download(package, version, source, into):
    """The file of a package, without what it depends on."""
    form = ["--no-binary", package] if source else ["--only-binary", package]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *form]
    subprocess.run([*command, "--dest", into, f"{package}=={version}"], check=True)
    (file,) = Path(into).iterdir()
    return file


def members(file):
    """Names and contents of an archive's files."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                yield name, lambda: archive.read(name)
        return
    with tarfile.open(file) as archive:
        for member in archive:
            if member.isfile():
                yield member.name, lambda: archive.extractfile(member).read()


def main():
    wanted = f"{WHEEL[:2]} {SOURCE[:2]}\n"
    done = FOLDER / "installed.txt"
    if done.is_file() and done.read_text() == wanted:
        return
    print(f"setup: downloading chat templates of {WHEEL[0]} and {SOURCE[0]} into .cache/templates")
    shutil.rmtree(FOLDER, ignore_errors=True)
    for (package, version, inner, name), source in [(WHEEL, False), (SOURCE, True)]:
        (FOLDER / name).mkdir(parents=True)
        with tempfile.TemporaryDirectory() as into:
            for path, content in members(download(package, version, source, into)):
                if inner in path and path.endswith(".jinja"):
                    (FOLDER / name / Path(path).name).write_bytes(content())
    done.write_text(wanted)


main()
