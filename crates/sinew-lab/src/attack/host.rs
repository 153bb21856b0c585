//! Observes the host: traps that an escape would spring, and remains of an attack.
//!
//! The suite counts possible remains of sandboxes: processes below this one, control groups, mounts. It
//! counts before and after each attack, while one unharmed sandbox runs, and asks again for a while before it
//! calls a difference a leak: the kernel frees groups late.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher};
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Traps on the host: a secret file, a local TCP port, an abstract Unix socket.
#[derive(Debug)]
pub(crate) struct Witness {
    /// Content of the file; nobody inside can know it.
    pub(crate) secret: String,
    /// Readable by only the host, with the secret as its content.
    file: PathBuf,
    /// A connection to it has left the network namespace.
    port: TcpListener,
    /// Name of an abstract Unix socket, which lives in a network namespace and not in a file system.
    abstract_name: String,
    abstract_socket: UnixListener,
}

/// A number that no program can guess.
fn unguessable() -> u64 {
    // Keys of a `RandomState` come from the kernel's random source.
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

impl Witness {
    /// Sets the traps.
    ///
    /// # Errors
    /// If a file, a port or a socket cannot be had.
    pub(crate) fn new() -> std::io::Result<Self> {
        let id = std::process::id();
        let secret = format!("secret-{:016x}{:016x}", unguessable(), unguessable());
        let file = std::env::temp_dir().join(format!("sinew-attack-{id}"));
        std::fs::write(&file, &secret)?;
        let port = TcpListener::bind("127.0.0.1:0")?;
        port.set_nonblocking(true)?;
        let abstract_name = format!("sinew-attack-{id}");
        let address = SocketAddr::from_abstract_name(&abstract_name)?;
        let abstract_socket = UnixListener::bind_addr(&address)?;
        abstract_socket.set_nonblocking(true)?;
        Ok(Self {
            secret,
            file,
            port,
            abstract_name,
            abstract_socket,
        })
    }

    /// Addresses of the traps, in the attacker's language, without the secret itself.
    pub(crate) fn python(&self) -> String {
        let port = self.port.local_addr().map_or(0, |a| a.port());
        format!(
            "SECRET = {:?}; PORT = {port}; ABSTRACT = {:?}\n",
            self.file.to_string_lossy(),
            self.abstract_name
        )
    }

    /// Path of the secret file.
    pub(crate) fn path(&self) -> String {
        self.file.to_string_lossy().into_owned()
    }

    /// The first sprung trap.
    pub(crate) fn sprung(&self) -> Option<String> {
        let now = std::fs::read_to_string(&self.file).unwrap_or_default();
        if now != self.secret {
            return Some("a file of the host was changed".into());
        }
        let quiet = |e: std::io::Error| e.kind() == ErrorKind::WouldBlock;
        if !self.port.accept().is_err_and(quiet) {
            return Some("a TCP connection reached the host".into());
        }
        if !self.abstract_socket.accept().is_err_and(quiet) {
            return Some("an abstract Unix connection reached the host".into());
        }
        None
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

/// Looks at the host within two seconds.
pub(crate) const LOOKS: u32 = 100;

/// Counts of things on the host that belong to sandboxes of this process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Residue {
    /// Processes below this one, at any depth.
    processes: usize,
    /// Control groups of sandboxes.
    groups: usize,
    /// Mounts at places of sandboxes.
    mounts: usize,
}

impl Residue {
    /// Counts at this moment.
    pub(crate) fn now() -> Self {
        let processes = descendants(std::process::id());
        let names: Vec<String> = processes.iter().map(|p| format!("sinew-{p}-")).collect();
        let groups = ["memory", "pids", "cpuacct", "cpu,cpuacct", "unified", ""]
            .iter()
            .filter_map(|c| std::fs::read_dir(Path::new("/sys/fs/cgroup").join(c)).ok())
            .flat_map(|dir| dir.flatten())
            .filter_map(|e| e.file_name().into_string().ok())
            .filter(|n| names.iter().any(|prefix| n.starts_with(prefix)))
            .count();
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        Self {
            processes: processes.len(),
            groups,
            mounts: mounts.lines().filter(|l| of_sandboxes(l)).count(),
        }
    }

    /// Counts once `looks` counts in a row agree: living sandboxes and pools make interpreters ready for
    /// the next call.
    pub(crate) async fn settled(looks: usize) -> Self {
        let (mut last, mut still) = (Self::now(), 0);
        for _ in 0..100 {
            tokio::time::sleep(Duration::from_millis(15)).await;
            let now = Self::now();
            still = if now == last { still + 1 } else { 0 };
            last = now;
            if still == looks {
                break;
            }
        }
        last
    }

    /// Growth since then, in words. The kernel may take a moment to free groups, so this counts at most
    /// `looks` times.
    pub(crate) async fn left_since(&self, looks: u32) -> Option<String> {
        let mut left = None;
        for _ in 0..looks {
            let now = Self::now();
            left = if now.processes > self.processes {
                Some(format!(
                    "{} processes are left",
                    now.processes - self.processes
                ))
            } else if now.groups > self.groups {
                Some(format!("{} groups are left", now.groups - self.groups))
            } else if now.mounts > self.mounts {
                Some(format!("{} mounts are left", now.mounts - self.mounts))
            } else {
                return None;
            };
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        left
    }
}

/// Whether a line of `/proc/PID/mounts` is at a place where sandboxes mount in separate namespaces; the host
/// itself and others mount elsewhere meanwhile.
pub(crate) fn of_sandboxes(line: &str) -> bool {
    let point = line.split(' ').nth(1).unwrap_or_default();
    let inside = point.strip_prefix("/root").unwrap_or(point);
    let exact = ["", "/", "/work", "/tmp", "/proc", "/etc/alternatives"];
    let below = ["/sb", "/usr", "/bin", "/sbin", "/lib", "/dev"];
    exact.contains(&inside) || below.iter().any(|folder| inside.starts_with(folder))
}

/// All processes below `root`, from the host's view.
pub(crate) fn descendants(root: u32) -> HashSet<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // The fields after the name in parentheses: state, parent.
        let parent = stat.rsplit(')').next().and_then(|rest| {
            let field = rest.split_whitespace().nth(1)?;
            field.parse::<u32>().ok()
        });
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(pid);
        }
    }
    let (mut found, mut todo) = (HashSet::new(), vec![root]);
    while let Some(pid) = todo.pop() {
        for &child in children.get(&pid).into_iter().flatten() {
            if found.insert(child) {
                todo.push(child);
            }
        }
    }
    found
}
