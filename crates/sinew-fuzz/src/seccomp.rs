//! The filter of system calls, run as the kernel runs it.
//!
//! The tests of `sinew-jail` compare the filter with the list from which it is compiled. This target knows
//! nothing of the list: it states what no list may allow.

use crate::choices;
use sinew_jail::seccomp::{Filter, filter};
use std::sync::OnceLock;

/// Audit number of this machine's system calls (linux/audit.h).
#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xC000_003E;
/// Audit number of this machine's system calls (linux/audit.h).
#[cfg(not(target_arch = "x86_64"))]
const ARCH: u32 = 0xC000_00B7;

/// `SECCOMP_RET_ALLOW`, `SECCOMP_RET_KILL_PROCESS`, `SECCOMP_RET_ERRNO` (linux/seccomp.h).
const ALLOW: u32 = 0x7fff_0000;
/// `SECCOMP_RET_KILL_PROCESS`.
const KILL: u32 = 0x8000_0000;
/// `SECCOMP_RET_ERRNO`, with the number in the low 16 bits.
const ERRNO: u32 = 0x0005_0000;

/// Calls that no sandbox may make with any arguments: they mount, trace, load, configure or reach the
/// network.
const NEVER: &[i64] = &[
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_add_key,
    libc::SYS_keyctl,
    libc::SYS_request_key,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_open_by_handle_at,
    libc::SYS_mknodat,
    libc::SYS_clone3,
    libc::SYS_swapon,
    libc::SYS_sethostname,
    libc::SYS_settimeofday,
];

/// Calls of which a sandbox without TCP may make none.
const TCP: &[i64] = &[
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept4,
];

/// Runs a filter: classic BPF on `struct seccomp_data`. Panics for what the kernel refuses to load: a jump or
/// a load out of range, an unknown instruction, no return at the end.
fn answer(filter: &Filter, arch: u32, number: u32, arguments: [u64; 6]) -> u32 {
    let mut data = [0; 64];
    data[0..4].copy_from_slice(&number.to_ne_bytes());
    data[4..8].copy_from_slice(&arch.to_ne_bytes());
    for (at, argument) in arguments.into_iter().enumerate() {
        data[16 + 8 * at..24 + 8 * at].copy_from_slice(&argument.to_ne_bytes());
    }
    let word = |at: u32| {
        let bytes = data[at as usize..].first_chunk::<4>();
        u32::from_ne_bytes(*bytes.expect("a load inside of the data"))
    };
    let (mut at, mut value) = (0, 0);
    // Jumps go forward, so that it ends.
    loop {
        let i = &filter.bytes[8 * at..8 * at + 8];
        let (code, operand) = (
            u16::from_ne_bytes([i[0], i[1]]),
            u32::from_ne_bytes([i[4], i[5], i[6], i[7]]),
        );
        let jump = |holds: bool| usize::from(if holds { i[2] } else { i[3] });
        at += 1;
        match code {
            0x20 => value = word(operand),
            0x54 => value &= operand,
            0x05 => at += operand as usize,
            0x15 => at += jump(value == operand),
            0x35 => at += jump(value >= operand),
            0x06 => return operand,
            other => panic!("instruction {other:#x}"),
        }
    }
}

/// A system call with any architecture, number and arguments. Other architectures are killed, dangerous calls
/// are refused whatever their arguments, and answers do not depend on the upper half of arguments.
pub(crate) fn seccomp(data: &[u8]) {
    static FILTERS: OnceLock<[Filter; 2]> = OnceLock::new();
    let filters = FILTERS.get_or_init(|| [false, true].map(|tcp| filter(tcp).expect("a filter")));
    let ([flags, low, high], rest) = choices::<3>(data);
    let (words, _) = choices::<48>(rest);
    let arguments: [u64; 6] = std::array::from_fn(|n| {
        let bytes = words[8 * n..].first_chunk::<8>();
        u64::from_le_bytes(*bytes.expect("six arguments"))
    });
    let tcp = flags & 1 != 0;
    let number = u32::from(u16::from_le_bytes([low, high]));
    // Numbers of the x32 interface have this bit.
    let number = if flags & 2 != 0 {
        number | 1 << 30
    } else {
        number
    };
    let filter = &filters[usize::from(tcp)];
    let got = answer(filter, ARCH, number, arguments);
    let errno = got & 0xffff;
    let refused = got & 0xffff_0000 == ERRNO && errno > 0 && errno < 4096;
    assert!(got == ALLOW || got == KILL || refused, "{got:#x}");
    assert_eq!(answer(filter, ARCH ^ 1, number, arguments), KILL);
    let upper = arguments.map(|a| a ^ 0xffff_ffff_0000_0000);
    assert_eq!(answer(filter, ARCH, number, upper), got, "call {number}");
    let is = |calls: &[i64]| calls.contains(&i64::from(number));
    assert!(!(is(NEVER) && got == ALLOW), "call {number} is allowed");
    assert!(
        !(!tcp && is(TCP) && got == ALLOW),
        "call {number} reaches a network"
    );
    assert!(
        !(number >= 1 << 30 && got == ALLOW),
        "call {number:#x} is allowed"
    );
}
