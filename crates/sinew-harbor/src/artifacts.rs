//! Files that an agent leaves: those that go to a separate verifier, and those that are kept on the host.
//!
//! Paths on the host are those of the format: the path in the container without its first slash, or the
//! `destination` of the task. The first one holds where two meet.

use crate::folder::Step;
use crate::manifest::Artifact;
use crate::place::{Layout, Place};
use crate::stages::{World, broken, bytes_below};
use sinew_env::EnvError;
use sinew_sandbox::{Entry, EntryKind};
use std::path::{Component, Path, PathBuf};

/// Folder of the format in which agents leave files.
const PUBLISHED: &str = "/logs/artifacts";

/// Bytes of excluded files that a copy may have in addition: they are left out after it.
const EXCLUDED_BYTES: u64 = 256 << 20;

/// A file or folder to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wanted {
    /// Absolute path in the place.
    path: String,
    /// Patterns of files below it that are left out.
    exclude: Vec<String>,
    /// Path on the host; `None`: an earlier one meets it.
    kept: Option<PathBuf>,
}

/// A file or folder that was copied.
#[derive(Clone, Debug)]
pub(crate) struct Copied {
    /// Absolute path in the place.
    pub(crate) path: String,
    /// Entries below it; a regular file is one entry with its name.
    pub(crate) entries: Vec<Entry>,
    kept: Option<PathBuf>,
}

impl Copied {
    /// Whether it is one regular file.
    pub(crate) fn is_file(&self) -> bool {
        let name = Path::new(&self.path).file_name().unwrap_or_default();
        match self.entries.as_slice() {
            [only] => matches!(only.kind, EntryKind::File(_)) && only.path.as_os_str() == name,
            _ => false,
        }
    }
}

/// All that was copied, and why something was not.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gathered {
    pub(crate) copied: Vec<Copied>,
    pub(crate) missing: Option<String>,
}

impl Gathered {
    /// The entries as they are kept on the host.
    pub(crate) fn kept(&self) -> Vec<Entry> {
        let mut all = Vec::new();
        for copied in &self.copied {
            let Some(place) = &copied.kept else {
                continue;
            };
            let file = copied.is_file();
            all.extend(copied.entries.iter().map(|entry| Entry {
                path: if file {
                    place.clone()
                } else {
                    place.join(&entry.path)
                },
                ..entry.clone()
            }));
        }
        all
    }
}

/// Copies what the agent left, at most the bytes of the recipe. `declared`: the files that the task names as
/// well.
///
/// # Errors
/// If the place died. What cannot be copied is missing, with its reason.
pub(crate) async fn gather(
    world: &World,
    step: &Step,
    place: &mut Place,
    declared: bool,
) -> Result<Gathered, EnvError> {
    let named: &[Artifact] = if declared { &step.artifacts } else { &[] };
    let mut all = Gathered::default();
    let mut left = world.artifacts_bytes;
    for wanted in planned(named, &place.layout) {
        let path = wanted.path.as_str();
        let tests = place.layout.tests.as_str();
        if Path::new(path).starts_with(tests) {
            let why = format!("artifacts: {path} is in the folder of the tests");
            all.missing.get_or_insert(why);
            continue;
        }
        let spare = if wanted.exclude.is_empty() {
            0
        } else {
            EXCLUDED_BYTES
        };
        let found = match place.take(path, left.saturating_add(spare)).await {
            Ok(found) => found,
            Err(e) if place.sandbox.is_dead() => return Err(broken(e)),
            Err(e) => {
                all.missing.get_or_insert(format!("artifacts: {path}: {e}"));
                continue;
            }
        };
        let mut copied = Copied {
            entries: found.unwrap_or_default(),
            kept: wanted.kept,
            path: wanted.path,
        };
        if !copied.is_file() {
            let stays = |entry: &Entry| !is_excluded(&entry.path, &wanted.exclude);
            copied.entries.retain(stays);
        }
        let bytes = bytes_below(&copied.entries);
        if bytes > left {
            let why = format!("artifacts: {}: {bytes} bytes, {left} are left", copied.path);
            all.missing.get_or_insert(why);
            continue;
        }
        left -= bytes;
        if !copied.entries.is_empty() {
            all.copied.push(copied);
        }
    }
    Ok(all)
}

