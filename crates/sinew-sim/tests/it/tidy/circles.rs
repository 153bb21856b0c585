//! Circles of files inside a crate: files that use each other can only be read together.
//!
//! A file uses another one if it names it by a path from `crate::` or `super::`. A module and those below it
//! count as one.

use super::source;
use super::{crates, fail_if_any, name, production_files};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Circles that may stay, or become smaller: crate, files, reason.
const ALLOWED: &[(&str, &str, &str)] = &[
    (
        "sinew-egress",
        "exchange tunnel",
        "a request can open a tunnel, and an intercepted tunnel is served as requests again",
    ),
    (
        "sinew-env",
        "chat registry tiny",
        "the registry lists every environment, and an environment implements the registry's traits",
    ),
    (
        "sinew-microvm",
        "monitor probe provider qemu sandbox template",
        "a monitor, its template and its probe start each other; one unit at run time",
    ),
];

type Module = Vec<String>;

/// The module that a file below `src` is.
fn module(src: &Path, path: &Path) -> Module {
    let inside = path.strip_prefix(src).unwrap().with_extension("");
    let mut parts: Module = inside
        .iter()
        .map(|p| p.to_string_lossy().into_owned())
        .collect();
    if parts
        .last()
        .is_some_and(|l| ["mod", "lib", "main"].contains(&l.as_str()))
    {
        parts.pop();
    }
    parts
}

/// Paths from `crate::` and `super::` in a file, tests left out, as modules and names below them.
fn used(path: &Path, own: &Module) -> Vec<Module> {
    let code: String = source::lines(path)
        .iter()
        .filter(|l| !l.test)
        .map(|l| format!("{}\n", l.code))
        .collect();
    let mut out = Vec::new();
    for (prefix, base) in [
        ("crate::", Vec::new()),
        ("super::", own[..own.len().saturating_sub(1)].to_vec()),
    ] {
        for (at, _) in code.match_indices(prefix) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':' || c == '$') {
                continue;
            }
            expand(&code[at + prefix.len()..], base.clone(), &mut out);
        }
    }
    out
}

/// Follows a path, into the braces of a `use`.
fn expand(rest: &str, mut base: Module, out: &mut Vec<Module>) {
    let mut rest = rest;
    while let Some(after) = rest.strip_prefix("super::") {
        base.pop();
        rest = after;
    }
    if let Some(group) = rest.strip_prefix('{') {
        let (mut depth, mut start) = (0, 0);
        for (i, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => {
                    return expand(group[start..i].trim(), base, out);
                }
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    expand(group[start..i].trim(), base.clone(), out);
                    start = i + 1;
                }
                _ => {}
            }
        }
        return;
    }
    let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
    let (word, after) = rest.split_at(end.unwrap_or(rest.len()));
    if word.is_empty() {
        return;
    }
    base.push(word.to_owned());
    match after.strip_prefix("::") {
        Some(more) if base.len() < 6 => expand(more, base, out),
        _ => out.push(base),
    }
}

/// The files that each file of a crate uses.
fn edges(dir: &Path) -> BTreeMap<Module, BTreeSet<Module>> {
    let src = dir.join("src");
    let mut paths = production_files(dir);
    paths.retain(|p| !p.starts_with(src.join("bin")));
    let modules: BTreeSet<Module> = paths.iter().map(|p| module(&src, p)).collect();
    let mut graph = BTreeMap::new();
    for path in paths {
        let own = module(&src, &path);
        let of = |target: Module| (1..=target.len()).rev().map(move |n| target[..n].to_vec());
        let found = |target| of(target).find(|m| modules.contains(m));
        let uses: BTreeSet<Module> = used(&path, &own)
            .into_iter()
            .filter_map(found)
            .filter(|m| !m.starts_with(&own) && !own.starts_with(m))
            .collect();
        graph.insert(own, uses);
    }
    graph
}

/// All files that can be reached from a file.
fn reachable<'a>(
    graph: &'a BTreeMap<Module, BTreeSet<Module>>,
    from: &'a Module,
) -> BTreeSet<&'a Module> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        for used in graph.get(module).into_iter().flatten() {
            if seen.insert(used) {
                next.push(used);
            }
        }
    }
    seen
}

/// Groups of files that all reach each other.
fn circles(graph: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<String> {
    let reach: BTreeMap<_, _> = graph.keys().map(|m| (m, reachable(graph, m))).collect();
    let mut found = BTreeSet::new();
    for (module, reached) in &reach {
        if !reached.contains(module) {
            continue;
        }
        let both = |m: &&&Module| reach.get(*m).is_some_and(|r| r.contains(module));
        let members: Vec<_> = reached.iter().filter(both).map(|m| m.join("/")).collect();
        found.insert(members.join(" "));
    }
    found
}

/// Whether a circle is one of the table, or a part of one.
fn is_allowed(krate: &str, circle: &str) -> bool {
    ALLOWED.iter().any(|(owner, known, _)| {
        let known: BTreeSet<&str> = known.split(' ').collect();
        *owner == krate && circle.split(' ').all(|file| known.contains(file))
    })
}

#[test]
fn files_of_a_crate_form_no_circles() {
    let mut problems = Vec::new();
    for dir in crates() {
        let krate = name(&dir);
        for circle in circles(&edges(&dir)) {
            if !is_allowed(&krate, &circle) {
                problems.push(format!("(\"{krate}\", \"{circle}\", \"\"),"));
            }
        }
    }
    fail_if_any(&problems, "circles");
}
