//! A started Python and its forks.
//!
//! A program is a turn: one step of a Python generator (`boot.py`), which ends when its program has ended.
//! The host takes the step through the slot `tp_iternext` of the generator's type, a function pointer in
//! linear memory whose place is part of CPython's public layout of type objects. This needs no symbols of
//! the module and no function number. The state of an interpreter between two turns is its linear memory,
//! globals, tables, and the descriptors of the host. A snapshot copies the memory into a memfd. A fork is a
//! new instance with a private mapping of the memfd, so that pages are shared until they are written. This
//! requires the on-demand allocator, which unmaps the memory of a dropped instance. A pooling allocator
//! would reuse the mapping for another instance.

use crate::error::WasmError;
use crate::outcome::{Outcome, ended, finish, store};
use crate::ticks::Running;
use crate::wasi::{Fd, Host, Setting};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use sinew_sandbox::Ending;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use wasmtime::{
    Extern, Global, Instance, InstancePre, Memory, Mutability, Ref, Store, Table, TypedFunc, Val,
};

/// Exit code of the boot program when it is ready for a turn.
const PARKED: i32 = 99;
/// Bytes of a WebAssembly page.
const WASM_PAGE: usize = 1 << 16;
/// Bytes of a host page. Pages of zeros are not stored.
const PAGE: usize = 4096;
/// Exported name of the table of functions, to which function pointers in linear memory are indices. The name
/// is given by `scripts/wasm_modules.py`, as modules do not export it. A module without it has no turns.
pub(crate) const TABLE: &str = "sinew_table_0";
/// Offset of `PyObject.ob_type` on 32-bit machines.
const OB_TYPE: usize = 4;
/// Offset of `PyTypeObject.tp_name` on 32-bit machines, as in all versions since 3.0.
const TP_NAME: usize = 12;
/// Offset of `PyTypeObject.tp_iternext` on 32-bit machines, as in all versions since 3.4.
const TP_ITERNEXT: usize = 112;
/// Name of the generator's type, compared before its slots are used.
const GENERATOR: &[u8] = b"generator\0";
/// Program for the warm-up. It prints nothing and defines no names.
const WARM_UP: &str = "def f(x): return [str(i) for i in range(x)]\nprint(*f(0), end='')\ndel f";

/// Boot program of Python. Each turn is a step of its generator, which reads whether the instance is new,
/// whether names are kept for the next turn, and the program. It yields `None`, which needs no reference
/// counting.
const BOOT: &str = include_str!("boot.py");
/// Runs the boot program outside of `__main__`, which stays empty for programs.
const START: &str = "import sys; exec(compile(sys.argv[1], '<boot>', 'exec'), \
                     {'__name__': 'boot', '__builtins__': __builtins__, 'main': globals()})";

/// Snapshot of an interpreter after a turn.
#[derive(Debug)]
pub(crate) struct Frozen {
    /// Memory file with the linear memory.
    memory: File,
    /// Bytes of the linear memory.
    bytes: usize,
    /// Entry of a turn.
    entry: Entry,
    /// Values of the globals.
    globals: Vec<Val>,
    /// Sizes of the tables.
    tables: Vec<u64>,
    /// Open descriptors at the snapshot.
    fds: Vec<Option<Fd>>,
}

/// Entry of a turn, the same in all forks of an interpreter.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Address of the generator in linear memory.
    generator: u32,
    /// Index of the interpreter's step function in the function table. It has the type `(i32) -> i32` and
    /// returns 0 after an exception.
    step: u32,
}

impl Entry {
    /// Reads the slot of the generator at an address that the boot program has written.
    fn read(memory: &[u8], generator: u32) -> Option<Self> {
        let word = |at: usize| {
            let bytes = memory.get(at..)?.first_chunk::<4>()?;
            Some(u32::from_le_bytes(*bytes))
        };
        let class = word(generator as usize + OB_TYPE)? as usize;
        let name = word(class + TP_NAME)? as usize;
        let is_generator = memory.get(name..)?.starts_with(GENERATOR);
        let step = word(class + TP_ITERNEXT)?;
        is_generator.then_some(Self { generator, step })
    }
}

