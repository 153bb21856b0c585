#!/bin/sh
# Starts a Ray head in its own network namespace and in its own process namespace, since a head opens about ten ports on the host's
# address and finds other heads by scanning processes. Stops with Ctrl-C, and everything that it started ends with it. As root.
#
#   python3 -m venv ray && ray/bin/pip install 'ray[default]'
#   RAY=ray/bin/ray scripts/ray_head.sh
#   sinew launch recipe.toml --on ray://10.231.7.2:8265 --run-dir /tmp/run      # on the same host
#
# The recipe needs `launch.listen = "10.231.7.2:8092"`: this host and the namespace reach the owner there. The program `sinew` must
# be in the path of this script. CPUS is the number of cores that Ray hands out (8), whatever the host has.
set -eu
: "${RAY:?names the program ray}"
name=${NAMESPACE:-sinew-ray}
test -x "$RAY" || { echo "missing: $RAY (pip install 'ray[default]')" >&2; exit 3; }

head=
ended() {
    # Its parent passes no other signal on; the processes of the namespace end with it.
    test -z "$head" || kill -KILL "$head" 2>/dev/null || true
    ip netns delete "$name" 2>/dev/null || true
    ip link delete "$name" 2>/dev/null || true
}
ip netns add "$name"
trap ended EXIT
trap 'exit 130' INT TERM
ip link add "$name" type veth peer name inside netns "$name"
ip address add 10.231.7.1/24 dev "$name"
ip link set "$name" up
ip -n "$name" link set lo up
ip -n "$name" address add 10.231.7.2/24 dev inside
ip -n "$name" link set inside up
echo "head: ray://10.231.7.2:8265"
ip netns exec "$name" unshare --pid --fork --kill-child --mount-proc \
    "$RAY" start --head --block --num-cpus="${CPUS:-8}" --node-ip-address=10.231.7.2 \
    --dashboard-host=10.231.7.2 --disable-usage-stats &
head=$!
# A shell acts on signals at once only while it waits for a job in the background.
wait "$head"
