//! Folders of builds: a hash of everything in them, and the base images that their Dockerfile names.
//!
//! The hash has the paths, kinds, rights and contents of all files, whether the Dockerfile copies them or
//! not, so that no two folders that build differently have the same. Times and owners are left out.

use super::{BuildError, BuildNetwork, BuildRequest, io_error};
use crate::documents::hex;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Maximum entries of a folder.
const MAX_ENTRIES: usize = 200_000;
/// Maximum bytes of the files of a folder.
const MAX_BYTES: u64 = 8 << 30;
/// Maximum bytes of a Dockerfile.
const MAX_DOCKERFILE: u64 = 1 << 20;
/// Maximum folders in each other.
const MAX_DEPTH: usize = 128;

/// A folder that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Context {
    /// Hexadecimal SHA-256 of the folder and of the request.
    pub(super) hash: String,
    /// Base images by name, sorted, without the stages of the Dockerfile itself.
    pub(super) bases: Vec<String>,
}

impl Context {
    /// Key of a build above base images with these ids.
    pub(super) fn key(&self, ids: &[String]) -> String {
        let mut hash = Sha256::new();
        for text in std::iter::once(&self.hash).chain(ids) {
            field(&mut hash, text.as_bytes());
        }
        hex(&hash.finalize())
    }
}

/// Adds a text and its length, so that no two lists of texts are equal.
fn field(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

/// Reads the folder of a request.
///
/// # Errors
/// If the Dockerfile is missing or too long, or the folder has too many files or bytes.
pub(super) fn read(request: &BuildRequest) -> Result<Context, BuildError> {
    let dockerfile = request.context.join(&request.dockerfile);
    let missing = |e: std::io::Error| BuildError::Request {
        field: "dockerfile",
        value: format!("{} ({e})", dockerfile.display()),
        allowed: "a file of the folder; its usual name is Dockerfile".into(),
    };
    let mut text = String::new();
    let file = File::open(&dockerfile).map_err(missing)?;
    if !file.metadata().map_err(missing)?.is_file() {
        return Err(missing(std::io::ErrorKind::InvalidInput.into()));
    }
    let mut limited = file.take(MAX_DOCKERFILE);
    limited.read_to_string(&mut text).map_err(missing)?;
    let mut hash = Sha256::new();
    field(&mut hash, b"sinew-build-1");
    field(&mut hash, request.dockerfile.as_bytes());
    field(
        &mut hash,
        match request.network {
            BuildNetwork::None => b"none",
            BuildNetwork::Host => b"host",
        },
    );
    for (name, value) in &request.args {
        field(&mut hash, format!("{name}={value}").as_bytes());
    }
    let mut left = Left {
        entries: MAX_ENTRIES,
        bytes: MAX_BYTES,
    };
    walk(&request.context, Path::new(""), 0, &mut hash, &mut left)?;
    Ok(Context {
        hash: hex(&hash.finalize()),
        bases: bases(&text, &request.args),
    })
}

/// Room left for the entries and bytes of a folder.
struct Left {
    entries: usize,
    bytes: u64,
}

/// Adds one folder in the order of names.
fn walk(
    folder: &Path,
    inside: &Path,
    depth: usize,
    hash: &mut Sha256,
    left: &mut Left,
) -> Result<(), BuildError> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |e: std::io::Error| io_error(format!("read {path}"), e)
    };
    let large = |value: String, allowed: String| BuildError::Request {
        field: "context",
        value,
        allowed,
    };
    if depth > MAX_DEPTH {
        let value = format!("{} with many folders in each other", folder.display());
        return Err(large(value, format!("at most {MAX_DEPTH}")));
    }
    let names = fs::read_dir(folder).map_err(failed(folder))?;
    let names = names.map(|e| e.map(|e| e.file_name()));
    let mut names = names
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed(folder))?;
    names.sort();
    for name in names {
        let (path, inner) = (folder.join(&name), inside.join(&name));
        let meta = path.symlink_metadata().map_err(failed(&path))?;
        let next = left.entries.checked_sub(1);
        left.entries = next.ok_or_else(|| {
            let value = format!("a folder with more than {MAX_ENTRIES} files");
            large(value, "move what the build does not need elsewhere".into())
        })?;
        field(hash, inner.as_os_str().as_bytes());
        hash.update((meta.mode() & 0o777).to_le_bytes());
        if meta.is_dir() {
            hash.update(b"d");
            walk(&path, &inner, depth + 1, hash, left)?;
        } else if meta.is_symlink() {
            hash.update(b"l");
            let target = fs::read_link(&path).map_err(failed(&path))?;
            field(hash, target.as_os_str().as_bytes());
        } else if meta.is_file() {
            hash.update(b"f");
            hash.update(meta.len().to_le_bytes());
            let next = left.bytes.checked_sub(meta.len());
            left.bytes = next.ok_or_else(|| {
                let value = format!("a folder with more than {MAX_BYTES} bytes");
                large(value, "move what the build does not need elsewhere".into())
            })?;
            content(&path, meta.len(), hash).map_err(failed(&path))?;
        } else {
            let value = format!("{}, a device, pipe or socket", path.display());
            return Err(large(value, "files, folders and links".into()));
        }
    }
    Ok(())
}

