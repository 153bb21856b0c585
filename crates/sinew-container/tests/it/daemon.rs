//! Daemons of container engines, only for tests. The tests of `sinew-lab` use it as well.

use std::process::Command;
use std::time::Duration;

/// A daemon of only this test; it ends with the thread that started it.
pub(crate) struct Daemon {
    child: std::process::Child,
    folder: tempfile::TempDir,
}

/// Arguments of a daemon, given the paths of its own files by name.
type Args = fn(&dyn Fn(&str) -> String) -> Vec<String>;

impl Daemon {
    /// Docker's, without a network.
    pub(crate) fn start() -> Self {
        Self::run("dockerd", "docker.io", |at| {
            vec![
                "--bridge=none".into(),
                "--iptables=false".into(),
                "--log-level=warn".into(),
                format!("--data-root={}", at("data")),
                format!("--exec-root={}", at("exec")),
                format!("--pidfile={}", at("pid")),
                format!("--host=unix://{}", at("socket")),
            ]
        })
    }

    /// Podman's service, with runc: its crun refuses hosts with both versions of the groups.
    pub(crate) fn podman() -> Self {
        Self::run("podman", "podman", |at| {
            vec![
                format!("--root={}", at("data")),
                format!("--runroot={}", at("exec")),
                "--storage-driver=vfs".into(),
                "--cgroup-manager=cgroupfs".into(),
                "--runtime=/usr/sbin/runc".into(),
                "system".into(),
                "service".into(),
                "--time=0".into(),
                format!("unix://{}", at("socket")),
            ]
        })
    }

    fn run(program: &str, package: &str, args: Args) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let log = std::fs::File::create(at("log")).unwrap();
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", program])
            .args(args(&at))
            // Podman leaves a mark where it stands when memory runs out.
            .current_dir(folder.path())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|e| panic!("{program}: {e}; scripts/setup.sh installs {package}"));
        let mut daemon = Self { child, folder };
        for _ in 0..2400 {
            if std::os::unix::net::UnixStream::connect(daemon.socket()).is_ok() {
                return daemon;
            }
            if let Some(status) = daemon.child.try_wait().unwrap() {
                let log = std::fs::read_to_string(daemon.folder.path().join("log")).unwrap();
                panic!("{program} ended with {status}; scripts/setup.sh installs {package}: {log}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("{program} does not listen after 120 s");
    }

    pub(crate) fn socket(&self) -> std::path::PathBuf {
        self.folder.path().join("socket")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // SIGTERM: it ends its containers and unmounts what it mounted.
        let pid = self.child.id().to_string();
        let _ = Command::new("kill").arg(pid).status();
        let _ = self.child.wait();
    }
}
