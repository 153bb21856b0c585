//! Executions: a program on its way into the namespaces of a sandbox.
//!
//! Namespaces and a fork of the zygote get ready in any order; `advance` does whatever has
//! become possible.

use super::Spawner;
use super::children::{Child, Role};
use super::launch::Launch;
use super::live::{Live, NO_SANDBOX};
use super::pending_exec::{PendingExec, Way, c_strings, program_packet};
use crate::error::{Error, Result, call};
use crate::protocol::{Start, send_bytes};
use crate::python::{self, BASE_ENV};
use crate::walls::{Plan, Who};
use nix::sched::{CloneFlags, setns};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;

impl Spawner {
    /// Asks for an interpreter that waits in the sandbox, if the next program is expected to need one.
    pub(super) fn warm_up(&mut self, id: u64) -> Result<()> {
        let wanted = |live: &Live| live.creation.warm && live.python_next && live.warm.is_none();
        if self.zygote.is_none() || !self.live.get(&id).is_some_and(wanted) {
            return Ok(());
        }
        let entrant = self.fork_python(id)?;
        if let Some(live) = self.live.get_mut(&id) {
            live.warm = Some(entrant);
        }
        Ok(())
    }

    /// Begins an execution; its end is the answer. `files` are standard input, output and error.
    ///
    /// # Errors
    /// Fails before anything runs: if a sandbox is busy or gone, or a program cannot be one.
    pub(super) fn exec(
        &mut self,
        id: u64,
        (seq, start): (u64, Start),
        env: Vec<(String, String)>,
        files: Vec<OwnedFd>,
    ) -> Result<()> {
        if files.len() != 3 {
            return Err(Error::Files {
                got: files.len(),
                expected: 3,
            });
        }
        let python = matches!(start, Start::Python(_));
        let live = self.idle(id)?;
        (live.run, live.python_next) = (seq, python);
        if live.init.is_none() {
            self.start_init(id)?;
        }
        self.python_last = python;
        let entrant = match start {
            Start::Python(code) if self.zygote.is_some() => self.python(id, &code, &env, files)?,
            Start::Python(code) => {
                let python = self.host.python.as_deref();
                let python = python.ok_or(Error::NoSuch("program: the image has no python3"))?;
                let argv = python::command(python.as_bytes(), code.as_bytes());
                let argv = argv.map_err(|e| Error::refused("program", e.to_string()))?;
                self.program(id, argv, env, (files, false))?
            }
            Start::Argv(argv) => self.program(id, c_strings(argv)?, env, (files, false))?,
            Start::OnTerminal(argv) => self.program(id, c_strings(argv)?, env, (files, true))?,
        };
        if let Some(live) = self.live.get_mut(&id) {
            live.running = Some(entrant);
        }
        self.advance(id);
        Ok(())
    }

    /// Code for the interpreter that waits, else for a new fork of the zygote.
    fn python(
        &mut self,
        id: u64,
        code: &str,
        env: &[(String, String)],
        files: Vec<OwnedFd>,
    ) -> Result<PendingExec> {
        let packet = program_packet(code, env)?;
        let warm = self.live.get_mut(&id).and_then(|live| live.warm.take());
        let mut entrant = match warm {
            Some(warm) => warm,
            None => self.fork_python(id)?,
        };
        if let Way::Python { program, .. } = &mut entrant.way {
            *program = Some((packet, files));
        }
        Ok(entrant)
    }

    /// A program that is started by `execve`, with the environment of the level and that of the request,
    /// which wins.
    fn program(
        &mut self,
        id: u64,
        argv: Vec<CString>,
        env: Vec<(String, String)>,
        (files, terminal): (Vec<OwnedFd>, bool),
    ) -> Result<PendingExec> {
        if argv.is_empty() {
            return Err(Error::NoSuch("program"));
        }
        let base = BASE_ENV.iter().map(|&(k, v)| (k.to_owned(), v.to_owned()));
        let env: std::collections::BTreeMap<String, String> = base.chain(env).collect();
        let env = c_strings(env.into_iter().map(|(k, v)| format!("{k}={v}")))?;
        let live = self.live.get_mut(&id).ok_or(NO_SANDBOX)?;
        // An interpreter that waits would be seen by the program, and could be killed by it.
        live.evict = live.warm.is_some();
        if let Some(child) = live.warm.as_ref().and_then(|w| w.child.as_ref()) {
            child.kill();
        }
        let serial = live.serial;
        Ok(PendingExec {
            serial,
            child: None,
            way: Way::Program {
                argv,
                env,
                files,
                terminal,
            },
        })
    }