/// Adds the content of a file of this length.
fn content(path: &Path, len: u64, hash: &mut Sha256) -> std::io::Result<()> {
    let mut file = File::open(path)?.take(len);
    let mut chunk = vec![0; 256 << 10];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(()),
            n => hash.update(&chunk[..n]),
        }
    }
}

/// Instructions of a Dockerfile: continued lines are joined, comments and here-documents left out.
fn instructions(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let mut whole = line.trim().to_owned();
        if whole.is_empty() || whole.starts_with('#') {
            continue;
        }
        while let Some(start) = whole.strip_suffix('\\') {
            let start = start.to_owned();
            // Comments between continued lines do not end the instruction.
            let next = lines.by_ref().map(str::trim).find(|l| !l.starts_with('#'));
            whole = format!("{start} {}", next.unwrap_or_default());
            if next.is_none() {
                break;
            }
        }
        if let Some(word) = here_document(&whole) {
            let mut after = lines.clone();
            if after.any(|l| l.trim() == word) {
                lines = after;
            }
        }
        all.push(whole);
    }
    all
}

/// The word that ends the here-document of an instruction.
fn here_document(instruction: &str) -> Option<String> {
    let (_, after) = instruction.split_once("<<")?;
    let word = after.trim_start_matches('-');
    if word.starts_with(char::is_whitespace) {
        return None;
    }
    let word = word.split_whitespace().next()?.trim_matches(['"', '\'']);
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    (!word.is_empty() && word.chars().all(plain)).then(|| word.to_owned())
}

/// Names of base images, sorted, each once.
fn bases(text: &str, args: &[(String, String)]) -> Vec<String> {
    let mut values = BTreeMap::<String, String>::new();
    let (mut stages, mut found) = (Vec::<String>::new(), Vec::<String>::new());
    for instruction in instructions(text) {
        let mut words = instruction.split_whitespace();
        let name = words.next().unwrap_or_default().to_ascii_uppercase();
        let options: Vec<&str> = words.clone().take_while(|w| w.starts_with("--")).collect();
        let mut words = words.skip(options.len());
        match name.as_str() {
            "ARG" if stages.is_empty() && found.is_empty() => {
                for word in words {
                    let (name, default) = word.split_once('=').unwrap_or((word, ""));
                    let given = args.iter().rev().find(|(n, _)| n == name);
                    let value =
                        given.map_or(default.trim_matches(['"', '\'']), |(_, v)| v.as_str());
                    values.insert(name.into(), substituted(value, &values));
                }
            }
            "FROM" => {
                let image = substituted(words.next().unwrap_or_default(), &values);
                if !stages.contains(&image.to_lowercase()) {
                    found.push(image);
                }
                let rest: Vec<&str> = words.collect();
                if let [word, stage] = rest.as_slice()
                    && word.eq_ignore_ascii_case("as")
                {
                    stages.push(stage.to_lowercase());
                }
            }
            "COPY" => {
                let from = options.iter().find_map(|o| o.strip_prefix("--from="));
                let from = from.map(|from| substituted(from, &values));
                let stage = |from: &String| {
                    stages.contains(&from.to_lowercase()) || from.parse::<u32>().is_ok()
                };
                found.extend(from.filter(|from| !stage(from)));
            }
            _ => {}
        }
    }
    found.retain(|image| image != "scratch" && !image.is_empty());
    found.sort();
    found.dedup();
    found
}