/// The folder of the format first, if the task does not name it, then what the task names, each once.
fn planned(artifacts: &[Artifact], layout: &Layout) -> Vec<Wanted> {
    let published = |artifact: &Artifact| artifact.source.trim_end_matches('/') == PUBLISHED;
    let usual = Artifact {
        source: PUBLISHED.into(),
        ..Artifact::default()
    };
    let first = (!artifacts.iter().any(published)).then_some(&usual);
    let mut all: Vec<Wanted> = Vec::new();
    for artifact in first.into_iter().chain(artifacts) {
        let source = artifact.source.trim_end_matches('/');
        let path = if source == PUBLISHED {
            format!("{}/artifacts", layout.logs)
        } else {
            let path = Path::new(&layout.workdir).join(source);
            path.to_string_lossy().into_owned()
        };
        // The place of the published files has another path in a sandbox.
        let host = match (&artifact.destination, source) {
            (Some(to), _) => plain(Path::new(to)),
            (None, PUBLISHED) => plain(Path::new(PUBLISHED)),
            (None, _) => plain(Path::new(&path)),
        };
        let wanted = Wanted {
            path,
            exclude: artifact.exclude.clone(),
            kept: Some(host),
        };
        if all.iter().any(|earlier| covers(earlier, &wanted)) {
            continue;
        }
        let meets = |earlier: &Wanted| match (&earlier.kept, &wanted.kept) {
            (Some(a), Some(b)) => a.starts_with(b) || b.starts_with(a),
            _ => false,
        };
        let kept = wanted.kept.clone().filter(|_| !all.iter().any(meets));
        all.push(Wanted { kept, ..wanted });
    }
    all
}

/// Whether an earlier copy has the files of a later one, at the same paths.
fn covers(earlier: &Wanted, later: &Wanted) -> bool {
    let Ok(below) = Path::new(&later.path).strip_prefix(&earlier.path) else {
        return false;
    };
    let host = earlier.kept.as_ref().map(|host| host.join(below));
    let same = below.as_os_str().is_empty() && earlier.exclude == later.exclude;
    host == later.kept && (same || earlier.exclude.is_empty())
}

/// A path of plain names only.
fn plain(path: &Path) -> PathBuf {
    let names = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name),
        _ => None,
    });
    names.collect()
}

/// Whether a pattern excludes a path below the copied folder, as `tar --exclude` does: it may begin at any
/// name, `*` and `?` match slashes too, and an excluded folder takes all below it along.
fn is_excluded(path: &Path, patterns: &[String]) -> bool {
    let name: Vec<char> = format!("./{}", path.display()).chars().collect();
    let slash = |at: &usize| name[*at] == '/';
    let starts = (0..name.len()).filter(slash).map(|at| at + 1);
    let starts: Vec<usize> = std::iter::once(0).chain(starts).collect();
    let ends = (0..name.len()).filter(slash).chain([name.len()]);
    let ends: Vec<usize> = ends.collect();
    patterns.iter().any(|pattern| {
        let pattern: Vec<char> = pattern.chars().collect();
        starts.iter().any(|start| {
            let mut ends = ends.iter().filter(|end| *end > start);
            ends.any(|end| matches(&pattern, &name[*start..*end]))
        })
    })
}

/// Whether a shell pattern matches a whole text. After a mismatch only the last `*` takes one more character,
/// so that the time is bounded by the product of both lengths.
fn matches(pattern: &[char], text: &[char]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p + 1, t));
            p += 1;
            continue;
        }
        if let Some(used) = one(&pattern[p..], text[t]) {
            p += used;
            t += 1;
            continue;
        }
        let Some((after, taken)) = star else {
            return false;
        };
        star = Some((after, taken + 1));
        (p, t) = (after, taken + 1);
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Characters of a pattern that match this one; `None`: they do not.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['\\', escaped, ..] => (*escaped == c).then_some(2),
        ['[', set @ ..] => match class(set, c) {
            Some((found, used)) => found.then_some(used + 1),
            None => (c == '[').then_some(1),
        },
        [first, ..] => (*first == c).then_some(1),
        [] => None,
    }
}

