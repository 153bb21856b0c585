#!/bin/sh
# Starts Slurm on this host: munged, slurmctld and three slurmd of two cores each, with files and logs in a folder. Prints the
# variable that points `sinew launch --on slurm` to it. As root, with the Debian packages slurmctld, slurmd, slurm-client and munge.
# `stop` ends only what was started here, jobs included.
#
#   scripts/slurm_host.sh start FOLDER
#   export SLURM_CONF=FOLDER/slurm.conf
#   sinew launch recipe.toml --on slurm --run-dir FOLDER/run
#   scripts/slurm_host.sh stop FOLDER
set -eu
what=${1:?start or stop}
folder=$(mkdir -p "${2:?a folder}" && cd "$2" && pwd)
host=$(hostname -s)
export SLURM_CONF="$folder/slurm.conf"

ended() {
    # Processes of jobs would stay: they have 30 s to end before Slurm kills them.
    if timeout 10 squeue --noheader --format=%i > "$folder/jobs" 2>/dev/null; then
        xargs -r timeout 10 scancel < "$folder/jobs" 2>/dev/null || true
        for _ in $(seq 80); do
            test -n "$(timeout 10 squeue --noheader 2>/dev/null)" || break
            sleep 0.5
        done
    fi
    for file in "$folder"/*.pid; do
        test -e "$file" || continue
        pid=$(cat "$file")
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 40); do
            test -e "/proc/$pid/exe" || break
            sleep 0.25
        done
        rm -f "$file"
    done
}

if [ "$what" = stop ]; then
    ended
    exit 0
fi
for program in munged slurmctld slurmd squeue; do
    command -v "$program" > /dev/null || { echo "missing: $program (apt-get install slurmctld slurmd slurm-client munge)" >&2; exit 3; }
done

mkdir -p "$folder/state"
# Requests are signed with a key of this folder.
test -e "$folder/munge.key" || head -c 1024 /dev/urandom > "$folder/munge.key"
chmod 700 "$folder"
chmod 400 "$folder/munge.key"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"

cat > "$folder/slurm.conf" <<CONF
ClusterName=sinew
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=10
SlurmdTimeout=10
MinJobAge=300
SlurmctldPort=16817
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17001 CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17002 CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n3 NodeHostname=$host NodeAddr=127.0.0.1 Port=17003 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP
CONF
slurmctld
for node in n1 n2 n3; do
    mkdir -p "$folder/spool-$node"
    slurmd -N "$node"
done
tries=0
until squeue > /dev/null 2>&1; do
    tries=$((tries + 1))
    test "$tries" -lt 240 || { echo "slurmctld does not answer: $folder/slurmctld.log" >&2; ended; exit 1; }
    sleep 0.5
done
echo "export SLURM_CONF=$folder/slurm.conf"