/// An interpreter between two turns.
pub(crate) struct Live {
    /// Instance and state of the host.
    store: Store<Host>,
    /// Linear memory of the instance.
    memory: Memory,
    /// Step of the generator.
    step: TypedFunc<u32, u32>,
    /// Entry of a turn.
    entry: Entry,
    /// Globals of the instance.
    globals: Vec<Global>,
    /// Tables of the instance.
    tables: Vec<Table>,
    /// True if no turn has run in it.
    fresh: bool,
}

/// The linear memory, which every interpreter exports under this name.
fn memory(store: &mut Store<Host>, instance: &Instance) -> Result<Memory, WasmError> {
    let memory = instance.get_memory(store, "memory");
    memory.ok_or_else(|| "no memory".into())
}

/// Text of an error of wasmtime with its backtrace.
fn say(e: impl std::fmt::Debug) -> String {
    format!("{e:?}")
}

impl Live {
    /// An interpreter whose memory already holds the generator of `entry`.
    ///
    /// # Errors
    /// If the module exports no memory or table, or the step is not a function of one address that returns an
    /// address.
    fn new(mut store: Store<Host>, instance: Instance, entry: Entry) -> Result<Self, WasmError> {
        let memory = memory(&mut store, &instance)?;
        let table = instance.get_table(&mut store, TABLE).ok_or("no table")?;
        let step = match table.get(&mut store, entry.step.into()) {
            Some(Ref::Func(Some(step))) => step.typed(&store).map_err(say)?,
            _ => return Err("the step of a generator is no function".into()),
        };
        let (mut globals, mut tables) = (Vec::new(), Vec::new());
        let names: Vec<(String, Extern)> = instance
            .exports(&mut store)
            .map(|e| (e.name().to_string(), e.into_extern()))
            .collect();
        for (_, export) in names {
            match export {
                Extern::Global(g) if g.ty(&store).mutability() == Mutability::Var => {
                    globals.push(g)
                }
                Extern::Table(t) => tables.push(t),
                _ => {}
            }
        }
        Ok(Self {
            store,
            memory,
            step,
            entry,
            globals,
            tables,
            fresh: true,
        })
    }

    /// Starts an interpreter until it is ready for a turn.
    pub(crate) fn boot(
        module: &InstancePre<Host>,
        setting: Setting,
        env: Vec<(String, String)>,
    ) -> Result<Self, WasmError> {
        let args = ["python", "-S", "-B", "-c", START, BOOT].map(String::from);
        let mut host = Host::new(args.to_vec(), env, setting);
        host.boots = true;
        let mut store = store(module, host);
        let instance = module.instantiate(&mut store).map_err(say)?;
        let start = instance
            .get_typed_func::<(), ()>(&mut store, "_start")
            .map_err(say)?;
        // The boot program ends with `os._exit`. Its frames stay on the stack in linear memory, and turns run
        // above them like a callback of the host.
        let parked = match start.call(&mut store, ()) {
            Ok(()) => false,
            Err(error) => ended(&error).0 == Ending::Exited { code: PARKED },
        };
        if !parked {
            store.data_mut().flush();
            return Err("the boot program of Python did not get to its end".into());
        }
        store.data_mut().boots = false;
        let generator = store.data_mut().status.take();
        let generator = generator.and_then(|at| u32::try_from(at).ok());
        let generator = generator.ok_or("the boot program of Python wrote no address")?;
        let memory = memory(&mut store, &instance)?;
        let entry = Entry::read(memory.data(&store), generator);
        let entry = entry.ok_or("objects of this Python have another layout")?;
        Self::new(store, instance, entry)
    }

    /// Forks a snapshot. Pages are shared until they are written.
    pub(crate) fn thaw(
        module: &InstancePre<Host>,
        frozen: &Frozen,
        setting: Setting,
    ) -> Result<Self, WasmError> {
        let mut host = Host::new(Vec::new(), Vec::new(), setting);
        host.fds.clone_from(&frozen.fds);
        let mut store = store(module, host);
        let instance = module.instantiate(&mut store).map_err(say)?;
        let mut live = Self::new(store, instance, frozen.entry)?;
        let have = live.memory.data_size(&live.store);
        let more = frozen.bytes.checked_sub(have).ok_or("its memory shrank")?;
        if more > 0 {
            let grown = live.memory.grow(&mut live.store, (more / WASM_PAGE) as u64);
            grown.map_err(say)?;
        }
        live.cover(frozen)?;
        for (global, value) in live.globals.iter().zip(&frozen.globals) {
            global.set(&mut live.store, *value).map_err(say)?;
        }
        let tables: Vec<u64> = live.tables.iter().map(|t| t.size(&live.store)).collect();
        if tables != frozen.tables || live.globals.len() != frozen.globals.len() {
            return Err("its tables or globals are not those of a fresh instance".into());
        }
        Ok(live)
    }

