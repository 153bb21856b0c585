"""Theorems that are proved by scripts, which Coq checks: implications, connectives, equations of numbers, induction.

The model writes the tactics between `Proof` and `Qed`. A check compiles three files in a fresh sandbox: `Given.v` with the definitions,
`Submission.v` with the script, and `Certificate.v`, which states the theorem again, proves it by the compiled one and asks what it assumes.
Only the output of the last file counts. Coq is the host's `/usr/bin/coqc`: `apt-get install --no-install-recommends coq`.
"""

import collections
import functools
import itertools
import json
import os
import random
import re
import zlib

from sinew import Done, Env, ToolError, run_code, tool

COQC = "/usr/bin/coqc"
#: Characters of a script, and of Coq's message that the model sees.
MAX_SCRIPT, MAX_MESSAGE = 4000, 600
#: The answer of `Print Assumptions` to a theorem without any.
CLOSED = "Closed under the global context"
#: Commands, and tactics that leave a proof open: no script may name them.
FORBIDDEN = set(
    "Admitted Abort Axiom Axioms Parameter Parameters Conjecture Hypothesis Variable Variables Context Declare Require Import Export "
    "Redirect Drop Extraction Print Load Unset Notation Ltac admit give_up shelve".split()
)
#: Tactics that search for a proof by themselves.
AUTOMATION = set(
    "auto eauto tauto intuition firstorder trivial easy now done lia nia lra ring omega congruence repeat try first solve match "
    "lazymatch multimatch do btauto".split()
)
ATOMS = "ABCDEFGH"
#: Compiles the files that it is told, until one fails. A sandbox shows no `/etc`, where findlib looks for its configuration.
COMPILE = """
import json, os, subprocess, sys
with open("findlib.conf", "w") as file:
    file.write('destdir="/usr/lib/ocaml"\\npath="/usr/lib/ocaml:/usr/lib/ocaml/METAS"\\n')
coqc, names = json.load(sys.stdin)
for name in names:
    words = [coqc, "-q", "-Q", ".", "", "-w", "none", name + ".v"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "OCAMLFIND_CONF": "findlib.conf"})
    said = [text[:10000].decode(errors="replace") for text in (done.stdout, done.stderr)]
    print(json.dumps([name, done.returncode, *said]), flush=True)
    if done.returncode:
        break
"""

Theorem = collections.namedtuple("Theorem", "imports given says gold")


def accept(script, automation):
    """A script as it goes into the file: tactics only, without `Proof.` and `Qed.`, which models write around them.

    Commands of Coq begin with a capital letter, tactics do not. So nothing in a script ends the proof, adds an axiom or loads a file.
    """
    if len(script) > MAX_SCRIPT:
        raise ToolError(f"the script has {len(script)} characters; allowed: {MAX_SCRIPT}")
    odd = re.search(r'[^ -~\t\n\r]|"', script)
    if odd:
        raise ToolError(f"a script has no character {odd.group()!r}")
    text, depth = "", 0
    for part in re.split(r"(\(\*|\*\))", script):
        if part == "(*":
            depth += 1
        elif part == "*)" and depth:
            depth, text = depth - 1, text + " "
        elif not depth:
            text += part
    if depth:
        raise ToolError("a comment is not closed")
    text = re.sub(r"^\s*Proof\.|Qed\.\s*$", "", text).strip()
    if not text:
        raise ToolError("the script is empty")
    if text[-1] not in ".}":
        raise ToolError("the last sentence has no period")
    for word in re.findall(r"[A-Za-z0-9_']+", text):
        if word in FORBIDDEN:
            raise ToolError(f"{word} is not allowed: a proof is complete and adds nothing")
        if word in AUTOMATION and not automation:
            raise ToolError(f"{word} is not allowed here: give the steps of the proof")
    # A sentence ends with a period before white space. Bullets and braces may stand before it.
    for sentence in re.split(r"(?<=\.)\s", text):
        begin = sentence.lstrip("-+*{} \t\n\r")
        if begin and not re.match(r"[a-z0-9(\[!]", begin):
            raise ToolError(f"{begin[:40]!r} is no tactic; Theorem, Proof and Qed are written for you")
    return text


