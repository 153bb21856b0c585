//! The program of a recipe with its paths inside a sandbox.
//!
//! A sandbox mounts only the system folders of the host (`/usr`, `/bin`, `/lib`, `/lib64`), at the same
//! paths. The folders of a script and of a virtual environment are therefore mounted below `/agent`, and the
//! command uses their paths there.

use super::error::{ProgramError, invalid, missing};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Path in the sandbox below which the program's folders are mounted.
const SHOWN: &str = "/agent";
/// Host folders that every sandbox mounts at the same path.
const SYSTEM: [&str; 4] = ["/usr", "/bin", "/lib", "/lib64"];

/// A command whose files exist on the host, with paths as seen inside a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramCommand {
    /// Program and arguments, with paths inside the sandbox.
    pub argv: Vec<String>,
    /// Folders that the sandbox must mount read-only: path on the host, and path inside.
    pub shows: Vec<(PathBuf, PathBuf)>,
}

impl ProgramCommand {
    /// Finds the files that `command` names, relative to the current folder, and mounts their folders: an
    /// interpreter's virtual environment, or a script's folder. `mounts` are mounted at the paths that they
    /// name. With an image, the program is a path inside the image.
    ///
    /// # Errors
    /// If the command is empty, a file or folder is missing, or a path cannot be shown.
    pub fn resolve(
        command: &[String],
        mounts: &BTreeMap<String, PathBuf>,
        in_image: bool,
    ) -> Result<Self, ProgramError> {
        let Some((program, arguments)) = command.split_first() else {
            return Err(invalid(
                "command",
                "is empty: allowed: a program and its arguments",
            ));
        };
        let mut made = Self {
            argv: Vec::new(),
            shows: Vec::new(),
        };
        let inside = match in_image {
            true if program.starts_with('/') => program.clone(),
            true => {
                return Err(invalid(
                    "command",
                    format!(
                        "{program}: with an image, the program is a path inside of it, as in /usr/bin/python3"
                    ),
                ));
            }
            false => made.program(program)?,
        };
        made.argv.push(inside);
        for argument in arguments {
            let path = Path::new(argument);
            let translated = if path.is_file() {
                made.file(path)?
            } else {
                argument.clone()
            };
            made.argv.push(translated);
        }
        for (inside, host) in mounts {
            made.mount(inside, host)?;
        }
        Ok(made)
    }

    /// Whether the command is a Python interpreter with a script, which the fork server can run.
    pub(super) fn is_python_script(&self) -> bool {
        let name = |at: usize| self.argv.get(at).map(String::as_str).unwrap_or_default();
        let program = Path::new(name(0)).file_name().unwrap_or_default();
        program.to_string_lossy().starts_with("python") && name(1).ends_with(".py")
    }

    /// Returns the path of the program inside the sandbox. A name without `/` is looked up in `/usr/bin` and
    /// `/bin`, which a sandbox searches, regardless of `PATH` on the host.
    fn program(&mut self, program: &str) -> Result<String, ProgramError> {
        let path = if program.contains('/') {
            PathBuf::from(program)
        } else {
            let dirs = ["/usr/bin", "/bin"].map(Path::new);
            let found = dirs
                .map(|d| d.join(program))
                .into_iter()
                .find(|p| p.is_file());
            found.ok_or_else(|| {
                missing("command", format!(
                    "no {program} in /usr/bin or /bin, the folders that a sandbox searches\n  hint: give a path, as in .cache/venv/bin/python3"
                ))
            })?
        };
        if !path.is_file() {
            return Err(missing(
                "command",
                format!(
                    "no such file: {}\n  hint: paths are relative to the current folder; scripts/setup.sh makes .cache/venv",
                    path.display()
                ),
            ));
        }
        // An interpreter outside of the system's folders is shown where its links expect it.
        let real = path.canonicalize().map_err(|e| bad(&path, &e))?;
        let own = std::path::absolute(&path).map_err(|e| bad(&path, &e))?;
        if real != own
            && !is_system(&real)
            && let Some(prefix) = real.parent().and_then(Path::parent)
        {
            self.show(prefix.into(), prefix.into());
        }
        self.file(&path)
    }

