//! Machine code in which the zygote waits for requests and forks, and in which a fork carries
//! out its plan ([`super::plan`]) and waits for its program before Python runs in it. Every line
//! of Python would cost more: it counts references, so both processes write to memory that the
//! other one shares, and each such page is copied. The mother of rooms ([`super::mother`]) has
//! nothing but this code.
//!
//! The code stands alone: no other code, no data, any address. `serve(socket, places, close)`
//! finds in `places`, eight bytes each: messages (struct msghdr) for requests, a plan and a
//! program; where notices go; flags of `clone`; where to put the cookie of a socket (eight bytes
//! and its length in four). Results are numbers:
//!
//! With `close` 0, `serve` receives requests from `socket`: packets of 12 bytes with two
//! descriptors, see [`super::zygote::Zygote::fork`]. For each it calls `setns` and `clone` and
//! writes a notice; -2^42 when there are no more. In children it receives a packet with
//! descriptors from the request's socket and carries out its rows: -(2^40 + step * 2^16 + errno)
//! if one failed, -2^41 if no packet came. Then the socket becomes descriptor 3, all behind it
//! are closed, and a program is awaited there with `close` 4.
//!
//! Else it receives a packet from `socket`: 0 if no three descriptors came with it; they become
//! the standard streams, all from `close` on are closed, and the result is the packet's length.
//! -2^43 if the other side is gone.
//!
//! `mother(places)` never returns. In `places`, eight bytes each: addresses and sizes of all memory
//! below and above her own, which she gives up; the socket of requests; where notices go; a message
//! for requests. She sends eight bytes of zero when she is ready and a process id or -errno for each
//! request: the cmsg_len of the descriptors that come with it (eight bytes), a notice (24 bytes), a plan. Her forks are children of her parent and first processes of new PID namespaces; they carry
//! out the plan, send the notice, as it is or changed to tell the step that failed, close everything
//! and wait for ever.

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.sinew_zygote_serve, \"ax\", @progbits",
    ".balign 16",
    // Who refers to them may be compiled into another object.
    ".globl sinew_zygote_serve, sinew_mother, sinew_zygote_serve_end",
    ".hidden sinew_zygote_serve, sinew_mother, sinew_zygote_serve_end",
    "sinew_zygote_serve:",
    "endbr64",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "sub rsp, 104",
    // Notice at rsp + 48, places at rsp + 72.
    "mov [rsp + 72], rsi",
    "mov rbx, rdi", // control
    "mov r12, rsi", // places
    "mov r13, rdx",
    "test rdx, rdx",
    "jnz 52f",
    "mov rbp, [r12]", // request
    "10:",
    "mov qword ptr [rbp + 40], 64", // msg_controllen
    "mov eax, {recvmsg}",
    "mov rdi, rbx",
    "mov rsi, rbp",
    "xor edx, edx",
    "syscall",
    "cmp rax, -4", // EINTR
    "je 10b",
    "cmp rax, 12",
    "jne 81f",
    // r13: packet, r14: descriptors (behind a struct cmsghdr).
    "mov r13, [rbp + 16]",
    "mov r13, [r13]",
    "mov r14, [rbp + 32]",
    "add r14, 16",
    "mov rax, [r13]",
    "mov [rsp + 48], rax",
    "mov eax, [r13 + 8]",
    "mov [rsp + 56], eax",
    "mov dword ptr [rsp + 60], {forked}",
    "cmp qword ptr [rbp + 40], 24",
    "jb 11f",
    "mov eax, {setns}",
    "mov edi, [r14]",
    "mov esi, {new_pid}",
    "syscall",
    "test rax, rax",
    "jnz 12f",
    "mov eax, {clone}",
    "mov rdi, [r12 + 32]",
    "xor esi, esi",
    "xor edx, edx",
    "xor r10d, r10d",
    "xor r8d, r8d",
    "syscall",
    "test rax, rax",
    "jz 19f",
    "jmp 12f",
    "11:",
    "mov qword ptr [r14], -1",
    "mov rax, -9", // EBADF
    "12:",
    "mov [rsp + 64], eax",
    "mov dword ptr [rsp + 68], 0",
    "test rax, rax",
    "jns 13f",
    "mov dword ptr [rsp + 64], -1",
    "neg eax",
    "mov [rsp + 68], eax",
    "13:",
    "mov eax, {close}",
    "mov edi, [r14]",
    "syscall",
    "mov eax, {close}",
    "mov edi, [r14 + 4]",
    "syscall",
    "14:",
    "mov eax, {write}",
    "mov rdi, [r12 + 24]",
    "lea rsi, [rsp + 48]",
    "mov edx, 24",
    "syscall",
    "cmp rax, -4",
    "je 14b",
    "jmp 10b",
    // The child: recvmsg(socket, plan, 0), again after EINTR.
    "19:",
    "mov ebx, [r14 + 4]",
    "mov [rsp + 80], ebx",
    "mov rbp, [r12 + 8]",
    "20:",
    "mov eax, {recvmsg}",
    "mov edi, ebx",
    "mov rsi, rbp",
    "xor edx, edx",
    "syscall",
    "cmp rax, -4",
    "je 20b",
    "cmp rax, 8",
    "jl 80f",
    "mov r12, [rbp + 16]",
    "mov r12, [r12]",
    "mov rbp, [rbp + 32]",
    "add rbp, 16",
    "call 30f",
    "test rax, rax",
    "js 90f",
    // The socket becomes descriptor 3, alone, and its cookie is asked for.
    "mov r12, [rsp + 72]",
    "mov edi, [rsp + 80]",
    "cmp edi, 3",
    "je 51f",
    "mov eax, {dup3}",
    "mov esi, 3",
    "xor edx, edx",
    "syscall",
    "51:",
    "mov ebx, 3",
    "mov r13d, 4",
    "mov eax, {close_range}",
    "mov edi, r13d",
    "mov esi, -1",
    "xor edx, edx",
    "syscall",
    "test rax, rax",
    "jnz 82f",
    "mov eax, {getsockopt}",
    "mov edi, ebx",
    "mov esi, {sol_socket}",
    "mov edx, {so_cookie}",
    "mov r10, [r12 + 40]",
    "lea r8, [r10 + 8]",
    "mov dword ptr [r8], 8",
    "syscall",
    // A program from socket ebx; descriptors from r13 on are closed.
    "52:",
    "mov rbp, [r12 + 16]",
    "53:",
    "mov qword ptr [rbp + 40], 64", // msg_controllen
    "mov eax, {recvmsg}",
    "mov edi, ebx",
    "mov rsi, rbp",
    "xor edx, edx",
    "syscall",
    "cmp rax, -4", // EINTR
    "je 53b",
    "test rax, rax",
    "jle 82f",
    "mov r14, rax",
    "xor eax, eax",
    "cmp qword ptr [rbp + 40], 28",
    "jb 90f",
    "mov rbp, [rbp + 32]",
    "xor r15d, r15d",
    "54:",
    "mov eax, {dup3}",
    "mov edi, [rbp + r15 * 4 + 16]",
    "mov esi, r15d",
    "xor edx, edx",
    "syscall",
    "cmp rax, r15",
    "jne 82f",
    "inc r15d",
    "cmp r15d, 3",
    "jne 54b",
    "mov eax, {close_range}",
    "mov edi, r13d",
    "mov esi, -1",
    "xor edx, edx",
    "syscall",
    "test rax, rax",
    "jnz 82f",
    "mov rax, r14",
    "jmp 90f",
    "80:",
    "xor eax, eax",
    "bts rax, 41",
    "neg rax",
    "jmp 90f",
    "81:",
    "xor eax, eax",
    "bts rax, 42",
    "neg rax",
    "jmp 90f",
    "82:",
    "xor eax, eax",
    "bts rax, 43",
    "neg rax",
    "90:",
    "add rsp, 104",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    // Carries out the plan at r12 with the slots at rbp, descriptors first; 0, or -(2^40 + step *
    // 2^16 + errno). Six arguments at rsp, r13: rows left, r14: this row, r15: blob.
    "30:",
    "sub rsp, 56",
    "mov r13, [r12]",
    "lea r14, [r12 + 8]",
    "imul r15, r13, 80",
    "add r15, r14",
    "31:",
    "test r13, r13",
    "jz 45f",
    "mov rax, [r14]",
    "cmp rax, {poke_address}",
    "jne 32f",
    "mov rdi, [r14 + 8]",
    "mov rsi, [r14 + 16]",
    "add rsi, r15",
    "mov [r15 + rdi], rsi",
    "jmp 44f",
    "32:",
    "cmp rax, {unless_more}",
    "jne 40f",
    "mov rdi, [r14 + 8]",
    "movsxd rax, dword ptr [rbp + rdi * 4]",
    "cmp rax, [r14 + 16]",
    "jg 44f",
    "add r14, 80",
    "dec r13",
    "jmp 44f",
    // Six arguments by their kinds: value, place in the blob, slot.
    "40:",
    "mov ebx, [r14 + 56]",
    "xor ecx, ecx",
    "41:",
    "mov rdx, [r14 + rcx * 8 + 8]",
    "mov eax, ebx",
    "and eax, 3",
    "jz 43f",
    "cmp eax, 1",
    "jne 42f",
    "add rdx, r15",
    "jmp 43f",
    "42:",
    "movsxd rdx, dword ptr [rbp + rdx * 4]",
    "43:",
    "mov [rsp + rcx * 8], rdx",
    "shr ebx, 2",
    "inc ecx",
    "cmp ecx, 6",
    "jne 41b",
    "mov rdi, [rsp]",
    "mov rsi, [rsp + 8]",
    "mov rdx, [rsp + 16]",
    "mov r10, [rsp + 24]",
    "mov r8, [rsp + 32]",
    "mov r9, [rsp + 40]",
    "mov rax, [r14]",
    "syscall",
    "cmp rax, -4095",
    "jae 46f",
    "mov rcx, [r14 + 64]",
    "test rcx, rcx",
    "js 44f",
    "mov [rbp + rcx * 4], eax",
    "44:",
    "add r14, 80",
    "dec r13",
    "jmp 31b",
    "45:",
    "xor eax, eax",
    "jmp 47f",
    "46:",
    "cmp qword ptr [r14 + 72], {optional}",
    "je 44b",
    "neg rax",
    "mov rdx, [r14 + 72]",
    "shl rdx, 16",
    "or rax, rdx",
    "bts rax, 40",
    "neg rax",
    "47:",
    "add rsp, 56",
    "ret",
    // rbx: places, rbp: struct msghdr, r12: socket, r13: packet, r14: descriptors (behind a struct
    // cmsghdr), r15: how many.
    "sinew_mother:",
    "endbr64",
    "sub rsp, 32",
    "mov rbx, rdi",
    "mov eax, {munmap}",
    "mov rdi, [rbx]",
    "mov rsi, [rbx + 8]",
    "syscall",
    "test rax, rax",
    "jnz 69f",
    "mov eax, {munmap}",
    "mov rdi, [rbx + 16]",
    "mov rsi, [rbx + 24]",
    "syscall",
    "test rax, rax",
    "jnz 69f",
    "mov r12, [rbx + 32]",
    "mov rbp, [rbx + 48]",
    "mov r13, [rbp + 16]",
    "mov r13, [r13]",
    "mov r14, [rbp + 32]",
    "add r14, 16",
    "xor r15d, r15d",
    "xor eax, eax",
    // Tells rax, then closes what came with the request.
    "60:",
    "mov [rsp], rax",
    "61:",
    "mov eax, {sendto}",
    "mov rdi, r12",
    "mov rsi, rsp",
    "mov edx, 8",
    "mov r10d, {no_signal}",
    "xor r8d, r8d",
    "xor r9d, r9d",
    "syscall",
    "cmp rax, -4", // EINTR
    "je 61b",
    "cmp rax, 8",
    "jne 69f",
    "62:",
    "test r15, r15",
    "jz 63f",
    "dec r15",
    "mov eax, {close}",
    "mov edi, [r14 + r15 * 4]",
    "syscall",
    "jmp 62b",
    "63:",
    "mov qword ptr [rbp + 40], 64", // msg_controllen
    "mov eax, {recvmsg}",
    "mov rdi, r12",
    "mov rsi, rbp",
    "xor edx, edx",
    "syscall",
    "cmp rax, -4",
    "je 63b",
    "test rax, rax",
    "jle 69f",
    // cmsg_len, if there is one.
    "xor edx, edx",
    "xor r15d, r15d",
    "cmp qword ptr [rbp + 40], 16",
    "jb 64f",
    "mov rdx, [r14 - 16]",
    "lea r15, [rdx - 16]",
    "shr r15, 2",
    "64:",
    "mov rax, -22", // EINVAL
    "test dword ptr [rbp + 48], {truncated}", // msg_flags
    "jnz 60b",
    "mov rax, -9", // EBADF
    "cmp rdx, [r13]",
    "jne 60b",
    "mov eax, {clone}",
    "mov edi, {room}",
    "xor esi, esi",
    "xor edx, edx",
    "xor r10d, r10d",
    "xor r8d, r8d",
    "syscall",
    "test rax, rax",
    "jnz 60b",
    // The first process of a room. Packet at rsp, where notices go at rsp + 8.
    "mov [rsp], r13",
    "mov rax, [rbx + 40]",
    "mov [rsp + 8], rax",
    "mov eax, {close}",
    "mov rdi, r12",
    "syscall",
    "lea r12, [r13 + 32]",
    "mov rbp, r14",
    "call 30b",
    "mov rbp, [rsp]",
    "add rbp, 8",
    "xor r15d, r15d",
    "test rax, rax",
    "jz 66f",
    "inc r15d",
    "neg rax",
    "movzx ecx, ax",
    "shr eax, 16",
    "mov dword ptr [rbp + 12], {failed}",
    "mov [rbp + 16], eax",
    "mov [rbp + 20], ecx",
    "66:",
    "mov eax, {write}",
    "mov rdi, [rsp + 8]",
    "mov rsi, rbp",
    "mov edx, 24",
    "syscall",
    "cmp rax, -4",
    "je 66b",
    "test r15d, r15d",
    "jnz 69f",
    "mov eax, {close_range}",
    "xor edi, edi",
    "mov esi, -1",
    "xor edx, edx",
    "syscall",
    "67:",
    "mov eax, {pause}",
    "syscall",
    "jmp 67b",
    "69:",
    "mov eax, {exit_group}",
    "mov edi, 1",
    "syscall",
    "jmp 69b",
    "sinew_zygote_serve_end:",
    ".popsection",
    clone = const libc::SYS_clone,
    setns = const libc::SYS_setns,
    new_pid = const libc::CLONE_NEWPID,
    recvmsg = const libc::SYS_recvmsg,
    close = const libc::SYS_close,
    close_range = const libc::SYS_close_range,
    dup3 = const libc::SYS_dup3,
    getsockopt = const libc::SYS_getsockopt,
    sol_socket = const libc::SOL_SOCKET,
    so_cookie = const libc::SO_COOKIE,
    write = const libc::SYS_write,
    forked = const super::messages::Notice::FORKED,
    failed = const super::messages::Notice::FAILED,
    poke_address = const super::plan::POKE_ADDRESS,
    unless_more = const super::plan::UNLESS_MORE,
    optional = const super::plan::OPTIONAL,
    munmap = const libc::SYS_munmap,
    sendto = const libc::SYS_sendto,
    pause = const libc::SYS_pause,
    exit_group = const libc::SYS_exit_group,
    no_signal = const libc::MSG_NOSIGNAL,
    truncated = const libc::MSG_TRUNC | libc::MSG_CTRUNC,
    // With CLONE_PARENT, the signal of an end is that of the mother's.
    room = const libc::CLONE_NEWPID | libc::CLONE_PARENT | libc::SIGCHLD,
);

