use super::peft::testing::write_adapter;
use super::peft::{CONFIG, WEIGHTS};
use super::*;
use sinew_infer::{FakeConfig, FakeEngine};

/// Adapters of an engine that takes two.
fn adapters(dir: Option<&Path>) -> Adapters {
    let config = FakeConfig {
        max_adapters: 2,
        ..FakeConfig::default()
    };
    let engine = FakeEngine::stepped(config).unwrap();
    let dir = dir.map(Path::to_owned);
    Adapters::new(Arc::new(engine), "policy".into(), dir, 1 << 20)
}

fn name(text: &str) -> AdapterName {
    AdapterName::new(text).unwrap()
}

/// A form with the files of a folder.
fn form(folder: &Path, version: Option<&str>) -> Bytes {
    let mut form = Vec::new();
    let mut part = |name: &str, content: &[u8]| {
        let head = format!("--x\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n");
        form.extend_from_slice(head.as_bytes());
        form.extend_from_slice(content);
        form.extend_from_slice(b"\r\n");
    };
    for file in [CONFIG, WEIGHTS] {
        part(file, &std::fs::read(folder.join(file)).unwrap());
    }
    if let Some(version) = version {
        part("version", version.as_bytes());
    }
    form.extend_from_slice(b"--x--\r\n");
    form.into()
}

#[test]
fn versions_rise_unless_the_caller_sets_them() {
    let dir = tempfile::tempdir().unwrap();
    write_adapter(dir.path(), 2, 1.0);
    let adapters = adapters(None);
    let load = |text: &str, version: Option<u64>| {
        adapters.load(&name(text), dir.path(), version.map(PolicyVersion))
    };
    let first = load("a", None).unwrap();
    assert_eq!((first.version.0, first.rank, first.alpha), (1, 2, 4.0));
    assert_eq!(first.bytes, 64);
    assert_eq!(load("b", Some(7)).unwrap().version.0, 7);
    assert_eq!(load("a", None).unwrap().version.0, 8);
    let full = load("c", None).unwrap_err();
    assert_eq!((full.status, full.code), (400, "adapter_refused"));
    assert!(full.message.contains("max_adapters = 2"), "{full}");
    let names: Vec<_> = adapters.list().into_iter().map(|a| a.name).collect();
    assert_eq!(names, [name("a"), name("b")]);
    adapters.unload(&name("b")).unwrap();
    assert_eq!(load("b", None).unwrap().version.0, 9);
    let own = load("policy", None).unwrap_err();
    assert_eq!(own.param.as_deref(), Some("name"));
    let missing = adapters.load(&name("a"), &dir.path().join("none"), None);
    assert_eq!(missing.unwrap_err().code, "adapter_refused");
    assert_eq!(adapters.list()[0].version.0, 8);
}

#[test]
fn models_are_chosen_by_name_once_there_is_an_adapter() {
    let dir = tempfile::tempdir().unwrap();
    write_adapter(dir.path(), 2, 1.0);
    let adapters = adapters(None);
    assert_eq!(adapters.resolve("gpt-x").unwrap(), None);
    adapters.load(&name("a"), dir.path(), None).unwrap();
    adapters.load(&name("b"), dir.path(), None).unwrap();
    assert_eq!(adapters.resolve("a").unwrap(), Some(name("a")));
    for base in ["", "policy"] {
        assert_eq!(adapters.resolve(base).unwrap(), None);
    }
    let unknown = adapters.resolve("gpt-x").unwrap_err();
    assert_eq!((unknown.status, unknown.code), (404, "model_not_found"));
    assert!(
        unknown.message.ends_with("allowed: policy, a, b"),
        "{unknown}"
    );
    let (a, b) = (name("a"), name("b"));
    for own in [None, Some(&a)] {
        for model in ["gpt-x", "policy", ""] {
            adapters.fits(model, own).unwrap();
        }
        let other = adapters.fits("b", own).unwrap_err();
        assert_eq!((other.status, other.param.as_deref()), (400, Some("model")));
    }
    adapters.fits("a", Some(&a)).unwrap();
    adapters.check(&b).unwrap();
    adapters.unload(&b).unwrap();
    let gone = adapters.check(&b).unwrap_err();
    assert!(gone.message.ends_with("allowed: a"), "{gone}");
    adapters.unload(&a).unwrap();
    // An adapter that is gone is never replaced by the model in silence.
    assert_eq!(adapters.resolve("a").unwrap_err().code, "model_not_found");
    assert_eq!(adapters.unload(&a).unwrap_err().status, 404);
    let none = adapters.check(&a).unwrap_err();
    assert!(none.message.contains("PUT /adapters/NAME"), "{none}");
}

#[test]
fn uploads_are_stored_and_loaded_again() {
    let source = tempfile::tempdir().unwrap();
    write_adapter(source.path(), 2, 1.0);
    let without = adapters(None);
    assert_eq!(without.upload_permit().unwrap_err().code, "no_adapter_dir");
    let root = tempfile::tempdir().unwrap();
    let first = adapters(Some(root.path()));
    let permit = first.upload_permit().unwrap();
    assert_eq!(first.upload_permit().unwrap_err().status, 503);
    drop(permit);
    drop(first.upload_permit().unwrap());
    let upload = |body: &Bytes| first.upload(&name("a"), "x", body);
    let loaded = upload(&form(source.path(), Some("5"))).unwrap();
    assert_eq!(loaded.version.0, 5);
    assert_eq!(loaded.folder, root.path().join("a/v5"));
    // The same upload again, after a lost answer.
    upload(&form(source.path(), Some("5"))).unwrap();
    write_adapter(source.path(), 2, 2.0);
    let other = upload(&form(source.path(), Some("5"))).unwrap_err();
    assert_eq!((other.status, other.code), (409, "adapter_version"));
    assert_eq!(upload(&form(source.path(), None)).unwrap().version.0, 6);
    assert!(!root.path().join("a/v5").exists());
    std::fs::write(source.path().join(CONFIG), "{}").unwrap();
    let refused = upload(&form(source.path(), None)).unwrap_err();
    assert_eq!(refused.code, "adapter_refused");
    assert!(!root.path().join("a/v7").exists());
    let second = adapters(Some(root.path()));
    assert_eq!(second.restore().unwrap(), 1);
    assert_eq!(second.list()[0].version.0, 6);
    second.unload(&name("a")).unwrap();
    assert_eq!(adapters(Some(root.path())).restore().unwrap(), 0);
}
