//! Archives of work folders and of images.
//!
//! Agents write the first, and the second come from registries. Both are read by a process that may do more
//! than their writer, so that a path that leaves its folder is an escape.

use crate::choices;
use sinew_image::{UnpackLimits, unpack_root};
use sinew_jail::archive::reader::{Budget, Kind, ReadLimits, read};
use std::io::Read;
use std::path::Component;

/// Types of entries and parts of headers.
pub(crate) const WORDS: &[&str] = &[
    "../",
    "/",
    "./",
    "ustar\0",
    "ustar  \0",
    ".wh.",
    ".wh..wh..opq",
    "0000644\0",
    "77777777777",
    "path=",
    "21 GNU.sparse.size=9\n",
];

/// Limits that inputs of a few kilobytes reach.
fn limits() -> ReadLimits {
    ReadLimits {
        entries: 16,
        depth: 8,
        path_bytes: 200,
        header_bytes: 4 << 10,
        ..ReadLimits::work_folder(20_000)
    }
}

/// The shared reader of archives, and the entries that levels with an agent make of them. The first byte
/// says whether checksums of headers are corrected.
///
/// - Paths and targets of hard links are relative and have only names; depth, entries and bytes stay within
///   the limits.
/// - Entries are written and read again as the same entries.
pub(crate) fn archive(data: &[u8]) {
    let data = repaired(data);
    let mut budget = Budget::new(limits());
    let mut kept = 0;
    let done = read(data.as_slice(), &mut budget, |entry, budget| {
        assert!(entry.path.components().count() <= limits().depth);
        let mut paths = vec![&entry.path];
        if let Kind::HardLink(first) = &entry.kind {
            paths.push(first);
        }
        for path in paths {
            let plain = path.components().all(|c| matches!(c, Component::Normal(_)));
            assert!(plain, "{path:?}");
        }
        if entry.kind == Kind::File {
            kept += entry.bytes(budget)?.len() as u64;
        }
        Ok(())
    });
    assert!(kept <= limits().bytes && budget.bytes() <= limits().bytes);
    if done.is_ok() {
        assert!(budget.entries() <= limits().entries);
    }
    if let Ok(entries) = sinew_sandbox::guest::unpack(data.as_slice(), limits().bytes)
        && let Ok(packed) = sinew_sandbox::guest::pack(&entries, Vec::new(), 1 << 30)
    {
        let again = sinew_sandbox::guest::unpack(packed.as_slice(), limits().bytes);
        assert_eq!(again.ok(), Some(entries), "entries change on their way");
    }
}

/// The root of an image, compressed or not.
///
/// - Nothing outside of the root changes, and nothing is left after an error.
/// - The root has no devices, no FIFOs and no set-user-ID files.
pub(crate) fn image(data: &[u8]) {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let folder = tempfile::tempdir().expect("a folder");
    let (archive, victim) = (folder.path().join("a"), folder.path().join("victim"));
    std::fs::write(&archive, repaired(data)).expect("a file");
    std::fs::write(&victim, "safe").expect("a file");
    let limits = UnpackLimits {
        bytes: 100_000,
        entries: 64,
        layers: 1,
        ratio: 50,
    };
    let root = folder.path().join("root");
    let done = unpack_root(&archive, &root, &limits);
    assert_eq!(std::fs::read(&victim).expect("a file"), b"safe");
    let names = std::fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(
        names,
        2 + usize::from(done.is_ok()),
        "files beside the root"
    );
    let mut folders = vec![root];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let meta = entry.metadata().expect("an entry");
            let kind = meta.file_type();
            assert!(!kind.is_block_device() && !kind.is_char_device() && !kind.is_fifo());
            assert!(
                kind.is_symlink() || meta.mode() & 0o6000 == 0,
                "{:?}",
                entry.path()
            );
            if kind.is_dir() {
                folders.push(entry.path());
            }
        }
    }
}

/// Corrects the checksums of headers, if the first byte asks for it: mutations would rarely find them.
fn repaired(data: &[u8]) -> Vec<u8> {
    let ([choice], rest) = choices::<1>(data);
    let mut bytes = rest.to_vec();
    if choice & 1 != 0 {
        for header in bytes.chunks_exact_mut(512) {
            if header[257..262] == *b"ustar" {
                header[148..156].fill(b' ');
                let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
                header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            }
        }
    }
    // Long archives make a run slow.
    let mut out = Vec::new();
    let _ = bytes.as_slice().take(60_000).read_to_end(&mut out);
    out
}
