//! Builds from folders into the cache, and images of other storages.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use sinew_image::UnpackLimits;
use sinew_image::build::{
    BuildError, BuildNetwork, BuildRequest, BuilderKind, EngineBuilder, ImageBuilder, PlainBuilder,
    build, find, import_from, list, remove,
};
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

/// A folder with a Dockerfile that a small builder understands.
fn folder(dir: &Path) -> BuildRequest {
    let context = dir.join("context");
    fs::create_dir_all(context.join("app/inner")).unwrap();
    fs::write(context.join("app/inner/x"), "one").unwrap();
    let text = "FROM scratch\nCOPY app /app\nENV A=1\nENV B=two=2\nWORKDIR /app\nUSER 1000\n";
    fs::write(context.join("Dockerfile"), text).unwrap();
    BuildRequest::new(&context, &dir.join("cache"))
}

/// Counts builds.
#[derive(Debug, Default)]
struct Counted {
    inner: PlainBuilder,
    built: Mutex<usize>,
}

impl ImageBuilder for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }

    fn id(&self, image: &str) -> Result<Option<String>, BuildError> {
        self.inner.id(image)
    }

    fn build(&self, request: &BuildRequest, tag: &str) -> Result<String, BuildError> {
        *self.built.lock().unwrap() += 1;
        self.inner.build(request, tag)
    }

    fn save(&self, image: &str, file: &Path, timeout: Duration) -> Result<(), BuildError> {
        self.inner.save(image, file, timeout)
    }
}

#[test]
fn a_folder_is_built_once_until_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    let builder = Counted::default();
    let mut request = folder(dir.path());
    let first = build(&request, &builder).unwrap();
    assert!(first.fresh && first.log.contains("6 instructions"));
    let config = &first.image.config;
    assert_eq!(
        (config.working_dir.as_str(), config.user.as_str()),
        ("/app", "1000")
    );
    let env = [("A", "1"), ("B", "two=2")];
    assert_eq!(config.env, env.map(|(k, v)| (k.to_owned(), v.to_owned())));
    let held = first.image.root.join("app/inner/x");
    assert_eq!(fs::read_to_string(held).unwrap(), "one");
    request.tag = Some("team/x:1".into());
    let again = build(&request, &builder).unwrap();
    assert!(!again.fresh);
    assert_eq!((&again.key, &again.image.id), (&first.key, &first.image.id));
    assert_eq!(*builder.built.lock().unwrap(), 1);
    fs::write(request.context.join("app/inner/x"), "two").unwrap();
    let changed = build(&request, &builder).unwrap();
    assert!(changed.fresh && changed.key != first.key);
    assert_eq!(*builder.built.lock().unwrap(), 2);
    // The tag is that of the newest build.
    let records = list(&request.cache).unwrap();
    let tagged = records.iter().filter(|r| r.tag.is_some()).count();
    assert_eq!((records.len(), tagged), (2, 1));
    let by_tag = find(&request.cache, "team/x:1").unwrap().unwrap();
    assert_eq!(by_tag.id, changed.image.id);
    let by_key = find(&request.cache, &first.key[..12]).unwrap().unwrap();
    assert_eq!(by_key.id, first.image.id);
    assert!(find(&request.cache, "team").unwrap().is_none());
}

#[test]
fn a_removed_build_is_built_again() {
    let dir = tempfile::tempdir().unwrap();
    let builder = Counted::default();
    let request = folder(dir.path());
    assert!(!remove(&request.cache, "none").unwrap());
    assert!(list(&request.cache).unwrap().is_empty());
    let first = build(&request, &builder).unwrap();
    assert!(remove(&request.cache, &first.key).unwrap());
    assert!(!first.image.root.exists() && list(&request.cache).unwrap().is_empty());
    let again = build(&request, &builder).unwrap();
    assert!(again.fresh && again.image.root.exists());
    assert_eq!(again.key, first.key);
}

