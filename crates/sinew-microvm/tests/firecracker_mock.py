#!/usr/bin/python3
"""Stands for Firecracker and KVM in tests: the API as documented (swagger/firecracker.yaml, docs/vsock.md, docs/snapshotting of
that project), over the real guest agent in namespaces instead of a machine.

    firecracker_mock.py --api-sock SOCKET            the monitor, which runs behind the same walls as the real one
    firecracker_mock.py --machines SOCKET FOLDER     in place of /dev/kvm: makes "machines", as root, with FOLDER/agent

What a monitor was asked is in FOLDER/calls.log; FOLDER/faults.json names what to refuse, {"PUT /snapshot/create": "why"}, "die" kills
the monitor. The memory of a machine is the files of its work folders and the agent's last SETUP: programs do not survive a restore.
"""

import contextlib
import ctypes
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import threading

SETUP, RESUME, DONE = 1, 12, 7
PORT = 52
KVM = "/dev/kvm"


class Fault(Exception):
    pass


def end(connection):
    """Whoever waits for bytes of it, here or at its other side, sees its end: closing alone does not wake a thread that reads."""
    with contextlib.suppress(OSError):  # it ended by itself
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def whole(stream, size):
    data = b""
    while len(data) < size:
        more = stream.recv(min(size - len(data), 1 << 20))
        if not more:
            raise EOFError
        data += more
    return data


def line(stream):
    data = b""
    while not data.endswith(b"\n"):
        more = stream.recv(1)
        if not more:
            raise EOFError
        data += more
    return data


def send(stream, message, payload=b""):
    stream.sendall(json.dumps({**message, "size": len(payload)}).encode() + b"\n" + payload)


def receive(stream):
    message = json.loads(line(stream))
    return message, whole(stream, message["size"])


def frame(stream):
    head = whole(stream, 5)
    return head + whole(stream, int.from_bytes(head[1:5], "little"))


# The monitor.


