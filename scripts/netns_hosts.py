"""Network namespaces as hosts: a few machines with addresses of their own on one Linux host.

Each host is a network namespace with a loopback interface and one card; a further namespace has the switch (a bridge)
between the cards, so nothing of the network of this machine changes. Needs root, Linux and `ip` (Debian: iproute2).

As a module:

    with Hosts(3) as hosts:
        process = hosts.popen(1, ["sinew", "worker", "--owner", f"https://{hosts.address(0)}:9000", ...])
        hosts.partition(0, 1)          # no packet passes between the two, in silence
        hosts.heal(0, 1)
        hosts.cut(2); hosts.join(2)    # the card of a host is unplugged, and plugged in again
        with hosts.delay(1, 50):       # what the host sends is 50 ms late
            ...

As a command, for scripts and tests in other languages; `down` ends nothing but the namespaces of that name:

    scripts/netns_hosts.py up NAME --hosts 3             # prints {"hosts": [{"namespace": ..., "address": ...}, ...]}
    ip netns exec NAME-1 COMMAND ...
    scripts/netns_hosts.py partition NAME 0 1            # heal, cut and join alike
    scripts/netns_hosts.py delay NAME 1 --ms 50 --for-s 20
    scripts/netns_hosts.py down NAME
    scripts/netns_hosts.py probe                         # 0 if this machine can make them, else 3 and the reason

A partition gives both hosts a wrong hardware address of the other, so it needs no firewall. A delay needs `netem`; where the
kernel lacks it, a process takes the packets of the host through a tunnel and sends them late.
"""

import argparse
import contextlib
import fcntl
import heapq
import json
import os
import pathlib
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time

#: A hardware address that no card has: the switch gives its frames to nobody who takes them.
NOWHERE = "02:00:00:00:de:ad"
NEWNET = 0x40000000
#: Interface of a tunnel: packets without a header in front (linux/if_tun.h).
TUNSETIFF, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
#: Packets that a tunnel holds at most; more are dropped, as by a card.
HELD_PACKETS = 4096


class HostsError(Exception):
    """Why this machine cannot do it, in words."""


