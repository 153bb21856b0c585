//! Loads compiled interpreters and runs one instance to its end.

use crate::wasi::{Bounds, Host, Setting, Start, Stop, thread_cpu};
use sinew_sandbox::Ending;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use wasmtime::{Config, Engine, InstancePre, Linker, Module, Store, Trap, UpdateDeadline};

/// How often a running program is looked at: the precision of deadlines.
const TICK: Duration = Duration::from_millis(2);
/// Stack of WebAssembly; deeper recursion traps.
const WASM_STACK_BYTES: usize = 1 << 20;
/// Stack of a thread that runs an instance: that of WebAssembly and of host calls above it.
const THREAD_STACK_BYTES: usize = 4 << 20;
/// An interpreter that was started early and does not ask for work by then never will.
const WARM_UP: Duration = Duration::from_secs(60);

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
    running: Arc<AtomicUsize>,
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
    /// Loads `NAME.cwasm` of a folder, by name.
    pub(crate) fn load(folder: &Path, names: &[String]) -> Result<Self, String> {
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
        let running = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&running);
        let ticker = std::thread::Builder::new()
            .name("epochs".into())
            .spawn(move || tick(&engine, &counter))
            .map_err(|e| format!("start a thread: {e}"))?;
        Ok(Self {
            modules,
            running,
            ticker: ticker.thread().clone(),
        })
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
        run(module, Host::new(args, env, setting)).0
    }

    /// Starts an instance that stops where it asks for work.
    pub(crate) fn warm(
        &self,
        module: &str,
        args: Vec<String>,
        env: Vec<(String, String)>,
    ) -> Option<SyncSender<Start>> {
        let module = self.modules.get(module)?.clone();
        let (sender, receiver) = sync_channel(1);
        let handle = (Arc::clone(&self.running), self.ticker.clone());
        std::thread::Builder::new()
            .name("instance".into())
            .stack_size(THREAD_STACK_BYTES)
            .spawn(move || wait_and_run(&module, args, env, receiver, handle))
            .ok()?;
        Some(sender)
    }
}

fn wait_and_run(
    module: &InstancePre<Host>,
    args: Vec<String>,
    env: Vec<(String, String)>,
    work: Receiver<Start>,
    (running, ticker): (Arc<AtomicUsize>, std::thread::Thread),
) {
    let counter = Arc::clone(&running);
    let waker = ticker.clone();
    let _running = Running::of(running, ticker);
    let mut host = Host::new(args, env, warm_up());
    host.waiting = Some(work);
    // Who waits for work needs no epochs.
    host.pause = Some(Box::new(move |waits| {
        if waits {
            counter.fetch_sub(1, Ordering::SeqCst);
        } else if counter.fetch_add(1, Ordering::SeqCst) == 0 {
            waker.unpark();
        }
    }));
    let (outcome, reply) = run(module, host);
    if let Some(reply) = reply {
        // Nobody waits only if the worker ends.
        let _ = reply.send(outcome);
    }
}

/// Bounds until there is work.
fn warm_up() -> Setting {
    Setting {
        files: crate::wire::Tree::new(),
        stdin: Vec::new(),
        bounds: Bounds {
            until: Instant::now() + WARM_UP,
            cpu: thread_cpu() + WARM_UP,
            memory_bytes: 256 << 20,
            output_bytes: 4096,
            work_bytes: 0,
            open_files: 64,
            stream: false,
        },
        sink: Box::new(|_, _| {}),
    }
}

#[expect(unsafe_code, reason = "loading compiled code is unsafe by its nature")]
fn load(engine: &Engine, path: &Path) -> wasmtime::Result<Module> {
    // SAFETY: the file was compiled by wasmtime (scripts/wasm_modules.py), the host compared its
    // hash with the manifest's, and it lies on a mount that is read-only for this process.
    unsafe { Module::deserialize_file(engine, path) }
}

/// While one lives, epochs go on.
struct Running(Arc<AtomicUsize>);

impl Running {
    fn new(interpreters: &Interpreters) -> Self {
        Self::of(
            Arc::clone(&interpreters.running),
            interpreters.ticker.clone(),
        )
    }

    fn of(running: Arc<AtomicUsize>, ticker: std::thread::Thread) -> Self {
        if running.fetch_add(1, Ordering::SeqCst) == 0 {
            ticker.unpark();
        }
        Self(running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn tick(engine: &Engine, running: &AtomicUsize) {
    loop {
        if running.load(Ordering::SeqCst) == 0 {
            std::thread::park();
        } else {
            std::thread::sleep(TICK);
        }
        engine.increment_epoch();
    }
}

fn failed(failure: String) -> Outcome {
    Outcome {
        ending: Ending::SandboxDied,
        truncated: false,
        cpu_s: 0.0,
        peak_memory_bytes: 0,
        files: None,
        failure: Some(failure),
    }
}

fn run(module: &InstancePre<Host>, host: Host) -> (Outcome, Option<SyncSender<Outcome>>) {
    let mut store = Store::new(module.module().engine(), host);
    store.limiter(|host| &mut host.ceiling);
    store.set_epoch_deadline(1);
    store.epoch_deadline_callback(|context| {
        if context.data().over() {
            return Err(wasmtime::Error::new(Stop(Ending::Timeout)));
        }
        Ok(UpdateDeadline::Continue(1))
    });
    let result = module.instantiate(&mut store).and_then(|instance| {
        let start = instance.get_typed_func::<(), ()>(&mut store, "_start")?;
        start.call(&mut store, ())
    });
    let host = store.data_mut();
    let cpu = thread_cpu().saturating_sub(host.cpu_from);
    host.flush();
    let (ending, failure) = match result {
        Ok(()) => (Ending::Exited { code: 0 }, None),
        Err(error) => ended(&error),
    };
    let failed = !matches!(
        ending,
        Ending::Exited { code: 0 } | Ending::Timeout | Ending::OutputLimit
    );
    let outcome = Outcome {
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
    };
    (outcome, host.reply.take())
}

/// Traps are told as the signals that native code would have died of.
fn ended(error: &wasmtime::Error) -> (Ending, Option<String>) {
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