#[test]
fn a_base_image_is_part_of_the_key() {
    let dir = tempfile::tempdir().unwrap();
    let builder = Counted::default();
    let mut base = folder(dir.path());
    base.tag = Some("base:1".into());
    let mut request = base.clone();
    request.context = dir.path().join("above");
    request.tag = None;
    fs::create_dir(&request.context).unwrap();
    fs::write(request.context.join("Dockerfile"), "FROM base:1\nENV C=3\n").unwrap();
    let missing = build(&request, &builder).unwrap_err();
    assert!(matches!(missing, BuildError::NoBase { .. }), "{missing}");
    assert_eq!(*builder.built.lock().unwrap(), 0);
    build(&base, &builder).unwrap();
    let first = build(&request, &builder).unwrap();
    let env: Vec<&str> = first
        .image
        .config
        .env
        .iter()
        .map(|(k, _)| k.as_str())
        .collect();
    assert_eq!(env, ["A", "B", "C"]);
    assert!(!build(&request, &builder).unwrap().fresh);
    fs::write(base.context.join("app/y"), "new").unwrap();
    build(&base, &builder).unwrap();
    let second = build(&request, &builder).unwrap();
    assert!(second.fresh && second.key != first.key);
    assert!(second.image.root.join("app/y").exists());
}

#[test]
fn failures_name_the_line_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let builder = PlainBuilder::default();
    let request = folder(dir.path());
    fs::write(
        request.context.join("Dockerfile"),
        "FROM scratch\nRUN true\n",
    )
    .unwrap();
    let failed = build(&request, &builder).unwrap_err().to_string();
    assert!(
        failed.contains("RUN true") && failed.contains("plain build"),
        "{failed}"
    );
    assert!(list(&request.cache).unwrap().is_empty());
    let wrong = BuildRequest {
        tag: Some("--rm".into()),
        ..request.clone()
    };
    assert!(matches!(
        build(&wrong, &builder),
        Err(BuildError::Request { field: "tag", .. })
    ));
    let small = BuildRequest {
        limits: UnpackLimits {
            bytes: 1,
            ..UnpackLimits::default()
        },
        ..folder(dir.path())
    };
    assert!(matches!(build(&small, &builder), Err(BuildError::Image(_))));
    let left = fs::read_dir(&request.cache).unwrap().flatten();
    let left: Vec<_> = left.map(|e| e.file_name().into_string().unwrap()).collect();
    assert!(left.iter().all(|name| name.ends_with(".lock")), "{left:?}");
}

#[test]
fn an_image_of_a_storage_is_imported_once() {
    let dir = tempfile::tempdir().unwrap();
    let builder = PlainBuilder::default();
    let request = folder(dir.path());
    builder.build(&request, "kept:1").unwrap();
    let cache = dir.path().join("other");
    let limits = UnpackLimits::default();
    let import = |name: &str| import_from(&builder, name, &cache, &limits, Duration::from_secs(9));
    let first = import("kept:1").unwrap();
    assert!(first.fresh && first.root.join("app/inner/x").exists());
    let again = import("kept:1").unwrap();
    assert!(!again.fresh && again.id == first.id);
    assert!(matches!(import("none"), Err(BuildError::NoBase { .. })));
    assert!(matches!(import("-x"), Err(BuildError::Request { .. })));
}

/// A real builder, where the host has one that can build without a base image.
#[test]
fn a_builder_of_the_host_gives_the_same_files() {
    let Ok(engine) = EngineBuilder::find(Some(BuilderKind::Podman)) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let mut request = folder(dir.path());
    request.network = BuildNetwork::Host;
    let built = match build(&request, &engine) {
        Ok(built) => built,
        // Its storage or its runtime does not work on this host.
        Err(BuildError::Failed { .. }) => return,
        Err(e) => panic!("{e}"),
    };
    let held = built.image.root.join("app/inner/x");
    assert_eq!(fs::read_to_string(held).unwrap(), "one");
    assert_eq!(built.image.config.working_dir, "/app");
    assert!(!build(&request, &engine).unwrap().fresh);
}