def ip(*words, check=True):
    """Runs `ip`, and returns what it printed."""
    try:
        done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)
    except FileNotFoundError:
        raise HostsError("the program `ip` is missing (Debian: iproute2)") from None
    if check and done.returncode != 0:
        raise HostsError(f"`ip {' '.join(map(str, words))}`: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Hosts 0 to count - 1 with the addresses NETWORK.1 and so on. `name` begins the names of the namespaces."""

    def __init__(self, count, name=None, network="10.231.40", make=True):
        if not 1 <= count <= 200:
            raise HostsError(f"{count} hosts; allowed: 1 to 200")
        self.count, self.network = count, network
        self.name = name or f"sinew-{os.getpid()}"
        self.switch = f"{self.name}-switch"
        if make:
            try:
                self.make()
            except BaseException:
                self.close()
                raise

    def make(self):
        if os.geteuid() != 0:
            raise HostsError("network namespaces need root")
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for host in range(self.count):
            own = self.namespace(host)
            ip("netns", "add", own)
            ip("-n", self.switch, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", own)
            ip("-n", self.switch, "link", "set", f"port{host}", "master", "switch", "up")
            ip("-n", own, "link", "set", "lo", "up")
            ip("-n", own, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", own, "link", "set", "eth0", "up")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Removes the namespaces. Processes that still run in them keep theirs until they end."""
        for own in [*map(self.namespace, range(self.count)), self.switch]:
            ip("netns", "delete", own, check=False)

    def namespace(self, host):
        return f"{self.name}-{host}"

    def address(self, host):
        return f"{self.network}.{host + 1}"

    def command(self, host, args):
        """The command line that runs `args` on a host. It replaces itself, so its process id is that of `args`."""
        return ["ip", "netns", "exec", self.namespace(host), *map(str, args)]

    def popen(self, host, args, **options):
        return subprocess.Popen(self.command(host, args), **options)

    def partition(self, a, b):
        """No packet passes between two hosts any more, and neither gets an error."""
        for own, other in ((a, b), (b, a)):
            ip("-n", self.namespace(own), "neigh", "replace", self.address(other), "lladdr", NOWHERE,
               "nud", "permanent", "dev", "eth0")

    def heal(self, a, b):
        for own, other in ((a, b), (b, a)):
            ip("-n", self.namespace(own), "neigh", "delete", self.address(other), "dev", "eth0", check=False)

    def cut(self, host):
        """Unplugs the host at the switch."""
        ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def join(self, host):
        ip("-n", self.switch, "link", "set", f"port{host}", "up")

    @contextlib.contextmanager
    def delay(self, host, ms):
        """What the host sends to others is late by so many milliseconds; gives the way in which it is done."""
        own = self.namespace(host)
        netem = ["netns", "exec", own, "tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", f"{ms}ms"]
        try:
            ip(*netem)
        except HostsError:
            tunnel = Tunnel(own, self.network, ms / 1000)
            try:
                yield "tunnel"
            finally:
                tunnel.close()
            return
        try:
            yield "netem"
        finally:
            ip("netns", "exec", own, "tc", "qdisc", "delete", "dev", "eth0", "root", check=False)


@contextlib.contextmanager
def inside(namespace):
    """This thread is in a network namespace; sockets that it makes stay there."""
    libc_setns = __import__("ctypes").CDLL(None, use_errno=True).setns
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{namespace}") as there:
        if libc_setns(there.fileno(), NEWNET) != 0:
            raise HostsError(f"the namespace {namespace} cannot be entered")
        try:
            yield
        finally:
            libc_setns(before.fileno(), NEWNET)


class Tunnel:
    """Takes what a host sends to the others, and sends it late, in order. A thread does it until `close`."""

    def __init__(self, namespace, network, delay_s):
        self.namespace, self.delay_s, self.ended = namespace, delay_s, threading.Event()
        with inside(namespace):
            self.tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(self.tun, TUNSETIFF, struct.pack("16sH22x", b"late", TUN_WITHOUT_HEADER))
            self.out = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
            # The socket ignores the route into the tunnel, as it is bound to the card.
            self.out.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
            for card in ("all", "eth0", "late"):
                pathlib.Path(f"/proc/sys/net/ipv4/conf/{card}/rp_filter").write_text("0")
        ip("-n", namespace, "link", "set", "late", "up")
        # Two halves are more exact than the card's own route, and go with the tunnel.
        for half in (0, 128):
            ip("-n", namespace, "route", "add", f"{network}.{half}/25", "dev", "late")
        self.thread = threading.Thread(target=self.carry)
        self.thread.start()

    def carry(self):
        held, waits = [], selectors.DefaultSelector()
        waits.register(self.tun, selectors.EVENT_READ)
        while not self.ended.is_set():
            until = held[0][0] - time.monotonic() if held else 0.05
            if waits.select(max(0.0, min(until, 0.05))):
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(self.tun, 65536)
                    if packet[0] >> 4 == 4 and len(held) < HELD_PACKETS:
                        heapq.heappush(held, (time.monotonic() + self.delay_s, len(held), packet))
            while held and held[0][0] <= time.monotonic():
                packet = heapq.heappop(held)[2]
                with contextlib.suppress(OSError):
                    self.out.sendto(packet, (socket.inet_ntoa(packet[16:20]), 0))

    def close(self):
        self.ended.set()
        self.thread.join()
        os.close(self.tun)
        self.out.close()


def refusal():
    """Why hosts cannot be made here; None if they can."""
    try:
        with Hosts(1, name=f"sinew-probe-{os.getpid()}"):
            return None
    except HostsError as error:
        return str(error)


def of_name(name):
    """The hosts of a name that are there."""
    count = 0
    while pathlib.Path(f"/run/netns/{name}-{count}").exists():
        count += 1
    if not count:
        raise HostsError(f"no hosts have the name {name}")
    return Hosts(count, name=name, network=ip("-n", f"{name}-0", "-o", "-4", "address", "show", "eth0")
                 .split()[3].rsplit(".", 1)[0], make=False)


def act(args):
    if args.action == "probe":
        why = refusal()
        if why:
            raise HostsError(why)
    elif args.action == "up":
        hosts = Hosts(args.hosts, args.name, args.network)
        rows = [{"namespace": hosts.namespace(n), "address": hosts.address(n)} for n in range(hosts.count)]
        print(json.dumps({"hosts": rows}))
    elif args.action == "down":
        of_name(args.name).close()
    elif args.action == "delay":
        with of_name(args.name).delay(args.of[0], args.ms):
            time.sleep(args.for_s)
    else:
        getattr(of_name(args.name), args.action)(*args.of)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["up", "down", "partition", "heal", "cut", "join", "delay", "probe"])
    parser.add_argument("name", nargs="?", default="sinew", help="begins the names of the namespaces")
    parser.add_argument("of", nargs="*", type=int, help="numbers of hosts: two of `partition` and `heal`, else one")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--network", default="10.231.40", help="the first three numbers of all addresses")
    parser.add_argument("--ms", type=float, default=50.0)
    parser.add_argument("--for-s", type=float, default=10.0)
    args = parser.parse_args()
    wanted = {"partition": 2, "heal": 2, "cut": 1, "join": 1, "delay": 1}.get(args.action, 0)
    if len(args.of) != wanted:
        parser.error(f"{args.action} takes {wanted} numbers of hosts")
    try:
        act(args)
    except HostsError as error:
        print(f"netns_hosts: {error}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