@functools.lru_cache(maxsize=4096)
def check(theorem, script, timeout_s):
    """Whether a script proves a theorem, and Coq's words: `proved`, `refused`, or `forged` if it compiles and proves something else.

    Equal scripts have equal answers, which are kept. Runs that ended by a limit are not.
    """
    head = theorem.imports + "\n" + ("Require Import Given.\n" if theorem.given else "")
    files = {
        "Given": theorem.given,
        "Submission": f"{head}Theorem goal : {theorem.says}.\nProof.\n{script}\nQed.\n",
        "Certificate": f"{head}Require Submission.\nDefinition checked : {theorem.says} := Submission.goal.\nPrint Assumptions checked.\n",
    }
    names = [name for name in files if files[name]]
    ran = run_code(COMPILE, {f"{name}.v": files[name] for name in names}, json.dumps([COQC, names]), timeout_s)
    if ran.ending == "timeout":
        raise ToolError(f"Coq took more than {timeout_s:g} s")
    if ran.exit is None:
        raise ToolError(f"Coq was stopped ({ran.ending}): it took more time or memory than it has")
    if ran.exit != 0:
        raise RuntimeError(f"Coq did not run: {ran.stderr[-MAX_MESSAGE:]}")
    name, code, out, err = json.loads(ran.stdout.splitlines()[-1])
    if code < 0:
        raise ToolError(f"Coq was stopped (signal {-code}): it took more time or memory than it has")
    # The place in the file says nothing to those who wrote a part of it.
    said = "\n".join(line for line in (err + out).splitlines() if not line.startswith('File "')).strip()
    if name == "Given":
        raise RuntimeError(f"coqc refuses the definitions of the task: {said}")
    if name == "Certificate" and code == 0 and out.strip() == CLOSED:
        return "proved", "proved"
    return "refused" if name == "Submission" else "forged", said if len(said) <= MAX_MESSAGE else said[:MAX_MESSAGE] + "..."


class Coq(Env):
    system = "You prove theorems in Coq. Call the tool prove with the tactics between Proof. and Qed."
    #: Levels to draw from, 1 to 4: chains of implications; all connectives; equations of natural numbers; induction.
    levels = [1, 2, 3, 4]
    #: Proofs that may be tried in an episode.
    attempts = 3
    #: Tactics that search by themselves are allowed: one such word proves most theorems of levels 1 and 2.
    automation = False
    #: Seconds of one check.
    timeout_s = 20.0

    @classmethod
    def setup_worker(cls):
        if not cls.levels or not set(cls.levels) <= set(LEVELS):
            raise ValueError(f"levels = {cls.levels}: allowed: some of {sorted(LEVELS)}")
        if not os.path.exists(COQC):
            raise RuntimeError(f"there is no {COQC}; on Debian: apt-get install --no-install-recommends coq")

    def start(self, task):
        self.theorem = self.draw(task.level, task.world)
        self.s = {"tried": [], "proved": False, "forged": 0}

    @tool
    def prove(self, script: str):
        """Submit a proof. Coq's answer comes back.

        Args:
            script: tactics, each with a period
        """
        self.s["tried"].append(script[:MAX_SCRIPT])
        try:
            verdict, said = check(self.theorem, accept(script, self.automation), self.timeout_s)
        except ToolError as error:
            verdict, said = "refused", str(error)
        if verdict == "proved":
            self.s["proved"] = True
            return Done(said)
        if verdict == "forged":
            self.s["forged"] += 1
            said = f"this does not prove the theorem: {said}"
        if len(self.s["tried"]) >= self.attempts:
            return Done(said)
        raise ToolError(said)

    def reward(self, task):
        return {"reward": self.s["proved"], "forged": self.s["forged"], "attempts": len(self.s["tried"])}

    def state(self):
        return self.s

    def snapshot(self):
        return {"s": self.s, "theorem": self.theorem}

    def restore(self, snapshot):
        self.s, self.theorem = snapshot["s"], Theorem(*snapshot["theorem"])

    @staticmethod
    def draw(level, world):
        return LEVELS[level](random.Random(world))

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            level = cls.levels[i % len(cls.levels)]
            # The hash of a theorem says which split it is in, whatever the seed: a fifth is held out.
            for k in itertools.count():
                world = f"coq {split} {seed} {i} {k}"
                theorem = cls.draw(level, world)
                if (zlib.crc32((theorem.given + theorem.says).encode()) % 5 == 0) == (split != "train"):
                    break
            lines = [part for part in (theorem.imports, theorem.given) if part]
            prompt = "\n".join([*lines, f"Theorem goal : {theorem.says}."])
            yield {"prompt": prompt, "kind": f"coq/{level}", "level": level, "world": world}

    @classmethod
    def gold(cls, task):
        return [("prove", {"script": cls.draw(task.level, task.world).gold})]


def propositional(says, gold):
    """A theorem for all propositions that it names."""
    atoms = " ".join(a for a in ATOMS if re.search(rf"\b{a}\b", says))
    return Theorem("", "", f"forall {atoms} : Prop, {says}", f"intros {atoms}.\n{gold}")


def chain(draw):
    """`(A -> B) -> (C -> A) -> ... -> C -> B`, with implications that lead nowhere."""
    atoms, length = draw.sample(ATOMS, len(ATOMS)), draw.randint(2, 5)
    links = [(atoms[i], atoms[i + 1], i) for i in range(length)]
    links += [(draw.choice(atoms[:length]), draw.choice(atoms[6:]), -1) for _ in range(draw.randrange(3))]
    draw.shuffle(links)
    says = "".join(f"({a} -> {b}) -> " for a, b, _ in links) + f"{atoms[0]} -> {atoms[length]}"
    at = {place: i for i, (_, _, place) in enumerate(links)}
    steps = "".join(f"apply h{at[place]}.\n" for place in reversed(range(length)))
    return propositional(says, f"intros {' '.join(f'h{i}' for i in range(len(links)))} a.\n{steps}exact a.")