    /// Returns the path of a host file inside the sandbox. Its folder is mounted, or the whole virtual
    /// environment that contains it.
    fn file(&mut self, path: &Path) -> Result<String, ProgramError> {
        let path = std::path::absolute(path).map_err(|e| bad(path, &e))?;
        if is_system(&path) {
            return Ok(text(&path));
        }
        let folder = path.parent().unwrap_or(Path::new("/"));
        let environment = folder.parent().filter(|up| up.join("pyvenv.cfg").is_file());
        let shown = environment.unwrap_or(folder);
        if shown == Path::new("/") {
            return Err(invalid(
                "command",
                format!(
                    "{} lies in the root folder, which is not shown in a sandbox\n  hint: put the program into a folder of its own",
                    path.display()
                ),
            ));
        }
        let inside = match self.shows.iter().find(|(host, _)| host == shown) {
            Some((_, inside)) => inside.clone(),
            None => {
                let inside = Path::new(SHOWN).join(self.shows.len().to_string());
                self.show(shown.into(), inside.clone());
                inside
            }
        };
        let rest = path.strip_prefix(shown).unwrap_or(&path);
        Ok(text(&inside.join(rest)))
    }

    /// Mounts a folder at a path of the user's choice. Paths that a sandbox uses itself are refused.
    fn mount(&mut self, inside: &str, host: &Path) -> Result<(), ProgramError> {
        let target = Path::new(inside);
        let taken = ["/work", "/tmp", "/proc", "/dev", "/etc", SHOWN];
        let reserved = taken.iter().chain(&SYSTEM).any(|t| target.starts_with(t));
        let plain = target
            .components()
            .all(|c| !matches!(c, std::path::Component::ParentDir));
        if !target.is_absolute() || target == Path::new("/") || reserved || !plain {
            return Err(invalid(
                "mounts",
                format!(
                    "{inside:?}: allowed: an absolute path outside of {}",
                    taken.join(", ")
                ),
            ));
        }
        if !host.is_dir() {
            return Err(invalid(
                "mounts",
                format!(
                    "{inside:?} = {:?}: no such folder",
                    host.display().to_string()
                ),
            ));
        }
        let host = std::path::absolute(host).map_err(|e| bad(host, &e))?;
        self.show(host, target.into());
        Ok(())
    }

    /// Adds a folder to mount, unless it is already there.
    fn show(&mut self, host: PathBuf, inside: PathBuf) {
        let pair = (host, inside);
        if !self.shows.contains(&pair) {
            self.shows.push(pair);
        }
    }
}

fn is_system(path: &Path) -> bool {
    SYSTEM.iter().any(|s| path.starts_with(s))
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn bad(path: &Path, e: &std::io::Error) -> ProgramError {
    invalid("command", format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(words: &[&str]) -> Result<ProgramCommand, String> {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        ProgramCommand::resolve(&words, &BTreeMap::new(), false).map_err(|e| e.to_string())
    }

    #[test]
    fn system_programs_stand_where_they_are() {
        let shell = command(&["sh", "-c", "true"]).unwrap();
        assert!(shell.argv[0].ends_with("bin/sh"), "{shell:?}");
        assert_eq!(shell.argv[1..], ["-c", "true"]);
        assert!(shell.shows.is_empty());
        assert!(!shell.is_python_script());
    }

    #[test]
    fn scripts_and_environments_are_shown_whole() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for folder in ["venv/bin", "agents"] {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        for file in ["venv/pyvenv.cfg", "agents/a.py"] {
            std::fs::write(root.join(file), "").unwrap();
        }
        std::os::unix::fs::symlink("/bin/sh", root.join("venv/bin/python3")).unwrap();
        let python = text(&root.join("venv/bin/python3"));
        let script = text(&root.join("agents/a.py"));
        let made = command(&[&python, &script, "--fast"]).unwrap();
        assert_eq!(
            made.argv,
            ["/agent/0/bin/python3", "/agent/1/a.py", "--fast"]
        );
        let expected = [
            (root.join("venv"), PathBuf::from("/agent/0")),
            (root.join("agents"), PathBuf::from("/agent/1")),
        ];
        assert_eq!(made.shows, expected);
        assert!(made.is_python_script());
    }

    #[test]
    fn what_is_not_there_is_named() {
        for (words, needle) in [
            (&[][..], "command: is empty"),
            (&["no-such-program"], "no-such-program"),
            (&["no/such/file"], "no such file"),
        ] {
            let e = command(words).unwrap_err();
            assert!(e.contains(needle), "{e}");
        }
        let words = ["sh".to_owned()];
        let e = ProgramCommand::resolve(&words, &BTreeMap::new(), true).unwrap_err();
        assert!(e.to_string().contains("path inside of it"), "{e}");
        for (inside, host) in [
            ("/work/x", "/tmp"),
            ("relative", "/tmp"),
            ("/data", "/no/such"),
        ] {
            let mounts = BTreeMap::from([(inside.to_owned(), PathBuf::from(host))]);
            let e = ProgramCommand::resolve(&words, &mounts, false).unwrap_err();
            assert!(e.to_string().starts_with("mounts: "), "{e}");
        }
    }
}
