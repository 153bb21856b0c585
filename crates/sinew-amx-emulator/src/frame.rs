//! The CPU's own tile configuration, in the state that Linux saves when it delivers a signal.
//!
//! Layout: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 13 (XSAVE), and
//! `struct _fpx_sw_bytes` in `asm/sigcontext.h`.

use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The state component that holds the configuration, and its size.
const XTILECFG: u32 = 17;
const CONFIG_BYTES: usize = 64;
/// Leaf that describes state components.
const CPUID_STATE: u32 = 0xd;
/// Offset of Linux's description of the saved state, in reserved bytes of the legacy part.
const SOFTWARE: usize = 464;
const MAGIC: u32 = 0x4650_5853;
/// Offset of the header after the legacy part. It starts with the set of saved components.
const HEADER: usize = 512;

/// Offset of the configuration. 0 before [`find_config`], and on CPUs without AMX.
static OFFSET: AtomicUsize = AtomicUsize::new(0);

/// Reads the offset of the configuration from the CPU. This is slow in a virtual machine, so that the handler
/// does not do it.
pub(crate) fn find_config() {
    if __cpuid(0).eax < CPUID_STATE {
        return;
    }
    let component = __cpuid_count(CPUID_STATE, XTILECFG);
    if component.eax as usize >= CONFIG_BYTES {
        OFFSET.store(component.ebx as usize, Ordering::Release);
    }
}

/// Removes and returns the configuration that `ldtilecfg` has set in the CPU, so that the next one found is
/// that of another `ldtilecfg`.
///
/// # Safety
/// `state` is null, or the saved state of a signal's context.
pub(crate) unsafe fn take_config(state: *mut u8) -> Option<[u8; CONFIG_BYTES]> {
    let offset = OFFSET.load(Ordering::Acquire);
    if state.is_null() || offset == 0 {
        return None;
    }
    // SAFETY: the legacy part is always present, and describes the other parts.
    unsafe {
        let software = state.add(SOFTWARE);
        let magic = software.cast::<u32>().read_unaligned();
        let features = software.add(8).cast::<u64>().read_unaligned();
        let size = software.add(16).cast::<u32>().read_unaligned() as usize;
        let bit = 1u64 << XTILECFG;
        if magic != MAGIC || features & bit == 0 || offset + CONFIG_BYTES > size {
            return None;
        }
        let saved = state.add(HEADER).cast::<u64>();
        let components = saved.read_unaligned();
        if components & bit == 0 {
            return None;
        }
        let at = state.add(offset).cast::<[u8; CONFIG_BYTES]>();
        let config = at.read_unaligned();
        // A component that is not in the set starts anew when the context is restored.
        saved.write_unaligned(components & !bit);
        (config[0] != 0).then_some(config)
    }
}
