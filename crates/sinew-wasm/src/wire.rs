//! Protocol between host and worker: frames of length, kind and bytes on a stream.

use crate::error::WasmError;
use serde::{Deserialize, Serialize};
use sinew_sandbox::{Ending, Limits};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Maximum bytes of a frame: files and standard input of one execution.
pub(crate) const MAX_FRAME: usize = 1 << 30;

/// Files of a sandbox by path. `None` is a folder.
pub(crate) type Tree = BTreeMap<String, Option<Arc<[u8]>>>;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Runs a program; sent to the worker.
    Job,
    /// From the worker: bytes of standard output.
    Stdout,
    /// Bytes of standard error; sent by the worker.
    Stderr,
    /// Result of an execution.
    Done,
    /// The worker has loaded all modules.
    Ready,
}

impl Kind {
    /// Parses the kind. `None` for an unknown byte.
    pub(crate) fn of(byte: u8) -> Option<Self> {
        [
            Self::Job,
            Self::Stdout,
            Self::Stderr,
            Self::Done,
            Self::Ready,
        ]
        .into_iter()
        .find(|k| *k as u8 == byte)
    }
}

/// Header of a job, followed by the bytes of standard input and of the files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Job {
    /// Name of the module.
    pub(crate) module: String,
    /// Arguments of the program.
    pub(crate) args: Vec<String>,
    /// Environment variables.
    pub(crate) env: Vec<(String, String)>,
    /// Python code for an interpreter that is already running.
    pub(crate) code: Option<String>,
    /// Wall time in milliseconds.
    pub(crate) deadline_ms: u64,
    /// Limits of the sandbox.
    pub(crate) limits: Limits,
    /// Send output immediately.
    pub(crate) stream: bool,
    /// Bytes of standard input.
    pub(crate) stdin_len: usize,
    /// Paths and lengths of the files.
    pub(crate) paths: Paths,
}

/// Environment variables of every program.
pub(crate) fn base_env() -> Vec<(String, String)> {
    [
        ("HOME", "/work"),
        ("TMPDIR", "/tmp"),
        ("LANG", "C.UTF-8"),
        ("PWD", "/work"),
    ]
    .map(|(n, v)| (n.into(), v.into()))
    .to_vec()
}

/// Input of a turn: variables separated by a zero byte, two zero bytes, code.
pub(crate) fn program(env: &[(String, String)], code: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(code.len() + 64 * env.len());
    for (n, (name, value)) in env.iter().enumerate() {
        if n > 0 {
            out.push(0);
        }
        for part in [name.as_bytes(), b"=", value.as_bytes()] {
            out.extend_from_slice(part);
        }
    }
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(code.as_bytes());
    out
}

/// Paths with lengths in bytes. `None` is a folder.
pub(crate) type Paths = Vec<(String, Option<usize>)>;

/// Header of a result, followed by the files if any changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobResult {
    /// End of the program.
    pub(crate) ending: Ending,
    /// True if output was cut at the limit.
    pub(crate) truncated: bool,
    /// CPU seconds of the program.
    pub(crate) cpu_s: f64,
    /// Maximum linear memory in bytes.
    pub(crate) peak_memory_bytes: u64,
    /// Failure of the worker itself, not of the program.
    pub(crate) failure: Option<String>,
    /// True if files follow.
    pub(crate) changed: bool,
    /// Paths and lengths of the files.
    pub(crate) paths: Paths,
}

impl JobResult {
    /// Creates a result without files, usage and failures.
    pub(crate) fn new(ending: Ending) -> Self {
        Self {
            ending,
            truncated: false,
            cpu_s: 0.0,
            peak_memory_bytes: 0,
            failure: None,
            changed: false,
            paths: Vec::new(),
        }
    }
}

/// Paths and lengths of a tree, for a header.
fn paths(tree: &Tree) -> Paths {
    tree.iter()
        .map(|(path, file)| (path.clone(), file.as_ref().map(|f| f.len())))
        .collect()
}

/// Serializes the length of a header, the header, and blobs.
pub(crate) fn pack(header: &impl Serialize, blobs: &[&[u8]]) -> Result<Vec<u8>, WasmError> {
    let header = serde_json::to_vec(header)?;
    let mut out =
        Vec::with_capacity(4 + header.len() + blobs.iter().map(|b| b.len()).sum::<usize>());
    out.extend((header.len() as u32).to_le_bytes());
    out.extend(header);
    blobs.iter().for_each(|b| out.extend_from_slice(b));
    Ok(out)
}

