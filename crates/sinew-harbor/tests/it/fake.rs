//! Machines whose files are in memory and whose programs are a function of the test.

use futures::future::BoxFuture;
use sinew_env::{ImageSource, MachineImage, MachineSpec, Machines, Sandboxes};
use sinew_sandbox::{
    Ending, Entry, EntryKind, ExecOptions, ExecRequest, ExecResult, NullProvider, Program, Sandbox,
    SandboxError, SandboxFuture, SandboxSpec, UploadOptions, Usage,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Files by their absolute paths.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// An execution as the test sees it.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Number of the machine, from 0.
    pub(crate) machine: usize,
    pub(crate) argv: Vec<String>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) user: Option<String>,
    pub(crate) deadline: Duration,
}

impl Run {
    /// Whether it is the script of the tests.
    pub(crate) fn is_verifier(&self) -> bool {
        self.argv.iter().any(|word| word.ends_with("test.sh"))
    }
}

/// Time that a program takes, its end and its output.
pub(crate) type Answer = (Duration, Ending, String);

/// A program that ends at once.
pub(crate) fn exited(code: i32, printed: &str) -> Answer {
    (Duration::ZERO, Ending::Exited { code }, printed.to_owned())
}

type Programs = dyn FnMut(&Run, &mut Files) -> Answer + Send;

/// The events of a test, and the files of each machine.
pub(crate) struct World {
    programs: Mutex<Box<Programs>>,
    pub(crate) runs: Mutex<Vec<Run>>,
    pub(crate) files: Mutex<Vec<Files>>,
    pub(crate) specs: Mutex<Vec<MachineSpec>>,
    pub(crate) sources: Mutex<Vec<ImageSource>>,
    /// User that images name; empty: root.
    pub(crate) user: Mutex<String>,
}

impl World {
    pub(crate) fn new(
        programs: impl FnMut(&Run, &mut Files) -> Answer + Send + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            programs: Mutex::new(Box::new(programs)),
            runs: Mutex::default(),
            files: Mutex::default(),
            specs: Mutex::default(),
            sources: Mutex::default(),
            user: Mutex::default(),
        })
    }

    /// Sandboxes of a recipe at level `container`, whose machines are of this world.
    pub(crate) fn sandboxes(self: &Arc<Self>) -> Sandboxes {
        Sandboxes {
            provider: Arc::new(NullProvider::default()),
            spec: SandboxSpec::default(),
            images: BTreeMap::new(),
            machines: Some(Arc::new(Fakes(Arc::clone(self)))),
            user: None,
        }
    }

    /// A file of a machine.
    pub(crate) fn file(&self, machine: usize, path: &str) -> Option<String> {
        let files = self.files.lock().unwrap();
        let bytes = files[machine].get(path)?;
        Some(String::from_utf8_lossy(bytes).into_owned())
    }
}

struct Fakes(Arc<World>);

impl Machines for Fakes {
    fn image<'a>(
        &'a self,
        source: &'a ImageSource,
        _within: Duration,
    ) -> SandboxFuture<'a, MachineImage> {
        self.0.sources.lock().unwrap().push(source.clone());
        let user = self.0.user.lock().unwrap().clone();
        Box::pin(async move {
            Ok(MachineImage {
                workdir: "/app".into(),
                user,
                ..MachineImage::default()
            })
        })
    }

    fn start<'a>(&'a self, spec: &'a MachineSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        let mut files = self.0.files.lock().unwrap();
        files.push(Files::new());
        self.0.specs.lock().unwrap().push(spec.clone());
        let fake = Fake {
            world: Arc::clone(&self.0),
            number: files.len() - 1,
        };
        Box::pin(async move { Ok(Box::new(fake) as Box<dyn Sandbox>) })
    }
}

struct Fake {
    world: Arc<World>,
    number: usize,
}

impl Fake {
    fn with<T>(&self, use_files: impl FnOnce(&mut Files) -> T) -> T {
        use_files(&mut self.world.files.lock().unwrap()[self.number])
    }
}

fn ready<'a, T: Send + 'a>(value: T) -> BoxFuture<'a, Result<T, SandboxError>> {
    Box::pin(async { Ok(value) })
}

impl Sandbox for Fake {
    fn exec_with(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> SandboxFuture<'_, ExecResult> {
        let Program::Argv(argv) = request.program else {
            panic!("commands are lists of words");
        };
        let run = Run {
            machine: self.number,
            argv,
            env: options.env.into_iter().collect(),
            user: options.user,
            deadline: request.deadline,
        };
        let mut programs = self.world.programs.lock().unwrap();
        let (time, ending, printed) = self.with(|files| (*programs)(&run, files));
        self.world.runs.lock().unwrap().push(run);
        let late = time > request.deadline;
        Box::pin(async move {
            tokio::time::sleep(time.min(request.deadline)).await;
            Ok(ExecResult {
                ending: if late { Ending::Timeout } else { ending },
                stdout: printed.into_bytes(),
                stderr: Vec::new(),
                truncated: false,
                usage: Usage::default(),
                protections: Arc::default(),
            })
        })
    }

    fn write_file<'a>(&'a mut self, _: &'a str, _: &'a [u8]) -> SandboxFuture<'a, ()> {
        panic!("machines have absolute paths")
    }

    fn read_file<'a>(&'a mut self, _: &'a str, _: u64) -> SandboxFuture<'a, Vec<u8>> {
        panic!("machines have absolute paths")
    }

    fn upload<'a>(
        &'a mut self,
        to: &'a str,
        entries: &'a [Entry],
        options: &'a UploadOptions,
    ) -> SandboxFuture<'a, ()> {
        self.with(|files| {
            if options.replace {
                files.retain(|path, _| path != to && !path.starts_with(&format!("{to}/")));
            }
            for entry in entries {
                if let EntryKind::File(bytes) = &entry.kind {
                    files.insert(format!("{to}/{}", entry.path.display()), bytes.clone());
                }
            }
        });
        ready(())
    }

    fn download<'a>(
        &'a mut self,
        path: &'a str,
        max_bytes: u64,
    ) -> SandboxFuture<'a, Option<Vec<Entry>>> {
        let entry = |path: PathBuf, bytes: &Vec<u8>| Entry {
            path,
            mode: 0o644,
            kind: EntryKind::File(bytes.clone()),
        };
        let found = self.with(|files| {
            if let Some(bytes) = files.get(path) {
                let name = Path::new(path).file_name().unwrap();
                return vec![entry(name.into(), bytes)];
            }
            let below = files.iter().filter_map(|(file, bytes)| {
                let inside = file.strip_prefix(&format!("{path}/"))?;
                Some(entry(inside.into(), bytes))
            });
            below.collect()
        });
        let size = |e: &Entry| match &e.kind {
            EntryKind::File(bytes) => bytes.len() as u64,
            _ => 0,
        };
        if found.iter().map(size).sum::<u64>() > max_bytes {
            let why = SandboxError::Request {
                field: "path",
                value: path.into(),
                allowed: "less".into(),
            };
            return Box::pin(async { Err(why) });
        }
        ready((!found.is_empty()).then_some(found))
    }

    fn destroy(self: Box<Self>) -> SandboxFuture<'static, ()> {
        ready(())
    }
}
