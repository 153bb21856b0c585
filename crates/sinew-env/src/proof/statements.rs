//! Theorems by level, each with a proof that is right by construction.
//!
//! | level | theorem |
//! |---|---|
//! | 1 | a chain of implications among others that lead nowhere |
//! | 2 | conjunctions, disjunctions, cases, contradictions |
//! | 3 | an equation of natural numbers, by the laws of `Nat` |
//! | 4 | a recursive function and what it computes, by induction |

use crate::rng::Rng;
use serde::{Deserialize, Serialize};

/// A theorem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Statement {
    /// Lines that load libraries.
    pub(super) imports: String,
    /// Definitions that the theorem is about.
    pub(super) given: String,
    /// What is to be proved.
    pub(super) theorem: String,
    /// A script that proves it.
    pub(super) gold: String,
}

/// Levels.
pub(super) const LEVELS: std::ops::RangeInclusive<u8> = 1..=4;
/// Names of propositions.
const ATOMS: [&str; 8] = ["A", "B", "C", "D", "E", "F", "G", "H"];

/// A theorem of a level.
pub(super) fn draw(level: u8, rng: &mut Rng) -> Statement {
    match level {
        1 => chain(rng),
        2 => connectives(rng),
        3 => equation(rng),
        _ => induction(rng),
    }
}

/// A theorem for all propositions that it names.
fn propositional(theorem: &str, gold: String) -> Statement {
    let atoms = ATOMS.iter().filter(|a| {
        theorem
            .split(|c: char| !c.is_alphanumeric())
            .any(|w| w == **a)
    });
    let atoms: Vec<&str> = atoms.copied().collect();
    Statement {
        imports: String::new(),
        given: String::new(),
        theorem: format!("forall {} : Prop, {theorem}", atoms.join(" ")),
        gold: format!("intros {}.\n{gold}", atoms.join(" ")),
    }
}

/// Permutes items: every order is equally likely.
fn shuffle<T>(items: &mut [T], rng: &mut Rng) {
    for i in (1..items.len()).rev() {
        items.swap(i, rng.below(i + 1));
    }
}

/// `(A -> B) -> (C -> A) -> ... -> C -> B`, with implications that are not needed.
fn chain(rng: &mut Rng) -> Statement {
    let mut atoms = ATOMS;
    shuffle(&mut atoms, rng);
    let length = rng.range(2, 5) as usize;
    // (from, to, place in the chain): those at places from `length` on lead nowhere.
    let mut links: Vec<(&str, &str, usize)> =
        (0..length).map(|i| (atoms[i], atoms[i + 1], i)).collect();
    for extra in 0..rng.below(3) {
        links.push((
            atoms[rng.below(length)],
            atoms[6 + rng.below(2)],
            length + extra,
        ));
    }
    shuffle(&mut links, rng);
    let mut theorem = String::new();
    for (from, to, _) in &links {
        theorem.push_str(&format!("({from} -> {to}) -> "));
    }
    theorem.push_str(&format!("{} -> {}", atoms[0], atoms[length]));
    let names: Vec<String> = (0..links.len()).map(|i| format!("h{i}")).collect();
    let mut gold = format!("intros {} a.\n", names.join(" "));
    for place in (0..length).rev() {
        let name = links.iter().position(|l| l.2 == place).unwrap_or_default();
        gold.push_str(&format!("apply h{name}.\n"));
    }
    gold.push_str("exact a.");
    propositional(&theorem, gold)
}

/// A growing proof: what is known by name, and names that were used.
struct Growing<'a> {
    /// Where choices come from.
    rng: &'a mut Rng,
    /// Names that were used.
    names: usize,
}

