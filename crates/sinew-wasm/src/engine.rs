//! Loads compiled interpreters and runs instances.

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

/// Interval of epoch checks, the precision of deadlines.
const TICK: Duration = Duration::from_millis(2);
/// Bytes of the WebAssembly stack. Deeper recursion traps.
const WASM_STACK_BYTES: usize = 1 << 20;
/// Maximum time to start Python, and for the first empty turn of a fork.
const BOOT_TIME: Duration = Duration::from_secs(60);
/// Memory limit of Python during the start, before the program's limit applies.
const BOOT_MEMORY: usize = 256 << 20;

/// Result of an execution.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// End of the program.
    pub(crate) ending: Ending,
    /// True if output was cut at the limit.
    pub(crate) truncated: bool,
    /// CPU seconds of the program.
    pub(crate) cpu_s: f64,
    /// Maximum linear memory in bytes.
    pub(crate) peak_memory_bytes: u64,
    /// Files after the execution, if they have changed.
    pub(crate) files: Option<crate::wire::Tree>,
    /// Failure of the worker or module, not of the program.
    pub(crate) failure: Option<String>,
}

/// Loaded interpreters, and Python instances that are ready.
pub(crate) struct Interpreters {
    /// Modules by name, with resolved imports.
    modules: BTreeMap<String, InstancePre<Host>>,
    /// Snapshot of a started Python, if the module supports turns.
    template: Option<Frozen>,
    /// Unused forks of the template.
    waiting: VecDeque<Live>,
    /// Number of forks to keep ready.
    warm: usize,
    /// State shared with the ticker.
    running: Arc<Ticks>,
    /// Thread that advances the epoch.
    ticker: std::thread::Thread,
}

/// Settings of `scripts/wasm_modules.py`. Modules compiled with other settings are refused.
fn config() -> Config {
    let mut config = Config::new();
    config.epoch_interruption(true);
    config.max_wasm_stack(WASM_STACK_BYTES);
    config
}

impl Interpreters {
    /// Loads `NAME.cwasm` from a folder for each name. Keeps `warm` Python instances ready.
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

    /// Starts Python once for all sandboxes. `None` if the module does not support turns.
    fn boot(&self) -> Result<Option<Frozen>, String> {
        let Some(module) = self.modules.get(PYTHON) else {
            return Ok(None);
        };
        if module.module().get_export(crate::live::TABLE).is_none() {
            return Ok(None);
        }
        let mut live = {
            let _running = Running::new(self);
            Live::boot(module, boot_setting(), python_env())?
        };
        // The first turn initializes data that forks then share.
        live.warm(Running::new(self), boot_setting())?;
        live.freeze().map(Some)
    }

    /// Forks an interpreter from `frozen`, or from the template.
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

    /// True if fewer instances are ready than configured.
    pub(crate) fn lacks(&self) -> bool {
        self.template.is_some() && self.waiting.len() < self.warm
    }

    /// Prepares a Python instance. It runs an empty turn, which copies the pages that every turn writes.
    pub(crate) fn add(&mut self) -> Result<(), String> {
        let template = self.template.as_ref().ok_or("this Python has no turns")?;
        let mut live = self.thaw(template)?;
        live.warm(Running::new(self), boot_setting())?;
        self.waiting.push_back(live);
        Ok(())
    }

    /// True if Python supports turns.
    pub(crate) fn has_turns(&self) -> bool {
        self.template.is_some()
    }

    /// Returns a guard that keeps the epoch ticker running.
    pub(crate) fn running(&self) -> Running {
        Running::new(self)
    }

    /// Runs a program in a new instance.
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

/// Name of the module with turns.
pub(crate) const PYTHON: &str = "python";

/// Environment variables of the interpreter itself.
pub(crate) fn python_env() -> Vec<(String, String)> {
    [("PYTHONDONTWRITEBYTECODE", "1"), ("PYTHONNOUSERSITE", "1")]
        .map(|(n, v)| (n.into(), v.into()))
        .to_vec()
}

/// Limits during the start of an interpreter.
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
        // The host shows it if the worker does not start.
        sink: Box::new(|_, bytes| {
            let _ = std::io::stderr().write_all(bytes);
        }),
    }
}

#[expect(unsafe_code, reason = "loading compiled code is unsafe by its nature")]
fn load(engine: &Engine, path: &Path) -> wasmtime::Result<Module> {
    // SAFETY: wasmtime compiled the file (scripts/wasm_modules.py), the host has compared its hash with the
    // manifest, and the file is on a mount that is read-only for this process.
    unsafe { Module::deserialize_file(engine, path) }
}

/// Ticks without a program after which the ticker pauses. Waking it delays the next program.
const LINGER: u32 = 50;

/// State shared by running programs and the ticker.
#[derive(Debug, Default)]
pub(crate) struct Ticks {
    /// Number of running programs.
    running: AtomicUsize,
    /// True while the ticker is paused.
    resting: AtomicBool,
}

/// Guard that keeps the epoch ticker running.
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
            // A program that started in between has not seen the pause.
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

/// Result of a failure of the worker itself.
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

/// Creates a store whose program checks its limits at every tick.
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

/// Collects the result of an execution.
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

/// Converts a trap to the signal that would have killed native code.
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
