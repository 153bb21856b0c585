//! Emulator of AMX instructions, for tests on CPUs without them.
//!
//! A CPU without AMX raises `SIGILL` at each AMX instruction. [`install`] handles the signal: it decodes the
//! instruction, executes it on tile registers in thread-local memory, and continues after it. Tests thus run
//! the same machine code as on hardware, at a few microseconds per instruction. Supported are `ldtilecfg`,
//! `tilerelease`, `tilezero`, `tileloadd`, `tileloaddt1`, `tilestored` and `tdpbf16ps`, in 64-bit code with
//! 64-bit addresses.
//!
//! On a CPU with AMX, in a process that has not requested tile registers from Linux (`arch_prctl`), only the
//! instructions that access tile data raise the signal. `ldtilecfg` and `tilerelease` run on the CPU. The
//! handler then moves the configuration out of the interrupted state, so that it notices each `ldtilecfg`
//! once. After the process has requested tile registers, no instruction raises the signal. A process
//! therefore calls [`emulated`] before
//! [`hardware`].
//!
//! # Invariants
//! * The semantics are those of the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
//! * The handler uses no allocation and no locks, so that it is safe at any instruction of any thread.
//! * An unsupported instruction, or one that would fault on hardware, ends the process by `SIGILL`, as
//!   without the handler.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]
#![expect(
    unsafe_code,
    reason = "a signal handler that accesses the memory operands of instructions"
)]

mod decode;
mod frame;
mod on;
mod tiles;

pub use decode::{Address, Instruction, decode};
pub use on::On;
pub use tiles::{Fault, ROW_BYTES, ROWS, Tile, Tiles};

use sinew_tensor::{Cpu, KernelSet, KernelSetError, amx};
use std::cell::UnsafeCell;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    /// Has no destructor and is initialized at compile time, so that the handler can use it at any time.
    static TILES: UnsafeCell<Tiles> = const { UnsafeCell::new(Tiles::new()) };
}

static PRODUCTS: AtomicU64 = AtomicU64::new(0);

/// Installs the emulator for all threads of this process. Repeated calls are allowed.
///
/// # Errors
/// The error of the system if the handler cannot be installed.
pub fn install() -> io::Result<()> {
    frame::find_config();
    // SAFETY: all zeros is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_illegal;
    action.sa_sigaction = handler as libc::sighandler_t;
    // The frame is on the thread's own stack, below its red zone, because alternate stacks have only a few
    // KiB.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
    // SAFETY: the handler is async-signal-safe, see the crate's invariants.
    let done = unsafe { libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Reason why instructions cannot be emulated in this process.
#[derive(Debug, thiserror::Error)]
pub enum EmulationError {
    /// The process has tile registers, so that instructions do not trap.
    #[error(
        "linux has granted tile registers to this process, so that their instructions no longer trap: \
         emulate them in a separate process"
    )]
    Granted,
    /// The signal handler cannot be installed.
    #[error("the signal handler cannot be installed: {0}")]
    Handler(#[from] io::Error),
    /// The CPU lacks other requirements of the kernels, or their results are wrong.
    #[error(transparent)]
    Kernels(#[from] KernelSetError),
}

/// Creates a device with emulated AMX kernels, also on CPUs with AMX. The process then requests tile
/// registers only in [`hardware`].
///
/// # Errors
/// [`EmulationError`] if the process already has tile registers, or the CPU lacks AVX-512, which the kernels
/// need in addition to tiles.
pub fn emulated(threads: usize) -> Result<Cpu, EmulationError> {
    if granted() {
        return Err(EmulationError::Granted);
    }
    install()?;
    // SAFETY: the handler is installed and never removed.
    unsafe { amx::assume_emulated() };
    Ok(Cpu::new(KernelSet::parse("amx")?, threads))
}

/// Creates a device with AMX kernels on the CPU's tiles, which it requests from the system.
///
/// # Errors
/// The missing requirement, or wrong results.
pub fn hardware(threads: usize) -> Result<Cpu, KernelSetError> {
    amx::use_hardware();
    Ok(Cpu::new(KernelSet::parse("amx")?, threads))
}

/// True if Linux has granted tile registers to this process.
#[must_use]
pub fn granted() -> bool {
    const ARCH_GET_XCOMP_PERM: libc::c_long = 0x1022;
    const XFEATURE_XTILEDATA: u64 = 1 << 18;
    let mut features = 0u64;
    // SAFETY: the call writes one word.
    let done =
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &raw mut features) };
    done == 0 && features & XFEATURE_XTILEDATA != 0
}