impl Growing<'_> {
    /// A name that no hypothesis has.
    fn name(&mut self) -> String {
        self.names += 1;
        format!("h{}", self.names)
    }

    /// Some proposition.
    fn atom(&mut self) -> &'static str {
        self.rng.pick::<&str>(&ATOMS)
    }

    /// A formula that follows from `known`, and its proof.
    fn goal(&mut self, known: &[(String, String)], depth: usize) -> (String, String) {
        if depth == 0 || (known.len() > 4 && self.rng.below(3) == 0) {
            let (name, formula) = self.rng.pick(known).clone();
            return (formula, format!("exact {name}."));
        }
        match self.rng.below(5) {
            0 => {
                let (left, left_proof) = self.goal(known, depth - 1);
                let (right, right_proof) = self.goal(known, depth - 1);
                (
                    format!("({left} /\\ {right})"),
                    format!("split.\n{{ {left_proof} }}\n{{ {right_proof} }}"),
                )
            }
            1 => {
                let (right, proof) = self.goal(known, depth - 1);
                let other = self.atom();
                match self.rng.below(2) {
                    0 => (format!("({right} \\/ {other})"), format!("left.\n{proof}")),
                    _ => (format!("({other} \\/ {right})"), format!("right.\n{proof}")),
                }
            }
            2 => {
                let (first, second) = (self.atom(), self.atom());
                let (pair, a, b) = (self.name(), self.name(), self.name());
                let mut more = known.to_vec();
                more.extend([
                    (a.clone(), first.to_owned()),
                    (b.clone(), second.to_owned()),
                ]);
                let (goal, proof) = self.goal(&more, depth - 1);
                (
                    format!("({first} /\\ {second} -> {goal})"),
                    format!("intros {pair}.\ndestruct {pair} as [{a} {b}].\n{proof}"),
                )
            }
            3 => {
                let (first, second) = (self.atom(), self.atom());
                let (either, case) = (self.name(), self.name());
                (
                    format!("({first} \\/ {second} -> {second} \\/ {first})"),
                    format!(
                        "intros {either}.\ndestruct {either} as [{case} | {case}].\n\
                         {{ right.\nexact {case}. }}\n{{ left.\nexact {case}. }}"
                    ),
                )
            }
            _ => {
                let (name, formula) = self.rng.pick(known).clone();
                let (not, other) = (self.name(), self.atom());
                (
                    format!("(~ {formula} -> {other})"),
                    format!("intros {not}.\nexfalso.\napply {not}.\nexact {name}."),
                )
            }
        }
    }
}

/// Formulas of all connectives.
fn connectives(rng: &mut Rng) -> Statement {
    let depth = rng.range(2, 4) as usize;
    let mut growing = Growing { rng, names: 0 };
    let facts: Vec<(String, String)> = (0..2)
        .map(|_| (growing.name(), growing.atom().to_owned()))
        .collect();
    let (goal, proof) = growing.goal(&facts, depth);
    let names: Vec<&str> = facts.iter().map(|(name, _)| name.as_str()).collect();
    let theorem = format!("{} -> {} -> {goal}", facts[0].1, facts[1].1);
    propositional(&theorem, format!("intros {}.\n{proof}", names.join(" ")))
}

/// A term of natural numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Term {
    /// A variable.
    Var(&'static str),
    /// A sum.
    Add(Box<Term>, Box<Term>),
    /// A product.
    Mul(Box<Term>, Box<Term>),
}

impl std::fmt::Display for Term {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Var(name) => f.write_str(name),
            Self::Add(a, b) => write!(f, "({a} + {b})"),
            Self::Mul(a, b) => write!(f, "({a} * {b})"),
        }
    }
}

impl Term {
    /// The sum of two terms.
    fn add(a: Self, b: Self) -> Self {
        Self::Add(Box::new(a), Box::new(b))
    }

    /// The product of two terms.
    fn mul(a: Self, b: Self) -> Self {
        Self::Mul(Box::new(a), Box::new(b))
    }

    /// A term whose left side is `depth` deep.
    fn draw(rng: &mut Rng, depth: usize) -> Self {
        if depth == 0 {
            return Self::Var(rng.pick::<&str>(&["a", "b", "c", "d"]));
        }
        let (left, right) = (
            Self::draw(rng, depth - 1),
            Self::draw(rng, rng_depth(depth)),
        );
        match rng.below(3) {
            0 => Self::mul(left, right),
            _ => Self::add(left, right),
        }
    }

