//! Loads compiled interpreters and runs one instance to its end.

use crate::live::{Frozen, Live};
use crate::wasi::{Bounds, Host, Setting, Stop, thread_cpu};
use sinew_sandbox::Ending;
use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use wasmtime::{Config, Engine, InstancePre, Linker, Module, Store, Trap, UpdateDeadline};

/// How often a running program is looked at: the precision of deadlines.
const TICK: Duration = Duration::from_millis(2);
/// Stack of WebAssembly; deeper recursion traps.
const WASM_STACK_BYTES: usize = 1 << 20;
/// How long Python may take to get ready, and a fork its first empty turn.
const BOOT_TIME: Duration = Duration::from_secs(60);
/// Memory of a Python before a program's own limit holds.
const BOOT_MEMORY: usize = 256 << 20;

/// How an instance ended, and what it leaves.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) ending: Ending,
    pub(crate) truncated: bool,
    pub(crate) cpu_s: f64,
    pub(crate) peak_memory_bytes: u64,
    pub(crate) files: Option<crate::wire::Tree>,
    /// What is wrong with the worker or the module.
    pub(crate) failure: Option<String>,
}

/// Interpreters that are ready to be instantiated.
pub(crate) struct Interpreters {
    modules: BTreeMap<String, InstancePre<Host>>,
    /// Python at its first boundary, if there is one whose turns can be called.
    template: Option<Frozen>,
    /// Forks of it that no program ran in.
    waiting: VecDeque<Live>,
    warm: usize,
    running: Arc<Ticks>,
    ticker: std::thread::Thread,
}

/// What `scripts/wasm_modules.py` compiles with; other settings refuse its modules.
fn config() -> Config {
    let mut config = Config::new();
    config.epoch_interruption(true);
    config.max_wasm_stack(WASM_STACK_BYTES);
    config
}

impl Interpreters {
    /// Loads `NAME.cwasm` of a folder, by name; `warm` Pythons are kept waiting.
    pub(crate) fn load(folder: &Path, names: &[String], warm: usize) -> Result<Self, String> {
        let engine = Engine::new(&config()).map_err(|e| format!("wasm engine: {e:?}"))?;
        let mut linker = Linker::new(&engine);
        crate::calls::define(&mut linker).map_err(|e| format!("wasm interface: {e:?}"))?;
        let mut modules = BTreeMap::new();
        for name in names {
            let path = folder.join(format!("{name}.cwasm"));
            let module = load(&engine, &path).map_err(|e| format!("{}: {e:?}", path.display()))?;
            let ready = linker
                .instantiate_pre(&module)
                .map_err(|e| format!("{name}: {e:?}"))?;
            modules.insert(name.clone(), ready);
        }
        let running = Arc::<Ticks>::default();
        let counter = Arc::clone(&running);
        let ticker = std::thread::Builder::new()
            .name("epochs".into())
            .spawn(move || tick(&engine, &counter))
            .map_err(|e| format!("start a thread: {e}"))?;
        let mut all = Self {
            modules,
            template: None,
            waiting: VecDeque::new(),
            warm,
            running,
            ticker: ticker.thread().clone(),
        };
        all.template = all.boot()?;
        Ok(all)
    }

    /// Python, started once for all sandboxes. None if this one has no turns.
    fn boot(&self) -> Result<Option<Frozen>, String> {
        let Some(module) = self.modules.get(PYTHON) else {
            return Ok(None);
        };
        if module.module().get_export(crate::live::TURN).is_none() {
            return Ok(None);
        }
        let mut live = {
            let _running = Running::new(self);
            Live::boot(module, boot_setting(), python_env())?
        };
        // What a first turn makes anew, forks have.
        live.warm(Running::new(self), boot_setting())?;
        live.freeze().map(Some)
    }

    /// An interpreter that goes on from `frozen`; without it, from the first boundary.
    pub(crate) fn fork(&mut self, frozen: Option<&Frozen>) -> Result<Live, String> {
        match (frozen, self.waiting.pop_front()) {
            (None, Some(waiting)) => Ok(waiting),
            (frozen, waiting) => {
                self.waiting.extend(waiting);
                let frozen = frozen.or(self.template.as_ref());
                self.thaw(frozen.ok_or("this Python has no turns: nothing of it can be kept")?)
            }
        }
    }

    fn thaw(&self, frozen: &Frozen) -> Result<Live, String> {
        let module = self.modules.get(PYTHON).ok_or("there is no Python")?;
        Live::thaw(module, frozen, boot_setting())
    }

    /// Whether more Pythons are to wait.
    pub(crate) fn lacks(&self) -> bool {
        self.template.is_some() && self.waiting.len() < self.warm
    }

    /// Makes a Python that waits. It has run an empty turn: the pages that every turn writes are its
    /// own then.
    pub(crate) fn add(&mut self) -> Result<(), String> {
        let template = self.template.as_ref().ok_or("this Python has no turns")?;
        let mut live = self.thaw(template)?;
        live.warm(Running::new(self), boot_setting())?;
        self.waiting.push_back(live);
        Ok(())
    }

    /// Whether Python runs in turns.
    pub(crate) fn has_turns(&self) -> bool {
        self.template.is_some()
    }

    /// Keeps epochs going while it lives.
    pub(crate) fn running(&self) -> Running {
        Running::new(self)
    }

    /// Runs a fresh instance.
    pub(crate) fn run(
        &self,
        module: &str,
        args: Vec<String>,
        env: Vec<(String, String)>,
        setting: Setting,
    ) -> Outcome {
        let mut setting = setting;
        setting.bounds.cpu += thread_cpu();
        let Some(module) = self.modules.get(module) else {
            return failed(format!("no interpreter {module:?}"));
        };
        let _running = Running::new(self);
        run(module, Host::new(args, env, setting))
    }
}