class Monitor:
    def __init__(self):
        self.state = "Not started"
        self.config = {}
        self.lock = threading.Lock()
        self.connections = []
        self.kvm = self.device()
        self.machine = None

    @staticmethod
    def device():
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(KVM)
        return stream

    def do(self, message, payload=b""):
        send(self.kvm, message, payload)
        return receive(self.kvm)

    def ask(self, method, path, body):
        with self.lock:
            told, _ = self.do({"do": "call", "call": f"{method} {path}"})
            if told["fault"]:
                raise Fault(told["fault"])
            handler = {
                ("PUT", "/machine-config"): self.machine_config,
                ("PUT", "/boot-source"): self.boot_source,
                ("PUT", "/vsock"): self.vsock,
                ("PUT", "/actions"): self.action,
                ("PATCH", "/vm"): self.vm,
                ("PUT", "/snapshot/create"): self.create,
                ("PUT", "/snapshot/load"): self.load,
            }.get((method, path))
            if handler is None:
                raise Fault(f"Invalid request method and/or path: {method} {path}.")
            handler(body)

    def before_boot(self, key, body, needed):
        if self.state != "Not started":
            raise Fault("The requested operation is not supported after starting the microVM.")
        missing = [n for n in needed if n not in body]
        if missing:
            raise Fault(f"An error occurred when deserializing the json body of a request: missing field `{missing[0]}`.")
        self.config[key] = body

    def machine_config(self, body):
        self.before_boot("machine-config", body, ["vcpu_count", "mem_size_mib"])

    def boot_source(self, body):
        self.before_boot("boot-source", body, ["kernel_image_path"])
        with open(body["kernel_image_path"], "rb") as kernel:
            if kernel.read(4) != b"\x7fELF":
                raise Fault("The kernel file is not an ELF.")
        with open(body["initrd_path"], "rb") as root:
            root.read(1)

    def vsock(self, body):
        self.before_boot("vsock", body, ["guest_cid", "uds_path"])
        if body["guest_cid"] < 3:
            raise Fault("Invalid vsock guest CID")

    def action(self, body):
        if body.get("action_type") != "InstanceStart":
            raise Fault("unknown variant")
        if self.state != "Not started":
            raise Fault("The requested operation is not supported after starting the microVM.")
        if "boot-source" not in self.config:
            raise Fault("Cannot start microvm without kernel configuration.")
        self.start(b"")
        self.state = "Running"

    def vm(self, body):
        if self.state == "Not started":
            raise Fault("The requested operation is not supported before starting the microVM.")
        self.state = {"Paused": "Paused", "Resumed": "Running"}[body["state"]]

    def size(self):
        return self.config["machine-config"]["mem_size_mib"] << 20

    def create(self, body):
        if self.state != "Paused":
            raise Fault("Create snapshot error: Operation not allowed: save/restore unavailable while running.")
        _, memory = self.do({"do": "save"})
        with open(body["mem_file_path"], "wb") as f:
            f.truncate(self.size())
            # Not at the start: as little as in real memory.
            f.seek(3 << 20)
            f.write(len(memory).to_bytes(8, "little") + memory)
        with open(body["snapshot_path"], "w", encoding="utf-8") as f:
            json.dump(self.config, f)
        # The device is reset: the guest and the host see their connections end.
        for connection in self.connections:
            end(connection)
        self.connections.clear()

    def load(self, body):
        if self.state != "Not started" or self.config:
            raise Fault("Load snapshot error: Loading a microVM snapshot not allowed after configuring boot-specific resources.")
        if body.get("mem_backend", {}).get("backend_type") not in ("File", "Uffd"):
            raise Fault("missing field `mem_backend`")
        with open(body["snapshot_path"], encoding="utf-8") as f:
            self.config = json.load(f)
        with open(body["mem_backend"]["backend_path"], "rb") as f:
            if os.fstat(f.fileno()).st_size != self.size():
                raise Fault("Load snapshot error: memory file size mismatch")
            f.seek(3 << 20)
            memory = f.read(int.from_bytes(f.read(8), "little"))
        self.start(memory)
        self.state = "Running" if body.get("resume_vm") else "Paused"

    def start(self, memory):
        self.machine = self.do({"do": "start"}, memory)[0]["machine"]
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.config["vsock"]["uds_path"])
        listener.listen(16)
        threading.Thread(target=self.serve_vsock, args=(listener,), daemon=True).start()

    def serve_vsock(self, listener):
        while True:
            stream, _ = listener.accept()
            threading.Thread(target=self.serve_connection, args=(stream,), daemon=True).start()

    def serve_connection(self, stream):
        with contextlib.suppress(OSError, EOFError, ValueError):
            port = int(line(stream).removeprefix(b"CONNECT "))
            guest = self.device()
            send(guest, {"do": "connect", "machine": self.machine, "port": port})
            # One port is listened on; others are closed, as is everything until the guest is up.
            if receive(guest)[0]["connected"]:
                stream.sendall(b"OK 1073741824\n")
                with self.lock:
                    self.connections += [stream, guest]
                threading.Thread(target=self.pipe, args=(guest, stream), daemon=True).start()
                self.frames(stream, guest)
        end(stream)

    @staticmethod
    def pipe(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        end(target)

    @staticmethod
    def frames(stream, guest):
        """To the guest; but RESUME is answered here: the clock that it sets would be this host's."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                data = frame(stream)
                if data[0] == RESUME:
                    stream.sendall(bytes([DONE, 0, 0, 0, 0]))
                else:
                    guest.sendall(data)
        end(guest)


def answer(monitor, stream):
    data = b""
    while b"\r\n\r\n" not in data:
        more = stream.recv(4096)
        if not more:
            return
        data += more
    head, body = data.split(b"\r\n\r\n", 1)
    method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
    length = next((int(l.split(b":")[1]) for l in head.split(b"\r\n") if l.lower().startswith(b"content-length")), 0)
    while len(body) < length:
        body += stream.recv(4096)
    try:
        monitor.ask(method, path, json.loads(body or b"{}"))
        stream.sendall(b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n")
    except Fault as fault:
        text = json.dumps({"fault_message": str(fault)}).encode()
        stream.sendall(
            b"HTTP/1.1 400 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(text)}\r\n\r\n".encode()
            + text
        )


def serve(monitor, stream):
    with stream:
        answer(monitor, stream)


def monitor(path):
    made = Monitor()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=serve, args=(made, stream), daemon=True).start()


# Machines. Nothing counts what their programs take together; each has a bound.

START = """ulimit -v 600000; cd "$0" && mount -t proc proc proc && for folder in usr lib lib64; do
[ -e /$folder ] && mount --rbind /$folder $folder && mount -o remount,bind,ro $folder; done; exec chroot . /agent listen /agent.sock"""


def dies_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Machine:
    """A root with what the agent needs, and the agent as first process in it."""

    def __init__(self, folder, number):
        self.root = f"{folder}/machine-{number}"
        self.setup = b""
        for inside in ("work", "tmp", "dev", "proc", "usr", "lib", "lib64"):
            os.makedirs(f"{self.root}/{inside}")
        for inside in ("work", "tmp"):
            os.chmod(f"{self.root}/{inside}", 0o700)
            os.chown(f"{self.root}/{inside}", 1000, 1000)
        os.symlink("usr/bin", f"{self.root}/bin")
        shutil.copy(f"{folder}/agent", f"{self.root}/agent")
        os.chmod(f"{self.root}/agent", 0o500)
        for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("urandom", 9), ("random", 8)):
            device = f"{self.root}/dev/{name}"
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, minor))
            os.chmod(device, 0o666)

    def start(self, memory):
        if memory:
            with tarfile.open(fileobj=io.BytesIO(memory)) as archive:
                self.setup = archive.extractfile("setup").read()
                inside = [m for m in archive.getmembers() if m.name != "setup"]
                archive.extractall(self.root, members=inside, numeric_owner=True)
        walls = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--net"]
        self.agent = subprocess.Popen(
            [*walls, "sh", "-c", START, self.root], stderr=subprocess.DEVNULL, preexec_fn=dies_with_parent
        )
        if memory:
            # It said its first frame before, and was set up.
            guest = self.guest()
            frame(guest)
            if self.setup:
                guest.sendall(self.setup)
                frame(guest)
            end(guest)

    def guest(self):
        while self.agent.poll() is None:
            stream = socket.socket(socket.AF_UNIX)
            try:
                stream.connect(f"{self.root}/agent.sock")
                return stream
            except OSError:
                stream.close()
                threading.Event().wait(0.01)
        raise EOFError

    def save(self):
        memory = io.BytesIO()
        with tarfile.open(fileobj=memory, mode="w") as archive:
            info = tarfile.TarInfo("setup")
            info.size = len(self.setup)
            archive.addfile(info, io.BytesIO(self.setup))
            for inside in ("work", "tmp"):
                archive.add(f"{self.root}/{inside}", inside)
        return memory.getvalue()

    def stop(self):
        self.agent.kill()
        self.agent.wait()
        shutil.rmtree(self.root)

    def watch(self, source, guest):
        """What goes to the guest; the last SETUP is part of its memory."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                data = frame(source)
                if data[0] == SETUP:
                    self.setup = data
                guest.sendall(data)
        end(guest)


class Machines:
    def __init__(self, folder):
        self.folder = folder
        self.made = {}
        self.lock = threading.Lock()
        self.next = 0

    def call(self, call):
        faults = f"{self.folder}/faults.json"
        with self.lock, open(f"{self.folder}/calls.log", "a", encoding="utf-8") as log:
            log.write(call + "\n")
        if not os.path.exists(faults):
            return None
        with open(faults, encoding="utf-8") as f:
            return json.load(f).get(call)

    def new(self):
        with self.lock:
            self.next += 1
            number = self.next
        self.made[number] = Machine(self.folder, number)
        return number

    def serve(self, stream):
        """One monitor, or one connection to a guest. The machine of a monitor ends with its connection."""
        number = None
        try:
            while True:
                message, payload = receive(stream)
                if message["do"] == "call":
                    fault = self.call(message["call"])
                    if fault == "die":
                        pid = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                        os.kill(int.from_bytes(pid[:4], "little"), signal.SIGKILL)
                        return
                    send(stream, {"fault": fault})
                elif message["do"] == "start":
                    number = self.new()
                    self.made[number].start(payload)
                    send(stream, {"machine": number})
                elif message["do"] == "save":
                    send(stream, {}, self.made[number].save())
                else:
                    return self.connect(stream, message)
        except (OSError, EOFError):
            pass
        finally:
            if number is not None:
                self.made.pop(number).stop()
            end(stream)

    def connect(self, stream, message):
        machine = self.made[message["machine"]]
        connected = message["port"] == PORT and os.path.exists(f"{machine.root}/agent.sock")
        send(stream, {"connected": connected})
        if connected:
            guest = machine.guest()
            threading.Thread(target=Monitor.pipe, args=(guest, stream), daemon=True).start()
            machine.watch(stream, guest)


def machines(path, folder):
    dies_with_parent()
    made = Machines(folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o666)
    listener.listen(64)
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=made.serve, args=(stream,), daemon=True).start()


def main():
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    if sys.argv[1] == "--machines":
        machines(sys.argv[2], sys.argv[3])
    assert sys.argv[1] == "--api-sock"
    monitor(sys.argv[2])


if __name__ == "__main__":
    main()
