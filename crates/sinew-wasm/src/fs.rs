//! Memory file system of a program. Pure.

use crate::wire::Tree;
use std::cell::{Cell, Ref, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// Maximum files and folders of a sandbox.
const MAX_NODES: usize = 4096;
/// Maximum bytes of a path.
const MAX_PATH_BYTES: usize = 1024;
/// Maximum depth of folders.
const MAX_DEPTH: usize = 64;
/// Folder whose files are not kept: `/tmp`.
const TMP: &str = "tmp";

/// Error numbers of WASI preview 1.
///
/// Only the numbers that this level returns. `Notcapable` is the answer to a path that leads above the
/// root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Errno {
    Acces = 2,
    Badf = 8,
    Exist = 20,
    Fault = 21,
    Inval = 28,
    Io = 29,
    Isdir = 31,
    Mfile = 33,
    Nametoolong = 37,
    Noent = 44,
    Nospc = 51,
    Notdir = 54,
    Notempty = 55,
    Notsup = 58,
    Spipe = 70,
    Notcapable = 76,
}

/// Bytes of a file. They count against the quota until both the name and all descriptors are gone.
#[derive(Debug)]
pub(crate) struct Blob {
    /// Content.
    data: RefCell<Vec<u8>>,
    /// Used bytes of all files of the sandbox.
    used: Rc<Cell<u64>>,
}

impl Blob {
    /// The bytes, for reading.
    pub(crate) fn borrow(&self) -> Ref<'_, Vec<u8>> {
        self.data.borrow()
    }
}

impl Drop for Blob {
    fn drop(&mut self) {
        let bytes = self.data.get_mut().len() as u64;
        self.used.set(self.used.get() - bytes);
    }
}

/// Shared content of a file.
pub(crate) type Content = Rc<Blob>;

/// Entry of the tree.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    /// Folder without content.
    Folder,
    /// File with its content.
    File(Content),
}

/// File tree. Paths have no leading slash, and the root is the empty path.
#[derive(Debug)]
pub(crate) struct Fs {
    /// Inode number and node by path.
    nodes: BTreeMap<String, (u64, Node)>,
    /// Next inode number.
    next_id: u64,
    /// Bytes of all files, including removed files that are still open.
    used: Rc<Cell<u64>>,
    /// Maximum bytes of all files.
    max_bytes: u64,
    /// True if kept files have changed in this execution.
    changed: bool,
    /// Number of folder changes.
    version: u64,
}

/// Resolves a path below a folder. A path above the root is an error.
pub(crate) fn resolve(folder: &str, path: &str) -> Result<String, Errno> {
    if path.starts_with('/') {
        return Err(Errno::Notcapable);
    }
    if folder.len() + path.len() > MAX_PATH_BYTES {
        return Err(Errno::Nametoolong);
    }
    let mut parts: Vec<&str> = folder.split('/').filter(|p| !p.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop().ok_or(Errno::Notcapable)?;
            }
            name => parts.push(name),
        }
    }
    if parts.len() > MAX_DEPTH {
        return Err(Errno::Nametoolong);
    }
    Ok(parts.join("/"))
}

/// New content that counts against the quota from the start.
fn content(used: &Rc<Cell<u64>>, data: Vec<u8>) -> Content {
    used.set(used.get() + data.len() as u64);
    Rc::new(Blob {
        data: RefCell::new(data),
        used: Rc::clone(used),
    })
}

/// Folder of a path. The root for a path without a slash.
fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(p, _)| p)
}

/// True for `/tmp` and everything below it, which ends with the execution.
fn in_tmp(path: &str) -> bool {
    path == TMP || path.starts_with("tmp/")
}

impl Fs {
    /// Files of a sandbox and an empty `/tmp`. Content is copied, because programs write in place.
    pub(crate) fn new(tree: &Tree, max_bytes: u64) -> Self {
        let mut fs = Self {
            nodes: BTreeMap::new(),
            next_id: 1,
            used: Rc::default(),
            max_bytes,
            changed: false,
            version: 0,
        };
        fs.put(TMP, Node::Folder);
        for (path, file) in tree {
            let node = match file {
                None => Node::Folder,
                Some(file) => Node::File(content(&fs.used, file.to_vec())),
            };
            fs.put(path, node);
        }
        fs
    }

