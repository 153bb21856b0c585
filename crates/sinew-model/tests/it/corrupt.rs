//! Files with wrong bytes: an error or a model, never a panic and never unbounded memory.

use crate::support::golden_dir;
use proptest::prelude::*;
use sinew_model::{Gguf, GgufError, ModelConfig, ModelFiles, Safetensors, load_model};
use std::fs;
use std::sync::OnceLock;

fn gguf_bytes() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| fs::read(golden_dir().join("llama.gguf")).unwrap())
}

/// Length of header and metadata, in which a changed byte does most.
const HEADER: usize = 9000;

/// Opens, and where that works reads every tensor.
fn read_all(bytes: Vec<u8>) -> Result<(), GgufError> {
    let gguf = Gguf::read(Box::new(bytes))?;
    for (name, tensor) in gguf.tensors() {
        let mut values = vec![0.0; tensor.shape.iter().product()];
        gguf.read_tensor(name, &mut values)?;
    }
    Ok(())
}

/// Loads bytes as a model, configuration included.
fn load_bytes(bytes: &[u8]) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    fs::write(&path, bytes).unwrap();
    load_model(&ModelFiles::Gguf(path))
        .map(|_| ())
        .map_err(|error| error.to_string())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn damaged_gguf_headers_never_panic(
        edits in prop::collection::vec((0..HEADER, any::<u8>()), 1..8),
        cut in prop::option::of(0..HEADER),
    ) {
        let mut bytes = gguf_bytes().to_vec();
        for (at, byte) in edits {
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut);
        }
        let _ = load_bytes(&bytes);
        let _ = read_all(bytes);
    }

    #[test]
    fn huge_numbers_in_gguf_headers_never_panic(at in 0..HEADER / 4, value in any::<u64>()) {
        let mut bytes = gguf_bytes().to_vec();
        bytes[at * 4..at * 4 + 8].copy_from_slice(&value.to_le_bytes());
        let _ = load_bytes(&bytes);
        let _ = read_all(bytes);
    }

    #[test]
    fn damaged_safetensors_never_panic(
        edits in prop::collection::vec((0usize..2500, any::<u8>()), 1..6),
        cut in prop::option::of(0usize..170_000),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let mut bytes = fs::read(golden_dir().join("llama/model.safetensors")).unwrap();
        for (at, byte) in edits {
            bytes[at] = byte;
        }
        bytes.truncate(cut.unwrap_or(usize::MAX));
        fs::write(&path, bytes).unwrap();
        if let Ok(file) = Safetensors::open_file(&path) {
            for (name, shape) in file.shapes() {
                file.read_tensor(name, &mut vec![0.0; shape.iter().product()]).unwrap();
            }
        }
    }

    #[test]
    fn random_configurations_never_panic(
        sizes in prop::array::uniform8(prop_oneof![0u64..70, any::<u64>()]),
    ) {
        let [vocab, d, layers, heads, kv, head, ff, context] = sizes;
        let text = format!(
            r#"{{"model_type": "qwen3", "vocab_size": {vocab}, "hidden_size": {d},
            "num_hidden_layers": {layers}, "num_attention_heads": {heads},
            "num_key_value_heads": {kv}, "head_dim": {head}, "intermediate_size": {ff},
            "max_position_embeddings": {context}}}"#
        );
        if let Ok(config) = ModelConfig::from_json(&text) {
            prop_assert!(config.heads % config.kv_heads == 0 && config.head_dim % 2 == 0);
        }
    }
}

/// A header with the given counts and body.
fn gguf(version: u32, tensors: u64, values: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(values.to_le_bytes());
    bytes.extend(body);
    bytes
}

fn text(value: &str) -> Vec<u8> {
    let mut bytes = (value.len() as u64).to_le_bytes().to_vec();
    bytes.extend(value.as_bytes());
    bytes
}

/// One tensor's entry.
fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = text(name);
    bytes.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

#[test]
fn lies_in_gguf_headers_are_named() {
    let message = |bytes: Vec<u8>| read_all(bytes).unwrap_err().to_string();
    let array = |kind: u32, count: u64| {
        let mut bytes = text("k");
        bytes.extend(9u32.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(count.to_le_bytes());
        bytes
    };
    let mut long_string = text("k");
    long_string.extend(8u32.to_le_bytes());
    long_string.extend((1u64 << 40).to_le_bytes());
    let twice = [
        tensor("a", &[2], 0, 0),
        tensor("a", &[2], 0, 0),
        vec![0; 64],
    ]
    .concat();
    let cases = [
        (b"GGML\x03\0\0\0".to_vec(), "not a GGUF"),
        (gguf(1, 0, 0, &[]), "version 1 is not supported"),
        (gguf(3, u64::MAX, 0, &[]), "tensor count"),
        (gguf(3, 0, 1 << 60, &[]), "metadata count"),
        (gguf(3, 0, 1, &array(4, u64::MAX)), "truncated"),
        (gguf(3, 0, 1, &array(8, 1 << 50)), "truncated"),
        (gguf(3, 0, 1, &array(9, 1)), "array of arrays"),
        (gguf(3, 0, 1, &array(77, 1)), "types are 0 to 12"),
        (gguf(3, 0, 1, &long_string), "truncated"),
        (
            gguf(3, 1, 0, &tensor("a", &[u64::MAX, u64::MAX], 0, 0)),
            "has shape",
        ),
        (gguf(3, 1, 0, &tensor("a", &[31], 2, 0)), "has shape"),
        (gguf(3, 1, 0, &tensor("a", &[4], 0, 0)), "tensor `a`"),
        (
            gguf(3, 1, 0, &tensor("a", &[4], 0, u64::MAX - 31)),
            "tensor `a`",
        ),
        (
            gguf(3, 1, 0, &tensor("a", &[4], 0, 1)),
            "not a multiple of 32",
        ),
        (gguf(3, 1, 0, &tensor("a", &[4], 99, 0)), "has type 99"),
        (gguf(3, 1, 0, &tensor("a", &[1; 5], 0, 0)), "5 dimensions"),
        (gguf(3, 2, 0, &twice), "appears twice"),
    ];
    for (bytes, expected) in cases {
        let found = message(bytes);
        assert!(found.contains(expected), "{found}, expected {expected}");
    }
}
