//! What host and worker say to each other: frames of a length, a kind and bytes, over a stream.

use serde::{Deserialize, Serialize};
use sinew_sandbox::Ending;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Largest frame: files and standard input of one execution.
pub(crate) const MAX_FRAME: usize = 1 << 30;

/// Files of a sandbox by path; `None` is a folder.
pub(crate) type Tree = BTreeMap<String, Option<Arc<[u8]>>>;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// To the worker: run a program.
    Job,
    /// To the worker: keep the memory of a sandbox's Python.
    Freeze,
    /// To the worker: let go of sandboxes and snapshots; no answer.
    Forget,
    Stdout,
    Stderr,
    /// The last of an execution.
    Done,
    /// The worker has loaded all modules.
    Ready,
}

impl Kind {
    pub(crate) fn of(byte: u8) -> Option<Self> {
        [
            Self::Job,
            Self::Freeze,
            Self::Forget,
            Self::Stdout,
            Self::Stderr,
            Self::Done,
            Self::Ready,
        ]
        .into_iter()
        .find(|k| *k as u8 == byte)
    }
}

/// What to run, followed by the bytes of standard input and of the files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) module: String,
    pub(crate) args: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    /// Python code for an interpreter that is running already.
    pub(crate) code: Option<String>,
    /// The sandbox whose own interpreter runs it, and goes on living.
    pub(crate) place: Option<Place>,
    /// The sandbox has the files that it had after its last execution; none are sent.
    pub(crate) same_files: bool,
    pub(crate) deadline_ms: u64,
    pub(crate) cpu_ms: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) output_bytes: u64,
    pub(crate) work_bytes: u64,
    pub(crate) open_files: u64,
    /// Output as it comes.
    pub(crate) stream: bool,
    pub(crate) stdin_len: usize,
    pub(crate) paths: Paths,
}

/// A sandbox with an interpreter of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) number: u64,
    pub(crate) from: From,
}

/// Where a sandbox's interpreter comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum From {
    /// A new one.
    Start,
    /// The memory of a snapshot.
    Snapshot(u64),
    /// It is there.
    Last,
}

/// What a worker is to keep: the memory of the sandbox, under the number of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Freeze {
    pub(crate) place: u64,
    pub(crate) snapshot: u64,
}

/// Numbers of what is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Forget {
    pub(crate) places: Vec<u64>,
    pub(crate) snapshots: Vec<u64>,
}

/// Variables that every program has.
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

/// What a turn reads: variables with a zero between them, two zeros, code.
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

pub(crate) type Paths = Vec<(String, Option<usize>)>;

/// How it ended, followed by the files if any changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) ending: Ending,
    pub(crate) truncated: bool,
    pub(crate) cpu_s: f64,
    pub(crate) peak_memory_bytes: u64,
    /// What the worker itself could not do; nothing of the program's.
    pub(crate) failure: Option<String>,
    /// There is no room for another interpreter or snapshot; nothing ran.
    pub(crate) no_room: bool,
    /// The sandbox's own interpreter lives on.
    pub(crate) alive: bool,
    pub(crate) changed: bool,
    pub(crate) paths: Paths,
}

impl Done {
    pub(crate) fn new(ending: Ending) -> Self {
        Self {
            ending,
            truncated: false,
            cpu_s: 0.0,
            peak_memory_bytes: 0,
            failure: None,
            no_room: false,
            alive: false,
            changed: false,
            paths: Vec::new(),
        }
    }
}

fn paths(tree: &Tree) -> Paths {
    tree.iter()
        .map(|(path, file)| (path.clone(), file.as_ref().map(|f| f.len())))
        .collect()
}

/// Header with its length, then blobs.
pub(crate) fn pack(header: &impl Serialize, blobs: &[&[u8]]) -> Result<Vec<u8>, String> {
    let header = serde_json::to_vec(header).map_err(|e| e.to_string())?;
    let mut out =
        Vec::with_capacity(4 + header.len() + blobs.iter().map(|b| b.len()).sum::<usize>());
    out.extend((header.len() as u32).to_le_bytes());
    out.extend(header);
    blobs.iter().for_each(|b| out.extend_from_slice(b));
    Ok(out)
}

pub(crate) fn unpack<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Result<(T, &[u8]), String> {
    let cut = || "a frame was cut".to_string();
    let (len, rest) = bytes.split_first_chunk::<4>().ok_or_else(cut)?;
    let (header, blobs) = rest
        .split_at_checked(u32::from_le_bytes(*len) as usize)
        .ok_or_else(cut)?;
    Ok((
        serde_json::from_slice(header).map_err(|e| e.to_string())?,
        blobs,
    ))
}

fn tree(paths: Paths, mut blobs: &[u8]) -> Result<Tree, String> {
    let mut tree = Tree::new();
    for (path, len) in paths {
        let file = match len {
            None => None,
            Some(len) => {
                let (file, rest) = blobs.split_at_checked(len).ok_or("a frame was cut")?;
                blobs = rest;
                Some(file.into())
            }
        };
        tree.insert(path, file);
    }
    Ok(tree)
}

fn blobs(tree: &Tree) -> impl Iterator<Item = &[u8]> {
    tree.values().filter_map(|f| f.as_deref())
}

pub(crate) fn pack_job(mut job: Job, stdin: &[u8], files: &Tree) -> Result<Vec<u8>, String> {
    job.stdin_len = stdin.len();
    job.paths = paths(files);
    let all: Vec<&[u8]> = std::iter::once(stdin).chain(blobs(files)).collect();
    pack(&job, &all)
}

pub(crate) fn unpack_job(bytes: &[u8]) -> Result<(Job, Vec<u8>, Tree), String> {
    let (mut job, blobs): (Job, _) = unpack(bytes)?;
    let (stdin, blobs) = blobs
        .split_at_checked(job.stdin_len)
        .ok_or("a frame was cut")?;
    let files = tree(std::mem::take(&mut job.paths), blobs)?;
    Ok((job, stdin.to_vec(), files))
}

pub(crate) fn pack_done(mut done: Done, files: Option<&Tree>) -> Result<Vec<u8>, String> {
    done.changed = files.is_some();
    done.paths = files.map(paths).unwrap_or_default();
    let all: Vec<&[u8]> = files.into_iter().flat_map(blobs).collect();
    pack(&done, &all)
}

pub(crate) fn unpack_done(bytes: &[u8]) -> Result<(Done, Option<Tree>), String> {
    let (mut done, blobs): (Done, _) = unpack(bytes)?;
    let files = tree(std::mem::take(&mut done.paths), blobs)?;
    let files = done.changed.then_some(files);
    Ok((done, files))
}

/// Length and kind in front of a frame's bytes.
pub(crate) fn head(kind: Kind, len: usize) -> [u8; 5] {
    let [a, b, c, d] = (len as u32).to_le_bytes();
    [a, b, c, d, kind as u8]
}

/// Kind and length of a frame.
pub(crate) fn read_head(head: [u8; 5]) -> Result<(Kind, usize), String> {
    let [a, b, c, d, kind] = head;
    let len = u32::from_le_bytes([a, b, c, d]) as usize;
    let kind = Kind::of(kind).ok_or("a frame of no known kind")?;
    if len > MAX_FRAME {
        return Err(format!("a frame of {len} bytes, at most {MAX_FRAME}"));
    }
    Ok((kind, len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn jobs_and_results_come_out_as_they_went_in(
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
            let done = pack_done(Done::new(Ending::Timeout), Some(&tree)).unwrap();
            prop_assert_eq!(unpack_done(&done).unwrap().1, Some(tree));
        }
    }
}
