//! Plain Dockerfiles, which a sandbox can play without a container: only `FROM`, `WORKDIR`, `COPY` and `ENV`.

use std::path::{Component, Path, PathBuf};

/// A copied file or folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlainCopy {
    /// Path in the folder of the Dockerfile.
    pub from: PathBuf,
    /// Path below the working folder; empty: the folder itself.
    pub to: PathBuf,
    /// A file is copied into `to`, and not as `to`.
    pub into: bool,
}

/// The content of a plain Dockerfile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlainImage {
    /// Name of the base image; `None`: it is empty, or its name is not plain.
    pub base: Option<String>,
    /// Working folder; `None`: that of the base image, or one that depends on it.
    pub workdir: Option<String>,
    /// Copies, in order.
    pub copies: Vec<PlainCopy>,
    /// Environment variables.
    pub env: Vec<(String, String)>,
}

/// An instruction that needs a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotPlain(pub String);

impl PlainImage {
    /// Reads a Dockerfile.
    ///
    /// # Errors
    /// The first instruction that needs a container.
    pub fn parse(text: &str) -> Result<Self, NotPlain> {
        let mut image = Self::default();
        let mut workdir = PathBuf::from("/");
        let lines = instructions(text);
        // The last folder holds at the end, and copies above it would be lost.
        let folders = lines.iter().filter(|(word, _)| word == "WORKDIR");
        let root = PathBuf::from("/");
        let last = folders.fold(root, |at, (_, rest)| joined(&at, rest));
        let first = lines
            .iter()
            .find(|(word, _)| word == "WORKDIR" || word == "COPY");
        let own = first.is_some_and(|(word, rest)| word == "WORKDIR" && rest.starts_with('/'));
        image.workdir = own.then(|| last.to_string_lossy().into_owned());
        for (at, (word, rest)) in lines.iter().enumerate() {
            let refused = || NotPlain(format!("{word} {}", cut(rest)));
            match word.as_str() {
                "FROM" if at == 0 => image.base = base(rest),
                "WORKDIR" if !rest.contains('$') => workdir = joined(&workdir, rest),
                "ENV" => image.env.extend(variables(rest).ok_or_else(refused)?),
                "COPY" => {
                    let copies = copies(rest, &workdir, &last).ok_or_else(refused)?;
                    image.copies.extend(copies);
                }
                _ => return Err(refused()),
            }
        }
        Ok(image)
    }
}

/// The name of a base image that is written out.
fn base(rest: &str) -> Option<String> {
    let mut words = rest.split_whitespace();
    let name = words.next()?;
    let renamed = words
        .next()
        .is_none_or(|word| word.eq_ignore_ascii_case("as"));
    let plain = renamed && name != "scratch" && !name.starts_with("--") && !name.contains('$');
    plain.then(|| name.to_owned())
}

/// The start of an instruction, for messages.
fn cut(text: &str) -> String {
    text.chars().take(60).collect()
}

/// Instructions with their arguments; continued lines are joined, comments are left out.
fn instructions(text: &str) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut whole = String::new();
    for line in text.lines() {
        let line = line.trim();
        if line.starts_with('#') || (line.is_empty() && whole.is_empty()) {
            continue;
        }
        match line.strip_suffix('\\') {
            Some(part) => {
                whole.push_str(part);
                whole.push(' ');
                continue;
            }
            None => whole.push_str(line),
        }
        let complete = std::mem::take(&mut whole);
        let (word, rest) = complete.split_once([' ', '\t']).unwrap_or((&complete, ""));
        all.push((word.to_ascii_uppercase(), rest.trim().to_owned()));
    }
    if !whole.trim().is_empty() {
        all.push((whole.trim().to_owned(), String::new()));
    }
    all
}

/// A path of an instruction, which may be relative to the working folder.
fn joined(workdir: &Path, path: &str) -> PathBuf {
    let mut whole = PathBuf::from("/");
    for part in workdir.join(path.trim()).components() {
        match part {
            Component::Normal(name) => whole.push(name),
            Component::ParentDir => {
                whole.pop();
            }
            _ => {}
        }
    }
    whole
}

/// Variables as `NAME=VALUE ...`, or as `NAME VALUE`; `None`: a form that is not plain.
fn variables(rest: &str) -> Option<Vec<(String, String)>> {
    if rest.contains(['$', '\\']) {
        return None;
    }
    let name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let first = rest.split_whitespace().next()?;
    if !first.contains('=') {
        let value = rest.strip_prefix(first)?.trim();
        let plain = first.chars().all(name) && !value.is_empty();
        return plain.then(|| vec![(first.to_owned(), unquoted(value).to_owned())]);
    }
    if rest.contains(['"', '\'']) && rest.matches('=').count() > 1 {
        return None;
    }
    let single = rest.contains(['"', '\'']);
    let words: Vec<&str> = match rest.split_once('=') {
        Some(_) if single => vec![rest],
        _ => rest.split_whitespace().collect(),
    };
    let one = |word: &str| {
        let (key, value) = word.split_once('=')?;
        let plain = !key.is_empty() && key.chars().all(name);
        plain.then(|| (key.to_owned(), unquoted(value).to_owned()))
    };
    words.into_iter().map(one).collect()
}