    /// Maps a snapshot over the memory of this instance.
    #[expect(unsafe_code, reason = "mapping memory is unsafe by its nature")]
    fn cover(&mut self, frozen: &Frozen) -> Result<(), WasmError> {
        let at = self.memory.data_ptr(&self.store);
        let (read_write, how) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::FIXED,
        );
        // SAFETY: the range is the accessible part of this instance's linear memory, which nothing
        // refers to while no guest code runs; it is mapped readable and writable already, and the
        // on-demand allocator unmaps the whole reservation when the store is dropped. The file is a
        // memfd that nothing writes to after it was frozen.
        let mapped = unsafe {
            mmap(
                at.cast(),
                frozen.bytes,
                read_write,
                how,
                frozen.memory.as_fd(),
                0,
            )
        };
        match mapped {
            Ok(place) if place.cast() == at => Ok(()),
            Ok(_) => Err("the kernel mapped the memory elsewhere".into()),
            Err(e) => Err(format!("map the memory of a fork: {e}").into()),
        }
    }

    /// Takes a snapshot. This interpreter continues.
    pub(crate) fn freeze(&mut self) -> Result<Frozen, WasmError> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let memfd = rustix::fs::memfd_create("sinew-python", flags);
        let file = File::from(memfd.map_err(|e| format!("make a memfd: {e}"))?);
        let data = self.memory.data(&self.store);
        file.set_len(data.len() as u64)?;
        let zeros = [0; PAGE];
        for (n, page) in data.chunks(PAGE).enumerate() {
            if page != &zeros[..page.len()] {
                let written = file.write_all_at(page, (n * PAGE) as u64);
                written.map_err(|e| format!("freeze memory: {e}"))?;
            }
        }
        let bytes = data.len();
        let globals: Vec<Val> = self
            .globals
            .iter()
            .map(|g| g.get(&mut self.store))
            .collect();
        // References cannot be copied into another store.
        let number = |v: &Val| matches!(v, Val::I32(_) | Val::I64(_) | Val::F32(_) | Val::F64(_));
        if !globals.iter().all(number) {
            return Err("a global holds a reference: the interpreter cannot be forked".into());
        }
        Ok(Frozen {
            memory: file,
            bytes,
            entry: self.entry,
            globals,
            tables: self.tables.iter().map(|t| t.size(&self.store)).collect(),
            fds: self.store.data().saved_fds(),
        })
    }

    /// Runs a program. Returns true if this interpreter can run another one.
    pub(crate) fn run(
        &mut self,
        running: Running,
        setting: Setting,
        program: Vec<u8>,
        keep: bool,
    ) -> (Outcome, bool) {
        let flag = |yes: bool| b'0' + u8::from(yes);
        let fresh = std::mem::take(&mut self.fresh);
        let mut job = Vec::with_capacity(2 + program.len());
        job.extend([flag(fresh), flag(keep)]);
        job.extend(program);
        self.store.data_mut().begin(setting, job);
        self.store.set_epoch_deadline(1);
        let result = self.step.call(&mut self.store, self.entry.generator);
        drop(running);
        let host = self.store.data_mut();
        let status = host.status.take();
        match result {
            Ok(returned) => {
                let code = status.unwrap_or(i32::from(returned == 0));
                // A pending exception would break the next call.
                (finish(host, Ending::Exited { code }, None), returned != 0)
            }
            Err(error) => {
                let (ending, failure) = ended(&error);
                (finish(host, ending, failure), false)
            }
        }
    }

    /// Runs a warm-up turn with the usual environment. It seeds random numbers and writes to the pages that
    /// programs write to.
    pub(crate) fn warm(&mut self, running: Running, setting: Setting) -> Result<(), WasmError> {
        let program = crate::wire::program(&crate::wire::base_env(), WARM_UP);
        let (outcome, alive) = self.run(running, setting, program, true);
        if alive && outcome.0.ending == (Ending::Exited { code: 0 }) {
            Ok(())
        } else {
            Err(format!(
                "the warm-up program of Python ended with {:?}",
                outcome.0.ending
            )
            .into())
        }
    }
}
