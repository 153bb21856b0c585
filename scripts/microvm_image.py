#!/usr/bin/env python3
"""Makes what virtual machines of the microvm level boot from: a kernel and a root file system.

    scripts/microvm_image.py [FOLDER]       default: .cache/microvm

Leaves FOLDER/KEY/{vmlinuz,root.cpio,manifest.json}. The kernel is Debian's for clouds, the root holds busybox (static,
Debian's) and a copy of the host's /usr/bin/python3 with its standard library; the guest agent is added by the program that
boots it. KEY names the content, so that nothing stale is used. Idempotent; needs apt-get and dpkg-deb.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile

KERNEL = "linux-image-cloud-amd64"
BUSYBOX = "busybox-static"
# In the order in which they are loaded: the bus, then the console's port.
MODULES = [
    "drivers/virtio/virtio_ring.ko",
    "drivers/virtio/virtio.ko",
    "drivers/virtio/virtio_mmio.ko",
    "drivers/char/virtio_console.ko",
]
# Of the standard library: what needs a screen, a network, a compiler, or tests the rest.
WITHOUT = {"test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data", "distutils"}
WITHOUT_EXTENSIONS = ("_ssl", "_hashlib", "_tkinter", "_dbm", "_gdbm", "nis", "readline", "ossaudiodev", "_test", "_ctypes_test", "_xxtest", "xx")
FOLDERS = ["usr", "usr/bin", "usr/lib", "usr/lib64", "etc", "dev", "proc", "sys", "run", "tmp", "work", "root", "opt"]
LINKS = {"bin": "usr/bin", "sbin": "usr/bin", "usr/sbin": "bin", "lib": "usr/lib", "lib64": "usr/lib64"}
ETC = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/work:/bin/sh\n",
    "etc/group": "root:x:0:\nuser:x:1000:\n",
}


def run(*argv, **kw):
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, **kw).stdout


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def fetch(name, folder):
    """Downloads a Debian package of the host's release, unless it is there, and unpacks it."""
    shown = run("apt-cache", "show", "--no-all-versions", name).decode()
    if name == KERNEL:
        name = re.search(r"linux-image-[0-9][\w.-]*-cloud-amd64", shown)[0]
        shown = run("apt-cache", "show", "--no-all-versions", name).decode()
    wanted = re.search(r"^SHA256: (\w+)$", shown, re.M)[1]
    path = os.path.join(folder, os.path.basename(re.search(r"^Filename: (\S+)$", shown, re.M)[1]))
    if not os.path.exists(path):
        with tempfile.TemporaryDirectory(dir=folder) as work:
            run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", name, cwd=work)
            os.rename(os.path.join(work, os.listdir(work)[0]), path)
    with open(path, "rb") as f:
        found = sha256(f.read())
    if found != wanted:
        os.remove(path)
        sys.exit(f"{path} has SHA-256 {found}, the archive says {wanted}: removed, run this again")
    target = tempfile.mkdtemp(dir=folder)
    run("dpkg-deb", "-x", path, target)
    return name, wanted, target