/// Number of `tdpbf16ps` instructions emulated in this process.
#[must_use]
pub fn products() -> u64 {
    PRODUCTS.load(Ordering::Relaxed)
}

extern "C" fn on_illegal(
    _signal: libc::c_int,
    _info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes the interrupted context, which is ours until we return.
    let machine = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext };
    // SAFETY: as above; the state is the one that the kernel wrote for this context.
    let config = unsafe { frame::take_config(machine.fpregs.cast()) };
    let registers = &mut machine.gregs;
    let at = registers[libc::REG_RIP as usize] as *const u8;
    // SAFETY: the CPU fetched an instruction there, and `decode` reads no further than it needs.
    let decoded = decode(|i| unsafe { at.add(i).read() });
    let done = decoded.is_some_and(|(instruction, length)| {
        let done = TILES.with(|tiles| {
            // SAFETY: tiles belong to this thread, which is inside this handler and nowhere else.
            let tiles = unsafe { &mut *tiles.get() };
            let configured = config.map_or(Ok(()), |config| tiles.configure(&config));
            // SAFETY: the program's own instruction names the memory, as it would on hardware.
            configured.is_ok() && unsafe { run(tiles, instruction, registers) }.is_ok()
        });
        registers[libc::REG_RIP as usize] += length as i64;
        done
    });
    if !done {
        registers[libc::REG_RIP as usize] = at as i64;
        // SAFETY: back to the default action; the instruction runs again and ends the process.
        unsafe { libc::signal(libc::SIGILL, libc::SIG_DFL) };
    }
}

/// Registers in the order of their numbers in instructions.
const NUMBERED: [libc::c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// First byte and bytes from one row to the next.
fn resolve(address: Address, registers: &[i64]) -> (usize, usize) {
    let value = |number: u8| registers[NUMBERED[usize::from(number)] as usize] as usize;
    let base = address.base.map_or(0, value);
    let stride = address
        .index
        .map_or(0, |(number, shift)| value(number) << shift);
    (
        base.wrapping_add_signed(address.displacement as isize),
        stride,
    )
}

/// # Safety
/// The memory that the instruction names is valid for what it does.
unsafe fn run(tiles: &mut Tiles, instruction: Instruction, registers: &[i64]) -> Result<(), Fault> {
    match instruction {
        Instruction::LoadConfig(address) => {
            let (from, _) = resolve(address, registers);
            // SAFETY: the instruction reads 64 bytes there.
            let config = unsafe { (from as *const [u8; 64]).read_unaligned() };
            tiles.configure(&config)
        }
        Instruction::Release => {
            tiles.release();
            Ok(())
        }
        Instruction::Zero(tile) => tiles.zero(tile),
        Instruction::Load(tile, address) => {
            let (from, stride) = resolve(address, registers);
            tiles.load(tile, |row, to| {
                let row = from.wrapping_add(row.wrapping_mul(stride)) as *const u8;
                // SAFETY: the instruction reads the bytes of this row there.
                unsafe { std::ptr::copy_nonoverlapping(row, to.as_mut_ptr(), to.len()) };
            })
        }
        Instruction::Store(tile, address) => {
            let (to, stride) = resolve(address, registers);
            tiles.store(tile, |row, from| {
                let row = to.wrapping_add(row.wrapping_mul(stride)) as *mut u8;
                // SAFETY: the instruction writes the bytes of this row there.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), row, from.len()) };
            })
        }
        Instruction::Dot { sum, a, b } => {
            PRODUCTS.fetch_add(1, Ordering::Relaxed);
            tiles.dot(sum, a, b)
        }
    }
}