/// Parses the header of a frame and returns the blobs after it.
///
/// # Errors
/// If the frame is shorter than its header states, or the header is not JSON of this type.
pub(crate) fn unpack<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Result<(T, &[u8]), WasmError> {
    let (len, rest) = bytes.split_first_chunk::<4>().ok_or(WasmError::Cut)?;
    let (header, blobs) = rest
        .split_at_checked(u32::from_le_bytes(*len) as usize)
        .ok_or(WasmError::Cut)?;
    Ok((serde_json::from_slice(header)?, blobs))
}

/// Files by the lengths of a header. Blobs that are too short are an error.
fn tree(paths: Paths, mut blobs: &[u8]) -> Result<Tree, WasmError> {
    let mut tree = Tree::new();
    for (path, len) in paths {
        let file = match len {
            None => None,
            Some(len) => {
                let (file, rest) = blobs.split_at_checked(len).ok_or(WasmError::Cut)?;
                blobs = rest;
                Some(file.into())
            }
        };
        tree.insert(path, file);
    }
    Ok(tree)
}

/// Contents of the files of a tree, in the order of their paths.
fn blobs(tree: &Tree) -> impl Iterator<Item = &[u8]> {
    tree.values().filter_map(|f| f.as_deref())
}

/// Serializes a job. The lengths of input and files are filled in.
pub(crate) fn pack_job(mut job: Job, stdin: &[u8], files: &Tree) -> Result<Vec<u8>, WasmError> {
    job.stdin_len = stdin.len();
    job.paths = paths(files);
    let all: Vec<&[u8]> = std::iter::once(stdin).chain(blobs(files)).collect();
    pack(&job, &all)
}

/// Parses a job, its input and its files.
pub(crate) fn unpack_job(bytes: &[u8]) -> Result<(Job, Vec<u8>, Tree), WasmError> {
    let (mut job, blobs): (Job, _) = unpack(bytes)?;
    let (stdin, blobs) = blobs
        .split_at_checked(job.stdin_len)
        .ok_or(WasmError::Cut)?;
    let files = tree(std::mem::take(&mut job.paths), blobs)?;
    Ok((job, stdin.to_vec(), files))
}

/// Serializes a result, with files only if they have changed.
pub(crate) fn pack_done(mut done: JobResult, files: Option<&Tree>) -> Result<Vec<u8>, WasmError> {
    done.changed = files.is_some();
    done.paths = files.map(paths).unwrap_or_default();
    let all: Vec<&[u8]> = files.into_iter().flat_map(blobs).collect();
    pack(&done, &all)
}

/// Parses a result. The files are `None` if they have not changed.
pub(crate) fn unpack_done(bytes: &[u8]) -> Result<(JobResult, Option<Tree>), WasmError> {
    let (mut done, blobs): (JobResult, _) = unpack(bytes)?;
    let files = tree(std::mem::take(&mut done.paths), blobs)?;
    let files = done.changed.then_some(files);
    Ok((done, files))
}

/// Header of a frame: length and kind.
pub(crate) fn head(kind: Kind, len: usize) -> [u8; 5] {
    let [a, b, c, d] = (len as u32).to_le_bytes();
    [a, b, c, d, kind as u8]
}

/// Parses the header of a frame.
///
/// # Errors
/// If the kind is unknown, or there are more than [`MAX_FRAME`] bytes, before anything is allocated.
pub(crate) fn read_head(head: [u8; 5]) -> Result<(Kind, usize), WasmError> {
    let [a, b, c, d, kind] = head;
    let len = u32::from_le_bytes([a, b, c, d]) as usize;
    let kind = Kind::of(kind).ok_or("a frame of no known kind")?;
    if len > MAX_FRAME {
        return Err(format!("a frame of {len} bytes, at most {MAX_FRAME}").into());
    }
    Ok((kind, len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn jobs_and_results_survive_a_round_trip(
            stdin in proptest::collection::vec(any::<u8>(), 0..50),
            files in proptest::collection::btree_map("[a-z/]{1,8}", proptest::option::of(proptest::collection::vec(any::<u8>(), 0..20)), 0..6),
            cut in any::<proptest::sample::Index>(),
        ) {
            let tree: Tree = files.into_iter().map(|(p, f)| (p, f.map(Into::into))).collect();
            let job = Job { module: "python".into(), code: Some("print(1)".into()), ..Job::default() };
            let bytes = pack_job(job, &stdin, &tree).unwrap();
            let (job, stdin_again, tree_again) = unpack_job(&bytes).unwrap();
            prop_assert_eq!((job.module.as_str(), &stdin_again, &tree_again), ("python", &stdin, &tree));
            prop_assert!(unpack_job(&bytes[..cut.index(bytes.len())]).is_err());
            let done = pack_done(JobResult::new(Ending::Timeout), Some(&tree)).unwrap();
            prop_assert_eq!(unpack_done(&done).unwrap().1, Some(tree));
        }
    }
}