def libraries(files):
    found = {}
    for path in files:
        out = subprocess.run(["ldd", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.decode()
        for line in out.splitlines():
            match = re.search(r"(?:=> )?(/\S+) \(0x", line)
            if match:
                found[match[1]] = os.path.realpath(match[1])
    return found


def python(entries):
    """Adds the host's interpreter; its version."""
    program = os.path.realpath("/usr/bin/python3")
    code = "import sys, sysconfig, json; print(json.dumps([sys.version.split()[0], sysconfig.get_path('stdlib')]))"
    version, stdlib = json.loads(run(program, "-I", "-S", "-c", code))
    name = program[1:]
    entries[name] = (0o755, open(program, "rb").read())
    entries["usr/bin/python3"] = ("link", os.path.basename(program))
    dynamic = [program]
    for folder, dirs, files in os.walk(stdlib):
        inner = os.path.relpath(folder, stdlib)
        dirs[:] = sorted(d for d in dirs if d not in WITHOUT and not d.startswith("config-") and not (inner == "." and d == "dist-packages"))
        for file in sorted(files):
            path = os.path.join(folder, file)
            extension = file.endswith(".so")
            if (extension and file.startswith(WITHOUT_EXTENSIONS)) or file.endswith((".a", ".exe")) or not os.path.exists(path):
                continue
            if file.endswith(".pyc") and ".opt-" in file:
                continue
            if extension:
                dynamic.append(path)
            entries[path[1:]] = (0o644, open(path, "rb").read())
    for soname, path in sorted(libraries(dynamic).items()):
        inside = soname[1:] if soname.startswith("/usr/") else "usr" + soname
        entries[inside] = (0o755, open(path, "rb").read())
    return version


def archive(entries):
    """An archive of the "new ASCII" kind, which the kernel unpacks; the same entries give the same bytes."""
    out, number = bytearray(), 1
    full = dict(entries)
    for path in list(entries):
        while "/" in path:
            path = path.rsplit("/", 1)[0]
            full.setdefault(path, ("dir", None))
    for name in sorted(full):
        kind, value = full[name]
        mode, data = {"link": (0o120777, value), "dir": (0o040755, b"")}.get(kind, (None, None))
        if mode is None:
            mode, data = 0o100000 | kind, value
        data = data.encode() if isinstance(data, str) else data
        number += 1
        encoded = name.encode() + b"\0"
        fields = [number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0]
        out += b"070701" + b"".join(b"%08x" % f for f in fields) + encoded
        out += b"\0" * (-len(out) % 4) + data
        out += b"\0" * (-len(out) % 4)
    end = b"TRAILER!!!\0"
    out += b"070701" + b"".join(b"%08x" % f for f in [0] * 4 + [1] + [0] * 6 + [len(end), 0]) + end
    out += b"\0" * (-len(out) % 512)
    return bytes(out)


def main():
    folder = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else ".cache/microvm")
    os.makedirs(folder, exist_ok=True)
    with open(__file__, "rb") as f:
        own = sha256(f.read())
    shown = "".join(run("apt-cache", "show", "--no-all-versions", n).decode() for n in (KERNEL, BUSYBOX))
    program = os.path.realpath("/usr/bin/python3")
    with open(program, "rb") as f:
        names = [own, shown, sha256(f.read())]
    key = sha256(json.dumps(names).encode())[:24]
    done = os.path.join(folder, key)
    if os.path.exists(os.path.join(done, "manifest.json")):
        print(done)
        return
    kernel, kernel_hash, kernel_files = fetch(KERNEL, folder)
    busybox, busybox_hash, busybox_files = fetch(BUSYBOX, folder)
    entries = {name: ("dir", None) for name in FOLDERS}
    entries.update({name: ("link", target) for name, target in LINKS.items()})
    entries.update({name: (0o644, text) for name, text in ETC.items()})
    tool = os.path.join(busybox_files, "bin/busybox")
    entries["usr/bin/busybox"] = (0o755, open(tool, "rb").read())
    for applet in run(tool, "--list").decode().split():
        if applet != "busybox":
            entries[f"usr/bin/{applet}"] = ("link", "busybox")
    version = python(entries)
    modules = os.path.join(kernel_files, "lib/modules", kernel.removeprefix("linux-image-"), "kernel")
    for number, module in enumerate(MODULES):
        entries[f"usr/lib/boot-modules/{number}-{os.path.basename(module)}"] = (0o644, open(os.path.join(modules, module), "rb").read())
    with tempfile.TemporaryDirectory(dir=folder) as work:
        boot = os.path.join(kernel_files, "boot")
        image = open(os.path.join(boot, next(f for f in os.listdir(boot) if f.startswith("vmlinuz-"))), "rb").read()
        files = {"vmlinuz": image, "root.cpio": archive(entries)}
        out = os.path.join(work, "out")
        os.mkdir(out)
        for name, data in files.items():
            with open(os.path.join(out, name), "wb") as f:
                f.write(data)
        manifest = {
            "kernel": kernel,
            "kernel_package_sha256": kernel_hash,
            "busybox_package_sha256": busybox_hash,
            "python": version,
            "sha256": {name: sha256(data) for name, data in files.items()},
        }
        with open(os.path.join(out, "manifest.json"), "w", encoding="utf-8") as f:
            json.dump(manifest, f, indent=1)
        os.rename(out, done)
    for path in (kernel_files, busybox_files):
        run("rm", "-r", path)
    print(done)


if __name__ == "__main__":
    main()