/// Name of the module that is forked.
pub(crate) const PYTHON: &str = "python";

/// What the interpreter itself needs to know.
pub(crate) fn python_env() -> Vec<(String, String)> {
    [("PYTHONDONTWRITEBYTECODE", "1"), ("PYTHONNOUSERSITE", "1")]
        .map(|(n, v)| (n.into(), v.into()))
        .to_vec()
}

/// Bounds while no program runs.
fn boot_setting() -> Setting {
    Setting {
        files: crate::wire::Tree::new(),
        stdin: Vec::new(),
        bounds: Bounds {
            until: Instant::now() + BOOT_TIME,
            cpu: thread_cpu() + BOOT_TIME,
            memory_bytes: BOOT_MEMORY,
            output_bytes: 4096,
            work_bytes: 0,
            open_files: 64,
            stream: false,
        },
        // The host shows it if the worker does not come up.
        sink: Box::new(|_, bytes| {
            let _ = std::io::stderr().write_all(bytes);
        }),
    }
}

#[expect(unsafe_code, reason = "loading compiled code is unsafe by its nature")]
fn load(engine: &Engine, path: &Path) -> wasmtime::Result<Module> {
    // SAFETY: the file was compiled by wasmtime (scripts/wasm_modules.py), the host compared its
    // hash with the manifest's, and it lies on a mount that is read-only for this process.
    unsafe { Module::deserialize_file(engine, path) }
}

/// Ticks without a program after which the ticker rests: waking it costs a program time.
const LINGER: u32 = 50;

/// What running programs and the ticker share.
#[derive(Debug, Default)]
pub(crate) struct Ticks {
    running: AtomicUsize,
    resting: AtomicBool,
}

/// While one lives, epochs go on.
pub(crate) struct Running(Arc<Ticks>);

impl Running {
    fn new(interpreters: &Interpreters) -> Self {
        let ticks = Arc::clone(&interpreters.running);
        ticks.running.fetch_add(1, Ordering::SeqCst);
        if ticks.resting.swap(false, Ordering::SeqCst) {
            interpreters.ticker.unpark();
        }
        Self(ticks)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

fn tick(engine: &Engine, ticks: &Ticks) {
    let mut idle = 0;
    loop {
        idle = match ticks.running.load(Ordering::SeqCst) {
            0 => idle + 1,
            _ => 0,
        };
        if idle > LINGER {
            ticks.resting.store(true, Ordering::SeqCst);
            // Who came in between has not seen that it rests.
            while ticks.resting.load(Ordering::SeqCst) && ticks.running.load(Ordering::SeqCst) == 0
            {
                std::thread::park();
            }
            ticks.resting.store(false, Ordering::SeqCst);
            idle = 0;
        }
        std::thread::sleep(TICK);
        engine.increment_epoch();
    }
}

pub(crate) fn failed(failure: String) -> Outcome {
    Outcome {
        ending: Ending::SandboxDied,
        truncated: false,
        cpu_s: 0.0,
        peak_memory_bytes: 0,
        files: None,
        failure: Some(failure),
    }
}

/// A store whose program is looked at with every tick.
pub(crate) fn store(module: &InstancePre<Host>, host: Host) -> Store<Host> {
    let mut store = Store::new(module.module().engine(), host);
    store.limiter(|host| &mut host.ceiling);
    store.set_epoch_deadline(1);
    store.epoch_deadline_callback(|context| {
        if context.data().over() {
            return Err(wasmtime::Error::new(Stop(Ending::Timeout)));
        }
        Ok(UpdateDeadline::Continue(1))
    });
    store
}

fn run(module: &InstancePre<Host>, host: Host) -> Outcome {
    let mut store = store(module, host);
    let result = module.instantiate(&mut store).and_then(|instance| {
        let start = instance.get_typed_func::<(), ()>(&mut store, "_start")?;
        start.call(&mut store, ())
    });
    let (ending, failure) = match result {
        Ok(()) => (Ending::Exited { code: 0 }, None),
        Err(error) => ended(&error),
    };
    finish(store.data_mut(), ending, failure)
}

/// What an execution leaves.
pub(crate) fn finish(host: &mut Host, ending: Ending, failure: Option<String>) -> Outcome {
    let cpu = thread_cpu().saturating_sub(host.cpu_from);
    host.flush();
    let failed = !matches!(
        ending,
        Ending::Exited { code: 0 } | Ending::Timeout | Ending::OutputLimit
    );
    Outcome {
        ending: if failed && host.ceiling.refused {
            Ending::OutOfMemory
        } else {
            ending
        },
        truncated: host.truncated,
        cpu_s: cpu.as_secs_f64(),
        peak_memory_bytes: host.ceiling.peak as u64,
        files: host.fs.changes(),
        failure,
    }
}

/// Traps are told as the signals that native code would have died of.
pub(crate) fn ended(error: &wasmtime::Error) -> (Ending, Option<String>) {
    if let Some(Stop(ending)) = error.downcast_ref::<Stop>() {
        return (*ending, None);
    }
    const ABORT: i32 = 6;
    const FLOATING: i32 = 8;
    const SEGMENT: i32 = 11;
    let signal = match error.downcast_ref::<Trap>() {
        Some(Trap::UnreachableCodeReached) => ABORT,
        Some(
            Trap::IntegerDivisionByZero | Trap::IntegerOverflow | Trap::BadConversionToInteger,
        ) => FLOATING,
        Some(_) => SEGMENT,
        None => return (Ending::SandboxDied, Some(format!("{error:?}"))),
    };
    (Ending::Signalled { signal }, None)
}
