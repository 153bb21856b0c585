//! The place of an episode: a machine with a writable root, or a sandbox whose work folder stands in for one.
//!
//! In a machine, tests and logs have the paths of the format (`/tests`, `/logs`), and files are moved by the
//! sandbox itself: no program of the image takes part. In a sandbox, they are below `/tmp`, and exist only
//! while they are needed; its programs are those of the host.

use sinew_sandbox::{
    Ending, Entry, EntryKind, ExecOptions, ExecRequest, ExecResult, Program, Sandbox, SandboxError,
    UploadOptions, folder,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum bytes of a folder of the host that is put into a place.
const MAX_PUT_BYTES: u64 = 512 << 20;

/// Maximum number of files that are taken out of a sandbox.
const MAX_TAKEN: usize = 1000;

/// Folder below the work folder through which files go to other places of a sandbox.
const STAGE: &str = ".put";

/// Time for commands that move files.
const FILES: Duration = Duration::from_secs(60);

type Placed<T> = Result<T, SandboxError>;

/// Folders of a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Folder in which commands start.
    pub(crate) workdir: String,
    /// Folder of the tests while a verifier runs.
    pub(crate) tests: String,
    /// Folder of a solution while it runs.
    pub(crate) solution: String,
    /// Folder with `verifier`, `agent` and `artifacts`.
    pub(crate) logs: String,
}

/// A command in a place.
#[derive(Clone, Debug, Default)]
pub(crate) struct Command {
    pub(crate) argv: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    /// User; `None`: that of the image. In a sandbox there is only one.
    pub(crate) user: Option<String>,
    pub(crate) deadline: Duration,
}

impl Command {
    /// A script for a shell.
    pub(crate) fn shell(script: impl Into<String>, deadline: Duration) -> Self {
        Self {
            argv: vec!["/bin/sh".into(), "-c".into(), script.into()],
            deadline,
            ..Self::default()
        }
    }
}

/// A sandbox and its layout.
pub(crate) struct Place {
    pub(crate) sandbox: Box<dyn Sandbox>,
    pub(crate) layout: Layout,
    /// It has a writable root.
    pub(crate) rooted: bool,
    /// User of the image; `None`: root.
    pub(crate) user: Option<String>,
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// The error of a file on the host.
fn on_host(path: &Path, e: &std::io::Error) -> SandboxError {
    SandboxError::io(format!("read {}", path.display()), e)
}

impl Place {
    /// A machine whose image names this user.
    pub(crate) fn machine(
        sandbox: Box<dyn Sandbox>,
        workdir: String,
        user: Option<String>,
    ) -> Self {
        Self {
            sandbox,
            layout: Layout {
                workdir,
                tests: "/tests".into(),
                solution: "/solution".into(),
                logs: "/logs".into(),
            },
            rooted: true,
            user,
        }
    }

    /// A sandbox with a work folder.
    ///
    /// # Errors
    /// If it does not run a shell.
    pub(crate) async fn sandbox(mut sandbox: Box<dyn Sandbox>) -> Placed<Self> {
        let request = ExecRequest::new(Program::Shell("pwd".into()), FILES);
        let done = sandbox.exec(request).await?;
        let workdir = String::from_utf8_lossy(&done.stdout).trim_end().to_owned();
        if done.ending != (Ending::Exited { code: 0 }) || !workdir.starts_with('/') {
            return Err(SandboxError::Request {
                field: "sandbox.level",
                value: done.ending.to_string(),
                allowed: "a level whose sandboxes run a shell".into(),
            });
        }
        Ok(Self {
            layout: Layout {
                workdir,
                tests: "/tmp/tests".into(),
                solution: "/tmp/solution".into(),
                logs: "/tmp/logs".into(),
            },
            sandbox,
            rooted: false,
            user: None,
        })
    }

    /// Runs a command to its end, with all processes that it starts.
    pub(crate) async fn run(&mut self, command: Command) -> Placed<ExecResult> {
        let request = ExecRequest::new(Program::Argv(command.argv), command.deadline);
        let options = ExecOptions {
            env: command.env,
            user: command.user.filter(|_| self.rooted),
            ..ExecOptions::default()
        };
        self.sandbox.exec_with(request, options).await
    }

    /// Runs a script of the host's programs, which must succeed.
    async fn script(&mut self, script: String) -> Placed<Vec<u8>> {
        let done = self.run(Command::shell(script, FILES)).await?;
        if done.ending == (Ending::Exited { code: 0 }) {
            return Ok(done.stdout);
        }
        let why = String::from_utf8_lossy(&done.stderr);
        Err(SandboxError::io(
            "move files",
            format!("{}: {}", done.ending, why.trim()),
        ))
    }

    /// Puts the content of a folder of the host at an absolute path. `replace`: what was there is removed.
    pub(crate) async fn put(&mut self, host: &Path, to: &str, replace: bool) -> Placed<()> {
        let path = host.to_path_buf();
        let read = tokio::task::spawn_blocking(move || folder::read_folder(&path, MAX_PUT_BYTES));
        let entries = match read.await {
            Ok(read) => read.map_err(|e| on_host(host, &e))?,
            Err(e) => return Err(SandboxError::Died(e.to_string())),
        };
        self.put_entries(&entries, to, replace).await
    }

