"""Writes one task in the format of Harbor for each part of the format: services, verifiers, users, steps, networks.

    python3 scripts/harbor_features.py --out .cache/harbor-features
    sinew env check .cache/harbor-features --all --level container
    python3 scripts/harbor_compare.py .cache/harbor-features/both

DIR/both has tasks that Harbor runs with podman as well, DIR/sinew those that it refuses there. The solution of each earns 1 and
nothing earns less than 1. Their images are those of harbor_tasks.py (`--base` makes one where no registry can be reached).

Needs Python 3.11, nothing else.
"""

import argparse
import json
import pathlib
import sys

from harbor_tasks import IMAGE, write

FROM = f"FROM {IMAGE}\n"
#: A user by useradd of Debian.
USER = "RUN useradd --create-home dev && mkdir -p /app && chown dev /app\n"
#: Ends of a verifier: its last condition is the reward.
REWARD = 'if {condition}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
SH = "#!/bin/sh\n"


def judged(condition):
    """A verifier that gives 1 where a condition of a shell holds."""
    return SH + REWARD.format(condition=condition)


def task(instruction, solution, test, keys="", dockerfile=FROM + "WORKDIR /app\n", **more):
    """Files of a task by path; `files` are further ones."""
    files = {"task.toml": 'schema_version = "1.4"\n' + keys, "instruction.md": instruction + "\n", "solution/solve.sh": SH + solution}
    files |= {"tests/test.sh": test} if test else {}
    files |= {"environment/Dockerfile": dockerfile} if dockerfile else {}
    return files | more.get("files", {})


COMPOSE = """services:
  main:
    build:
      context: .
    command: ["sh", "-c", "sleep infinity"]
    environment:
      - FLAVOR=mint
"""
PRIOR = {
    "schema_version": "ATIF-v1.6",
    "agent": {"name": "earlier", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "The word of the day is quince. Remember it."},
        {"step_id": 2, "source": "agent", "message": "I will."},
    ],
}
JUDGE = FROM + "WORKDIR /tests\nCOPY . /tests/\n"
SAYS = '[ "$(cat /app/out.txt 2>/dev/null)" = {word} ]'


#: A server with one tool, which says quince.
SERVER = (pathlib.Path(__file__).resolve().parent.parent / "crates/sinew/tests/it/mcp_server.py").read_text()


def steps():
    """A task of two steps, the second of which needs the first."""
    keys = '[[steps]]\nname = "first"\nmin_reward = 1.0\n[[steps]]\nname = "second"\n'
    files = {"task.toml": 'schema_version = "1.4"\n' + keys, "environment/Dockerfile": FROM + "WORKDIR /app\n"}
    for name, word in (("first", "one"), ("second", "two")):
        files[f"steps/{name}/instruction.md"] = f"Append the line {word} to /app/out.txt.\n"
        files[f"steps/{name}/solution/solve.sh"] = f"{SH}echo {word} >> /app/out.txt\n"
        files[f"steps/{name}/tests/test.sh"] = judged(f'[ "$(tail -n 1 /app/out.txt)" = {word} ]')
    return files


