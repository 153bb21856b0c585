//! Rows of the sandbox levels.

use super::row::{Mark, Row};
use crate::sandbox::{at_level, probed};
use std::time::Duration;

/// Checks the level that every run needs; it fails if the level does not work.
pub(super) fn process(level: &str) -> Vec<Row> {
    vec![row(level, Mark::Fail)]
}

/// Checks a level that only some recipes ask for; it is a warning if the level does not work.
pub(super) fn other(level: &str) -> Vec<Row> {
    vec![row(level, Mark::Warn)]
}

/// Starts a level and runs a program in a sandbox of it. `missing` is the mark of a level that does not work.
fn row(level: &str, missing: Mark) -> Row {
    let found = at_level(level).and_then(|section| probed(&section));
    let probed = match found {
        Ok(probed) => probed,
        Err(e) => return refused(level, missing, e.text()),
    };
    let took = match probed.program {
        took if took < Duration::from_secs(2) => format!("{} ms", took.as_millis()),
        took => format!("{:.1} s", took.as_secs_f64()),
    };
    let by = match level {
        // Its engine.
        "container" => probed
            .how("namespaces")
            .and_then(|how| how.split(':').next()),
        "microvm" => probed.how("machine"),
        _ => None,
    };
    let slower = probed.degradations.iter();
    let slower: String = slower.map(|why| format!("\nslower: {why}")).collect();
    let by = by.filter(|_| slower.is_empty() || level == "container");
    let by = by.map_or(String::new(), |by| format!("{by}; "));
    let detail = format!("{by}a program took {took}; {}{slower}", probed.in_force());
    match (probed.missing().is_empty(), slower.is_empty()) {
        (true, true) => Row::ok(level, detail),
        (true, false) => {
            let hint = "it works; what stands after `slower` says what would make it faster";
            Row::new(Mark::Warn, level, detail, hint)
        }
        (false, _) => {
            let hint = format!(
                "it works; the reasons in brackets say what is missing. sandbox.strict = true refuses to run so, and \
                 `sinew sandbox probe --level {level}` lists all"
            );
            Row::new(Mark::Warn, level, detail, hint)
        }
    }
}

/// The row of a level that cannot be started: errors end with what to do.
fn refused(level: &str, mark: Mark, error: &str) -> Row {
    let named = format!("sandbox.level = \"{level}\": ");
    let error = error.strip_prefix(&named).unwrap_or(error);
    let reason = error.split_once("cannot be built on this host: ");
    let error = reason.map_or(error, |(_, reason)| reason);
    if level == "container" && !error.contains("\n  hint: ") {
        // One reason for each engine.
        let detail = ["runc", "docker", "podman"]
            .iter()
            .fold(error.to_owned(), |all, engine| {
                all.replace(&format!("; {engine}: "), &format!("\n{engine}: "))
            });
        let hint = "one engine is enough: apt-get install crun, or start Docker or Podman; sandbox.container_socket names \
                    another socket";
        return Row::new(mark, level, detail, hint);
    }
    if let Some((detail, hint)) = error.rsplit_once("; ").filter(|_| !error.contains('\n')) {
        return Row::new(mark, level, detail, hint);
    }
    let hint = format!(
        "docs/troubleshooting.md, Setup; `sinew sandbox probe --level {level}` tries it again"
    );
    Row::failed(mark, level, error, &hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_error_says_to_do_is_the_hint() {
        let of = |level: &str, error: &str| {
            let row = refused(
                level,
                Mark::Warn,
                &format!("sandbox.level = \"{level}\": {error}"),
            );
            (row.detail, row.hint.unwrap())
        };
        let (detail, hint) = of(
            "microvm",
            "sandbox level microvm cannot be built on this host: no image in x: none; run make_it x",
        );
        assert_eq!(
            (detail.as_str(), hint.as_str()),
            ("no image in x: none", "run make_it x")
        );
        let (detail, hint) = of("container", "crun: none; docker: it is off: start it");
        assert_eq!(detail, "crun: none\ndocker: it is off: start it");
        assert!(hint.contains("apt-get install crun"));
        let (detail, hint) = of("wasm", "built without\n  hint: cargo build; or the wheel");
        assert_eq!(
            (detail.as_str(), hint.as_str()),
            ("built without", "cargo build; or the wheel")
        );
        assert!(
            of("process", "broken")
                .1
                .contains("sinew sandbox probe --level process")
        );
    }
}