    /// Puts entries below an absolute path.
    pub(crate) async fn put_entries(
        &mut self,
        entries: &[Entry],
        to: &str,
        replace: bool,
    ) -> Placed<()> {
        if self.rooted {
            let options = UploadOptions {
                user: None,
                replace,
            };
            return self.sandbox.upload(to, entries, &options).await;
        }
        let inside = Path::new(to).strip_prefix(&self.layout.workdir);
        let staged = inside.is_err();
        let stage = inside.map_or_else(|_| PathBuf::from(STAGE), Path::to_path_buf);
        let made = format!("{}/{}", self.layout.workdir, stage.display());
        let mut script = String::from("set -e\n");
        if replace || staged {
            script += &format!("rm -rf -- {}\n", quoted(&made));
        }
        script += &format!("mkdir -p -- {}\n", quoted(&made));
        let mut modes = String::from("set -e\n");
        for entry in entries {
            let path = format!("{made}/{}", entry.path.display());
            match &entry.kind {
                EntryKind::Folder => script += &format!("mkdir -p -- {}\n", quoted(&path)),
                EntryKind::File(_) if entry.mode & 0o111 != 0 => {
                    modes += &format!("chmod 755 -- {}\n", quoted(&path));
                }
                _ => {}
            }
        }
        self.script(script).await?;
        for entry in entries {
            let path = stage.join(&entry.path);
            let path = path.to_string_lossy();
            match &entry.kind {
                EntryKind::File(bytes) => self.sandbox.write_file(&path, bytes).await?,
                EntryKind::Folder => {}
                EntryKind::Link(_) => {
                    return Err(SandboxError::Request {
                        field: "path",
                        value: path.into_owned(),
                        allowed: "files and folders; links need sandbox.level = \"container\""
                            .into(),
                    });
                }
            }
        }
        if staged {
            let (made, to) = (quoted(&made), quoted(to));
            if replace {
                modes += &format!("rm -rf -- {to}\n");
            }
            modes += &format!("mkdir -p -- {to}\ncp -a -- {made}/. {to}/\nrm -rf -- {made}\n");
        }
        self.script(modes).await.map(|_| ())
    }

    /// Removes what is at a path, and makes an empty folder there that belongs to a user, or to root.
    pub(crate) async fn empty(&mut self, path: &str, user: Option<&str>) -> Placed<()> {
        if self.rooted {
            let options = UploadOptions {
                user: user.map(str::to_owned),
                replace: true,
            };
            return self.sandbox.upload(path, &[], &options).await;
        }
        let path = quoted(path);
        let script = format!("rm -rf -- {path} && mkdir -p -- {path}");
        self.script(script).await.map(|_| ())
    }

    /// Removes what is at a path; in a machine an empty folder stays.
    pub(crate) async fn remove(&mut self, path: &str) -> Placed<()> {
        if self.rooted {
            return self.empty(path, None).await;
        }
        let script = format!("rm -rf -- {}", quoted(path));
        self.script(script).await.map(|_| ())
    }

    /// Reads a regular file; `None`: there is none.
    pub(crate) async fn read(&mut self, path: &str, max_bytes: u64) -> Placed<Option<Vec<u8>>> {
        if self.rooted {
            let found = self.sandbox.download(path, max_bytes).await?;
            let file = |entry: Entry| match entry.kind {
                EntryKind::File(bytes) => Some(bytes),
                _ => None,
            };
            let name = Path::new(path).file_name().map(PathBuf::from);
            let mut entries = found.into_iter().flatten();
            let own = entries.find(|entry| Some(&entry.path) == name.as_ref());
            return Ok(own.and_then(file));
        }
        let word = quoted(path);
        let script = format!(
            "[ -f {word} ] && [ ! -L {word} ] || exit 0\necho\nhead -c {} -- {word}",
            max_bytes.saturating_add(1)
        );
        let printed = self.script(script).await?;
        let Some(bytes) = printed.strip_prefix(b"\n") else {
            return Ok(None);
        };
        if bytes.len() as u64 > max_bytes {
            return Err(SandboxError::Request {
                field: "path",
                value: path.into(),
                allowed: format!("a file of at most {max_bytes} bytes"),
            });
        }
        Ok(Some(bytes.to_vec()))
    }

    /// Copies a file or folder out, with paths relative to it; `None`: there is none.
    ///
    /// # Errors
    /// If it is larger than the bound.
    pub(crate) async fn take(&mut self, path: &str, max_bytes: u64) -> Placed<Option<Vec<Entry>>> {
        if self.rooted {
            return self.sandbox.download(path, max_bytes).await;
        }
        let word = quoted(path);
        let list = format!(
            "[ -e {word} ] || exit 0\nif [ -f {word} ]; then echo file; exit 0; fi\necho .\ncd -- {word} && \
             find . -type f | head -n {MAX_TAKEN}"
        );
        let listed = self.script(list).await?;
        if listed == b"file\n" {
            let bytes = self.read(path, max_bytes).await?;
            let name = Path::new(path).file_name().unwrap_or_default();
            let entry = |bytes| Entry {
                path: name.into(),
                mode: 0o644,
                kind: EntryKind::File(bytes),
            };
            return Ok(bytes.map(|bytes| vec![entry(bytes)]));
        }
        let listed = String::from_utf8_lossy(&listed).into_owned();
        let mut names = listed.lines();
        if names.next().is_none() {
            return Ok(None);
        }
        let (mut left, mut entries) = (max_bytes, Vec::new());
        for name in names {
            let name = name.strip_prefix("./").unwrap_or(name);
            let file = format!("{path}/{name}");
            let bytes = self.read(&file, left).await?.unwrap_or_default();
            left = left.saturating_sub(bytes.len() as u64);
            entries.push(Entry {
                path: name.into(),
                mode: 0o644,
                kind: EntryKind::File(bytes),
            });
        }
        Ok(Some(entries))
    }
}