/// A value without the quotes around it.
fn unquoted(value: &str) -> &str {
    let inner = |quote: char| value.strip_prefix(quote)?.strip_suffix(quote);
    inner('"').or_else(|| inner('\'')).unwrap_or(value)
}

/// Copies of an instruction; `None`: it has options, patterns, or a target outside of the working folder.
fn copies(rest: &str, workdir: &Path, last: &Path) -> Option<Vec<PlainCopy>> {
    let special = rest.contains(['*', '?', '[', '$', '"', '\'', '<', '\\']);
    let words: Vec<&str> = rest.split_whitespace().collect();
    if special || words.iter().any(|word| word.starts_with("--")) {
        return None;
    }
    let (to, sources) = words.split_last()?;
    let target = joined(workdir, to);
    let below = target.strip_prefix(last).ok()?.to_path_buf();
    let into = to.ends_with('/') || *to == "." || below.as_os_str().is_empty();
    if sources.is_empty() || (sources.len() > 1 && !into) {
        return None;
    }
    let copy = |source: &&str| {
        let from = Path::new(source.trim_start_matches('/'));
        let inside = |c: Component<'_>| matches!(c, Component::Normal(_) | Component::CurDir);
        from.components().all(inside).then(|| PlainCopy {
            from: from
                .components()
                .filter(|c| *c != Component::CurDir)
                .collect(),
            to: below.clone(),
            into,
        })
    };
    sources.iter().map(copy).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(from: &str, to: &str, into: bool) -> PlainCopy {
        PlainCopy {
            from: from.into(),
            to: to.into(),
            into,
        }
    }

    #[test]
    fn copies_and_variables_of_a_plain_file_are_read() {
        let text = "# syntax\nFROM docker.io/library/python:3.12-slim\nWORKDIR /app\nCOPY files/ /app/\n\
                    COPY a.txt \\\n  data/b.txt sub/\nENV A=1 B=two\nENV C \"x y\"\n";
        let image = PlainImage::parse(text).unwrap();
        let copies = [
            copy("files", "", true),
            copy("a.txt", "sub", true),
            copy("data/b.txt", "sub", true),
        ];
        assert_eq!(image.copies, copies);
        let env = [("A", "1"), ("B", "two"), ("C", "x y")];
        assert_eq!(image.env, env.map(|(k, v)| (k.to_owned(), v.to_owned())));
    }

    #[test]
    fn an_instruction_that_needs_a_container_is_named() {
        for (line, named) in [
            ("RUN apt-get install -y git", "RUN apt-get"),
            ("COPY --from=build /a /b", "COPY --from"),
            ("COPY a /etc/passwd", "COPY a /etc/passwd"),
            ("COPY *.py .", "COPY *.py"),
            ("COPY ../secret .", "COPY ../secret"),
            ("USER agent", "USER agent"),
            ("FROM other", "FROM other"),
            ("ENV PATH=$PATH:/x", "ENV PATH"),
            ("ADD a .", "ADD a"),
            ("WORKDIR $HOME", "WORKDIR $HOME"),
        ] {
            let text = format!("FROM a\nWORKDIR /app\n{line}\n");
            let e = PlainImage::parse(&text).unwrap_err().to_string();
            assert!(e.starts_with(named), "{line}: {e}");
        }
    }

    #[test]
    fn a_copy_above_the_last_folder_is_refused() {
        assert!(PlainImage::parse("FROM a\nCOPY x /data/\nWORKDIR /app").is_err());
        let empty = PlainImage {
            base: Some("a".into()),
            ..PlainImage::default()
        };
        assert_eq!(PlainImage::parse("FROM a").unwrap(), empty);
    }

    #[test]
    fn base_and_working_folder_are_known_where_they_are_written_out() {
        for (text, base, workdir) in [
            (
                "FROM a:1 AS x\nWORKDIR /app\nWORKDIR sub",
                Some("a:1"),
                Some("/app/sub"),
            ),
            ("FROM scratch\nWORKDIR app", None, None),
            ("FROM --platform=linux/amd64 a\nENV A=1", None, None),
            ("FROM a$TAG\nCOPY x /app/\nWORKDIR /", None, None),
        ] {
            let image = PlainImage::parse(text).unwrap();
            let found = (image.base.as_deref(), image.workdir.as_deref());
            assert_eq!(found, (base, workdir), "{text}");
        }
    }
}