    /// All parts that are no variables, itself first.
    fn parts<'a>(&'a self, out: &mut Vec<&'a Self>) {
        if let Self::Add(a, b) | Self::Mul(a, b) = self {
            out.push(self);
            a.parts(out);
            b.parts(out);
        }
    }

    /// With every `from` replaced, as `rewrite` does.
    fn replaced(&self, from: &Self, to: &Self) -> Self {
        if self == from {
            return to.clone();
        }
        match self {
            Self::Var(_) => self.clone(),
            Self::Add(a, b) => Self::add(a.replaced(from, to), b.replaced(from, to)),
            Self::Mul(a, b) => Self::mul(a.replaced(from, to), b.replaced(from, to)),
        }
    }

    /// Laws whose left side is this term and that change it: their name with arguments, and the right side.
    /// `rewrite` fails where a term stays as it is.
    fn laws(&self) -> Vec<(String, Self)> {
        let mut out = Vec::new();
        match self {
            Self::Var(_) => {}
            Self::Add(a, b) => {
                out.push((
                    format!("Nat.add_comm {a} {b}"),
                    Self::add((**b).clone(), (**a).clone()),
                ));
                if let Self::Add(c, d) = &**b {
                    let left = Self::add((**a).clone(), (**c).clone());
                    out.push((
                        format!("Nat.add_assoc {a} {c} {d}"),
                        Self::add(left, (**d).clone()),
                    ));
                }
            }
            Self::Mul(a, b) => {
                out.push((
                    format!("Nat.mul_comm {a} {b}"),
                    Self::mul((**b).clone(), (**a).clone()),
                ));
                if let Self::Add(c, d) = &**a {
                    let sides = (
                        Self::mul((**c).clone(), (**b).clone()),
                        Self::mul((**d).clone(), (**b).clone()),
                    );
                    out.push((
                        format!("Nat.mul_add_distr_r {c} {d} {b}"),
                        Self::add(sides.0, sides.1),
                    ));
                }
            }
        }
        out.retain(|(_, right)| right != self);
        out
    }
}

/// One side of a term is as deep as the other or a variable.
fn rng_depth(depth: usize) -> usize {
    if depth > 1 { depth - 2 } else { 0 }
}

/// An equation between a term and what some laws make of it.
fn equation(rng: &mut Rng) -> Statement {
    let steps = rng.range(1, 3) as usize;
    loop {
        let depth = 2 + rng.below(2);
        let start = Term::draw(rng, depth);
        let (mut end, mut rewrites) = (start.clone(), Vec::new());
        for _ in 0..steps {
            let mut parts = Vec::new();
            end.parts(&mut parts);
            let laws: Vec<_> = parts
                .iter()
                .flat_map(|p| p.laws().into_iter().map(|l| ((*p).clone(), l)))
                .collect();
            if laws.is_empty() {
                break;
            }
            let (from, (law, to)) = rng.pick(&laws).clone();
            end = end.replaced(&from, &to);
            rewrites.push((from, to, law));
        }
        // `rewrite` changes both sides: the script is tried on terms before it is given out.
        let (mut left, mut right) = (start.clone(), end.clone());
        let mut closed = start == end;
        for (from, to, _) in &rewrites {
            closed |= left == right;
            left = left.replaced(from, to);
            right = right.replaced(from, to);
        }
        if closed || left != right || rewrites.is_empty() {
            continue;
        }
        let script: Vec<String> = rewrites
            .iter()
            .map(|(_, _, law)| format!("rewrite ({law})."))
            .collect();
        return Statement {
            imports: "Require Import PeanoNat.".into(),
            given: String::new(),
            theorem: format!("forall a b c d : nat, {start} = {end}"),
            gold: format!("intros a b c d.\n{}\nreflexivity.", script.join("\n")),
        };
    }
}

/// `n` as Coq writes it after computing: `S (S ... x)`.
fn successors(n: usize, x: &str) -> String {
    format!("{}{x}{}", "S (".repeat(n), ")".repeat(n))
}

/// A function that adds the same number in each step.
fn induction(rng: &mut Rng) -> Statement {
    let (base, step) = (rng.below(10), 1 + rng.below(9));
    let name = *rng.pick(&["f", "g", "grow", "count", "walk", "sum"]);
    let body = successors(step, &format!("{name} m"));
    let given = format!(
        "Fixpoint {name} (n : nat) : nat :=\n  match n with\n  | 0 => {base}\n  | S m => {body}\n  end.\n"
    );
    let theorem = match base {
        0 => format!("forall n : nat, {name} n = n * {step}"),
        _ => format!("forall n : nat, {name} n = n * {step} + {base}"),
    };
    Statement {
        imports: String::new(),
        given,
        theorem,
        gold: "intros n.\ninduction n as [| n ih].\n- reflexivity.\n- simpl.\n  rewrite ih.\n  reflexivity.".into(),
    }
}
