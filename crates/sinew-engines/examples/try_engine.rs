//! Tries an outside engine: `cargo run -p sinew-engines --example try_engine -- KIND URL [IDS]`, where KIND
//! is `vllm`, `vllm-generate`, `sglang` or `openai` (one that returns ids, such as llama.cpp). The options
//! `--weights DIR --base MODEL_DIR` also publish the tensors of `MODEL_DIR/model.safetensors`, a little
//! changed, and have the engine load them.

use sinew_engines::{
    Backend, FolderDtype, OpenaiBackend, RemoteConfig, RemoteEngine, ServerConfig, SglangBackend,
    SglangOptions, VllmApi, VllmBackend, VllmOptions, WeightsFolder,
};
use sinew_types::{
    Engine, EngineEvent, FinishReason, GenerateRequest, PolicyVersion, RequestId, SampledToken,
    SamplingParams, TensorSource, TensorView, TokenId,
};
use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

type Failure = Box<dyn Error>;

/// Tensors of a file, each scaled.
struct Scaled {
    names: Vec<String>,
    tensors: Vec<(Vec<usize>, Vec<f32>)>,
}

impl Scaled {
    fn read(path: &Path, factor: f32) -> Result<Self, Failure> {
        let bytes = std::fs::read(path)?;
        let file = safetensors::SafeTensors::deserialize(&bytes)?;
        let mut all = Self {
            names: Vec::new(),
            tensors: Vec::new(),
        };
        for (name, view) in file.tensors() {
            if view.dtype() != safetensors::Dtype::F32 {
                return Err(format!("{name} is {:?}, this example reads f32", view.dtype()).into());
            }
            let values = view.data().chunks_exact(4);
            let values = values.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) * factor);
            all.tensors.push((view.shape().to_vec(), values.collect()));
            all.names.push(name);
        }
        Ok(all)
    }
}

impl TensorSource for Scaled {
    fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let at = self.names.iter().position(|n| n == name)?;
        let (shape, data) = &self.tensors[at];
        TensorView::f32(shape, data).ok()
    }
}

fn backend(kind: &str, config: ServerConfig) -> Result<Arc<dyn Backend>, Failure> {
    let vllm = |api| {
        let options = VllmOptions {
            api,
            ..VllmOptions::default()
        };
        VllmBackend::new(config.clone(), options)
    };
    Ok(match kind {
        "vllm" => Arc::new(vllm(VllmApi::Completions)?),
        "vllm-generate" => Arc::new(vllm(VllmApi::Generate)?),
        "sglang" => Arc::new(SglangBackend::new(config, SglangOptions::default(), 1)?),
        "openai" => Arc::new(OpenaiBackend::new(config, None)?),
        other => return Err(format!("unknown kind {other}").into()),
    })
}

/// More events than the few tokens of a request can make.
const EVENTS: usize = 64;

fn generate(
    engine: &RemoteEngine,
    id: u64,
    prompt: &[TokenId],
    temperature: f32,
) -> Result<(Vec<SampledToken>, FinishReason), Failure> {
    let (to, events) = sync_channel(EVENTS);
    let sampling = SamplingParams {
        temperature,
        max_tokens: 12,
        seed: 3,
        ..SamplingParams::default()
    };
    let request = GenerateRequest::new(RequestId(id), prompt.to_vec(), sampling);
    let sink = Box::new(move |event| {
        // The receiver lives until the last event.
        let _ = to.send(event);
    });
    engine.submit(request, sink)?;
    let mut all = Vec::new();
    loop {
        match events.recv_timeout(Duration::from_secs(120))? {
            EngineEvent::Prompt { .. } => {}
            EngineEvent::Tokens { tokens, .. } => all.extend(tokens),
            EngineEvent::Finished { reason, .. } => return Ok((all, reason)),
            EngineEvent::Failed { error, .. } => return Err(error.into()),
        }
    }
}

fn show(out: &mut impl Write, what: &str, tokens: &[SampledToken]) -> std::io::Result<()> {
    let ids: Vec<_> = tokens.iter().map(|t| t.id).collect();
    let logprobs: Vec<_> = tokens.iter().map(|t| format!("{:.4}", t.logprob)).collect();
    let version = tokens.first().map(|t| t.version.to_string());
    let version = version.unwrap_or_default();
    writeln!(out, "{what}: {version} {ids:?} [{}]", logprobs.join(", "))
}

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kind, url, rest @ ..] = &args[..] else {
        return Err("usage: try_engine KIND URL [IDS] [--weights DIR --base MODEL_DIR]".into());
    };
    let option = |name: &str| {
        let at = rest.iter().position(|a| a == name)?;
        rest.get(at + 1).map(String::as_str)
    };
    let ids = rest.first().filter(|a| !a.starts_with("--"));
    let ids = ids.map_or("1,5,9,12", String::as_str).split(',');
    let prompt = ids.map(str::parse).collect::<Result<Vec<TokenId>, _>>()?;
    let base = option("--base").map(Path::new);
    let folder = option("--weights");
    let folder = folder.map(|f| WeightsFolder::new(f, base.map(Path::to_owned), FolderDtype::F32));
    let config = RemoteConfig::new(Box::new(|| 0.5));
    let backends = vec![backend(kind, ServerConfig::new(url))?];
    let engine = RemoteEngine::new(backends, folder, config)?;
    engine.wait_ready(Duration::from_secs(60))?;
    let out = &mut std::io::stdout().lock();
    writeln!(out, "fidelity: {:?}", engine.fidelity())?;
    writeln!(out, "status: {:?}", engine.status())?;
    let (greedy, _) = generate(&engine, 1, &prompt, 0.0)?;
    show(out, "greedy", &greedy)?;
    let (again, _) = generate(&engine, 2, &prompt, 0.0)?;
    let same = greedy.iter().map(|t| t.id).eq(again.iter().map(|t| t.id));
    writeln!(
        out,
        "greedy twice: {}",
        if same { "same" } else { "DIFFERENT" }
    )?;
    show(out, "sampled", &generate(&engine, 3, &prompt, 1.0)?.0)?;
    if let Some(base) = base {
        let weights = Scaled::read(&base.join("model.safetensors"), 1.5)?;
        let start = Instant::now();
        engine.load_weights(PolicyVersion(1), Arc::new(weights))?;
        writeln!(out, "loaded v1 in {:.2} s", start.elapsed().as_secs_f64())?;
        show(
            out,
            "greedy, new weights",
            &generate(&engine, 4, &prompt, 0.0)?.0,
        )?;
    }
    writeln!(out, "engines: {:?}", engine.engines())?;
    writeln!(out, "counters: {:?}", engine.counters())?;
    Ok(())
}