def connectives(draw):
    """A formula that grows with its proof: conjunctions, disjunctions, cases, contradictions."""
    count = itertools.count(1)

    def name():
        return f"h{next(count)}"

    def goal(known, depth):
        """A formula that follows from `known`, and its proof."""
        fact, formula = draw.choice(known)
        if depth == 0 or len(known) > 4 and draw.randrange(3) == 0:
            return formula, f"exact {fact}."
        kind, a, b = draw.randrange(5), draw.choice(ATOMS), draw.choice(ATOMS)
        if kind == 0:
            (left, first), (right, second) = goal(known, depth - 1), goal(known, depth - 1)
            return f"({left} /\\ {right})", f"split.\n{{ {first} }}\n{{ {second} }}"
        if kind == 1:
            right, proof = goal(known, depth - 1)
            way = draw.choice(["left", "right"])
            return f"({right} \\/ {a})" if way == "left" else f"({a} \\/ {right})", f"{way}.\n{proof}"
        if kind == 2:
            pair, x, y = name(), name(), name()
            right, proof = goal([*known, (x, a), (y, b)], depth - 1)
            return f"({a} /\\ {b} -> {right})", f"intros {pair}.\ndestruct {pair} as [{x} {y}].\n{proof}"
        if kind == 3:
            either, x = name(), name()
            cases = f"{{ right.\nexact {x}. }}\n{{ left.\nexact {x}. }}"
            return f"({a} \\/ {b} -> {b} \\/ {a})", f"intros {either}.\ndestruct {either} as [{x} | {x}].\n{cases}"
        no = name()
        return f"(~ {formula} -> {a})", f"intros {no}.\nexfalso.\napply {no}.\nexact {fact}."

    facts = [(name(), draw.choice(ATOMS)) for _ in range(2)]
    right, proof = goal(facts, draw.randint(2, 4))
    return propositional(f"{facts[0][1]} -> {facts[1][1]} -> {right}", f"intros h1 h2.\n{proof}")


def shown(term):
    """A term of natural numbers: a variable, or an operator with two terms."""
    return term if isinstance(term, str) else f"({shown(term[1])} {term[0]} {shown(term[2])})"


def parts(term):
    return [] if isinstance(term, str) else [term, *parts(term[1]), *parts(term[2])]


def replaced(term, old, new):
    """A term with every `old` replaced, as `rewrite` does."""
    if term == old:
        return new
    return term if isinstance(term, str) else (term[0], replaced(term[1], old, new), replaced(term[2], old, new))


def laws(term):
    """Laws of `Nat` with this left side, and their right sides. `rewrite` fails where a term stays as it is."""
    sign, a, b = term
    found = [(f"Nat.{'add' if sign == '+' else 'mul'}_comm {shown(a)} {shown(b)}", (sign, b, a))]
    if sign == "+" and b[0] == "+":
        found.append((f"Nat.add_assoc {shown(a)} {shown(b[1])} {shown(b[2])}", ("+", ("+", a, b[1]), b[2])))
    if sign == "*" and a[0] == "+":
        law = f"Nat.mul_add_distr_r {shown(a[1])} {shown(a[2])} {shown(b)}"
        found.append((law, ("+", ("*", a[1], b), ("*", a[2], b))))
    return [(law, right) for law, right in found if right != term]


def equation(draw):
    """An equation between a term and what one to three laws make of it."""

    def term(depth):
        if depth == 0:
            return draw.choice("abcd")
        return draw.choice("*++"), term(depth - 1), term(max(0, depth - 2))

    while True:
        begin = end = term(draw.randint(2, 3))
        steps = []
        for _ in range(draw.randint(1, 3)):
            every = [(old, law, new) for old in parts(end) for law, new in laws(old)]
            if not every:
                break
            steps.append(draw.choice(every))
            end = replaced(end, steps[-1][0], steps[-1][2])
        # `rewrite` changes both sides: the script is tried on terms before it is given out.
        left, right, closed = begin, end, begin == end
        for old, _, new in steps:
            closed = closed or left == right
            left, right = replaced(left, old, new), replaced(right, old, new)
        if steps and not closed and left == right:
            script = "".join(f"rewrite ({law}).\n" for _, law, _ in steps)
            says = f"forall a b c d : nat, {shown(begin)} = {shown(end)}"
            return Theorem("Require Import PeanoNat.", "", says, f"intros a b c d.\n{script}reflexivity.")


def induction(draw):
    """A function that adds the same number in each step, and what it computes."""
    base, step, name = draw.randrange(10), draw.randint(1, 9), draw.choice("f g grow count walk sum".split())
    body = "S (" * step + f"{name} m" + ")" * step
    given = f"Fixpoint {name} (n : nat) : nat :=\n  match n with\n  | 0 => {base}\n  | S m => {body}\n  end.\n"
    says = f"forall n : nat, {name} n = n * {step}" + (f" + {base}" if base else "")
    gold = "intros n.\ninduction n as [| n ih].\n- reflexivity.\n- simpl.\n  rewrite ih.\n  reflexivity."
    return Theorem("", given, says, gold)


LEVELS = {1: chain, 2: connectives, 3: equation, 4: induction}
