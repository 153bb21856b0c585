"""A client that writes what it gets to the file RECORD, or refuses everything where there is no such variable."""

import json
import os


def record(**said):
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(said) + "\n")


class Settings:
    def __init__(self, **options):
        pass


class Run:
    def __init__(self):
        self.summary = {}
        for line in open(os.environ["RECORD"]):
            self.summary.update(json.loads(line).get("row", {}))

    def define_metric(self, name, **options):
        pass

    def log(self, row):
        record(row=row)

    def save(self, path, base_path, policy):
        record(file=os.path.relpath(path, base_path))

    def finish(self, exit_code):
        record(end=exit_code, why=self.summary["end"])


def init(id, **options):
    if "RECORD" not in os.environ:
        raise OSError("no route to https://user:secret@tracker.example/")
    record(id=id, name=options["name"])
    return Run()