/// The code; empty where there is none for this architecture, and Python does it.
#[cfg(target_arch = "x86_64")]
pub(super) fn code() -> &'static [u8] {
    unsafe extern "C" {
        static sinew_zygote_serve: u8;
        static sinew_zygote_serve_end: u8;
    }
    let (first, end) = (
        &raw const sinew_zygote_serve,
        &raw const sinew_zygote_serve_end,
    );
    // SAFETY: all bytes between the two labels are those of the instructions above.
    unsafe { std::slice::from_raw_parts(first, end.offset_from(first) as usize) }
}

/// Where in the code `mother` begins.
#[cfg(target_arch = "x86_64")]
pub(super) fn mother() -> usize {
    unsafe extern "C" {
        static sinew_zygote_serve: u8;
        static sinew_mother: u8;
    }
    (&raw const sinew_mother).addr() - (&raw const sinew_zygote_serve).addr()
}

/// The code; empty where there is none for this architecture, and Python does it.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn code() -> &'static [u8] {
    &[]
}

#[cfg(test)]
mod tests {
    use super::super::messages::{Notice, send_bytes};
    use super::super::zygote::source;
    use super::code;
    use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socketpair};
    use std::io::{PipeReader, Read};
    use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command, Stdio};

    /// A zygote without walls around it.
    struct Bare {
        python: Child,
        control: OwnedFd,
        notices: PipeReader,
    }

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SockFlag::SOCK_CLOEXEC;
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).expect("a pair")
    }

    /// Call, six arguments, kinds, slot, step.
    fn packet(rows: &[[i64; 10]], blob: &[u64]) -> Vec<u8> {
        let count = [rows.len() as i64];
        let numbers = count.iter().chain(rows.iter().flatten());
        let bytes = numbers.flat_map(|v| v.to_ne_bytes());
        bytes
            .chain(blob.iter().flat_map(|v| v.to_ne_bytes()))
            .collect()
    }

    impl Bare {
        fn start(source: &str) -> Self {
            let (control, theirs) = pair();
            let (notices, notices_in) = std::io::pipe().expect("a pipe");
            let boot = "import sys; exec(compile(sys.argv[1], '<zygote>', 'exec'), {'__name__': 'zygote', '__builtins__': __builtins__})";
            let mut command = Command::new("/usr/bin/python3");
            command.args(["-I", "-S", "-B", "-c", boot, source]);
            command.stdin(Stdio::null());
            let (three, four) = (theirs.as_raw_fd(), notices_in.as_raw_fd());
            // SAFETY: calls nothing but system calls between fork and exec.
            unsafe {
                command.pre_exec(move || {
                    let high = [three, four].map(|fd| libc::fcntl(fd, libc::F_DUPFD, 100));
                    libc::dup2(high[0], 3);
                    libc::dup2(high[1], 4);
                    libc::syscall(
                        libc::SYS_close_range,
                        5,
                        u32::MAX,
                        libc::CLOSE_RANGE_CLOEXEC,
                    );
                    Ok(())
                });
            }
            let python = command.spawn().expect("Debian's python3 starts");
            let mut zygote = Self {
                python,
                control,
                notices,
            };
            send_bytes(zygote.control.as_fd(), &packet(&[], &[0]), &[]).expect("a plan is sent");
            assert_eq!(zygote.notice().kind, Notice::ZYGOTE);
            zygote
        }

        fn notice(&mut self) -> Notice {
            let mut bytes = [0; Notice::BYTES];
            self.notices.read_exact(&mut bytes).expect("a notice");
            Notice::decode(&bytes)
        }

        /// Asks for a fork, gives it this plan; its socket.
        fn fork(&mut self, id: u64, plan: &[u8]) -> OwnedFd {
            let (ours, theirs) = pair();
            // SAFETY: no pointers; the descriptor is new and ours.
            let namespace = unsafe {
                let fd = libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0);
                OwnedFd::from_raw_fd(fd as RawFd)
            };
            let request = [&id.to_ne_bytes()[..], &1u32.to_ne_bytes()].concat();
            let fds = [namespace.as_raw_fd(), theirs.as_raw_fd()];
            send_bytes(self.control.as_fd(), &request, &fds).expect("a request is sent");
            let forked = self.notice();
            assert_eq!((forked.id, forked.room), (id, 1));
            assert!(
                forked.kind == Notice::FORKED && forked.value > 0,
                "{forked:?}"
            );
            send_bytes(ours.as_fd(), plan, &fds[..1]).expect("a plan is sent");
            ours
        }
    }

    /// What a program that gets these rows prints, and what comes of a row that fails.
    fn outcomes(source: &str) -> (String, Vec<u8>, (i32, i32)) {
        let mut zygote = Bare::start(source);
        // close(slot 0); umask(0o77); RLIMIT_NOFILE of this process from the blob.
        let rows = [
            [libc::SYS_close, 0, 0, 0, 0, 0, 0, 2, -1, 14],
            [libc::SYS_umask, 0o77, 0, 0, 0, 0, 0, 0, -1, 14],
            [libc::SYS_prlimit64, 0, 7, 0, 0, 0, 0, 1 << 4, -1, 6],
        ];
        let socket = zygote.fork(7, &packet(&rows, &[61, 62]));
        let (mut output, output_in) = std::io::pipe().expect("a pipe");
        let program = b"import os\nlimit = [l.split()[3:5] for l in open('/proc/self/limits') if 'open files' in l]\nprint(limit, os.umask(0), sorted(os.listdir('/proc/self/fd'))[:4])";
        let null = std::fs::File::open("/dev/null").expect("/dev/null");
        let files = [
            null.as_raw_fd(),
            output_in.as_raw_fd(),
            output_in.as_raw_fd(),
        ];
        let bytes = [&0u32.to_ne_bytes()[..], program].concat();
        send_bytes(socket.as_fd(), &bytes, &files).expect("a program is sent");
        drop(output_in);
        let mut end = vec![0; 8];
        let said = recv(socket.as_raw_fd(), &mut end, MsgFlags::empty()).expect("an end");
        end.truncate(said);
        drop(socket);
        let mut text = String::new();
        output.read_to_string(&mut text).expect("its output");
        let bad = [[libc::SYS_close, 9999, 0, 0, 0, 0, 0, 0, -1, 11]];
        let _socket = zygote.fork(8, &packet(&bad, &[0]));
        let failed = zygote.notice();
        assert_eq!((failed.id, failed.kind), (8, Notice::FAILED));
        drop(zygote.control);
        assert!(zygote.python.wait().expect("it ends").success());
        (text, end, (failed.value, failed.errno))
    }

    #[test]
    fn machine_code_and_python_carry_out_the_same() {
        let with = source();
        let hex: String = code().iter().map(|b| format!("{b:02x}")).collect();
        let without = with.replace(&hex, "");
        assert!(without.len() + 1000 < with.len(), "there is code");
        let expected = "[['61', '62']] 63 ['0', '1', '2', '3']\n".to_owned();
        let expected = (expected, b"E\0".to_vec(), (11, libc::EBADF));
        assert_eq!(outcomes(&with), expected);
        assert_eq!(outcomes(&without), expected);
    }
}
