"""The verbs. Each has a check on rank 0, a part that every rank runs, and an answer that rank 0 makes."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any

import torch

from . import checkpoint, requests
from .errors import Refused, wrong
from .lanes import dummy
from .policy import Policy, mesh_of
from .ranks import Ranks, device_name, peak_bytes


class Commands:
    """Computes each verb on this rank. `check_VERB` and `answer_VERB` run on rank 0 only."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.opened: Policy | None = None
        self.kept: list[int] | None = None
        self.wanted: dict[str, bool] = {}

    @classmethod
    def verbs(cls) -> set[str]:
        """Names of all commands that the main thread computes."""
        return {name[6:] for name in dir(cls) if name.startswith("check_")}

    @property
    def policy(self) -> Policy:
        """The open policy."""
        if self.opened is None:
            raise Refused("no model is open, because the last open failed: open one first")
        return self.opened

    def fill(self, parts: list[Any], blank: Any) -> list[Any]:
        """One part for each rank."""
        return parts + [blank] * (self.ranks.world - len(parts))

    def check_open(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """open"""
        return requests.opening(body, self.ranks.device.type == "cuda"), None

    def run_open(self, header: Any, _part: Any) -> Any:
        """Drops the old policy and loads the new one."""
        self.opened, self.kept = None, None
        mesh = mesh_of(self.ranks.world, self.ranks.device)
        self.opened = Policy(header, mesh, self.ranks.device, self.ranks.agree, self.ranks.share)
        checkpoint.carried(self.opened)
        return device_name(self.ranks.device)

    def answer_open(self, devices: list[Any]) -> dict[str, Any]:
        """open"""
        policy, main = self.policy, self.policy.main
        parameters, trained = policy.counts()
        return {
            "lanes": policy.world,
            "shared": not main.form.flat,
            "why_flat": main.form.why_flat,
            "attention": main.form.attention,
            "routers": main.described(),
            "vocabulary": main.vocabulary,
            "hidden": main.hidden,
            "family": main.causal.config.model_type,
            "parameters": parameters,
            "trained": trained,
            "device": self.ranks.device.type,
            "devices": devices,
            "versions": versions(),
        }

    def check_forward(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """forward"""
        policy = self.policy
        requests.computing(policy)
        of = requests.scorer(policy, body)
        wanted = {name: requests.flag(body, name) for name in ("entropies", "values", "backward")}
        if wanted["values"] and (policy.critic is None or of != "policy"):
            raise wrong("values", True, "false: there is no critic")
        if wanted["backward"] and of != "policy":
            raise wrong("backward", True, f"false for {of}")
        lanes = requests.wave(policy, body, of)
        member = policy.member(of)
        header = (of, max(member.passes(lane) for lane in lanes), wanted, [lane.items for lane in lanes])
        return header, self.fill(lanes, dummy())

    def run_forward(self, header: Any, part: Any) -> Any:
        """Scores of this rank's lane."""
        of, passes, wanted, items = header
        self.kept = None
        found = self.policy.forward(part, of, passes, **wanted)
        if wanted["backward"]:
            self.kept, self.wanted = (
                items,
                {"logprobs": True, **{n: wanted[n] for n in ("entropies", "values")}},
            )
        return found if self.ranks.rank < len(items) else None

    def answer_forward(self, results: list[Any]) -> dict[str, Any]:
        """forward"""
        return {"scores": [one for one in results if one is not None]}

    def check_backward(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """backward"""
        requests.computing(self.policy)
        if self.kept is None:
            raise Refused("backward without a forward that had backward = true; nothing is changed")
        return None, self.fill(list(requests.slopes(body, self.kept, self.wanted)), None)

    def run_backward(self, _header: Any, part: Any) -> None:
        """Adds to the gradients."""
        self.kept = None
        self.policy.backward(part)

    def check_top(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """top"""
        policy = self.policy
        requests.computing(policy)
        of = requests.scorer(policy, body)
        lanes = requests.wave(policy, body, of)
        member = policy.member(of)
        k = requests.whole(body, "k", 1, member.vocabulary)
        return (of, max(member.passes(lane) for lane in lanes), k, len(lanes)), self.fill(lanes, dummy())

    def run_top(self, header: Any, part: Any) -> Any:
        """The likeliest tokens of this rank's lane."""
        of, passes, k, lanes = header
        self.kept = None
        found = self.policy.top(part, of, passes, k)
        return found if self.ranks.rank < lanes else None

    def answer_top(self, results: list[Any]) -> dict[str, Any]:
        """top"""
        return {"tops": [one for one in results if one is not None]}

    def check_zero(self, _body: dict[str, Any]) -> tuple[Any, Any]:
        """zero"""
        assert self.policy
        return None, None

    def run_zero(self, _header: Any, _part: Any) -> None:
        """Gradients become 0."""
        self.kept = None
        self.policy.zero()

    def check_apply(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """apply"""
        policy = self.policy
        requests.computing(policy)
        return requests.update(body, policy.optimizer.number, policy.optimizer.skipped), None

    def run_apply(self, header: Any, _part: Any) -> Any:
        """One update."""
        self.kept = None
        return self.policy.apply(header)

    def answer_apply(self, results: list[Any]) -> dict[str, Any]:
        """apply"""
        return dict(results[0])

    def check_save(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """save"""
        assert self.policy
        return requests.folder(body), None

    def run_save(self, header: Any, _part: Any) -> Any:
        """Writes this rank's files."""
        self.kept = None
        return checkpoint.save(self.policy, header, self.ranks.control)

    def answer_save(self, results: list[Any]) -> dict[str, Any]:
        """save"""
        return {"files": [one for files in results for one in files]}

    def check_load(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """load"""
        assert self.policy
        return (requests.folder(body), requests.whole(body, "number", 0, (1 << 64) - 1)), None

    def run_load(self, header: Any, _part: Any) -> None:
        """Reads this rank's parts."""
        self.kept = None
        folder, number = header
        checkpoint.load(self.policy, folder, number, self.ranks.control)

    def check_publish(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """publish"""
        return requests.publishing(self.policy, body), None

    def run_publish(self, header: Any, _part: Any) -> Any:
        """Writes this rank's files."""
        self.kept = None
        return checkpoint.publish(self.policy, *header)

    def answer_publish(self, results: list[Any]) -> dict[str, Any]:
        """publish"""
        files = [one for found, _ in results for one in found]
        return {"files": files, "tensors": [one for _, found in results for one in found]}

    def check_reside(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """reside"""
        assert self.policy
        return requests.choice(body, "where", ("device", "host")), None

    def run_reside(self, header: Any, _part: Any) -> None:
        """Moves tensors."""
        self.kept = None
        self.policy.reside(header)

    def check_close(self, _body: dict[str, Any]) -> tuple[Any, Any]:
        """close"""
        return None, None

    def run_close(self, _header: Any, _part: Any) -> None:
        """Nothing: the loop ends after it."""

    def execute(self, verb: str, header: Any, parts: Any, has_parts: bool) -> list[Any] | None:
        """Runs a checked command on this rank; rank 0 gets (refused, result, peak) of each rank."""
        ranks = self.ranks
        with ranks.during(verb):
            part = ranks.scatter(parts) if has_parts else None
            refused, result = None, None
            try:
                result = getattr(self, f"run_{verb}")(header, part)
            except Refused as error:
                refused = error.report()
            return ranks.gather((refused, result, peak_bytes(ranks.device)))


def versions() -> dict[str, str]:
    """Versions of what computes."""
    import peft
    import transformers

    return {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "cuda": torch.version.cuda or "",
    }


def follow(ranks: Ranks, commands: Commands) -> None:
    """The loop of every rank but 0."""
    while True:
        try:
            verb, header, has_parts = ranks.receive()
            commands.execute(verb, header, None, has_parts)
        except Exception as error:
            fatal(ranks, error)
        if verb == "close":
            return


def lead(ranks: Ranks, commands: Commands, desk: Any) -> Any:
    """The loop of rank 0, until `close`, whose job it returns."""
    while True:
        job = desk.next()
        began = time.monotonic()
        try:
            header, parts = getattr(commands, f"check_{job.verb}")(job.body)
        except Refused as error:
            desk.ended()
            job.fail(error.report())
            continue
        except Exception as error:  # a fault of validation: no rank has begun, so the server stays usable
            traceback.print_exc()
            desk.ended()
            job.fail(Refused(f"{type(error).__name__}: {error}", "rank", 0, "check").report())
            continue
        job.body = {}
        try:
            ranks.send((job.verb, header, parts is not None))
            results = commands.execute(job.verb, header, parts, parts is not None)
            assert results is not None
            finish(commands, job, results, began, desk)
        except Exception as error:
            fatal(ranks, error)
        if job.verb == "close":
            return job


def finish(commands: Commands, job: Any, results: list[Any], began: float, desk: Any) -> None:
    """Answers a command that every rank has ended."""
    refused = [one for one, _, _ in results if one is not None]
    if refused and len(refused) < len(results):
        raise RuntimeError(f"ranks disagree: {refused[0]['text']}")
    if refused:
        desk.ended()
        job.fail(refused[0])
        return
    make: Any = getattr(commands, f"answer_{job.verb}", lambda _results: {})
    answer = make([result for _, result, _ in results])
    answer["seconds"] = time.monotonic() - began
    answer["peak_bytes"] = [peak for _, _, peak in results]
    desk.ended()
    job.finish(answer)


def fatal(ranks: Ranks, error: BaseException) -> None:
    """Reports an error after which ranks no longer agree, and waits for the owner."""
    print(f"{ranks.phase[0]} failed", file=sys.stderr)
    traceback.print_exception(error)
    try:
        ranks.report(error)
    except Exception:
        os._exit(1)
    del error
    ranks.wait_for_end()
