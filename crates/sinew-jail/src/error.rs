//! Failures of the jail: the operation, the file, and the error of the kernel.

use crate::archive::reader::ReadError;
use std::io;
use std::path::{Path, PathBuf};

/// Reason why something of a sandbox could not be made, run, read or written.
///
/// None of them is the doing of code inside, which is reported by [`Exit`](crate::protocol::Exit).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a call.
    #[error("{operation}{}: {source}{hint}", separated(path))]
    Call {
        /// The call, or the step of which it is a part.
        operation: &'static str,
        /// The file or folder, empty for a call without one.
        path: PathBuf,
        /// Holds the errno ([`io::Error::raw_os_error`]).
        source: io::Error,
        /// Way out, or empty; begins with a separator.
        hint: &'static str,
    },
    /// A request or a task names what does not exist, or does not any more.
    #[error("no such {0}")]
    NoSuch(&'static str),
    /// One program at a time runs in a sandbox, and its files are untouched meanwhile.
    #[error("something runs in it")]
    Busy,
    /// A packet came without the files that its request needs.
    #[error("{got} files, expected {expected}")]
    Files {
        /// Files that came.
        got: usize,
        /// Files that the request needs.
        expected: usize,
    },
    /// Something is larger than the spawner takes.
    #[error("{what} of {bytes} bytes, at most {max}")]
    TooLong {
        /// A message, a program, ...
        what: &'static str,
        /// Size in bytes.
        bytes: usize,
        /// The bound.
        max: usize,
    },
    /// A value of a request, or an entry of an archive, that is not allowed.
    #[error("{what}: {why}")]
    Refused {
        /// The value or the entry.
        what: String,
        /// Allowed values.
        why: String,
    },
    /// An archive that breaks a rule or a limit.
    #[error(transparent)]
    Archive(#[from] ReadError),
    /// Something that this host or this image cannot do, and why.
    #[error("{0}")]
    Unavailable(String),
    /// A message that is not JSON of its type.
    #[error("message: {0}")]
    Json(#[from] serde_json::Error),
}

/// Result of the jail's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

fn separated(path: &Path) -> String {
    if path.as_os_str().is_empty() {
        String::new()
    } else {
        format!(" {}", path.display())
    }
}

/// Reports an error at an entry of an archive.
impl From<Error> for ReadError {
    fn from(error: Error) -> Self {
        error.to_string().into()
    }
}

impl Error {
    /// The errno of the call that failed, if a call did.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Call { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// The call that set `errno` last on this thread.
    pub(crate) fn last(operation: &'static str) -> Self {
        call(operation)(io::Error::last_os_error())
    }

    pub(crate) fn refused(what: impl Into<String>, why: impl Into<String>) -> Self {
        let (what, why) = (what.into(), why.into());
        Self::Refused { what, why }
    }

    /// Adds a way out to an error of a call.
    pub(crate) fn hint(self, text: &'static str) -> Self {
        match self {
            Self::Call {
                operation,
                path,
                source,
                ..
            } => Self::Call {
                operation,
                path,
                source,
                hint: text,
            },
            other => other,
        }
    }
}

/// Adds the operation to the error of a call.
pub(crate) fn call<E: Into<io::Error>>(operation: &'static str) -> impl Fn(E) -> Error {
    move |source| Error::Call {
        operation,
        path: PathBuf::new(),
        source: source.into(),
        hint: "",
    }
}

/// Adds the operation and the file to the error of a call.
pub(crate) fn on<'a, E: Into<io::Error>>(
    operation: &'static str,
    path: &'a (impl AsRef<Path> + ?Sized),
) -> impl Fn(E) -> Error + 'a {
    move |source| Error::Call {
        operation,
        path: path.as_ref().into(),
        source: source.into(),
        hint: "",
    }
}