    /// Continues the work for a sandbox after a step of its namespaces or its program has finished.
    pub(super) fn advance(&mut self, id: u64) {
        let Some(live) = self.live.get(&id) else {
            return;
        };
        let Some(init) = live.init.as_ref().filter(|init| init.ready) else {
            return;
        };
        let (serial, init) = (init.serial, Rc::clone(&init.child));
        if live.evict {
            return;
        }
        let waits = |e: &PendingExec| e.serial == serial && matches!(e.way, Way::Program { .. });
        if live.running.as_ref().is_some_and(waits)
            && let Err(why) = self.fork_program(id, &init)
        {
            self.lost(id, why.to_string());
            return;
        }
        let Some(live) = self.live.get(&id) else {
            return;
        };
        let both = [&live.running, &live.warm];
        let plan = if both.into_iter().flatten().any(PendingExec::lacks_plan) {
            Plan::confine(
                Who::Python,
                &self.host.confinement(&live.creation, live.uid()),
            )
            .encode()
        } else {
            Vec::new()
        };
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        let ruleset = live.ruleset.as_ref().map(AsRawFd::as_raw_fd);
        let given: Vec<RawFd> = [init.as_raw_fd()].into_iter().chain(ruleset).collect();
        let mut begun = false;
        let both = [live.running.as_mut(), live.warm.as_mut()];
        for entrant in both.into_iter().flatten() {
            let child = entrant.child.as_ref().filter(|_| entrant.serial == serial);
            let Some(child) = child.map(Rc::clone) else {
                continue;
            };
            entrant.enter(&plan, &given);
            if let Some((socket, packet, files)) = entrant.program() {
                live.spent.begin(&live.group, child.cpu_us().unwrap_or(0));
                begun = true;
                let raw: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
                let _ = send_bytes(socket.as_fd(), &packet, &raw);
            }
        }
        if begun {
            self.watch_cpu(id);
        }
    }

    /// Starts a program in the PID namespace of a sandbox init.
    fn fork_program(&mut self, id: u64, init: &Child) -> Result<()> {
        let live = self.live.get_mut(&id).ok_or(NO_SANDBOX)?;
        let entrant = live.running.as_mut().ok_or(Error::NoSuch("program"))?;
        let way = std::mem::replace(&mut entrant.way, Way::Started);
        let Way::Program {
            argv,
            env,
            files,
            terminal,
        } = way
        else {
            return Err(Error::NoSuch("program"));
        };
        live.spent.begin(&live.group, 0);
        let live = self.live.get(&id).ok_or(NO_SANDBOX)?;
        let launch = Launch {
            group: &live.group,
            plan: Plan::confine(
                Who::Program,
                &self.host.confinement(&live.creation, live.uid()),
            ),
            init: init.as_raw_fd(),
            ruleset: live.ruleset.as_ref().map_or(-1, AsRawFd::as_raw_fd),
            files: &files,
            terminal,
            argv: &argv,
            env: &env,
        };
        let pid_ns = CloneFlags::CLONE_NEWPID;
        setns(init.as_fd(), pid_ns).map_err(call("enter the PID namespace"))?;
        let started = launch.start();
        let home = setns(self.host.pid_ns.as_fd(), pid_ns);
        let (number, failed) = started?;
        let child = Child::of(number)?;
        self.children.watch(&child, Role::Program { id })?;
        if let Some(live) = self.live.get_mut(&id) {
            live.children += 1;
            live.failed = failed;
            if let Some(running) = &mut live.running {
                running.child = Some(child);
            }
        }
        self.watch_cpu(id);
        home.map_err(call("leave the PID namespace"))
    }
}
