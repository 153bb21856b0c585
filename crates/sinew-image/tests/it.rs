//! Unpacking of valid and hostile images.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use sha2::{Digest, Sha256};
use sinew_image::{Image, ImageError, UnpackLimits, is_packed, unpack, unpack_root};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tar::EntryType as Kind;

fn sha256(bytes: &[u8]) -> String {
    let digits: String = Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    digits
}

/// Kind, name, content or target, mode.
type Entry<'a> = (Kind, &'a str, &'a str, u32);

fn file<'a>(name: &'a str, content: &'a str) -> Entry<'a> {
    (Kind::Regular, name, content, 0o644)
}

fn link<'a>(name: &'a str, target: &'a str) -> Entry<'a> {
    (Kind::Symlink, name, target, 0o777)
}

/// A tar file. Allows names that `tar::Builder` refuses.
fn layer(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (kind, name, content, mode) in entries {
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(*mode);
        header.set_mtime(1_600_000_000);
        let links = matches!(kind, Kind::Symlink | Kind::Link);
        if links {
            header.as_mut_bytes()[157..157 + content.len()].copy_from_slice(content.as_bytes());
        }
        let content = if links { b"" } else { content.as_bytes() };
        header.set_size(content.len() as u64);
        header.set_cksum();
        builder.append(&header, content).unwrap();
    }
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn plain(bytes: &[u8]) -> Vec<u8> {
    bytes.to_vec()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

type Pack = fn(&[u8]) -> Vec<u8>;

struct Layout {
    folder: tempfile::TempDir,
    manifests: Vec<serde_json::Value>,
}

impl Layout {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("layout/blobs/sha256")).unwrap();
        fs::write(
            folder.path().join("layout/oci-layout"),
            r#"{"imageLayoutVersion":"1.0.0"}"#,
        )
        .unwrap();
        Self {
            folder,
            manifests: Vec::new(),
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("layout")
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn blob(&self, bytes: &[u8], kind: &str) -> serde_json::Value {
        let name = sha256(bytes);
        fs::write(self.path().join("blobs/sha256").join(&name), bytes).unwrap();
        serde_json::json!({"mediaType": kind, "digest": format!("sha256:{name}"), "size": bytes.len()})
    }

    fn add(&mut self, layers: &[(Vec<u8>, Pack)], machine: (&str, &str), tag: Option<&str>) {
        let kind = "application/vnd.oci.image";
        let blobs: Vec<_> = layers
            .iter()
            .map(|(l, pack)| self.blob(&pack(l), &format!("{kind}.layer.v1.tar+gzip")))
            .collect();
        let ids: Vec<_> = layers
            .iter()
            .map(|(l, _)| format!("sha256:{}", sha256(l)))
            .collect();
        let config = serde_json::json!({
            "os": machine.0, "architecture": machine.1, "rootfs": {"type": "layers", "diff_ids": ids},
            "config": {
                "Env": ["PATH=/bin:/opt", "A=b=c"], "Entrypoint": ["/bin/a"],
                "Cmd": ["x"], "WorkingDir": "/opt",
            },
        });
        let config = self.blob(
            config.to_string().as_bytes(),
            &format!("{kind}.config.v1+json"),
        );
        let manifest = serde_json::json!({"schemaVersion": 2, "config": config, "layers": blobs});
        let mut manifest = self.blob(
            manifest.to_string().as_bytes(),
            &format!("{kind}.manifest.v1+json"),
        );
        if let Some(tag) = tag {
            manifest["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": tag});
        }
        self.manifests.push(manifest);
        self.index(&self.manifests.clone());
    }

    fn index(&self, manifests: &[serde_json::Value]) {
        let index = serde_json::json!({"schemaVersion": 2, "manifests": manifests});
        fs::write(self.path().join("index.json"), index.to_string()).unwrap();
    }

    fn unpack(&self) -> Result<Image, ImageError> {
        unpack(&self.path(), &self.cache(), &UnpackLimits::default())
    }
}

fn host() -> (&'static str, &'static str) {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    ("linux", architecture)
}

fn of(layers: &[&[Entry<'_>]]) -> Layout {
    let mut layout = Layout::new();
    let packs: [Pack; 3] = [gzip, zstd, plain];
    let layers: Vec<_> = layers
        .iter()
        .enumerate()
        .map(|(n, l)| (layer(l), packs[n % 3]))
        .collect();
    layout.add(&layers, host(), Some("latest"));
    layout
}

/// Names below a folder, sorted; files with their content.
fn tree(root: &Path) -> Vec<String> {
    fn walk(folder: &Path, root: &Path, out: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap().display().to_string();
            let meta = path.symlink_metadata().unwrap();
            if meta.is_symlink() {
                out.push(format!(
                    "{name} -> {}",
                    fs::read_link(&path).unwrap().display()
                ));
            } else if meta.is_dir() {
                out.push(format!("{name}/"));
                walk(&path, root, out);
            } else {
                out.push(format!("{name}={}", fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut out = Vec::new();
    walk(root, root, &mut out);
    out.sort();
    out
}

fn three_layers() -> Layout {
    of(&[
        &[
            (Kind::Directory, "./", "", 0o700),
            (Kind::Directory, "usr", "", 0o755),
            file("usr/lib/a", "a"),
            file("usr/lib/b", "b"),
            link("lib", "usr/lib"),
            link("abs", "/usr/lib"),
            link("opt", "/abs"),
            file("old/deep/x", "x"),
            file("opq/below", "1"),
            (Kind::Regular, "usr/suid", "s", 0o6755),
            (Kind::Directory, "tmp", "", 0o1777),
            (Kind::Char, "dev/null", "", 0o666),
        ],
        &[
            file("usr/lib/.wh.b", ""),
            file("lib/c", "c"),
            file("abs/d", "d"),
            file(".wh.old", ""),
            file("opq/kept", "2"),
            file("opq/.wh..wh..opq", ""),
            (Kind::Link, "usr/hard", "usr/lib/a", 0o644),
            file("usr/lib/.wh.none", ""),
        ],
        &[file("usr/lib/a", "new"), file("old", "a file now")],
    ])
}

#[test]
fn layers_replace_remove_and_extend_files() {
    let layout = three_layers();
    let image = layout.unpack().unwrap();
    assert_eq!(
        tree(&image.root),
        [
            "abs -> /usr/lib",
            "lib -> usr/lib",
            "old=a file now",
            "opq/",
            "opq/kept=2",
            "opt -> /abs",
            "tmp/",
            "usr/",
            "usr/hard=a",
            "usr/lib/",
            "usr/lib/a=new",
            "usr/lib/c=c",
            "usr/lib/d=d",
            "usr/suid=s",
        ]
    );
    let meta = |name: &str| image.root.join(name).metadata().unwrap();
    assert_eq!(
        meta("usr/suid").permissions().mode() & 0o7777,
        0o755,
        "no set-user bits"
    );
    assert_eq!(meta("tmp").permissions().mode() & 0o7777, 0o1777);
    assert_eq!(
        (
            meta("usr/lib/c").mtime(),
            meta("").permissions().mode() & 0o777
        ),
        (1_600_000_000, 0o755)
    );
    assert_eq!(image.config.argv(), ["/bin/a", "x"]);
    assert_eq!(
        image.config.env,
        [
            ("PATH".into(), "/bin:/opt".into()),
            ("A".into(), "b=c".into())
        ]
    );
    assert_eq!(image.config.working_dir, "/opt");
    assert_eq!(
        image.program("c").unwrap(),
        "/opt/c",
        "through a link within the image"
    );
    assert_eq!(image.program("./x").unwrap(), "./x");
    let error = image.program("ls").unwrap_err().to_string();
    assert!(error.contains("/bin:/opt"), "{error}");
    assert!(image.fresh && is_packed(&layout.path()) && !is_packed(&image.root));
    let again = layout.unpack().unwrap();
    assert_eq!(
        (again.fresh, &again.root),
        (false, &image.root),
        "unpacked once"
    );
}

#[test]
fn images_can_be_in_archives() {
    let layout = of(&[&[file("a", "1")], &[file("b", "2")]]);
    let image = layout.unpack().unwrap();
    let whole = layout.folder.path().join("layout.tar");
    let mut builder = tar::Builder::new(fs::File::create(&whole).unwrap());
    builder.append_dir_all(".", layout.path()).unwrap();
    builder.finish().unwrap();
    let other = layout.folder.path().join("other");
    let from_tar = unpack(&whole, &other, &UnpackLimits::default()).unwrap();
    assert_eq!(
        (&from_tar.id, tree(&from_tar.root)),
        (&image.id, tree(&image.root))
    );

    // The format of `docker save`: no index, and equal layers are links.
    let (one, two) = (
        layer(&[file("a", "1")]),
        layer(&[file(".wh.a", ""), file("c", "3")]),
    );
    let ids = [&one, &two, &two].map(|l| format!("sha256:{}", sha256(l)));
    let config = serde_json::json!({
        "os": "linux", "architecture": host().1, "rootfs": {"diff_ids": ids},
        "config": {"Cmd": ["sh"], "Env": null},
    });
    let manifest = serde_json::json!([{
        "Config": "cfg.json", "RepoTags": ["me/it:v1"],
        "Layers": ["1/layer.tar", "2/layer.tar", "3/layer.tar"],
    }]);
    let saved = layout.folder.path().join("saved.tar");
    let mut builder = tar::Builder::new(fs::File::create(&saved).unwrap());
    let (config, manifest) = (config.to_string(), manifest.to_string());
    let parts: [(&str, &[u8]); 4] = [
        ("1/layer.tar", &one),
        ("2/layer.tar", &two),
        ("cfg.json", config.as_bytes()),
        ("manifest.json", manifest.as_bytes()),
    ];
    for (name, content) in parts {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, content).unwrap();
    }
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(Kind::Symlink);
    header.set_size(0);
    builder
        .append_link(&mut header, "3/layer.tar", "../2/layer.tar")
        .unwrap();
    builder.finish().unwrap();
    let cache = layout.cache();
    let docker = unpack(&saved, &cache, &UnpackLimits::default()).unwrap();
    assert_eq!(
        (tree(&docker.root), docker.config.argv()),
        (vec!["c=3".to_string()], vec!["sh".to_string()])
    );
    let tagged = PathBuf::from(format!("{}:v1", saved.display()));
    assert_eq!(
        unpack(&tagged, &cache, &UnpackLimits::default())
            .unwrap()
            .id,
        docker.id
    );
    let wrong = PathBuf::from(format!("{}:v2", saved.display()));
    let error = unpack(&wrong, &cache, &UnpackLimits::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("\"v2\"") && error.contains("me/it:v1"),
        "{error}"
    );
}

#[test]
fn hostile_entries_change_nothing_outside() {
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    fs::write(&victim, "safe").unwrap();
    let out = outside.path().to_str().unwrap().to_string();
    let (absolute, up) = (
        format!("{out}/new"),
        format!("../../../../../../../../{out}/new"),
    );
    let hard = format!("{out}/victim");
    let white = format!("l/{}", ".wh.victim");
    let refused: [(&str, Vec<Entry<'_>>); 12] = [
        ("`..`", vec![file(&up, "x")]),
        ("`..`", vec![file("a/../../b", "x")]),
        ("absolute", vec![file(&absolute, "x")]),
        ("absolute", vec![(Kind::Link, "h", &hard, 0o644)]),
        ("`..`", vec![(Kind::Link, "h", "../victim", 0o644)]),
        ("missing", vec![(Kind::Link, "h", "none/such", 0o644)]),
        ("device", vec![(Kind::Block, "sda", "", 0o666)]),
        ("device", vec![(Kind::Char, "etc/mem", "", 0o666)]),
        ("device or pipe", vec![(Kind::Fifo, "pipe", "", 0o666)]),
        ("is no folder", vec![file("f", "x"), file("f/below", "y")]),
        ("whiteout of nothing", vec![file(".wh...", "")]),
        ("root", vec![file(".wh..wh..opq", "")]),
    ];
    for (why, entries) in &refused {
        let layout = of(&[&[file("base", "b")], entries]);
        let error = layout.unpack().unwrap_err();
        assert!(
            matches!(error, ImageError::Entry { layer: 2, .. }),
            "{why}: {error}"
        );
        assert!(error.to_string().contains(why), "{why}: {error}");
        let left: Vec<_> = fs::read_dir(layout.cache()).unwrap().flatten().collect();
        assert!(
            left.iter()
                .all(|e| e.file_name().to_string_lossy().ends_with(".lock")),
            "{left:?}"
        );
    }
    // Links are resolved within the root, also those with `..`.
    let climbing = format!("../../../../../../..{out}");
    for target in [&out, &climbing] {
        let inner = format!("{}/keep", out.trim_start_matches('/'));
        let layout = of(&[
            &[link("l", target), file(&inner, "k")],
            &[file("l/new", "x"), file("l/victim", "x"), file(&white, "")],
            &[
                (Kind::Link, "hard", "l/new", 0o644),
                link("self", "/proc/self/root"),
                file("self", "y"),
            ],
        ]);
        let image = layout.unpack().unwrap();
        let inside = image.root.join(out.trim_start_matches('/'));
        assert_eq!(fs::read_to_string(inside.join("new")).unwrap(), "x");
        assert_eq!(fs::read_to_string(image.root.join("hard")).unwrap(), "x");
    }
    assert_eq!(tree(outside.path()), ["victim=safe"]);
}

#[test]
fn bombs_are_refused() {
    let limits = |f: fn(&mut UnpackLimits)| {
        let mut limits = UnpackLimits::default();
        f(&mut limits);
        limits
    };
    let many: Vec<Entry<'_>> = (0..20).map(|_| file("same", "0123456789")).collect();
    let layout = of(&[&many]);
    let cases = [
        (limits(|l| l.bytes = 150), "bytes of files"),
        (limits(|l| l.entries = 19), "entries"),
        (limits(|l| l.layers = 0), "layers"),
    ];
    for (limits, what) in cases {
        let error = unpack(&layout.path(), &layout.cache(), &limits).unwrap_err();
        assert!(
            matches!(error, ImageError::Limit { what: w, .. } if w == what),
            "{error}"
        );
    }
    let zeros = "\0".repeat(80 << 20);
    let bomb = of(&[&[file("zeros", &zeros)]]);
    let error = bomb.unpack().unwrap_err().to_string();
    assert!(error.contains("a bomb"), "{error}");
    let deep = vec!["d"; 40].join("/");
    let mut layout = Layout::new();
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(0);
    builder
        .append_data(&mut header, [deep.as_str(); 10].join("/"), &b""[..])
        .unwrap();
    layout.add(&[(builder.into_inner().unwrap(), gzip)], host(), None);
    let error = layout.unpack().unwrap_err().to_string();
    assert!(error.contains("deeper than 256"), "{error}");
}

#[test]
fn damaged_foreign_and_missing_images_have_different_errors() {
    let layout = of(&[&[file("a", "1")]]);
    let blobs = layout.path().join("blobs/sha256");
    let one = layer(&[file("a", "1")]);
    let name = blobs.join(sha256(&gzip(&one)));
    let good = fs::read(&name).unwrap();
    // Other content under the name of the first blob, and truncated content.
    fs::write(&name, gzip(&layer(&[file("a", "2")]))).unwrap();
    let error = layout.unpack().unwrap_err();
    assert!(matches!(error, ImageError::Digest { .. }), "{error}");
    fs::write(&name, &good[..good.len() - 9]).unwrap();
    assert!(layout.unpack().is_err());
    // The same content with another compression: the hash of the blob differs.
    fs::write(&name, plain(&one)).unwrap();
    let error = layout.unpack().unwrap_err();
    assert!(
        matches!(&error, ImageError::Digest { blob, .. } if blob.starts_with("blobs/")),
        "{error}"
    );
    fs::remove_file(&name).unwrap();
    let error = layout.unpack().unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
    fs::write(&name, &good).unwrap();
    layout.unpack().unwrap();

    let mut foreign = Layout::new();
    foreign.add(&[(one.clone(), gzip)], ("linux", "s390x"), None);
    let error = foreign.unpack().unwrap_err();
    assert!(
        matches!(&error, ImageError::Platform { found, .. } if found == "linux/s390x"),
        "{error}"
    );
    // One of several images, chosen by platform or by name.
    foreign.add(&[(one.clone(), gzip)], host(), Some("mine"));
    foreign.manifests[0]["platform"] = serde_json::json!({"os": "linux", "architecture": "s390x"});
    foreign.index(&foreign.manifests);
    foreign.unpack().unwrap();
    foreign.manifests[0]["platform"] = serde_json::Value::Null;
    foreign.index(&foreign.manifests);
    let error = foreign.unpack().unwrap_err();
    assert!(
        matches!(&error, ImageError::Tag { tags, .. } if tags.starts_with("mine")),
        "{error}"
    );
    let tagged = PathBuf::from(format!("{}:mine", foreign.path().display()));
    unpack(&tagged, &foreign.cache(), &UnpackLimits::default()).unwrap();
    let mut odd = foreign.manifests[1].clone();
    odd["mediaType"] = "application/vnd.example".into();
    foreign.index(&[odd]);
    let error = foreign.unpack().unwrap_err();
    assert!(matches!(error, ImageError::Unsupported { .. }), "{error}");

    let folder = tempfile::tempdir().unwrap();
    for path in ["none", ""] {
        let error = unpack(
            &folder.path().join(path),
            &folder.path().join("c"),
            &UnpackLimits::default(),
        )
        .unwrap_err();
        assert!(error.to_string().contains("docker save"), "{error}");
    }
    assert!(!folder.path().join("c").exists());
}

/// This test also runs as the process that is killed.
#[test]
fn killed_builders_leave_no_incomplete_image() {
    if let Some(folder) = std::env::var_os("SINEW_TEST_UNPACK") {
        let folder = PathBuf::from(folder);
        unpack(
            &folder.join("layout"),
            &folder.join("cache"),
            &UnpackLimits::default(),
        )
        .unwrap();
        return;
    }
    let text = "some text, not much of it\n".repeat(500);
    let names: Vec<String> = (0..1500)
        .map(|n| format!("folder{}/file{n}", n % 7))
        .collect();
    let entries: Vec<Entry<'_>> = names.iter().map(|n| file(n, &text)).collect();
    let mut layout = Layout::new();
    layout.add(&[(layer(&entries), plain)], host(), None);
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed_builders_leave_no_incomplete_image"])
        .env("SINEW_TEST_UNPACK", layout.folder.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let partial = || {
        let entries = fs::read_dir(layout.cache()).ok()?;
        let mut names = entries.flatten().map(|e| e.path());
        names.find(|p| p.extension().is_some_and(|e| e == "partial"))
    };
    let under_way = loop {
        if let Some(path) = partial().filter(|p| p.join("root/folder1").exists()) {
            break path;
        }
        assert!(
            child.try_wait().unwrap().is_none(),
            "it was too quick to be killed"
        );
        std::thread::yield_now();
    };
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(under_way.exists(), "killed in the middle");
    let finished = under_way.with_extension("");
    assert!(!finished.exists());
    // The next unpack removes the partial folder, and a repeated unpack is complete.
    let image = layout.unpack().unwrap();
    assert!(image.fresh && image.root.starts_with(finished.canonicalize().unwrap()));
    let files = tree(&image.root).iter().filter(|l| l.contains('=')).count();
    assert_eq!((files, partial()), (1500, None));
}

/// An archive with names of any length in the format of GNU tar.
fn long_names(entries: &[(Kind, &str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (kind, name, target) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o755);
        header.set_size(0);
        match kind {
            Kind::Symlink => builder.append_link(&mut header, name, target).unwrap(),
            _ => builder.append_data(&mut header, name, &b""[..]).unwrap(),
        }
    }
    builder.into_inner().unwrap()
}

fn unpack_layer(layer: Vec<u8>, limits: &UnpackLimits) -> Result<Image, ImageError> {
    let mut layout = Layout::new();
    layout.add(&[(layer, gzip)], host(), None);
    unpack(&layout.path(), &layout.cache(), limits)
}

#[test]
fn sparse_files_count_with_their_unpacked_bytes() {
    let mut header = tar::Header::new_gnu();
    header.as_mut_bytes()[..6].copy_from_slice(b"sparse");
    header.set_entry_type(Kind::GNUSparse);
    header.set_mode(0o644);
    header.set_size(0);
    let size = format!("{:011o}", 8 << 20);
    let gnu = header.as_gnu_mut().unwrap();
    gnu.realsize[..11].copy_from_slice(size.as_bytes());
    gnu.sparse[0].offset[..11].copy_from_slice(size.as_bytes());
    gnu.sparse[0].numbytes[..11].copy_from_slice(b"00000000000");
    header.set_cksum();
    let mut builder = tar::Builder::new(Vec::new());
    builder.append(&header, &b""[..]).unwrap();
    let limits = UnpackLimits {
        bytes: 1 << 20,
        ..UnpackLimits::default()
    };
    let error = unpack_layer(builder.into_inner().unwrap(), &limits).unwrap_err();
    assert!(
        matches!(
            error,
            ImageError::Limit {
                what: "bytes of files",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn endless_names_are_not_buffered() {
    for kind in [Kind::GNULongName, Kind::GNULongLink, Kind::XHeader] {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(8 << 20);
        header.set_cksum();
        let mut builder = tar::Builder::new(Vec::new());
        builder.append(&header, &vec![b'x'; 8 << 20][..]).unwrap();
        let layer = builder.into_inner().unwrap();
        let error = unpack_layer(layer.clone(), &UnpackLimits::default()).unwrap_err();
        let what = "bytes of names and extensions in one entry";
        assert!(
            matches!(error, ImageError::Limit { what: w, .. } if w == what),
            "{kind:?}: {error}"
        );
        // The same in the archive that contains the image.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.tar");
        fs::write(&path, layer).unwrap();
        let error = unpack(&path, folder.path(), &UnpackLimits::default()).unwrap_err();
        assert!(
            error.to_string().contains("names and extensions"),
            "{error}"
        );
    }
}

#[test]
fn folders_without_entries_count_too() {
    let names: Vec<String> = (0..20)
        .map(|n| format!("{n}/{}f", "d/".repeat(20)))
        .collect();
    let entries: Vec<_> = names
        .iter()
        .map(|n| (Kind::Regular, n.as_str(), ""))
        .collect();
    let limits = |entries| UnpackLimits {
        entries,
        ..UnpackLimits::default()
    };
    let error = unpack_layer(long_names(&entries), &limits(439)).unwrap_err();
    assert!(
        error.to_string().contains("more than 439 entries"),
        "{error}"
    );
    unpack_layer(long_names(&entries), &limits(440)).unwrap();
}

#[test]
fn links_do_not_bypass_the_maximum_depth() {
    let (half, other) = ("a/".repeat(200), format!("l/{}", "b/".repeat(100)));
    let entries = [
        (Kind::Directory, half.as_str(), ""),
        (Kind::Symlink, "l", half.as_str()),
        (Kind::Directory, other.as_str(), ""),
    ];
    let error = unpack_layer(long_names(&entries), &UnpackLimits::default()).unwrap_err();
    assert!(error.to_string().contains("deeper than 256"), "{error}");
    unpack_layer(long_names(&entries[..2]), &UnpackLimits::default()).unwrap();
}

#[test]
fn root_archives_are_unpacked_like_layers() {
    let folder = tempfile::tempdir().unwrap();
    let (archive, target) = (folder.path().join("root.tar"), folder.path().join("root"));
    let good = layer(&[(Kind::Regular, "bin/su", "x", 0o4755), link("sh", "bin/su")]);
    for pack in [plain as Pack, gzip, zstd] {
        fs::write(&archive, pack(&good)).unwrap();
        unpack_root(&archive, &target, &UnpackLimits::default()).unwrap();
        let mode = fs::metadata(target.join("bin/su"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7777, 0o755);
        fs::remove_dir_all(&target).unwrap();
    }
    let climbs = layer(&[file("a", "x"), file("../outside", "x")]);
    let few = UnpackLimits {
        bytes: 3,
        ..UnpackLimits::default()
    };
    let much = layer(&[file("a", "xx"), file("b", "xx")]);
    let cases = [
        (climbs, UnpackLimits::default(), "`..`"),
        (much, few, "bytes of files"),
    ];
    for (hostile, limits, why) in cases {
        fs::write(&archive, hostile).unwrap();
        let error = unpack_root(&archive, &target, &limits).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert!(!target.exists() && !folder.path().join("outside").exists());
    }
}