#: Tasks that Harbor runs with podman, by name.
BOTH = {
    "compose": task("Write the value of FLAVOR to /app/out.txt.", 'echo "$FLAVOR" > /app/out.txt\n', judged(SAYS.format(word="mint")),
                    files={"environment/docker-compose.yaml": COMPOSE}),
    "run-line": task("Copy /made.txt to /app/out.txt.", "cp /made.txt /app/out.txt\n", judged(SAYS.format(word="made")),
                     dockerfile=FROM + "RUN echo made > /made.txt\nWORKDIR /app\n"),
    "image": task("Write done to /app/out.txt.", "mkdir -p /app && echo done > /app/out.txt\n", judged(SAYS.format(word="done")),
                  keys=f'[environment]\ndocker_image = "{IMAGE}"\nworkdir = "/tmp"\n', dockerfile=None),
    "root": task("Write done to /etc/out.txt.", "echo done > /etc/out.txt\n", judged('[ "$(cat /etc/out.txt)" = done ]')),
    "separate": task("Write done to /app/out.txt.", "echo done > /app/out.txt\n", None,
                     keys='artifacts = ["/app/out.txt"]\n[verifier]\nenvironment_mode = "separate"\n',
                     files={"tests/Dockerfile": JUDGE, "tests/test.sh": judged(SAYS.format(word="done"))}),
    "separate-copy": task(
        "Write done to /app/out.txt, and nothing else.", "mkdir -p /data/cache && echo x > /data/cache/x && echo done > /app/out.txt\n",
        judged('[ "$(cat /data/state.txt)" = done ] && [ ! -e /data/cache ]'),
        keys='[[artifacts]]\nsource = "/data"\ndestination = "state"\nexclude = ["cache"]\n[verifier]\nenvironment_mode = "separate"\n'
             '[[verifier.collect]]\ncommand = "mkdir -p /data; cat /app/out.txt > /data/state.txt; true"\n'),
    "several-rewards": task(
        "Write done to /app/out.txt.", "echo done > /app/out.txt\n",
        SH + "r=0; " + SAYS.format(word="done") + ' && r=1\necho "{\\"reward\\": $r, \\"style\\": 0.5}" > /logs/verifier/reward.json\n'),
    "part": task("Write two lines to /app/out.txt.", "printf 'a\\nb\\n' > /app/out.txt\n",
                 SH + 'n=$(cat /app/out.txt 2>/dev/null | wc -l)\npython3 -c "print(max(0.25, min(1, $n / 2)))" > /logs/verifier/reward.txt\n'),
    "health": task(
        "Copy /tmp/warm to /app/out.txt.", "cp /tmp/warm /app/out.txt\n", judged(SAYS.format(word="ready")),
        keys='[environment.healthcheck]\ncommand = "grep -q ready /tmp/warm || { [ -e /tmp/warm ] && echo ready > /tmp/warm || touch '
             '/tmp/warm; exit 1; }"\ninterval_sec = 1\nretries = 5\n'),
    "agent-user": task(
        "Write your user's name to /app/out.txt.", "id -un > /app/out.txt\n", judged(SAYS.format(word="dev") + ' && [ "$(id -u)" = 0 ]'),
        keys='[agent]\nuser = "dev"\n', dockerfile=FROM + USER + "WORKDIR /app\n"),
    "image-user": task(
        "Write your user's name to /app/out.txt.", "id -un > /app/out.txt\n",
        judged(SAYS.format(word="dev") + ' && [ "$(id -un)" = dev ]'), dockerfile=FROM + USER + "WORKDIR /app\nUSER dev\n"),
    "verifier-user": task(
        "Write done to /app/out.txt.", "echo done > /app/out.txt\n", judged(SAYS.format(word="done") + ' && [ "$(id -un)" = dev ]'),
        keys='[verifier]\nuser = "dev"\n', dockerfile=FROM + USER + "WORKDIR /app\n"),
    "variables": task(
        "Write the values of A and B to /app/out.txt.", 'echo "$A-$B-$C" > /app/out.txt\n',
        judged('[ "$(cat /app/out.txt)" = image-task-solution ] && [ "$D" = verifier ]'), dockerfile=FROM + "ENV A=image\nWORKDIR /app\n",
        keys='[environment.env]\nB = "task"\n[solution.env]\nC = "solution"\n[verifier.env]\nD = "${NOT_SET_HERE:-verifier}"\n'),
    "workdir": task(
        "Write done to out.txt in your working folder.", "echo done > out.txt\n", judged('[ "$(cat /srv/work/out.txt)" = done ]'),
        keys='[environment]\nworkdir = "/srv/work"\n', dockerfile=FROM + "RUN mkdir -p /srv/work\nWORKDIR /app\n"),
    "limits": task("Write done to /app/out.txt.", "echo done > /app/out.txt\n", judged(SAYS.format(word="done")),
                   keys="[environment]\ncpus = 1\nmemory_mb = 512\nstorage_mb = 1024\n"),
    "bash": task("Write done to /app/out.txt.", "echo done > /app/out.txt\n",
                 "#!/bin/bash\nset -euo pipefail\nif [[ -f /app/out.txt && $(< /app/out.txt) == done ]]; then r=1; else r=0; fi\n"
                 "echo $r > /logs/verifier/reward.txt\n"),
    "prior": task("Write the word of the day to /app/out.txt.", "echo quince > /app/out.txt\n", judged(SAYS.format(word="quince")),
                  files={"trajectory.json": json.dumps(PRIOR, indent=1) + "\n"}),
    "mcp": task(
        "Write the word of the day to /app/out.txt. The tool quince_lookup of the MCP server words gives it.",
        "echo '{\"id\": 1, \"method\": \"tools/call\"}' | python3 /srv/words.py | grep -o quince > /app/out.txt\n",
        judged(SAYS.format(word="quince")), dockerfile=FROM + "COPY words.py /srv/words.py\nWORKDIR /app\n",
        keys='[[environment.mcp_servers]]\nname = "words"\ntransport = "stdio"\ncommand = "python3"\nargs = ["/srv/words.py"]\n',
        files={"environment/words.py": SERVER}),
    "steps": steps(),
}
CLOSED = 'import socket\nsocket.create_connection((\\"1.1.1.1\\", 53), 3)'
#: Tasks with parts that Harbor refuses with podman, by name.
SINEW = {
    "no-network": task(
        "Write closed to /app/out.txt if no address can be reached.", f'python3 -c "{CLOSED}" 2>/dev/null || echo closed > /app/out.txt\n',
        judged(SAYS.format(word="closed")), keys='[environment]\nnetwork_mode = "no-network"\n'),
    "allowlist": task(
        "Write closed to /app/out.txt if 1.1.1.1 cannot be reached.", f'python3 -c "{CLOSED}" 2>/dev/null || echo closed > /app/out.txt\n',
        judged(SAYS.format(word="closed")), keys='[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["pypi.org"]\n'),
}


def write_all(out):
    """Writes both folders; returns the number of tasks."""
    for folder, tasks in (("both", BOTH), ("sinew", SINEW)):
        for name, files in tasks.items():
            for path, content in files.items():
                mode = 0o755 if path.endswith(".sh") else 0o644
                write(out / folder / name / path, content, mode)
    return len(BOTH) + len(SINEW)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the tasks")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"--out {args.out}: it exists already\n  hint: remove it, or name another folder")
    print(f"{write_all(args.out)} tasks in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
