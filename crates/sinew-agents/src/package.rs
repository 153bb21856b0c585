//! Packages of agents, with the locks by which package managers install them.

/// The package manager of a package, with its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manager {
    /// npm: the texts of `package.json` and `package-lock.json`.
    Npm {
        manifest: &'static str,
        lock: &'static str,
    },
    /// pip: requirements with hashes, installed into the folder `site`.
    Pip { requirements: &'static str },
}

/// A program with everything that it needs, installed into one folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Package {
    /// Name of the folder.
    pub name: &'static str,
    pub manager: Manager,
    /// A file in the folder without which nothing starts.
    pub program: &'static str,
}

impl Package {
    /// Text that changes with every version of every package.
    pub fn lock(&self) -> &'static str {
        match self.manager {
            Manager::Npm { lock, .. } => lock,
            Manager::Pip { requirements } => requirements,
        }
    }
}