    /// Bytes of all files, including removed files that are still open.
    pub(crate) fn bytes(&self) -> u64 {
        self.used.get()
    }

    /// Adds or replaces a node and returns its inode number, which is never used again.
    fn put(&mut self, path: &str, node: Node) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.version += 1;
        self.nodes.insert(path.into(), (id, node));
        id
    }

    /// The kept files, if they have changed.
    pub(crate) fn changes(&self) -> Option<Tree> {
        let kept = self.nodes.iter().filter(|(path, _)| !in_tmp(path));
        let tree = kept.map(|(path, (_, node))| {
            let file = match node {
                Node::Folder => None,
                Node::File(content) => Some(Arc::from(content.borrow().as_slice())),
            };
            (path.clone(), file)
        });
        self.changed.then(|| tree.collect())
    }

    /// Number of changes: created, moved or removed names.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Finds a node and its inode number.
    pub(crate) fn find(&self, path: &str) -> Result<(u64, Node), Errno> {
        if path.is_empty() {
            return Ok((0, Node::Folder));
        }
        match self.nodes.get(path) {
            Some((id, node)) => Ok((*id, node.clone())),
            None => {
                self.folder(parent(path))?;
                Err(Errno::Noent)
            }
        }
    }

    /// Checks that `path` is a folder.
    ///
    /// # Errors
    /// [`Errno::Notdir`] if it or a part of it is a file, else [`Errno::Noent`].
    fn folder(&self, path: &str) -> Result<(), Errno> {
        match self.find(path)?.1 {
            Node::Folder => Ok(()),
            Node::File(_) => Err(Errno::Notdir),
        }
    }

    /// Checks that a node can be created at `path`.
    fn check_new(&self, path: &str) -> Result<(), Errno> {
        self.folder(parent(path))?;
        if self.nodes.contains_key(path) || path.is_empty() {
            return Err(Errno::Exist);
        }
        if self.nodes.len() >= MAX_NODES {
            return Err(Errno::Nospc);
        }
        Ok(())
    }

    /// Creates an empty file.
    ///
    /// # Errors
    /// [`Errno::Exist`], or [`Errno::Nospc`] at the limit of nodes.
    pub(crate) fn create(&mut self, path: &str) -> Result<Content, Errno> {
        self.check_new(path)?;
        let content = content(&self.used, Vec::new());
        self.put(path, Node::File(Rc::clone(&content)));
        self.changed |= !in_tmp(path);
        Ok(content)
    }

    /// Creates a folder, with the errors of [`Self::create`].
    pub(crate) fn make_folder(&mut self, path: &str) -> Result<(), Errno> {
        self.check_new(path)?;
        self.put(path, Node::Folder);
        self.changed |= !in_tmp(path);
        Ok(())
    }

    /// Nodes directly in a folder, sorted by name.
    fn children<'a>(&'a self, path: &'a str) -> impl Iterator<Item = (&'a str, &'a (u64, Node))> {
        let prefix = if path.is_empty() {
            String::new()
        } else {
            format!("{path}/")
        };
        let from = prefix.clone();
        let below = self
            .nodes
            .range(from..)
            .take_while(move |(p, _)| p.starts_with(&prefix));
        let skip = if path.is_empty() { 0 } else { path.len() + 1 };
        below.filter_map(move |(p, node)| {
            let name = &p[skip..];
            (!name.contains('/')).then_some((name, node))
        })
    }

    /// Entries of a folder: name, inode number, and true for folders.
    pub(crate) fn list(&self, path: &str) -> Result<Vec<(String, u64, bool)>, Errno> {
        self.folder(path)?;
        let entries = self.children(path);
        Ok(entries
            .map(|(name, (id, node))| (name.to_string(), *id, matches!(node, Node::Folder)))
            .collect())
    }

    /// Removes a name. Open descriptors keep the content until they are closed.
    pub(crate) fn remove_file(&mut self, path: &str) -> Result<(), Errno> {
        match self.find(path)?.1 {
            Node::Folder => Err(Errno::Isdir),
            Node::File(_) => {
                // An open descriptor keeps the content, which counts against the quota until it is closed.
                self.nodes.remove(path);
                self.version += 1;
                self.changed |= !in_tmp(path);
                Ok(())
            }
        }
    }

    /// Removes an empty folder. The root and `/tmp` cannot be removed.
    pub(crate) fn remove_folder(&mut self, path: &str) -> Result<(), Errno> {
        if path.is_empty() || path == TMP {
            return Err(Errno::Acces);
        }
        if matches!(self.find(path)?.1, Node::File(_)) {
            return Err(Errno::Notdir);
        }
        if self.children(path).next().is_some() {
            return Err(Errno::Notempty);
        }
        self.nodes.remove(path);
        self.version += 1;
        self.changed |= !in_tmp(path);
        Ok(())
    }

    /// Moves a node with everything below it. A file replaces a file, and a folder replaces an empty
    /// folder.
    ///
    /// # Errors
    /// [`Errno::Acces`] for the root and `/tmp`, [`Errno::Inval`] for a folder that would be below itself.
    pub(crate) fn rename(&mut self, from: &str, to: &str) -> Result<(), Errno> {
        let (_, node) = self.find(from)?;
        if [from, to].iter().any(|p| p.is_empty() || *p == TMP) {
            return Err(Errno::Acces);
        }
        if from == to {
            return Ok(());
        }
        let below = format!("{from}/");
        if to.starts_with(&below) {
            return Err(Errno::Inval);
        }
        self.folder(parent(to))?;
        match (self.find(to), &node) {
            (Err(Errno::Noent), _) => {}
            (Err(e), _) => return Err(e),
            (Ok((_, Node::Folder)), Node::File(_)) => return Err(Errno::Isdir),
            (Ok((_, Node::File(_))), Node::Folder) => return Err(Errno::Notdir),
            (Ok((_, Node::Folder)), Node::Folder) => self.remove_folder(to)?,
            (Ok((_, Node::File(_))), Node::File(_)) => self.remove_file(to)?,
        }
        let paths: Vec<String> = self
            .nodes
            .range(below.clone()..)
            .map(|(p, _)| p)
            .take_while(|p| p.starts_with(&below))
            .cloned()
            .collect();
        for path in std::iter::once(from.to_string()).chain(paths) {
            if let Some(node) = self.nodes.remove(&path) {
                self.nodes
                    .insert(format!("{to}{}", &path[from.len()..]), node);
            }
        }
        self.version += 1;
        self.changed = true;
        Ok(())
    }

    /// Changes the length of a file within the quota.
    pub(crate) fn resize(&mut self, content: &Content, len: u64) -> Result<(), Errno> {
        let old = content.borrow().len() as u64;
        let total = self.bytes().saturating_sub(old).saturating_add(len);
        if len > old && total > self.max_bytes {
            return Err(Errno::Nospc);
        }
        content.data.borrow_mut().resize(len as usize, 0);
        self.used.set(total);
        self.changed = true;
        Ok(())
    }

    /// Writes at an offset. A gap after the end is filled with zeros, which count against the quota.
    pub(crate) fn write(&mut self, content: &Content, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        let end = at.checked_add(bytes.len() as u64).ok_or(Errno::Inval)?;
        if end > content.borrow().len() as u64 {
            self.resize(content, end)?;
        }
        let at = at as usize;
        content.data.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
        self.changed = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn paths_stay_below_the_root() {
        for path in ["..", "a/../..", "/etc/passwd", "a/b/../../../x", "../work"] {
            assert_eq!(resolve("", path), Err(Errno::Notcapable), "{path}");
        }
        assert_eq!(resolve("a/b", "../c/./d"), Ok("a/c/d".into()));
        assert_eq!(resolve("", &"a/".repeat(65)), Err(Errno::Nametoolong));
        assert_eq!(resolve("", &"a".repeat(2000)), Err(Errno::Nametoolong));
    }

    #[test]
    fn files_share_a_quota_that_removal_frees() {
        let mut fs = Fs::new(&Tree::new(), 10);
        let a = fs.create("a").unwrap();
        fs.write(&a, 0, b"12345678").unwrap();
        let b = fs.create("tmp/b").unwrap();
        assert_eq!(fs.write(&b, 0, b"123"), Err(Errno::Nospc));
        assert_eq!(fs.write(&b, u64::MAX, b"1"), Err(Errno::Inval));
        assert_eq!(fs.resize(&b, 1 << 40), Err(Errno::Nospc));
        fs.remove_file("a").unwrap();
        drop(a);
        fs.write(&b, 2, b"123").unwrap();
        assert_eq!(*b.borrow(), b"\0\x00123");
    }

    #[test]
    fn removed_files_count_until_they_are_closed() {
        let mut fs = Fs::new(&Tree::new(), 100);
        let mut open = Vec::new();
        for n in 0..10 {
            let name = format!("f{n}");
            let file = fs.create(&name).unwrap();
            fs.write(&file, 0, &[1; 10]).unwrap();
            match n % 2 {
                0 => fs.remove_file(&name).unwrap(),
                _ => {
                    fs.create("other").unwrap();
                    fs.rename("other", &name).unwrap();
                }
            }
            open.push(file);
        }
        assert_eq!(fs.bytes(), 100);
        let more = fs.create("more").unwrap();
        assert_eq!(fs.write(&more, 0, b"x"), Err(Errno::Nospc));
        assert_eq!(fs.resize(&open[0], 11), Err(Errno::Nospc));
        fs.resize(&open[0], 4).unwrap();
        open.truncate(1);
        assert_eq!(fs.bytes(), 4);
        fs.write(&more, 0, &[1; 96]).unwrap();
        fs.remove_file("more").unwrap();
        drop((open, more));
        assert_eq!(fs.bytes(), 0);
    }

    #[test]
    fn all_files_except_tmp_are_kept() {
        let tree = Tree::from([
            ("d".into(), None),
            ("d/f".into(), Some(Arc::from(&b"x"[..]))),
        ]);
        let mut fs = Fs::new(&tree, 100);
        fs.create("tmp/t").unwrap();
        assert_eq!(fs.changes(), None);
        fs.rename("d", "e").unwrap();
        let wanted = Tree::from([
            ("e".into(), None),
            ("e/f".into(), Some(Arc::from(&b"x"[..]))),
        ]);
        assert_eq!(fs.changes(), Some(wanted));
        assert_eq!(fs.remove_folder("e"), Err(Errno::Notempty));
        assert_eq!(fs.rename("e", "e/f/g"), Err(Errno::Inval));
        assert_eq!(fs.find("e/f/g").unwrap_err(), Errno::Notdir);
        assert_eq!(fs.create("nowhere/x").unwrap_err(), Errno::Noent);
    }

    #[test]
    fn number_of_files_is_limited() {
        let mut fs = Fs::new(&Tree::new(), 100);
        let made = (0..5000)
            .take_while(|n| fs.create(&format!("f{n}")).is_ok())
            .count();
        assert_eq!(made, MAX_NODES - 1);
    }

    proptest! {
        #[test]
        fn resolved_paths_are_plain(folder in "[a-c/]{0,6}", path in "[a-c./]{0,12}") {
            if let Ok(path) = resolve(&folder, &path) {
                prop_assert!(!path.starts_with('/') && !path.ends_with('/'));
                prop_assert!(path.split('/').all(|p| path.is_empty() || !matches!(p, "" | "." | "..")), "{}", path);
            }
        }
    }
}
