#!/usr/bin/env python3
"""Stands for Firecracker in tests: its API as documented (swagger/firecracker.yaml, docs/vsock.md, docs/snapshotting of
that project), over the real guest agent in namespaces instead of a machine.

    firecracker_mock.py --api-sock SOCKET       in a folder of its own, with ../agent, ../busybox

What it was asked is in calls.log. It saves no memory: a restored agent is a new one whose first frame was read already.
"""

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading

RESUME, DONE = 12, 7


class Fault(Exception):
    pass


def end(connection):
    """Whoever waits for bytes of it, here or at its other side, sees its end: closing alone does not wake a thread that reads."""
    with contextlib.suppress(OSError):  # it ended by itself
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Machine:
    def __init__(self):
        self.state = "Not started"
        self.config = {}
        self.lock = threading.Lock()
        self.connections = []
        self.agent = None

    def ask(self, method, path, body):
        with self.lock:
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
        for key in ("kernel_image_path", "initrd_path"):
            if not os.path.exists(body.get(key, "/")):
                raise Fault(f"The kernel file cannot be opened: {body[key]}")

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
        self.start()
        self.state = "Running"

    def vm(self, body):
        if self.state == "Not started":
            raise Fault("The requested operation is not supported before starting the microVM.")
        self.state = {"Paused": "Paused", "Resumed": "Running"}[body["state"]]

    def create(self, body):
        if self.state != "Paused":
            raise Fault("Create snapshot error: Operation not allowed: save/restore unavailable while running.")
        with open(body["mem_file_path"], "wb") as f:
            f.truncate(self.config["machine-config"]["mem_size_mib"] << 20)
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
        if os.path.getsize(body["mem_backend"]["backend_path"]) != self.config["machine-config"]["mem_size_mib"] << 20:
            raise Fault("Load snapshot error: memory file size mismatch")
        self.start()
        first = self.guest()
        head = first.recv(5, socket.MSG_WAITALL)
        first.recv(int.from_bytes(head[1:5], "little"), socket.MSG_WAITALL)
        first.close()
        self.state = "Running" if body.get("resume_vm") else "Paused"

    def start(self):
        """A root with what the agent and a few programs need, and the agent as first process in it."""
        os.makedirs("root/bin", exist_ok=True)
        for folder in ("work", "tmp", "dev", "proc"):
            os.makedirs(f"root/{folder}", exist_ok=True)
        for folder in ("work", "tmp"):
            os.chown(f"root/{folder}", 1000, 1000)
        shutil.copy("../agent", "root/agent")
        shutil.copy("../busybox", "root/bin/busybox")
        for name, minor in (("null", 3), ("zero", 5), ("full", 7)):
            os.mknod(f"root/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(1, minor))
        walls = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--net"]
        self.agent = subprocess.Popen([*walls, "chroot", "root", "/agent", "listen", "/agent.sock"])
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.config["vsock"]["uds_path"])
        listener.listen(16)
        threading.Thread(target=self.serve_vsock, args=(listener,), daemon=True).start()

    def guest(self):
        while True:
            stream = socket.socket(socket.AF_UNIX)
            try:
                stream.connect("root/agent.sock")
                return stream
            except OSError:
                stream.close()
                threading.Event().wait(0.01)

    def serve_vsock(self, listener):
        while True:
            stream, _ = listener.accept()
            threading.Thread(target=self.serve_connection, args=(stream,), daemon=True).start()

    def serve_connection(self, stream):
        line = b""
        while not line.endswith(b"\n"):
            line += stream.recv(1) or b"\n"
        # One port is listened on; others are closed, as is everything until the guest is up.
        if line != b"CONNECT 52\n" or not os.path.exists("root/agent.sock"):
            stream.close()
            return
        guest = self.guest()
        stream.sendall(b"OK 1073741824\n")
        with self.lock:
            self.connections += [stream, guest]
        threading.Thread(target=self.pipe, args=(guest, stream), daemon=True).start()
        self.frames(stream, guest)

    def pipe(self, source, target):
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        end(target)

    def frames(self, stream, guest):
        """To the guest; but RESUME is answered here: the clock that it sets would be this host's."""
        try:
            while head := stream.recv(5, socket.MSG_WAITALL):
                size = int.from_bytes(head[1:5], "little")
                payload = stream.recv(size, socket.MSG_WAITALL) if size else b""
                if head[0] == RESUME:
                    stream.sendall(bytes([DONE, 0, 0, 0, 0]))
                else:
                    guest.sendall(head + payload)
        except OSError:
            pass
        end(guest)


def answer(machine, stream):
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
    with open("calls.log", "a", encoding="utf-8") as log:
        log.write(f"{method} {path}\n")
    try:
        machine.ask(method, path, json.loads(body or b"{}"))
        stream.sendall(b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n")
    except Fault as fault:
        text = json.dumps({"fault_message": str(fault)}).encode()
        stream.sendall(
            b"HTTP/1.1 400 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(text)}\r\n\r\n".encode()
            + text
        )


def serve(machine, stream):
    with stream:
        answer(machine, stream)


def main():
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    assert sys.argv[1] == "--api-sock"
    machine = Machine()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[2])
    listener.listen(16)
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=serve, args=(machine, stream), daemon=True).start()


if __name__ == "__main__":
    main()
