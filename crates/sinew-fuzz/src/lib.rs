//! Fuzz targets: one function for each parser of input that can be hostile.
//!
//! A target takes any bytes and panics if a property does not hold. It never panics for input that its parser
//! refuses. The same functions run in two places:
//!
//! - `tests/it.rs` runs every target on the files of `corpus/` and on a fixed number of mutations of them,
//!   with seeds that never change. It is a part of every test run and takes a second or two for a target.
//! - `make fuzz TARGET=sse SECONDS=3600` runs one target in libFuzzer, which keeps inputs that reach new
//!   code.
//!
//! Invariants:
//! - A target is a function of its input alone: no clock, no network, no files but its own temporary folder.
//! - The mutations of a test run depend on the seed and the corpus alone, so that a failure can be repeated.
//!
//! A new target is a function, a row of [`TARGETS`] and a folder of the corpus. An input that breaks a
//! property becomes a test of the crate with the defect, and a file of the corpus.

mod archive;
mod harbor;
mod mutate;
mod recipe;
mod seccomp;
mod stream;
mod template;
mod tinker;
mod trace;

pub use mutate::Mutations;

use std::path::PathBuf;

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of the target and of its folder in `corpus/`.
    pub name: &'static str,
    /// Folder of other crates whose files are inputs, too, relative to the repository. Empty: none.
    pub more: &'static str,
    /// The function. It panics if a property does not hold.
    pub run: fn(&[u8]),
    /// Mutations of a test run, so that it takes about a second.
    pub mutations: u32,
    /// Texts that mean something to the parser, which mutations insert.
    pub words: &'static [&'static str],
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "trace",
        more: "crates/sinew-types/tests/data",
        run: trace::trace,
        mutations: 8_000,
        words: trace::WORDS,
    },
    Target {
        name: "store",
        more: "",
        run: trace::store,
        mutations: 40,
        words: &["FRAM", "SINEWSEG"],
    },
    Target {
        name: "chat_template",
        more: "crates/sinew-render/tests/templates",
        run: template::chat_template,
        mutations: 2_000,
        words: template::WORDS,
    },
    Target {
        name: "tool_calls",
        more: "",
        run: stream::tool_calls,
        mutations: 10_000,
        words: stream::CALL_WORDS,
    },
    Target {
        name: "sse",
        more: "",
        run: stream::sse,
        mutations: 40_000,
        words: &["data:", "data: ", "\n\n", "\r\n", "\r", "event: ", ": "],
    },
    Target {
        name: "archive",
        more: "",
        run: archive::archive,
        mutations: 10_000,
        words: archive::WORDS,
    },
    Target {
        name: "image",
        more: "",
        run: archive::image,
        mutations: 600,
        words: archive::WORDS,
    },
    Target {
        name: "recipe",
        more: "recipes",
        run: recipe::recipe,
        mutations: 2_000,
        words: recipe::WORDS,
    },
    Target {
        name: "harbor",
        more: "",
        run: harbor::harbor,
        mutations: 4_000,
        words: harbor::WORDS,
    },
    Target {
        name: "seccomp",
        more: "",
        run: seccomp::seccomp,
        mutations: 40_000,
        words: &[],
    },
    Target {
        name: "tinker",
        more: "crates/sinew-tinker/tests/fixtures",
        run: tinker::tinker,
        mutations: 20_000,
        words: tinker::WORDS,
    },
];

/// Finds a target by its name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

impl Target {
    /// Folder with the first inputs of the target.
    pub fn corpus(&self) -> PathBuf {
        let crates = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        crates.join("corpus").join(self.name)
    }

    /// First inputs, sorted by their names, so that mutations of them do not change.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn inputs(&self) -> std::io::Result<Vec<Vec<u8>>> {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut folders = vec![self.corpus()];
        if !self.more.is_empty() {
            folders.push(root.join(self.more));
        }
        let mut paths = Vec::new();
        for folder in folders {
            for entry in std::fs::read_dir(folder)? {
                let path = entry?.path();
                if path.is_file() {
                    paths.push(path);
                }
            }
        }
        paths.sort();
        paths.iter().map(std::fs::read).collect()
    }
}

/// Splits off the first `N` bytes, which choose a variant. Missing bytes are zeros.
fn choices<const N: usize>(data: &[u8]) -> ([u8; N], &[u8]) {
    let mut chosen = [0; N];
    let (head, rest) = data.split_at(data.len().min(N));
    chosen[..head.len()].copy_from_slice(head);
    (chosen, rest)
}