/// A text with the values of `$NAME`, `${NAME}` and `${NAME:-DEFAULT}` in it.
fn substituted(text: &str, values: &BTreeMap<String, String>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        let letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let (name, default, next) = match after.strip_prefix('{').and_then(|a| a.split_once('}')) {
            Some((inner, next)) => {
                let (name, default) = inner.split_once(":-").unwrap_or((inner, ""));
                (name, default, next)
            }
            None => {
                let end = after.find(|c| !letter(c)).unwrap_or(after.len());
                (&after[..end], "", &after[end..])
            }
        };
        let value = values.get(name).filter(|v| !v.is_empty());
        out.push_str(value.map_or(default, String::as_str));
        rest = next;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn base_images_are_found_and_stages_are_not() {
        let text = r#"
# FROM comment
ARG VERSION=3.12
ARG BASE="python:${VERSION}-slim"
FROM --platform=linux/amd64 $BASE AS Build
RUN <<EOF
FROM here
EOF
RUN echo FROM \
  # FROM inner
  FROM nowhere
FROM build as next
COPY --from=build /a /a
COPY --from=0 /a /b
COPY --chown=1:1 --from=docker.io/library/busybox:1 /bin /bin
from scratch
FROM ${NONE:-debian:12}
"#;
        let all = [
            "debian:12",
            "docker.io/library/busybox:1",
            "python:3.12-slim",
        ];
        assert_eq!(bases(text, &[]), all);
        let args = [("VERSION".to_owned(), "3.9".to_owned())];
        assert!(bases(text, &args).contains(&"python:3.9-slim".to_owned()));
        assert!(bases("", &[]).is_empty() && bases("FROM", &[]).is_empty());
        assert!(bases("FROM scratch\nCOPY a b \\", &[]).is_empty());
    }

    fn hash(request: &BuildRequest) -> String {
        read(request).unwrap().hash
    }

    #[test]
    fn every_change_of_a_folder_changes_its_hash() {
        let dir = tempfile::tempdir().unwrap();
        let mut request = BuildRequest::new(dir.path(), Path::new("/cache"));
        assert!(read(&request).is_err(), "no Dockerfile");
        fs::write(dir.path().join("Dockerfile"), "FROM a:1\n").unwrap();
        fs::write(dir.path().join("x"), "1").unwrap();
        let mut seen = vec![hash(&request)];
        assert_eq!(hash(&request), seen[0]);
        fs::write(dir.path().join("x"), "2").unwrap();
        seen.push(hash(&request));
        fs::rename(dir.path().join("x"), dir.path().join("y")).unwrap();
        seen.push(hash(&request));
        let mode = fs::Permissions::from_mode(0o700);
        fs::set_permissions(dir.path().join("y"), mode).unwrap();
        seen.push(hash(&request));
        std::os::unix::fs::symlink("y", dir.path().join("l")).unwrap();
        seen.push(hash(&request));
        request.args.push(("A".into(), "1".into()));
        seen.push(hash(&request));
        request.network = BuildNetwork::None;
        seen.push(hash(&request));
        let all = seen.len();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), all);
        let context = read(&request).unwrap();
        assert_eq!(context.bases, ["a:1"]);
        let key = |id: &str| context.key(&[format!("a:1={id}")]);
        assert_ne!(key("1"), key("2"));
        assert_ne!(key("1"), context.key(&[]));
    }
}