/// Whether a set of characters has this one, and the length of the set with its bracket; `None`: it has no
/// end, and the bracket before it is a plain character.
fn class(set: &[char], c: char) -> Option<(bool, usize)> {
    let inverted = matches!(set.first(), Some('!' | '^'));
    let mut at = usize::from(inverted);
    let begin = at;
    let mut found = false;
    loop {
        let first = *set.get(at)?;
        if first == ']' && at > begin {
            return Some((found != inverted, at + 1));
        }
        match (set.get(at + 1), set.get(at + 2)) {
            (Some('-'), Some(last)) if *last != ']' => {
                found |= (first..=*last).contains(&c);
                at += 3;
            }
            _ => {
                found |= first == c;
                at += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout() -> Layout {
        Layout {
            workdir: "/app".into(),
            tests: "/tests".into(),
            solution: "/solution".into(),
            logs: "/logs".into(),
        }
    }

    fn artifact(source: &str, destination: Option<&str>, exclude: &[&str]) -> Artifact {
        Artifact {
            source: source.into(),
            destination: destination.map(str::to_owned),
            exclude: exclude.iter().map(|p| (*p).to_owned()).collect(),
            service: None,
        }
    }

    /// The left of `tar cf - --exclude=PATTERN -C DIR . | tar tf -` of GNU tar 1.34, without the folders.
    #[test]
    fn patterns_exclude_what_tar_excludes() {
        let all = [
            "a/b/c.log",
            "a/keep.txt",
            "node_modules/x/y",
            "sub/node_modules/z",
            "top.log",
        ];
        for (pattern, left) in [
            ("*.log", "123"),
            ("node_modules", "014"),
            ("node_modules/", "01234"),
            ("./a", "234"),
            ("a/*", "234"),
            ("a", "234"),
            ("a/b", "1234"),
            ("b/c*", "1234"),
            ("b/c.lo", "01234"),
            ("/a", "01234"),
            ("a*g", "1234"),
            ("[a]", "234"),
            ("\\a", "234"),
            ("./a/*.log", "1234"),
            ("sub/[l-o]*", "0124"),
            ("[!a]", ""),
            ("[^a]", ""),
            ("*", ""),
            (".", ""),
            ("", "01234"),
        ] {
            let patterns = [pattern.to_owned()];
            let stays = |at: &usize| !is_excluded(Path::new(all[*at]), &patterns);
            let found = (0..all.len()).filter(stays).map(|at| at.to_string());
            assert_eq!(found.collect::<String>(), left, "{pattern}");
        }
    }

    #[test]
    fn files_are_kept_at_their_destination_or_path_and_the_first_one_holds() {
        let named = [
            artifact("/data/out", Some("result"), &["*.tmp"]),
            artifact("notes.txt", None, &[]),
            artifact("/logs/artifacts/one.txt", None, &[]),
            artifact("/data/more", Some("result/more"), &[]),
            artifact("/data/out/", Some("result"), &["*.tmp"]),
        ];
        let kept = planned(&named, &layout());
        let kept: Vec<(&str, Option<&str>)> = kept
            .iter()
            .map(|w| (w.path.as_str(), w.kept.as_deref().and_then(Path::to_str)))
            .collect();
        assert_eq!(
            kept,
            [
                ("/logs/artifacts", Some("logs/artifacts")),
                ("/data/out", Some("result")),
                ("/app/notes.txt", Some("app/notes.txt")),
                ("/data/more", None),
            ]
        );
        let own = planned(&[artifact("/logs/artifacts/", None, &["big"])], &layout());
        assert_eq!((own.len(), own[0].exclude.len()), (1, 1));
    }

    proptest! {
        /// A pattern of plain characters matches itself only, and one after a star any text that ends so.
        #[test]
        fn a_plain_pattern_matches_itself(text in "[a-z./]{0,12}", other in "[a-z./]{0,12}") {
            let chars = |text: &str| text.chars().collect::<Vec<char>>();
            prop_assert!(matches(&chars(&text), &chars(&text)));
            prop_assert_eq!(matches(&chars(&text), &chars(&other)), text == other);
            let star = format!("*{text}");
            prop_assert_eq!(matches(&chars(&star), &chars(&other)), other.ends_with(&text));
        }

        /// Any pattern ends.
        #[test]
        fn any_pattern_ends(pattern in "[\\[\\]!^*?a\\\\-]{0,16}", path in "[a-c/]{1,16}") {
            is_excluded(Path::new(&path), &[pattern]);
        }
    }
}
