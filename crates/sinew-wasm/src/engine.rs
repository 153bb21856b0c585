//! Loads compiled interpreters and runs instances.

use crate::error::WasmError;
use crate::live::{Frozen, Live};
use crate::outcome::{Outcome, ended, failed, finish, store};
use crate::ticks::{Running, Ticker};
use crate::wasi::{Bounds, Host, Setting, thread_cpu};
use sinew_sandbox::{Ending, Limits};
use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};
use wasmtime::{Config, Engine, InstancePre, Linker, Module};

/// Bytes of the WebAssembly stack. Deeper recursion traps.
const WASM_STACK_BYTES: usize = 1 << 20;
/// Maximum time to start Python, and for the first empty turn of a fork.
const BOOT_TIME: Duration = Duration::from_secs(60);
/// Memory limit of Python during the start, before the program's limit applies.
const BOOT_MEMORY: u64 = 256 << 20;

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
    /// Advances the epoch while a program runs.
    ticker: Ticker,
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
    pub(crate) fn load(folder: &Path, names: &[String], warm: usize) -> Result<Self, WasmError> {
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
        let ticker = Ticker::start(engine)?;
        let mut all = Self {
            modules,
            template: None,
            waiting: VecDeque::new(),
            warm,
            ticker,
        };
        all.template = all.boot()?;
        Ok(all)
    }

    /// Starts Python once for all sandboxes. `None` if the module does not support turns.
    fn boot(&self) -> Result<Option<Frozen>, WasmError> {
        let Some(module) = self.modules.get(PYTHON) else {
            return Ok(None);
        };
        if module.module().get_export(crate::live::TABLE).is_none() {
            return Ok(None);
        }
        let mut live = {
            let _running = self.ticker.running();
            Live::boot(module, boot_setting(), python_env())?
        };
        // The first turn initializes data that forks then share.
        live.warm(self.ticker.running(), boot_setting())?;
        live.freeze().map(Some)
    }

    /// An interpreter that is ready, or a new fork of the template.
    ///
    /// # Errors
    /// If this Python has no turns: its module does not export the table of functions.
    pub(crate) fn fork(&mut self) -> Result<Live, WasmError> {
        self.waiting.pop_front().map_or_else(|| self.thaw(), Ok)
    }

    /// A new instance with the memory of the template. It costs a mapping, not a copy.
    fn thaw(&self) -> Result<Live, WasmError> {
        let template = self.template.as_ref().ok_or("this Python has no turns")?;
        let module = self.modules.get(PYTHON).ok_or("there is no Python")?;
        Live::thaw(module, template, boot_setting())
    }

    /// True if fewer instances are ready than configured.
    pub(crate) fn lacks(&self) -> bool {
        self.template.is_some() && self.waiting.len() < self.warm
    }

    /// Prepares a Python instance. It runs an empty turn, which copies the pages that every turn writes: a
    /// program then starts without page faults.
    pub(crate) fn add(&mut self) -> Result<(), WasmError> {
        let mut live = self.thaw()?;
        live.warm(self.ticker.running(), boot_setting())?;
        self.waiting.push_back(live);
        Ok(())
    }

    /// True if Python supports turns.
    pub(crate) fn has_turns(&self) -> bool {
        self.template.is_some()
    }

    /// Returns a guard that keeps the epoch ticker running.
    pub(crate) fn running(&self) -> Running {
        self.ticker.running()
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
        let _running = self.ticker.running();
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
            limits: Limits {
                memory_bytes: BOOT_MEMORY,
                output_bytes: 4096,
                work_bytes: 0,
                open_files: 64,
                ..Limits::default()
            },
            stream: false,
        },
        // The host shows it if the worker does not start.
        sink: Box::new(|_, bytes| {
            let _ = std::io::stderr().write_all(bytes);
        }),
    }
}

/// Maps compiled code into memory. Code of another wasmtime version or other settings is refused.
#[expect(unsafe_code, reason = "loading compiled code is unsafe by its nature")]
fn load(engine: &Engine, path: &Path) -> wasmtime::Result<Module> {
    // SAFETY: wasmtime compiled the file (scripts/wasm_modules.py), the host has compared its hash with the
    // manifest, and the file is on a mount that is read-only for this process.
    unsafe { Module::deserialize_file(engine, path) }
}

/// Runs a program from `_start` to its end in a new instance, which is dropped.
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
